"""Whole runs whose rewards come from models: a reward model, the policy itself, a judge behind HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.leftovers import LIMIT_S
from transformers import AutoConfig, AutoModelForSequenceClassification

from braid.config.load import Loaded, load_config
from braid.errors import ConfigError, RolloutError
from braid.models.tokenizer import character_tokenizer
from braid.trainer import commands

from .server import Answer, completion, serving

pytestmark = pytest.mark.slow

Load = Callable[..., Loaded]

ALPHABET = "abcdefgh"
BASE: dict[str, Any] = {
    "run": {"name": "tiny", "max_rounds": 3, "device": "cpu", "output_dir": "runs"},
    "model": {
        "build": {
            "hidden_size": 32, "intermediate_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16,
            "characters": ALPHABET,
        }
    },
    "data": {"train": [{"kind": "file", "name": "letters", "path": "letters.jsonl"}]},
    "reward": {"parts": [{"kind": "exact"}]},
    "rollout": {"prompts_per_round": 4, "group_size": 8, "sampling": {"max_new_tokens": 2}},
    "train": {"optimizer": {"lr": 3e-3}},
    "checkpoint": {"at_end": False},
    "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
}  # fmt: skip


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load("key=value", ...)` loads a tiny config from a separate folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.jsonl").write_text(
        "".join(f'{{"prompt": "{x}", "answer": "{x}"}}\n' for x in "abcd")
    )
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(BASE))
    return lambda *overrides: load_config(tmp_path / "tiny.yaml", overrides)


LIKES_A = "{kind: judge, url: policy, prompt: '{response}', temperature: 1.0, max_tokens: 60, backoff_s: 0.0, pattern: '([ab])', scores: {a: 1, b: 0}}"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def reproducible(run: Path) -> list[dict[str, Any]]:
    """The metrics without those that depend on clocks or other runs."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "reward/time/")) and "per_s" not in k}
        for line in lines(run)
    ]  # fmt: skip


def reward_model(folder: Path) -> Path:
    """A random classifier over the tiny policy's alphabet."""
    tokenizer = character_tokenizer(ALPHABET)
    tokenizer.chat_template = "{{ messages[-1].content }}<eos>"
    config = AutoConfig.for_model(
        "qwen3", vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_labels=1, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_policy_learns_what_a_reward_model_likes(load: Load, tmp_path: Path) -> None:
    part = f"reward.parts=[{{kind: model, name: liked, path: {reward_model(tmp_path / 'rm')}, activation: sigmoid}}]"
    settings = (part, "run.max_rounds=30", "rollout.group_size=16", "train.optimizer.lr=1e-2")
    run = commands.train(load(*settings)).run_dir
    rounds = lines(run)
    assert all(line["reward/truncated/liked"] == 0 for line in rounds[1:])
    assert all(line["reward/part/liked"] == line["reward/mean"] for line in rounds[1:])
    last = sum(line["reward/mean"] for line in rounds[-3:]) / 3
    assert last > rounds[1]["reward/mean"] + 0.1
    plan = json.loads((run / "plan.json").read_text())
    assert [role["role"] for role in plan["memory"]] == ["policy", "reward:liked"]


def test_a_policy_can_judge_itself_and_samples_as_without_a_judge(load: Load) -> None:
    cut_off = "rollout.max_invalid_fraction=1.0"
    judged, again = (
        commands.train(load(f"run.name={name}", f"reward.parts=[{LIKES_A}]", cut_off)).run_dir
        for name in ("judged", "again")
    )
    assert reproducible(judged) == reproducible(again)
    rounds = lines(judged)
    assert 0 < rounds[1]["reward/part/judge"] < 1
    # The first round is sampled from the same weights by the same keys as with any other reward.
    plain = lines(commands.train(load("run.name=plain")).run_dir)
    for name in ("rollout/tokens", "rollout/output_length_mean", "rollout/output_length_max"):
        assert rounds[1][name] == plain[1][name]


def test_a_judges_api_key_is_not_stored(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "sk-not-for-the-record"
    monkeypatch.setenv("TINY_JUDGE_KEY", secret)

    def answer(number: int, body: dict[str, Any]) -> Answer:
        if number % 5 == 0:
            return Answer(f"{secret} is over its quota", status=429)
        if number % 7 == 0:
            return completion(f"no idea, {secret}")
        return completion(str(body["messages"][0]["content"].count("a")))

    with serving(answer) as server:
        part = (
            f"reward.parts=[{{kind: judge, url: '{server.url}', model: m, prompt: '{{response}}', "
            "backoff_s: 0.001, api_key_env: TINY_JUDGE_KEY, retries: 1}]"
        )
        run = commands.train(load(part, "report.samples_every_rounds=1", "report.tensorboard=true")).run_dir
    assert all(headers["authorization"] == f"Bearer {secret}" for _, headers, _ in server.requests)
    assert any(line["reward/retries/judge"] > 0 for line in lines(run)[1:])
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert b"TINY_JUDGE_KEY" in (run / "config.yaml").read_bytes()


def test_a_key_that_is_not_there_ends_the_run_before_it_samples(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINY_JUDGE_KEY", raising=False)
    part = "reward.parts=[{kind: judge, url: 'http://127.0.0.1:9', model: m, prompt: '{response}', api_key_env: TINY_JUDGE_KEY}]"
    with pytest.raises(ConfigError, match="the environment variable TINY_JUDGE_KEY is not set"):
        commands.train(load(part))


def test_a_judge_that_rejects_every_call_ends_the_run_with_its_message(load: Load) -> None:
    with serving(lambda *_: Answer("no such model", status=404)) as server:
        part = f"reward.parts=[{{kind: judge, url: '{server.url}', model: m, prompt: '{{response}}'}}]"
        with pytest.raises(
            RolloutError, match="32 x reward judge: the server failed: answered 404: 'no such model'"
        ):
            commands.train(load(part))


def test_parts_go_by_the_sources_of_rows(load: Load, tmp_path: Path) -> None:
    rows = [{"prompt": x, "answer": x, "domain": "vowel" if x == "a" else "consonant"} for x in "abcd"]
    (tmp_path / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ("data.train=[{kind: file, path: mixed.jsonl, source_key: domain}]",)
    parts = "reward.parts=[{{kind: exact, sources: [vowel]}}, {{kind: length, end: 2, sources: [{}]}}]"
    run = commands.train(load(*data, parts.format("consonant"))).run_dir
    for line in lines(run)[1:]:
        assert line["status/invalid"] == 0
        assert line["reward/part/exact"] == line["reward/source/vowel"]
        assert line["reward/part/length"] == line["reward/source/consonant"]
    with pytest.raises(ConfigError) as caught:
        commands.train(load(*data, parts.format("consonants"), "run.name=other"))
    assert "unknown data source 'consonants', did you mean 'consonant'?" in str(caught.value)
    assert "no part scores the source 'consonant'" in str(caught.value)


def test_ctrl_c_ends_a_run_that_waits_for_its_judge(load: Load, tmp_path: Path) -> None:
    never, arrived = threading.Event(), threading.Event()

    def answer(*_: Any) -> Answer:
        arrived.set()
        return Answer(wait=never)

    assert load().config.run.name == "tiny"
    with serving(answer) as server:
        part = f"reward.parts=[{{kind: judge, url: '{server.url}', model: m, prompt: '{{response}}', timeout_s: 1000}}]"
        command = [sys.executable, "-m", "braid.cli.main", "train", "tiny.yaml", part]
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        ) as process:  # fmt: skip
            assert arrived.wait(LIMIT_S)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=LIMIT_S)  # the judge would have let it wait for 1000 s
    assert process.returncode == 130, output
    assert "interrupted; the run is in" in output
    assert "Traceback" not in output
