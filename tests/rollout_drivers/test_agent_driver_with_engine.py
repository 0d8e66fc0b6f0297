"""Conversations of a small real model: the native engine, the driver, rows and the trainer's forward
together."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch
from tests.driven import drive
from tests.native_engines import make_engine
from tests.rows import rows_of

from braid.config.model import BuildSpec, ModelConfig
from braid.data.prompts import Prompts, PromptSet
from braid.data.worked import NO_EXAMPLES
from braid.envs.agents.base import AgentEnv, Opening, Step
from braid.envs.agents.single_turn import SingleTurn
from braid.envs.kinds import Timeouts
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.chat import ChatFormat
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.drivers.agents import AgentDriver, Limits
from braid.rollout.engine import Sampling
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.trainer.inputs import TextInputs
from braid.types import Action, Group, Message, Prompt

MODEL = ModelConfig(
    build=BuildSpec(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16,
        characters="0123456789 =<>",
    )
)  # fmt: skip
TOKENIZER = load_tokenizer(MODEL)
TEMPERATURE = 0.8


class Echo:
    """Answers twice with the turn's length, then ends. A turn ends at a 5 or a 7."""

    def __init__(self) -> None:
        self.count = 0

    async def start(self, task: Prompt, seed: int) -> Opening:
        self.count = 0
        return Opening(stop_strings=("5", "7"))

    async def step(self, action: Action) -> Step:
        self.count += 1
        message: Message = {"role": "user", "content": f"<{len(action.text)}>"}
        return Step([message], 0.25, is_done=self.count == 3)

    async def close(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return load_policy(MODEL, temperature=TEMPERATURE, seed=0, device=torch.device("cpu"))


def _driver(engine: NativeEngine, env: Callable[[], AgentEnv], sampling: Sampling) -> AgentDriver:
    chat = ChatFormat(TOKENIZER, end_token_ids=sampling.stop_token_ids)
    return AgentDriver(engine, env, chat, sampling, Limits(128, None, Timeouts()), seed=3, retries=0)


def _run(lm: CausalLM, prompts: list[Prompt], *, max_running: int = 64) -> list[Group]:
    engine = make_engine(lm, InProcess(lambda ids: str(TOKENIZER.decode(list(ids)))), max_running=max_running)
    sampling = Sampling(
        max_new_tokens=24, temperature=TEMPERATURE, stop_token_ids=tuple(TOKENIZER.encode("<eos>"))
    )
    driver = _driver(engine, Echo, sampling)
    with closing(engine):
        return drive(driver, prompts, 4, (0, 1))


def test_stop_strings_and_texts_see_special_tokens_and_an_answer_does_not_end_with_them(lm: CausalLM) -> None:
    """With what a run decodes by: <eos> ends turns here as a stop string, and is no end token."""
    none = PromptSet(Prompts([]), {})
    inputs = TextInputs(TOKENIZER, none, none, NO_EXAMPLES, ())
    engine = make_engine(lm, InProcess(inputs.decode))
    sampling = Sampling(max_new_tokens=24, temperature=2.0, stop_strings=("<eos>",))
    driver = _driver(engine, SingleTurn, sampling)
    with closing(engine):
        groups = drive(driver, _prompts(8), 4, (0, 1))
    trajectories = [t for g in groups for t in g.trajectories]
    written = [t.turns[0].output_ids for t in trajectories]
    ended = [ids for ids in written if 1 in ids]
    assert ended, "768 tokens of 16 kinds"
    assert all(ids.index(1) == len(ids) - 1 for ids in ended)
    for trajectory, ids in zip(trajectories, written, strict=True):
        assert trajectory.text == TOKENIZER.decode(ids) == inputs.decode(ids)
        assert trajectory.text.endswith("<eos>") == (ids[-1] == 1)
        assert trajectory.sampled_text == trajectory.text
        answer, rest = trajectory.answer_text, trajectory.text.removeprefix(trajectory.answer_text)
        assert trajectory.text == answer + rest
        assert re.fullmatch(r"(<\w+>\s*)*", rest)
        assert not answer.endswith(("<eos>", "<pad>", "<unk>"))


def _prompts(count: int) -> list[Prompt]:
    return [Prompt(f"t:{i}", "t", tuple(TOKENIZER.encode(f"{i} =")), ()) for i in range(count)]


def _tokens(groups: list[Group]) -> list[list[int]]:
    return [
        [i for turn in t.turns for i in (*turn.context_ids, *turn.output_ids)]
        for g in groups
        for t in g.trajectories
    ]


def test_a_conversation_does_not_depend_on_concurrent_ones(lm: CausalLM) -> None:
    together = _run(lm, _prompts(6))
    assert _tokens(_run(lm, _prompts(6), max_running=3)) == _tokens(together)
    assert _tokens(_run(lm, _prompts(2))) == _tokens(together)[:8]


def test_logprobs_of_all_turns_are_those_that_training_computes(lm: CausalLM) -> None:
    groups = _run(lm, _prompts(6))
    trajectories = [t for g in groups for t in g.trajectories]
    assert {len(t.turns) for t in trajectories} >= {1, 3}, "cut ones and whole ones"
    for trajectory in trajectories:
        trajectory.reward = sum(turn.reward for turn in trajectory.turns)
    for row, trajectory in zip(rows_of(groups), trajectories, strict=True):
        ids = torch.from_numpy(row.inputs["input_ids"])
        batch = PackedBatch({"input_ids": ids}, torch.from_numpy(row.mask), (len(row),))
        logprobs = lm.forward(batch, frozenset({"logprobs"}))["logprobs"].detach().numpy()
        np.testing.assert_allclose(logprobs, row.fields["behavior_logprobs"], atol=1e-5)  # fp32 rounding
        assert TOKENIZER.decode(
            ids[len(trajectory.prompt.token_ids) :].tolist(), skip_special_tokens=False
        ) in (
            trajectory.text,
            trajectory.text[: trajectory.text.rfind("<")],  # the reply to the last turn is never read
        )
