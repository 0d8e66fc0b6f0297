"""The share of a round's CPU time that the checks of the loop take: the time inside of what measures and judges
them, in this process, against that of whole rounds. Of the quickstart with a short warm-up, and of a larger model
with longer answers.

    python benchmarks/checks.py [--rounds 10]
"""

from __future__ import annotations

import argparse
import functools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import braid.rollout.collector as collector
import braid.training.advantages as advantages
import braid.training.backends.single.backend as single
import braid.training.losses as losses
from braid.config.load import load_config
from braid.trainer import commands
from braid.trainer.checks import Checks
from braid.trainer.learner import Learner
from braid.trainer.on_policy import OnPolicy

ROOT = Path(__file__).parents[1]
MEASURED: tuple[tuple[Any, str], ...] = (
    (losses, "token_sums"),
    (advantages, "advantage_sums"),
    (advantages, "kl_sums"),
    (collector, "rollout_sums"),
    (single.SingleBackend, "_probes"),
    (single, "_changes"),
    (Learner, "check_rows"),
    (Checks, "judge"),
)
"""What only the checks call, none of it within another."""
LARGER = (
    "model.build.hidden_size=384",
    "model.build.intermediate_size=1024",
    "model.build.num_layers=6",
    "model.build.max_positions=512",
    "rollout.sampling.max_new_tokens=256",
    "rollout.prompts_per_round=16",
    "sft=null",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    spent: defaultdict[str, float] = defaultdict(float)
    for owner, name in MEASURED:
        setattr(owner, name, _timed(getattr(owner, name), spent))
    for title, overrides in (("quickstart", ("sft.steps=30",)), ("larger", LARGER)):
        spent.clear()
        whole = _train(rounds, overrides)
        print(f"{title}: {sum(spent.values()) / whole:.2%} of {rounds} rounds without their first rollout")
        print(
            "   "
            + ", ".join(
                f"{name} {seconds / whole:.2%}"
                for name, seconds in sorted(spent.items(), key=lambda x: -x[1])
            )
        )


def _timed(function: Any, spent: defaultdict[str, float]) -> Any:
    """The function, with its CPU time counted in `spent`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[function.__name__] += time.process_time() - start

    return call


def _train(rounds: int, overrides: Sequence[str]) -> float:
    """CPU seconds of a run from its first update, which leaves the warm-up and the first rollout out."""
    starts: list[float] = []
    train = OnPolicy.train

    def trained(run: Any, *args: Any) -> Any:
        starts.append(time.process_time())
        return train(run, *args)

    OnPolicy.train = trained  # pyright: ignore[reportAttributeAccessIssue]
    with tempfile.TemporaryDirectory() as folder:
        settings = (
            f"run.output_dir={folder}",
            f"run.max_rounds={rounds}",
            "eval={before: false, at_end: false}",
            "report={console: none, tensorboard: false, samples_every_rounds: 0}",
            "checkpoint={at_end: false}",
        )
        commands.train(load_config(ROOT / "examples/quickstart.yaml", [*settings, *overrides]))
    OnPolicy.train = train
    return time.process_time() - starts[0]


if __name__ == "__main__":
    main()
