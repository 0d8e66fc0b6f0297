"""The config of a run folder that was copied or moved names the folder in which it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from braid.cli.main import main
from braid.config.load import load_config, to_yaml
from braid.config.paths import with_absolute_paths
from braid.errors import ConfigError

CONFIG = {
    "run": {"name": "first", "output_dir": "runs", "max_rounds": 1},
    "model": {"path": "./model"},
    "data": {"train": [{"kind": "file", "path": "rows.jsonl"}], "eval": []},
    "reward": {"parts": [{"kind": "exact"}]},
    "checkpoint": {"dir": "runs/first/states"},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as `braid train` writes it."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    folder = tmp_path / "runs/first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(with_absolute_paths(load_config(tmp_path / "config.yaml"))))
    (folder / "plan.json").write_text("{}")
    return folder


def test_the_run_of_an_earlier_version_says_so_and_where_its_keys_are_now(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["rollout"]["vllm"] = {"tensor_parallel": 1}
    config["critic"]["train"] = {"fsdp": {"size": None}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as error:
        load_config(run / "config.yaml")
    first, *others = sorted(map(str, error.value.problems), key=lambda text: not text.startswith("config: "))
    assert "an earlier version of braid made this run, with keys such as critic.train.fsdp" in first
    assert len(others) == 2
    (run / "plan.json").unlink()  # a config of the user's own
    with pytest.raises(ConfigError) as error:
        load_config(run / "config.yaml")
    assert len(error.value.problems) == 2


@pytest.mark.parametrize("is_moved", [False, True])
def test_the_folder_that_is_named_is_the_folder(run: Path, tmp_path: Path, is_moved: bool) -> None:
    there = tmp_path / "elsewhere/copy"
    (shutil.move if is_moved else shutil.copytree)(run, there)
    config = load_config(there / "config.yaml").config
    assert (config.run.output_dir, config.run.name) == (str(there.parent), "copy")
    assert config.checkpoint.dir == str(there / "states"), "paths inside the folder move along"
    assert config.model.path == str(tmp_path / "model")
    fork = load_config(there / "config.yaml", ["run.name=fork"]).config
    assert (fork.run.output_dir, fork.run.name) == (str(there.parent), "fork")


def test_a_folder_where_it_was_and_a_config_outside_a_run_are_read_as_written(
    run: Path, tmp_path: Path
) -> None:
    assert load_config(run / "config.yaml").origin("run.name").startswith("config.yaml:")
    run_config = load_config(tmp_path / "config.yaml").config.run
    assert (run_config.output_dir, run_config.name) == ("runs", "first")


def test_a_folder_whose_name_no_run_can_have_is_refused(run: Path) -> None:
    shutil.copytree(run, run.with_name("first (copy)"))
    with pytest.raises(ConfigError, match=r"run\.name: .*first \(copy\).* \[run folder\]"):
        load_config(run.with_name("first (copy)") / "config.yaml")


def test_show_of_a_copy_names_the_copy(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(run, run.with_name("copy"))
    assert main(["show", str(run.with_name("copy"))]) == 0
    assert "name copy" in " ".join(capsys.readouterr().out.split())
