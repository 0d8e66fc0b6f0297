"""Storing the common prompt of a group once changes no log-prob, no value and no gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.rounding import assert_near, rounding

from braid.config.model import BuildSpec, ModelConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.models.value import ValueModel
from braid.training.packing import pack
from braid.types import Row

CPU = torch.device("cpu")
TOLERANCE = rounding(2 * (64 + 32 + 14))
"""Of a tensor's norm: sums over 64 and 32 features and up to 14 positions, in each of 2 layers."""


def tiny(architecture: str) -> CausalLM:
    spec = BuildSpec(
        architecture=architecture, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=8, characters="abcdefgh",
    )  # fmt: skip
    return load_policy(ModelConfig(build=spec), temperature=1.0, seed=0, device=CPU)


def rows() -> list[Row]:
    """Two prompts of three and two answers."""
    rng = np.random.default_rng(0)
    out = []
    for group, (prompt, answers) in enumerate([(6, (3, 9, 1)), (4, (2, 5))]):
        ids = rng.integers(3, 11, prompt)
        for answer in answers:
            tokens = np.concatenate([ids, rng.integers(3, 11, answer)])
            mask = np.arange(len(tokens)) >= prompt
            out.append(Row({"input_ids": tokens}, mask, group=group, trajectory=len(out)))
    return out


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_shared_prompt_changes_no_output_and_no_gradient(architecture: str, role: str) -> None:
    policy = tiny(architecture)
    model = policy if role == "policy" else ValueModel.copy_of(policy)
    name = "logprobs" if role == "policy" else "values"
    if role == "critic":
        torch.nn.init.normal_(dict(model.named_weights())["value_head.weight"])
    together = pack(rows(), CPU)
    assert together.num_positions < sum(together.lengths)
    outputs = model.forward(together, frozenset({name}))[name]
    outputs.square().sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}
    model.module.zero_grad(set_to_none=True)
    apart = [model.forward(pack([row], CPU), frozenset({name}))[name] for row in rows()]
    torch.stack([x.square().sum() for x in apart]).sum().backward()
    written = torch.cat([x[torch.from_numpy(row.mask)] for x, row in zip(apart, rows(), strict=True)])
    assert_near(outputs[together.mask], written, TOLERANCE)
    assert gradients
    for n, p in model.module.named_parameters():
        if p.grad is not None:
            assert_near(gradients[n], p.grad, TOLERANCE, n)
