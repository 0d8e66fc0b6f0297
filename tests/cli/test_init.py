"""`braid init`: from what a file of data contains to a config that runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.cli.main import main
from braid.config.load import load_config
from braid.config.model import BuildSpec, ModelConfig
from braid.models.loading import load_policy, load_tokenizer, save_pretrained

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, *rows: dict[str, Any], num: int = 40) -> None:
    """A file of `num` rows, which repeat those given."""
    rows = tuple(rows[i % len(rows)] for i in range(num))
    with Path(name).open("w", newline="") as file:
        if name.endswith(".csv"):
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def source(section: dict[str, Any], key: str) -> dict[str, Any]:
    """The keys of the only source, without those that each has."""
    (only,) = section[key]
    return {name: value for name, value in only.items() if name not in ("kind", "path")}


@pytest.mark.parametrize(
    ("row", "keys", "reward"),
    [
        ({"question": "1+1?", "answer": "so\n#### 1,234"}, {"prompt_key": "question"}, "math"),
        ({"problem": "x?", "solution": r"\boxed{\frac12}"}, {"prompt_key": "problem", "answer_key": "solution"}, "math"),
        ({"prompt": "x?", "answer": 7}, {}, "math"),
        ({"prompt": "x?", "answer": "(B)"}, {}, "choice"),
        ({"prompt": "x?", "label": "Paris"}, {"answer_key": "label"}, "exact"),
        (
            {"prompt": TALK[:1], "reward_model": {"ground_truth": "3"}},
            {"answer_key": "reward_model.ground_truth"},
            "math",
        ),
        ({"messages": TALK[:1], "answer": ["1", "1.0"]}, {"prompt_key": "messages"}, "math"),
    ],
)  # fmt: skip
def test_prompts_with_answers_are_for_reinforcement_learning(
    row: dict[str, Any], keys: dict[str, str], reward: str
) -> None:
    write("rows.jsonl", row)
    assert main(["init", "rows.jsonl", "--model", "none"]) == 0
    tree = load_config(Path("rows.yaml")).config.model_dump(exclude_unset=True)
    assert tree["reward"] == {"parts": ({"kind": reward},)}
    assert {"prompt_key": "prompt"} | keys | {"skip": 4} == {"prompt_key": "prompt"} | source(
        tree["data"], "train"
    )
    assert source(tree["data"], "eval") | {"limit": 4} == source(tree["data"], "eval")


@pytest.mark.parametrize(
    ("row", "verb", "keys"),
    [
        ({"messages": TALK}, "sft", {"messages_key": "messages"}),
        ({"prompt": "a", "completion": "b"}, "sft", {"prompt_key": "prompt", "response_key": "completion"}),
        (
            {"instruction": "a", "input": "", "output": "b"},
            "sft",
            {"prompt_key": "instruction", "response_key": "output", "template": "{prompt}\n\n{input}"},
        ),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "prefer", {"prompt_key": "question"}),
        ({"chosen": TALK, "rejected": TALK[:1] * 2}, "prefer", {}),
    ],
)
def test_responses_are_imitated_and_pairs_preferred(
    row: dict[str, Any], verb: str, keys: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    write("rows.jsonl", row)
    assert main(["init", "rows.jsonl", "--model", "none", "--output", "mine.yaml"]) == 0
    tree = load_config(Path("mine.yaml")).config.model_dump(exclude_unset=True)
    assert source(tree[verb], "data") == {**keys, "skip": 4}
    assert source(tree[verb], "eval_data") == {**keys, "limit": 4}
    assert f"braid {verb} mine.yaml" in capsys.readouterr().out


def test_a_small_file_is_trained_on_as_a_whole_with_a_reward_of_ones_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    write("rows.csv", {"prompt": "a"}, num=19)
    assert main(["init", "rows.csv", "--model", "none", "--reward", "mine.py:score"]) == 0
    config = load_config(Path("rows.yaml")).config
    assert (config.data.train[0].skip, config.data.eval, config.checkpoint.keep_best) == (0, (), False)
    assert config.reward.model_dump(exclude_unset=True) == {
        "parts": ({"kind": "function", "path": "mine.py:score"},)
    }
    assert "reward: mine.py:score, as asked" in capsys.readouterr().out


def test_the_config_trains_a_model_whose_tokenizer_and_size_tell_lengths_and_learning_rate(
    tmp_path: Path,
) -> None:
    Path("data").mkdir()
    write("data/sums.jsonl", {"question": "1+1=", "answer": "2"})
    build = BuildSpec(
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        max_positions=160,
        characters="12+=",
    )
    config = ModelConfig(build=build)
    model = load_policy(config, device=torch.device("cpu"), temperature=1.0, seed=0)
    save_pretrained(model, load_tokenizer(config), tmp_path / "model")
    assert main(["init", "data/sums.jsonl", "--model", str(tmp_path / "model")]) == 0
    text = Path("sums.yaml").read_text()
    assert (
        "max_prompt_tokens: 128      # the longest of all prompts has 4, the rest is for the chat template"
        in text
    )
    assert text.count("max_new_tokens: 32}") == 2
    assert "lr: 1.0e-4}" in text
    small = ["rollout.prompts_per_round=2", "rollout.group_size=2", "rollout.sampling.max_new_tokens=2"]
    small += ["eval.sampling.max_new_tokens=2", "run.max_rounds=1", "report.console=none"]
    assert main(["train", "sums.yaml", *small]) == 0
    assert json.loads(Path("runs/sums/summary.json").read_text())["eval"]["best"]["round"] is not None


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "a"}, [], "no column for prompts among text; rename one to prompt"),
        ({"prompt": "a"}, [], "column prompt has prompts, but no column has answers (answer, "),
        ({"prompt": "a"}, ["--reward", "matth"], "no kind of reward is called 'matth', did you mean 'math'?"),
        ({"prompt": "a"}, ["--reward", "judge"], "reward.parts[0].prompt: missing required key"),
        ({"chosen": "a", "rejected": "b"}, ["--reward", "math"], "responses need no reward; leave out math"),
        ({"prompt": "a", "answer": "b"}, ["--output", "rows.jsonl"], "--output: rows.jsonl exists"),
        ({"prompt": "a", "answer": "b"}, ["--output", "no/rows.yaml"], "cannot write no/rows.yaml: No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_decided_is_refused_and_nothing_written(
    row: dict[str, Any], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write("rows.jsonl", row)
    assert main(["init", "rows.jsonl", "--model", "none", *options]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["rows.jsonl"]


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    write("rows.jsonl", {"prompt": "a"})
    assert main(["init", "row.jsonl", "--model", "none"]) == 2
    assert "row.jsonl, did you mean 'rows.jsonl'?" in capsys.readouterr().err
