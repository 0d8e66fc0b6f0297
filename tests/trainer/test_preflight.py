"""Problems found before a run builds anything, by `braid show --check` and by the run: no folder, exit code
2."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from braid.cli.main import main
from braid.errors import ConfigError, DataError, ModelError
from braid.plan import available
from braid.trainer import commands
from braid.trainer.cluster import RayCluster

from .conftest import LoadTiny, check

REWARDS = """
class Brevity:
    def __call__(self, text):
        return -float(len(text))

def missing_column(text, fields):
    return fields["nope"]

def wants(text, level):
    return 1.0

def one(text):
    return 1.0

def nothing(text):
    pass

async def late(text):
    raise KeyError("late")

def not_of_a(prompt, text):
    if prompt == "a":
        raise ValueError("a is not for me")
    return 1.0

def away(text):
    raise ConnectionError("the service is away")

def of_the_turn(trajectory, text, answer):
    assert text == answer == trajectory.answer_text
    assert len(trajectory.turns[-1].output_ids) == len(trajectory.turns[-1].logprobs) == 1
    return 1.0
"""
MODEL = "{kind: model, path: ./no-such-folder}"


def of(name: str) -> str:
    return f"reward.parts=[{{kind: function, path: 'rewards.py:{name}'}}]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([of("missing_column")], "letters:0 with the answer 'a': KeyError: 'nope' (rewards.py:7); 3 other prompts failed too"),
        ([of("wants")], "rewards.py:wants' needs 'level'; braid provides text, response"),
        ([of("one").replace("}]", ", group: true}]")], "returned 1.0 (float); with group=true"),
        ([of("nothing")], "returned None (NoneType), not a number"),
        ([of("late")], "KeyError: 'late'"),
        ([of("Brevity")], "is a class, not a function; name a function, or an instance: define `brevity = Brevity()`"),
        ([of("brevty")], "'brevty'"),
        ([f"reward.parts=[{MODEL}]"], "no such folder"),
        (["reward.parts=[{kind: code}]"], "code cannot score 8 of 8 prompts; first: letters:0: the prompt has no column 'tests'"),
        (["reward.parts=[{kind: reasoning_gym}]"], "is not procedural"),
        (["reward.parts=[{kind: judge, url: 'http://x', model: m, prompt: '{nope} {response}'}]"], "no column 'nope'"),
        (["reward.parts=[{kind: exact, sources: [numbers]}]"], "unknown data source 'numbers'"),
        (["rollout.engine=sglang"], "needs the package sglang"),
    ],
)  # fmt: skip
def test_missing_data_or_failing_rewards_are_refused_before_the_run_has_a_folder(
    load_tiny: LoadTiny, overrides: list[str], words: str
) -> None:
    loaded = load_tiny(*overrides, rewards=REWARDS)
    for attempt in (lambda: check(loaded), lambda: commands.train(loaded)):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert words in str(caught.value)
    assert not Path("runs").exists()


CANNOT_RUN = [
    ("reward.parts=[{kind: exact, weight: 0}]", "reward.parts: every weight is 0"),
    ("reward.parts=[{kind: exact}, {kind: exact}]", "reward.parts[1].name: reward.parts[0] is also named 'exact'"),
    ("run.device=cuda", "run.device: cuda needs a GPU"),
    ("train.backend=megatron", "train.backend: megatron needs a GPU"),
    ("model.build.architecture=gemma2", "train.backend: train.backend=megatron supports models of type llama, qwen2"),
    ("rollout.engine=vllm", "model.build.head_dim: the model's attention heads have size 16"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "words"), CANNOT_RUN)
def test_what_cannot_run_is_refused_alike_by_all_before_anything_starts(
    load_tiny: LoadTiny,
    override: str,
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(available, "count_gpus", lambda: 0)
    monkeypatch.setattr(available, "missing_packages", lambda *_: iter(()))
    monkeypatch.setattr(
        RayCluster, "open", classmethod(lambda *_, **__: pytest.fail("processes were started"))
    )
    load_tiny()
    overrides = [override, "cluster.placement={policy: 0, rollout: 1}"]
    if "gemma2" in override:
        overrides.append("train.backend=megatron")
    errors = []
    for verb in (["train"], ["show", "--check"], ["show", "--check", "--for", "train"]):
        assert main([*verb, "tiny.yaml", *overrides]) == 2
        errors.append(capsys.readouterr().err)
    assert words in errors[0]
    assert errors == errors[:1] * 3
    assert not Path("runs").exists()


def test_all_problems_are_reported_together(load_tiny: LoadTiny) -> None:
    parts = f"reward.parts=[{MODEL}, {{kind: function, path: 'rewards.py:nothing'}}]"
    with pytest.raises(ConfigError) as caught:
        check(load_tiny(parts, "rollout.engine=sglang", rewards=REWARDS))
    keys = {problem.key for problem in caught.value.problems}
    assert keys == {"rollout.engine", "reward.parts[0].path", "reward.parts[1].path"}


def test_the_command_plans_once(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tiny(rewards=REWARDS)
    planned = list[object]()
    module = sys.modules["braid.plan.resolve"]  # the package has a function of this name
    derive = module.derive
    monkeypatch.setattr(module, "derive", lambda *args: planned.append(args) or derive(*args))
    assert main(["show", "tiny.yaml", "--check"]) == 0
    assert len(planned) == 1


def test_null_answers_are_counted_and_the_first_is_named(load_tiny: LoadTiny) -> None:
    loaded = load_tiny("data.eval=[]")
    rows = [{"prompt": x, "answer": None if x in "bc" else x} for x in "abcd"]
    Path("letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match="exact cannot score 2 of 4 prompts; first: letters:1"):
        check(loaded)


@pytest.mark.parametrize("name", ["not_of_a", "away", "of_the_turn"])
def test_a_reward_that_rejects_one_prompt_or_lacks_its_service_passes_the_check(
    load_tiny: LoadTiny, name: str
) -> None:
    check(load_tiny(of(name), rewards=REWARDS))


def test_a_check_works_inside_a_running_event_loop(load_tiny: LoadTiny) -> None:
    async def inside() -> Any:
        return check(load_tiny(of("late"), rewards=REWARDS))

    with pytest.raises(ConfigError, match="KeyError"):
        asyncio.run(inside())


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("data.train.0.prompt_key=question", DataError),
        ("data.train=[{kind: file, path: nope.jsonl}]", DataError),
        ("model={path: ./no-such-folder}", ModelError),
        (of("nothing"), ConfigError),
        ("rollout.engine=sglang", ConfigError),
    ],
)
def test_the_command_line_exits_with_2_for_every_user_error(
    load_tiny: LoadTiny, override: str, error: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error):
        check(load_tiny(override, rewards=REWARDS))
    for verb in (["train"], ["show", "--check"]):
        assert main([*verb, "tiny.yaml", override]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("braid: ")
        assert out == ""


def test_show_checks_only_when_asked(load_tiny: LoadTiny, capsys: pytest.CaptureFixture[str]) -> None:
    load_tiny(rewards=REWARDS)
    assert main(["show", "tiny.yaml", of("nothing")]) == 0
    assert main(["show", "tiny.yaml", "--check"]) == 0
    assert "trajectories per round" in capsys.readouterr().out


def test_the_check_shows_what_rewards_read(load_tiny: LoadTiny, capsys: pytest.CaptureFixture[str]) -> None:
    load_tiny()
    Path("think.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}:<think>\n")
    thinks = ["model.chat_template=think.jinja", "model.build.special_tokens=['<think>', '</think>']"]
    assert main(["show", "tiny.yaml", "--check", *thinks, "model.build.characters='abcd:.\\n'"]) == 0
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(shown) if line.startswith("rewards read"))
    assert shown[start : start + 4] == [
        "rewards read letters:0 answered with its reference",
        "prefill '<think>' how the context begins the turn",
        r"text '...\n</think>\n\na' all that is sampled",
        "answer 'a' without reasoning and end of turn",
    ]
    assert main(["show", "tiny.yaml", "--check", "--json"]) == 0
    read = json.loads(capsys.readouterr().out)["reward_example"]
    assert read == {"uid": "letters:0", "prefill": "", "text": "a", "answer": "a"}


def test_the_configured_isolation_is_the_one_that_is_checked(
    load_tiny: LoadTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coded.jsonl").write_text('{"prompt": "a", "tests": "assert True"}\n')
    settings = (
        "data.train=[{kind: file, name: coded, path: coded.jsonl, answer_key: null}]",
        "reward.parts=[{kind: code, sources: [coded]}, {kind: exact, sources: ['*']}]",
    )
    asked: list[str] = []
    monkeypatch.setattr("braid.rewards.parts.find_isolation", lambda name: asked.append(name) or "process")
    check(load_tiny(*settings, "reward.code.isolation=process"))
    assert asked == ["process"]
