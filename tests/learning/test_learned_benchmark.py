"""benchmarks/learned.py, which trains the configs of benchmarks/learned."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

from braid.plan import default_verb, resolve
from braid_dialects.load import read_config, recognise

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "learned.py"))


@pytest.mark.parametrize("name", SCRIPT["TASKS"])
def test_every_task_resolves_and_has_a_bar(name: str) -> None:
    task = SCRIPT["TASKS"][name]
    loaded = read_config(task.config, list(task.overrides)).loaded
    verb = default_verb(loaded.config)
    warnings = resolve(loaded.config, 10**6, verb=verb, origin_of=loaded.origin).warnings
    assert not warnings or recognise(task.config) != "native"
    target = loaded.config.eval.target
    assert (target.min_final is None) != (target.max_final is None)
    assert target.min_gain is None, "where a run starts depends on the machine's rounding"


def test_every_example_with_a_bar_is_a_task() -> None:
    """So that `make nightly` holds it with several seeds."""
    examples = (Path(__file__).parents[2] / "examples").glob("*.yaml")
    assert set(examples) <= {task.config for task in SCRIPT["TASKS"].values()}


TINY = """# Optimum 1.00
run: {max_rounds: 1}
model: {mlp: {hidden_sizes: [4]}}
env: {kind: gymnasium, id: CartPole-v1, processes: 0, max_episode_steps: 3, eval_episodes: 2}
rollout: {prompts_per_round: 2, group_size: 1}
algorithm: {recipe: ppo}
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_results_are_compared_with_bars_and_a_failed_run_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each episode of the tiny runs has a return of 3 and counts as a success."""
    texts = {
        "broken": "# Optimum 1.00\nno_such_key: 1",
        "missing": "# Optimum 0.50\nmodel: {path: no_such_folder}\neval: {target: {min_final: 0.5}}",
        "reached": TINY + "eval: {target: {min_final: 3}}",
        "missed": TINY + "eval: {target: {metric: pass@1, min_final: 1, min_gain: 0.25}}",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    main = SCRIPT["main"]
    tasks = {name: SCRIPT["Task"](tmp_path / f"{name}.yaml") for name in texts}
    monkeypatch.setitem(main.__globals__, "TASKS", tasks)

    def run(*names: str, seeds: str = "3") -> tuple[object, list[str], str]:
        monkeypatch.setattr(sys, "argv", ["learned.py", *names, "--seeds", seeds, "--jobs", "2"])
        with pytest.raises(SystemExit) as stopped:
            main()
        table, log = capfd.readouterr()
        return (
            stopped.value.code,
            [re.sub(r"\d+( / \d+)* \|$", "s |", line) for line in table.splitlines()[2:]],
            log,
        )

    code, table, log = run("reached", seeds="3-4")
    assert (code, table) == (0, ["| reached | 1.00 | mean@1 3 | 3.000 to 3.000 / 3.000 to 3.000 | s |"])
    assert (
        "reached: 2 of 2 seeds finished, 0 missed the bar; first 3.000 to 3.000; last 3.000 to 3.000" in log
    )
    assert run("missed")[:2] == (1, ["| missed | 1.00 | pass@1 1 +0.25 | 1.000 to 1.000 | s |"])
    code, table, log = run("broken", "missing")
    assert code == 1
    assert table == [
        "| broken | 1.00 | mean@1 | failed | - |",
        "| missing | 0.50 | mean@1 0.5 | failed | - |",
    ]
    assert "broken_3: failed without a summary" in log
    assert "missing_3: failed without a summary" in log
