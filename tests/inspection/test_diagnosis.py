"""`braid diagnose`: each rule finds its own defect, and a healthy run has none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from braid.config.schema import RunConfig
from braid.config.shape import fields_of
from braid.inspection.diagnosis import RULES, diagnose
from braid.inspection.folder import Run
from braid.report.names import describe

NUM_ROUNDS = 40
Lines = list[dict[str, Any]]
Change = Callable[[float], dict[str, Any]]


def healthy(seed: int = 0) -> Lines:
    """A run that learns, with noise: rewards of 0 and 1 in rounds of 32 trajectories."""
    draws = np.random.default_rng(seed)
    lines: Lines = [{"round": 0, "step": 0, "eval/all/mean@1": 0.3, "eval/all/pass@1": 0.3}]
    for number in range(1, NUM_ROUNDS + 1):
        share = number / NUM_ROUNDS
        chance = 0.3 + 0.5 * share
        line = {
            "round": number,
            "step": number,
            "reward/mean": draws.binomial(32, chance) / 32,
            "reward/std": (chance * (1 - chance)) ** 0.5,
            "reward/same_in_group_fraction": draws.uniform(0.1, 0.3),
            "rollout/truncated_fraction": draws.uniform(0, 0.05),
            "rollout/invalid_fraction": 0.0,
            "rollout/empty_rounds": 0.0,
            "rollout/output_length_mean": draws.normal(40 + 30 * share, 2),
            "invalid/environment": 0,
            "policy/entropy": 1.0 - 0.7 * share + draws.normal(0, 0.02),
            "policy/kl": 0.02 * share,
            "policy/grad_norm": draws.uniform(0.2, 1),
            "policy/lr": 1e-3,
            "policy/skipped_steps": 0.0,
            "policy/clip_fraction": draws.uniform(0, 0.1),
            "policy/logprob_mismatch_kl": draws.uniform(1e-7, 1e-6),
            "critic/explained_variance": -1.0 if number < 5 else 0.5,
        }
        if number % 10 == 0:
            line |= {"eval/all/mean@1": 0.3 + 0.5 * share, "eval/all/pass@1": 0.3 + 0.5 * share}
        lines.append(line)
    return lines


def flat(share: float) -> dict[str, Any]:
    """Rewards and evaluations that stay as they were."""
    return {"reward/mean": 0.3 + 0.02 * (int(share * NUM_ROUNDS) % 2)}


DEFECTS: dict[str, Change] = {
    "most groups give no gradient": lambda s: (
        {"reward/same_in_group_fraction": 1.0, "reward/mean": 0.0} if s > 0.25 else {}
    ),
    "the policy gets no gradient": lambda s: {"policy/grad_norm": 0.0} if s > 0.8 else {},
    "the learning rate is 0": lambda s: {"policy/lr": 0.0} if s > 0.5 else {},
    "steps of the policy were skipped": lambda s: {"policy/skipped_steps": 1.0} if s > 0.9 else {},
    "trajectories are invalid": lambda s: (
        {"rollout/invalid_fraction": 0.25, "invalid/environment": 8} if s > 0.5 else {}
    ),
    "rounds had nothing to train on": lambda s: {"rollout/empty_rounds": 1.0} if s > 0.9 else {},
    "most answers are cut": lambda s: {"rollout/truncated_fraction": 0.7} if s > 0.5 else {},
    "rewards fall as answers are cut": lambda s: {
        "rollout/truncated_fraction": 0.3 * s, "reward/mean": 0.5 - 0.12 * s, "eval/all/mean@1": 0.3 + 0.1 * s
    },
    "rewards were higher before": lambda s: {"reward/mean": 0.8 * s if s < 0.5 else max(0.0, 0.8 - 0.8 * s)},
    "entropy has collapsed, and nothing improves": lambda s: flat(s) | {"policy/entropy": 0.8 * (1 - s) ** 2},
    "entropy rises, and rewards do not": lambda s: (
        {"policy/entropy": 0.5 + 3 * s, "reward/mean": 0.4 - 0.05 * s}
    ),
    "answers grow, and rewards do not": lambda s: flat(s) | {"rollout/output_length_mean": 40 + 200 * s},
    "rewards rise, and the evaluation falls": lambda s: {"eval/all/mean@1": 0.3 - 0.2 * s},
    "engine and trainer disagree more and more": lambda s: {"policy/logprob_mismatch_kl": 1e-5 + 0.02 * s * s},
    "engine and trainer disagree": lambda _: {"policy/logprob_mismatch_kl": 0.3},
    "the policy is far from its reference at the start": lambda s: {"policy/kl": 0.6 + 0.01 * s},
    "the policy has left its reference without gain": lambda s: (
        {"policy/kl": 4 * s, "reward/mean": 0.35 - 0.02 * s}
    ),
    "most tokens are clipped": lambda _: {"policy/clip_fraction": 0.7},
    "the critic explains nothing": lambda _: {"critic/explained_variance": -0.5},
    "nothing was learned": flat,
}  # fmt: skip
"""The title of a finding -> what differs from a healthy run when the share `s` of its rounds is over."""


def write(folder: Path, lines: Lines, **summary: Any) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {"status": "finished", "round": lines[-1]["round"], "num_rounds": NUM_ROUNDS, "error": None}
    (folder / "summary.json").write_text(json.dumps(about | summary))
    return Run(folder)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_found_in_a_healthy_run_at_any_length(tmp_path: Path, seed: int) -> None:
    lines = healthy(seed)
    for length in (1, 3, 6, 12, 25, len(lines)):
        assert diagnose(write(tmp_path, lines[:length])) == []


@pytest.mark.parametrize("title", DEFECTS)
@pytest.mark.parametrize("seed", range(2))
def test_a_defect_is_found_and_explained(tmp_path: Path, title: str, seed: int) -> None:
    lines = healthy(seed)
    for line in lines[1:]:
        change = DEFECTS[title](line["round"] / NUM_ROUNDS)
        if "eval/all/mean@1" not in line:
            change.pop("eval/all/mean@1", None)
        line |= change
        if "reward/mean" in change or "eval/all/mean@1" in change:
            line.pop("eval/all/pass@1", None)  # flat or falling like the mean
            if "eval/all/mean@1" in line and "eval/all/mean@1" not in change:
                line["eval/all/mean@1"] = 0.3
    lines[0].pop("eval/all/pass@1")
    run = write(tmp_path, lines[:-1] if "rate" in title else lines)
    titles = {finding.title: finding for finding in diagnose(run)}
    assert title in titles
    finding = titles[title]
    assert finding.since is not None
    assert finding.evidence
    assert finding.causes
    assert finding.fix


def test_every_rule_has_a_defect_here() -> None:
    texts = {rule.__name__: Path(rule.__code__.co_filename).read_text() for rule in RULES}
    titles = set(re.findall(r'Finding\(\s*f?"([^"]+)"', next(iter(texts.values()))))
    shown = {re.sub(r"\{role\}", "policy", title) for title in titles}
    assert shown - set(DEFECTS) == {
        "the run failed",
        "the run's process ended without a word",
        "check {trip['check']} tripped",
    }


def test_a_check_of_the_loop_that_tripped_is_a_finding(tmp_path: Path) -> None:
    trip = {
        "check": "loss_weights", "sort": "identity", "since": 3, "last": 40, "rounds": 38,
        "evidence": "the weights sum to 4", "causes": "a mean of micro-batches", "look_at": "train.backend",
    }  # fmt: skip
    run = write(tmp_path, healthy(), checks={"tripped": [trip], "off": {}})
    (finding,) = diagnose(run)
    assert (finding.title, finding.since, finding.severity) == ("check loss_weights tripped", 3, "problem")
    assert "the weights sum to 4" in finding.evidence
    assert "train.backend" in finding.fix


@pytest.mark.parametrize(
    ("summary", "title"),
    [
        ({"status": "failed", "error": "WorkerError: policy worker 1 died"}, "the run failed"),
        ({"status": "running"}, "the run's process ended without a word"),
    ],
)
def test_how_a_run_ended_comes_first(tmp_path: Path, summary: dict[str, Any], title: str) -> None:
    lines = healthy()
    for line in lines[1:]:
        line["policy/clip_fraction"] = 0.9
    findings = diagnose(write(tmp_path, lines, **summary))
    assert [finding.title for finding in findings] == [title, "most tokens are clipped"]
    assert str(summary.get("error", "SIGKILL")) in findings[0].evidence + findings[0].causes


def test_prompts_that_were_learned_are_no_defect(tmp_path: Path) -> None:
    """All groups are right at the end, since the run has learned its prompts; from the start is too easy."""
    lines = healthy()
    for line in lines[1:]:
        if line["round"] > 0.75 * NUM_ROUNDS:
            line |= {"reward/mean": 1.0, "reward/same_in_group_fraction": 1.0}
    lines[-1] |= {"eval/all/mean@1": 1.0, "eval/all/pass@1": 1.0}
    assert diagnose(write(tmp_path, lines)) == []
    for line in lines[1:]:
        line |= {"reward/mean": 1.0, "reward/same_in_group_fraction": 1.0, "rollout/output_length_mean": 40.0}
    for line in lines:
        line |= {name: 0.9 for name in line if name.startswith("eval/")}
    (finding,) = diagnose(write(tmp_path, lines))
    assert "too easy" in finding.causes


def test_keys_and_metrics_that_findings_name_exist() -> None:
    text = Path(RULES[0].__code__.co_filename).read_text()
    keys = {path for path, _ in fields_of(RunConfig)}
    sections = "model|data|reward|rollout|algorithm|train|critic|reference|env|eval|pipeline"
    named = set(re.findall(rf"(?<![\w./])((?:{sections})(?:\.[a-z_]+)+)", text))
    assert named
    assert named - keys == set()
    for name in set(re.findall(r'"((?:policy|reward|rollout|critic|eval)/[\w/@]+)"', text)):
        describe(name)  # KeyError for none
