"""The update of preference pairs depends on neither cut, order nor packing, and is that of a plain computation
row by row through the Hugging Face forward."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.rounding import assert_near, rounding
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braid.algorithms.pairs import Pairs
from braid.algorithms.preference_losses import PREFERENCE_LOSSES
from braid.algorithms.preference_losses.base import PreferenceLoss
from braid.config.train import TrainConfig
from braid.data.pairs import Pair
from braid.data.worked import Example
from braid.models.causal_lm import CausalLM
from braid.training.backend import StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.pairs import preference_loss, rows_of_pair, write_field
from braid.types import Row

VOCAB, SFT_COEF = 40, 0.3
LENGTHS = ((5, 3, 7), (12, 9, 2), (1, 4, 4), (8, 1, 6), (3, 11, 11))
"""Tokens of the prompt and of both responses."""
TOLERANCE = rounding(sum(map(sum, LENGTHS)))
REFERENCE = np.random.default_rng(5).normal(-20, 3, (len(LENGTHS), 2))


@cache
def _model() -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3", vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.1,
        pad_token_id=None, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@cache
def _pairs() -> list[Pair]:
    rng = np.random.default_rng(0)
    pairs = []
    for prompt, *responses in LENGTHS:
        ids = tuple(rng.integers(0, VOCAB, prompt).tolist())
        sides = []
        for num in responses:
            mask = [True] * num
            if num > 8:
                mask[3:5] = [False] * 2  # a reply of an environment
            sides.append(Example(ids, tuple(rng.integers(0, VOCAB, num).tolist()), tuple(mask)))
        pairs.append(Pair(*sides))
    return pairs


def _rows(order: list[int], kind: PreferenceLoss) -> list[Row]:
    pairs, rows = _pairs(), list[Row]()
    mean = np.mean([sum(pair.chosen.response_mask) for pair in pairs])
    for i in order:
        both = rows_of_pair(pairs[i], i)
        for side, row in enumerate(both):
            write_field(row, "ref_logprob", REFERENCE[i, side])
            write_field(row, "mean_chosen", mean)
            if kind.matches_pairs:
                write_field(row, "matched", REFERENCE[i, 0] / 10)
        rows += both
    return rows


def _update(
    kind: PreferenceLoss, order: list[int], micro_batch_tokens: int
) -> tuple[StepReport, dict[str, Tensor]]:
    model = CausalLM(deepcopy(_model()))
    grads: dict[str, Tensor] = {}
    for name, p in model.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: grads.update({name: p.grad.clone()}))
    config = TrainConfig(micro_batch_tokens=micro_batch_tokens)
    backend = SingleBackend(model, config, total_steps=1, device=torch.device("cpu"))
    rows = _rows(order, kind)
    loss = preference_loss(kind, sft_coef=SFT_COEF)
    return backend.train(rows, [1 / len(order)] * len(rows), loss), grads


def _plainly(kind: PreferenceLoss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients, each response in a separate forward pass."""
    model = deepcopy(_model())
    sums, counts = [], []
    for pair in _pairs():
        for side in (pair.chosen, pair.rejected):
            ids = torch.tensor([side.prompt_ids + side.response_ids])
            logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :-1]
            of_tokens = logprobs.gather(1, ids[0, 1:, None])[len(side.prompt_ids) - 1 :, 0].double()
            mask = torch.tensor(side.response_mask)
            sums.append(of_tokens[mask].sum())
            counts.append(float(mask.sum()))
    policy = torch.stack(sums).view(-1, 2)
    num, ref = torch.tensor(counts, dtype=torch.float64).view(-1, 2), torch.from_numpy(REFERENCE)
    pairs = Pairs(
        policy[:, 0], policy[:, 1], ref[:, 0], ref[:, 1], num[:, 0], num[:, 1],
        num[:, 0].mean().expand(len(num)), matched=ref[:, 0] / 10 if kind.matches_pairs else None,
    )  # fmt: skip
    tokens = num[:, 0].sum()
    loss = kind.per_pair(pairs).mean() - SFT_COEF * policy[:, 0].sum() / tokens
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


POLICY_LOSSES = [name for name, kind in PREFERENCE_LOSSES.items() if not kind.trains_reward_model]


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_a_step_is_that_of_a_plain_computation_however_it_is_cut_and_ordered(kind: str) -> None:
    made: Any = PREFERENCE_LOSSES[kind]()
    loss, expected = _plainly(made)
    for order, micro_batch_tokens in (([0, 1, 2, 3, 4], 10**6), ([3, 0, 4, 2, 1], 30), ([4, 3, 2, 1, 0], 1)):
        report, grads = _update(made, order, micro_batch_tokens)
        assert report.loss == pytest.approx(loss.item(), rel=TOLERANCE)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            assert_near(grad, expected[name], TOLERANCE, name)
        means = {name: total / count for name, (total, count) in report.metrics.items()}
        assert report.metrics["prefer/accuracy"][1] == len(LENGTHS)
        assert means["prefer/margin"] == pytest.approx(
            means["prefer/reward_chosen"] - means["prefer/reward_rejected"], abs=1e-9
        )


def test_the_prompt_of_a_pair_is_stored_once() -> None:
    from braid.training.packing import pack

    batch = pack(_rows([0, 1, 2, 3, 4], PREFERENCE_LOSSES["sigmoid"]()), torch.device("cpu"))
    assert batch.num_positions == sum(map(sum, LENGTHS))
