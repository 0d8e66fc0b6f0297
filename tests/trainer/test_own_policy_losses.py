"""Policy losses of a user's own: the example of docs/algorithms.md, a function passed to braid.train, and
what is refused."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.test_api import config, even

import braid
from braid.algorithms.policy_losses import PolicyLoss
from braid.algorithms.surrogate import Tokens
from braid.config.load import load_config, to_yaml
from braid.errors import ConfigError
from braid.trainer import commands

from .conftest import LoadTiny

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
SECTION = PAGE.partition("**A policy loss of your own**")[2]
CODE, CONFIG = (re.findall(rf"```{kind}\n(.*?)```", SECTION, re.DOTALL)[0] for kind in ("python", "yaml"))
OWN = f"algorithm={json.dumps(yaml.safe_load(CONFIG)['algorithm'])}"


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_example_of_the_documentation_trains_and_reports_its_metric(
    load_tiny: LoadTiny, tmp_path: Path
) -> None:
    (tmp_path / "my_loss.py").write_text(CODE)
    run = commands.train(load_tiny(OWN, "train.steps_per_pass=2", "run.max_rounds=1")).run_dir
    assert lines(run)[1]["policy/distance"] >= 0
    stored = load_config(run / "config.yaml").config.algorithm.policy_loss  # from another folder
    assert stored is not None
    assert stored.model_dump() == {"kind": "my_loss.py:SquaredRatio", "tau": 0.2}


def weighted(tokens: Tokens) -> torch.Tensor:
    return -tokens.ratio * tokens.advantages


def test_a_function_passed_to_train_is_the_loss(tmp_path: Path) -> None:
    run = braid.train(config(tmp_path), ["run.max_rounds=1"], reward=even, policy_loss=weighted)
    assert run.summary["status"] == "finished"
    plan = json.loads((run.path / "plan.json").read_text())
    assert plan["recipe"]["policy_loss"] == {"kind": "braid.given.weighted"}


SEQUENCES = """
from braid.algorithms import PolicyLoss

class OfSequences(PolicyLoss):
    @property
    def reads_sequences(self):
        return True

    def per_token(self, tokens):
        mean = tokens.sequences.mean((tokens.logprobs - tokens.old_logprobs).detach())
        return -tokens.advantages * mean.exp() * tokens.logprobs, {}
"""


def test_a_loss_that_reads_sequences_gets_the_trajectories(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SEQUENCES)
    run = commands.train(load_tiny("algorithm.policy_loss=mine.py:OfSequences", "run.max_rounds=1"))
    assert lines(run.run_dir)[1]["policy/skipped_steps"] == 0


def test_functions_of_one_name_that_are_passed_to_train_and_to_a_later_run_do_not_mix(tmp_path: Path) -> None:
    def scored(value: float) -> Any:
        def weighted(response: str) -> float:
            return value

        return weighted

    settings = ["run.max_rounds=1", "eval={before: false}"]
    for i, value in enumerate((2.0, 3.0)):
        run = braid.train(
            config(tmp_path), [*settings, f"run.name=run{i}"], reward=scored(value), policy_loss=weighted
        )
        assert run.metrics[-1]["reward/mean"] == value


def test_an_own_loss_is_loaded_again_in_a_process_that_receives_it(tmp_path: Path) -> None:
    (tmp_path / "my_loss.py").write_text(CODE)
    loss = _loaded(tmp_path).policy_loss
    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).model_dump())"
    sent = pickle.dumps(loss)
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().strip() == "{'kind': 'my_loss.py:SquaredRatio', 'tau': 0.2}"


def _loaded(folder: Path, *overrides: str) -> Any:
    file = folder / "run.yaml"
    file.write_text("model: {build: {}}\n" + CONFIG)
    return load_config(file, overrides).config.algorithm


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.policy_loss.tua=1", r"unknown key 'tua', did you mean 'tau'\?; its keys are tau"),
        (
            "algorithm.policy_loss.tau=high",
            r"my_loss\.py:SquaredRatio: tau is 'high' \(str\): Input should be",
        ),
        ("algorithm.policy_loss=my_loss.py:Squared", r"'my_loss\.py' has no 'Squared', did you mean"),
        ("algorithm.policy_loss=other.py:Loss", r"no such file: .*other\.py"),
        (
            "algorithm.policy_loss=pathlib.Path",
            r"is not a class of braid\.algorithms\.policy_losses\.PolicyLoss; derive it",
        ),
        (
            "algorithm.policy_loss={kind: math.exp, tau: 1}",
            r"is a function, which has no settings such as 'tau'",
        ),
    ],
)
def test_what_is_no_policy_loss_is_refused_with_its_key(tmp_path: Path, override: str, message: str) -> None:
    (tmp_path / "my_loss.py").write_text(CODE)
    with pytest.raises(ConfigError, match=rf"algorithm\.policy_loss: .*{message}"):
        _loaded(tmp_path, override)


GOOD = "-tokens.ratio * tokens.advantages"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (f"return ({GOOD}).mean()", r"must be a number for each of the 4 tokens, not a tensor of shape \[\]"),
        (f"return ({GOOD}).detach()", "its loss has no gradient"),
        (f"return {GOOD} / 0.0", "the loss is not finite"),
        (f"return {GOOD}, {{'seen': tokens.ratio.detach()}}", "diagnostic 'seen', which it does not declare"),
        (f"return {GOOD}, {{'seen': tokens.ratio}}", "diagnostic 'seen' has a gradient"),
        ("return tokens.reward", r"raised AttributeError: .*\(own\.py:2\)"),
        ("return None", "must be a number for each of the 4 tokens, not None"),
    ],
)
def test_a_loss_that_cannot_train_is_refused_before_the_run(
    load_tiny: LoadTiny, tmp_path: Path, body: str, message: str
) -> None:
    (tmp_path / "own.py").write_text(f"def loss(tokens):\n    {body}\n")
    with pytest.raises(ConfigError, match=rf"algorithm\.policy_loss: 'own\.py:loss': .*{message}"):
        commands.train(load_tiny("algorithm.policy_loss=own.py:loss"))
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_metric_that_every_loss_reports_is_refused(load_tiny: LoadTiny, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE.replace("distance", "entropy"))
    with pytest.raises(ConfigError, match="its metric 'entropy' is one that every policy loss reports"):
        commands.train(load_tiny("algorithm.policy_loss=own.py:SquaredRatio"))


def test_a_function_of_another_process_is_needed_only_to_train(tmp_path: Path) -> None:
    loaded = load_config(None, ["model.build={}", "algorithm.policy_loss=braid.given.gone"])
    loss = loaded.config.algorithm.policy_loss
    assert isinstance(loss, PolicyLoss)
    assert "policy_loss:\n    kind: braid.given.gone" in to_yaml(loaded)
    with pytest.raises(ValueError, match=r"'gone' was passed to braid\.train from Python and is not stored"):
        loss.per_token(Tokens(*[torch.zeros(1)] * 5))
