"""Agents that look: images in openings and replies reach the engine, rows and the trainer."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tests.driven import drive
from tests.native_engines import make_engine
from tests.pictures import PAD, TOKENIZER, model_of, picture, vision_of
from tests.rows import rows_of

from braid.envs.agents.base import Opening, Step
from braid.envs.kinds import Timeouts
from braid.models.causal_lm import CausalLM
from braid.models.chat import ChatFormat
from braid.report.samples import read_samples, write_samples
from braid.rollout.drivers.agents import AgentDriver, Limits
from braid.rollout.engine import Sampling
from braid.training.packing import pack
from braid.types import Action, Group, Image, Prompt, Status

SAMPLING = Sampling(max_new_tokens=5, temperature=1.0, stop_token_ids=(1,))
LIMITS = Limits(256, None, Timeouts(), continues_cut_turns=True)
SEEN = [picture(seed) for seed in range(3)]


def shows(text: str, *images: Image) -> dict[str, Any]:
    parts = [{"type": "image", "image": image.data} for image in images]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


class Gallery:
    """Shows an image, then another, or two; and ends."""

    def __init__(self) -> None:
        self._shown = 0

    async def start(self, task: Prompt, seed: int) -> Opening:
        return Opening([shows("see ", SEEN[0])])

    async def step(self, action: Action) -> Step:
        self._shown += 1
        images = SEEN[1:] if len(action.text) % 2 else SEEN[1:2]
        return Step([shows("and ", *images)], 0.5, is_done=self._shown == 2)

    async def close(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    lm = CausalLM(model_of("qwen3_vl"))
    lm.vision = vision_of("qwen3_vl")
    return lm


@pytest.fixture(scope="module")
def groups(lm: CausalLM) -> list[Group]:
    engine = make_engine(lm)
    chat = ChatFormat(TOKENIZER, end_token_ids=(1,), vision=lm.vision)
    driver = AgentDriver(engine, Gallery, chat, SAMPLING, LIMITS, seed=1, retries=0)
    prompts = [Prompt(f"t:{i}", "t", (), ()) for i in range(3)]
    with closing(engine):
        groups = drive(driver, prompts, 3, (0, 1))
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.reward = sum(turn.reward for turn in trajectory.turns)
    return groups


def test_rows_have_the_images_where_their_tokens_are(groups: list[Group]) -> None:
    rows = rows_of(groups)
    assert len(rows) == 9
    for row in rows:
        ids, mask = row.inputs["input_ids"], row.mask
        assert [one.image for one in row.images][:2] == SEEN[:2]
        for start, num, _ in row.images:
            assert set(ids[start : start + num].tolist()) == {PAD}
        assert (ids == PAD).sum() == sum(one.num for one in row.images)
        assert not (mask & (ids == PAD)).any()
    assert {len(row.images) for row in rows} == {2, 3}


def test_sampled_log_probs_are_those_of_training(groups: list[Group], lm: CausalLM) -> None:
    rows = rows_of(groups)
    with torch.no_grad():
        logprobs = lm.forward(batch := pack(rows, lm.device), frozenset({"logprobs"}))["logprobs"]
    for row, part in zip(rows, logprobs.split(batch.stored), strict=True):
        first = len(row) - len(part)
        sampled = row.fields["behavior_logprobs"][first:][row.mask[first:]]
        assert np.abs(part.numpy()[row.mask[first:]] - sampled).max() < 1e-5


def test_images_are_stored_once_and_come_back(groups: list[Group], tmp_path: Any) -> None:
    write_samples(tmp_path / "round_000001.jsonl", groups)
    assert {file.name for file in (tmp_path / "images").iterdir()} == {f"{one.key}.png" for one in SEEN}
    for sample, original in zip(
        read_samples(tmp_path / "round_000001.jsonl"),
        [trajectory for group in groups for trajectory in group.trajectories],
        strict=True,
    ):
        back = [turn.images for turn in sample.trajectory.turns]
        assert back == [turn.images for turn in original.turns]
        assert back[0][0].image.data == SEEN[0].data


def test_a_model_of_text_makes_an_image_an_invalid_episode() -> None:
    lm = CausalLM(model_of("qwen3_vl"))
    engine, chat = make_engine(lm), ChatFormat(TOKENIZER, end_token_ids=(1,))
    driver = AgentDriver(engine, Gallery, chat, SAMPLING, LIMITS, seed=1, retries=0)
    with closing(engine):
        ((trajectory,),) = [g.trajectories for g in drive(driver, [Prompt("t", "t", (), ())], 1, (0, 1))]
    assert trajectory.status is Status.INVALID
    assert "the model reads only text; set model.vision" in trajectory.reason
