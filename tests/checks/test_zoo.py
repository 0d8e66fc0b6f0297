"""Each bug of the zoo trips its check within three rounds, and a loop without bugs trips none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from tests.checks.zoo import BUGS, LONG, Bug
from tests.trainer.conftest import BASE, LoadTiny, load_tiny

from braid.checks import CHECKS, as_markdown
from braid.errors import CheckTripped
from braid.trainer import commands
from braid.types import CheckName

__all__ = ["load_tiny"]


def run_of(bug: Bug, load_tiny: LoadTiny) -> Path:
    """The folder of the run of a bug's scenario."""
    run = commands.train(load_tiny(*bug.scenario)).run_dir
    if bug.resumed:
        run = commands.train(load_tiny(*bug.scenario, *bug.resumed, "run.resume=latest")).run_dir
    return run


def checks_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())["checks"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_trips_its_check(load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    bug = BUGS[name]
    bug.around(monkeypatch)
    bug.patch(monkeypatch)
    run = run_of(bug, load_tiny)
    trips = {trip["check"]: trip for trip in checks_of(run)["tripped"]}
    assert bug.check in trips, (sorted(trips), checks_of(run)["off"])
    trip = trips[bug.check]
    assert trip["evidence"]
    assert trip["last"] <= trip["since"] + BASE["run"]["max_rounds"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_the_scenario_of_a_bug_is_silent_without_it(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bug = BUGS[name]
    bug.around(monkeypatch)
    run = run_of(bug, load_tiny)
    assert checks_of(run)["tripped"] == []
    assert bug.check not in checks_of(run)["off"]
    assert set(checks_of(run)["off"]) < set(CHECKS)


RECIPES = {
    "grpo": (),
    "ppo": ("algorithm.kl_coef=0.01", "train.steps_per_pass=2"),
    "rloo": ("algorithm={recipe: grpo, advantage: rloo, kl_coef: 0.05}", "train.passes_per_round=2"),
    "dapo": ("train.steps_per_pass=2", "rollout.filter={min_std: 0.0, then: resample, max_batches: 2}"),
    "gspo": ("train.steps_per_pass=2", "train.micro_batch_tokens=32"),
    "dr_grpo": ("algorithm.kl_coef=0.01", "model.dtype=bf16"),
}
"""Recipe -> further overrides of a run that learns the letters."""


def assert_silent(load_tiny: LoadTiny, recipe: str, num_rounds: int) -> None:
    named = () if recipe == "rloo" else (f"algorithm.recipe={recipe}",)
    rounds = (f"run.max_rounds={num_rounds}", "eval.at_end=false", LONG)
    run = commands.train(load_tiny(*named, *RECIPES[recipe], *rounds)).run_dir
    assert checks_of(run)["tripped"] == []
    assert json.loads((run / "summary.json").read_text())["round"] == num_rounds


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_of_each_recipe_is_silent(load_tiny: LoadTiny, recipe: str) -> None:
    assert_silent(load_tiny, recipe, 15)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_thousand_rounds_of_all_recipes_are_silent(load_tiny: LoadTiny, recipe: str) -> None:
    assert_silent(load_tiny, recipe, 167)


@pytest.mark.slow
def test_a_statistic_of_two_rounds_trips_across_a_resume(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BUGS["all answers of a group have the same random numbers"]
    bug.patch(monkeypatch)
    run = commands.train(load_tiny("run.max_rounds=1", *bug.scenario)).run_dir
    assert checks_of(run)["tripped"] == []
    commands.train(load_tiny("run.max_rounds=2", "run.resume=latest", *bug.scenario))
    (trip,) = (t for t in checks_of(run)["tripped"] if t["check"] == "repeated_answers")
    assert (trip["since"], trip["last"]) == (1, 2)


def test_the_documentation_has_the_table_of_checks() -> None:
    assert as_markdown() in (Path(__file__).parents[2] / "docs/checks.md").read_text()
    assert tuple(CHECKS) == get_args(CheckName)


def test_a_tripped_check_is_logged_once_and_stops_the_run_if_asked_to(
    load_tiny: LoadTiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug = BUGS["log-probs of the position before"]
    bug.patch(monkeypatch)
    run = commands.train(load_tiny("run.name=warned", *bug.scenario)).run_dir
    assert len([r for r in caplog.records if "check sampler_logprobs" in r.getMessage()]) == 1
    (trip,) = (t for t in checks_of(run)["tripped"] if t["check"] == "sampler_logprobs")
    assert (trip["since"], trip["last"], trip["rounds"]) == (1, 3, 3)
    with pytest.raises(CheckTripped, match=r"check sampler_logprobs .* since round 1"):
        commands.train(load_tiny("run.name=stopped", "checks.on_trip=stop", *bug.scenario))
    stopped = json.loads(Path("runs/stopped/summary.json").read_text())
    assert (stopped["status"], stopped["round"]) == ("failed", 1)
    assert not list(Path("runs/stopped/checkpoints").glob("step_*"))
    left_out = commands.train(load_tiny("run.name=left", "checks.disable=[sampler_logprobs]", *bug.scenario))
    assert "sampler_logprobs" not in {t["check"] for t in checks_of(left_out.run_dir)["tripped"]}
    assert checks_of(left_out.run_dir)["off"]["sampler_logprobs"] == "checks.disable names it"
