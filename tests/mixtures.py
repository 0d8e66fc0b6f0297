"""A small mixture of experts whose routers are often undecided, and rows that its engine has sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from braid.models.causal_lm import CausalLM
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.rows import group_rows
from braid.types import Group, Prompt, Row, Segment, Trajectory, Turn

VOCAB, LAYERS, EXPERTS, CHOSEN = 48, 3, 48, 2


def mixture(dtype: torch.dtype = torch.float32, kind: str = "qwen3_moe", **settings: Any) -> CausalLM:
    """With random weights. Of the experts two are chosen, and each three have nearly the same scores, so that
    rounding in bf16 changes choices."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, moe_intermediate_size=16,
        num_experts=EXPERTS, num_experts_per_tok=CHOSEN, norm_topk_prob=True, initializer_range=0.3,
        max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False, **settings,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, weight in model.named_parameters():
        if name.endswith("gate.weight"):
            like = weight.detach()[::3].repeat_interleave(3, dim=0)
            weight.data.copy_(like * (1 + 0.004 * torch.randn_like(like)))
    return CausalLM(model)


def sampled_turns(
    engine: NativeEngine,
    prompts: Sequence[Sequence[int]],
    *,
    group_size: int = 1,
    num_new: int = 12,
    replies: Sequence[int] = (),
) -> list[list[list[Turn]]]:
    """The turns of each member of each prompt's group: a second one follows `replies`."""

    async def member(prompt: Sequence[int], key: tuple[int, int]) -> list[Turn]:
        history, turns, unread = list[int](), list[Turn](), list(prompt)
        for number in range(2 if replies else 1):
            history += unread
            request = Request(tuple(history), Sampling(num_new), (*key, number), key)
            completion = await engine.generate(request)
            turns.append(completion.turn(unread))
            history += completion.token_ids
            unread = list(replies)
        return turns

    async def groups() -> list[list[list[Turn]]]:
        await engine.set_weights(1)
        members = [(p, (i, m)) for i, p in enumerate(prompts) for m in range(group_size)]
        turns = await asyncio.gather(*(member(*each) for each in members))
        return [turns[i : i + group_size] for i in range(0, len(turns), group_size)]

    return asyncio.run(groups())


def rows_of(groups: Sequence[Sequence[list[Turn]]]) -> list[Row]:
    """With advantages of 1 and -1 in turn, and the engine's log-probs as those before the update."""
    rows: list[Row] = []
    for place, members in enumerate(groups):
        prompt = Prompt(str(place), "", tuple(members[0][0].context_ids), ())
        trajectories = [
            Trajectory(prompt, i, segments=[Segment(turns)], reward=0.0) for i, turns in enumerate(members)
        ]
        rows += group_rows(Group(prompt, trajectories), place, len(rows))
    for number, row in enumerate(rows):
        behavior = row.fields["behavior_logprobs"]
        row.fields = {
            "behavior_logprobs": behavior,
            "old_logprobs": behavior,
            "advantages": (row.mask * (1 - 2 * (number % 2))).astype(behavior.dtype),
        }
    return rows
