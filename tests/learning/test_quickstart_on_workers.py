"""The quickstart learns on workers: two FSDP2 ranks train, and vLLM samples in a separate process.

It is the file itself, made shorter: sums of three numbers, a warm-up whose answers at once are guesses, which
takes no time to learn, and six rounds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from examples.solutions import chain_sum
from tests.needs import WITH_VLLM

from braid.config.load import load_config
from braid.trainer import commands

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
SUMS = "{min_terms: 3, max_terms: 3, min_digits: 1, max_digits: 1}"


def work_or_guess(row: Mapping[str, Any]) -> str:
    """Two tasks of five worked out, the others guessed."""
    return chain_sum(row) if row["metadata"]["source_index"] % 5 < 2 else "A:0"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.xdist_group("workers")
@WITH_VLLM
def test_the_quickstart_learns_with_two_fsdp2_ranks_and_vllm(tmp_path: Path) -> None:
    overrides = [
        "train.backend=fsdp2",
        "cluster.placement={policy: 0-1, rollout: 2}",
        "rollout.engine=vllm",
        *(f"{source}.params={SUMS}" for source in ("data.train[0]", "data.eval[0]", "sft.data[0]")),
        "sft.data[0].size=18000",
        f"sft.data[0].response_function={Path(__file__)}:work_or_guess",
        "sft.steps=300",
        "sft.rows_per_step=48",
        "train.optimizer.lr=3.0e-4",
        "rollout.sampling.max_new_tokens=32",
        "eval.sampling.max_new_tokens=32",
        "eval.target={min_final: null, min_gain: null}",
        "run.max_rounds=6",
        f"run.output_dir={tmp_path}",
        "run.device=cpu",
        "run.num_threads=1",
        "report={console: none, tensorboard: false}",
    ]
    outcome = commands.train(load_config(QUICKSTART, overrides))
    summary = json.loads((outcome.run_dir / "summary.json").read_text())
    before, after = (summary["eval"][when]["all"]["mean@1"] for when in ("first", "last"))
    assert before < 0.4  # a guess is right one time in eight
    assert after > before + 0.2
    plan = json.loads((outcome.run_dir / "plan.json").read_text())
    assert plan["layout"]["mode"] == "disaggregated"
