"""How tests of rewards make trajectories and score them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from braid.config.reward import RewardConfig
from braid.errors import ConfigError
from braid.isolation.sandbox import find_isolation
from braid.rewards.scorer import Scorer, build_scorer
from braid.types import Action, Prompt, Trajectory


@pytest.fixture(scope="session")
def isolation() -> str:
    """The sandbox for programs, if this machine has one."""
    try:
        return find_isolation("auto").partition(",")[0]
    except ConfigError:
        return "process"


@pytest.fixture
def answered() -> Callable[..., Trajectory]:
    """Makes the trajectory of an answer to a prompt with the given columns. `sampled` is the whole last turn,
    with `reasoning`, which the context begins with `prefill`."""

    def answered(
        text: str, *, sampled: str = "", prefill: str = "", reasoning: str = "", **fields: Any
    ) -> Trajectory:
        prompt = Prompt("a:0", "a", (1,), ({"role": "user", "content": "the task"},), fields)
        trajectory = Trajectory(prompt, sample=0, text=f"before {text}", answer_text=text)
        trajectory.set_last_turn(Action(text, reasoning, raw_text=sampled or text, prefill=prefill))
        return trajectory

    return answered


@pytest.fixture
def build(tmp_path: Path, isolation: str) -> Iterator[Callable[..., Scorer]]:
    """Builds scorers from parts and settings, and closes them."""
    built: list[Scorer] = []

    def build(*parts: dict[str, Any], **settings: Any) -> Scorer:
        settings = {"code": {"isolation": isolation}, **settings}
        config = RewardConfig.model_validate({"parts": parts, **settings})
        built.append(build_scorer(config, base_dir=tmp_path))
        return built[-1]

    yield build
    for scorer in built:
        scorer.close()


@pytest.fixture
def score(build: Callable[..., Scorer]) -> Callable[..., list[Trajectory]]:
    """Scores trajectories with a new scorer."""

    def score(trajectories: list[Trajectory], *parts: dict[str, Any], **settings: Any) -> list[Trajectory]:
        asyncio.run(build(*parts, **settings).score(trajectories))
        return trajectories

    return score
