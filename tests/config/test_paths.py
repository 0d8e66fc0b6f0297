"""Paths of a config do not depend on the working directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from braid.config.load import Loaded, load_config
from braid.config.paths import with_absolute_paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a config; the working directory is another one."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    folder = tmp_path / "project"
    (folder / "models/policy").mkdir(parents=True)
    return folder


def load(folder: Path, tree: dict[str, object], *overrides: str) -> Loaded:
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return with_absolute_paths(load_config(folder / "run.yaml", overrides))


def test_every_path_in_a_file_starts_from_its_folder(folder: Path) -> None:
    config = load(
        folder,
        {
            "run": {"resume": "old/checkpoints/step_1"},
            "model": {"path": "models/policy", "tokenizer": "models/gone", "chat_template": "chat.jinja"},
            "critic": {"path": "./critic"},
            "reference": {"path": "~/reference"},
            "data": {"train": [{"kind": "file", "path": ["a.jsonl", "b/*.jsonl"]}]},
            "reward": {"parts": [{"kind": "function", "path": "rewards.py:score"}, {"kind": "model", "path": "../judge"}]},
            "checkpoint": {"dir": "kept", "export_dir": "exported"},
            "report": {"dir": "reports"},
        },
    ).config  # fmt: skip
    assert config.run.output_dir == str(folder / "runs")
    assert config.run.resume == str(folder / "old/checkpoints/step_1")
    assert config.model.path == str(folder / "models/policy")
    assert config.model.tokenizer == str(folder / "models/gone"), "its folder is there, so it is no hub name"
    assert config.model.chat_template == str(folder / "chat.jinja")
    assert config.critic.path == str(folder / "critic")
    assert config.reference.path == str(Path.home() / "reference")
    assert config.data.train[0].path == (str(folder / "a.jsonl"), str(folder / "b/*.jsonl"))  # pyright: ignore[reportAttributeAccessIssue]
    assert [part.path for part in config.reward.parts] == [  # pyright: ignore[reportAttributeAccessIssue]
        f"{folder}/rewards.py:score",
        str(folder / "../judge"),
    ]
    assert (config.checkpoint.dir, config.checkpoint.export_dir) == (
        str(folder / "kept"),
        str(folder / "exported"),
    )
    assert config.report.dir == str(folder / "reports")


def test_values_that_are_not_paths_are_unchanged(folder: Path) -> None:
    tree = {
        "model": {"path": "Qwen/Qwen3-0.6B", "chat_template": "{{ messages }}"},
        "data": {"train": [{"kind": "hub", "path": "openai/gsm8k"}]},
        "reward": {"parts": [{"kind": "function", "path": "package.module.score"}]},
        "run": {"resume": "latest"},
    }
    loaded = load(folder, tree)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    before, after = load_config(folder / "run.yaml").config, loaded.config
    update = {"output_dir": before.run.output_dir}
    assert after.model_copy(update={"run": after.run.model_copy(update=update)}) == before


def test_paths_on_the_command_line_start_from_the_working_directory(folder: Path) -> None:
    Path("policy").mkdir()
    tree: dict[str, object] = {"model": {"path": "models/policy"}}
    config = load(folder, tree, "model.path=policy", "run.output_dir=out").config
    assert (config.model.path, config.run.output_dir) == (str(Path.cwd() / "policy"), str(Path.cwd() / "out"))


def test_making_paths_absolute_twice_changes_nothing(folder: Path) -> None:
    once = load(folder, {"model": {"path": "models/policy"}}, "run.output_dir=out")
    assert with_absolute_paths(once) == once


def test_kinds_of_the_users_own_are_found_from_the_configs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "mine.py").write_text("def loss(batch):\n    return batch.ratio\n")
    (folder / "c.yaml").write_text(
        "model: {build: {}}\nalgorithm: {policy_loss: mine.py:loss}\nprefer: {loss: mine.py:loss}\n"
    )
    monkeypatch.chdir(elsewhere)
    config = with_absolute_paths(load_config(folder / "c.yaml")).config
    assert config.prefer is not None
    assert config.algorithm.policy_loss is not None
    assert config.prefer.loss.kind == config.algorithm.policy_loss.kind == "mine.py:loss"
