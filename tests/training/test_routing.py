"""Router replay in optimizer steps, and the load-balancing loss of routers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.mixtures import CHOSEN, EXPERTS, LAYERS, VOCAB, mixture, rows_of, sampled_turns
from tests.native_engines import make_engine
from torch import Tensor

from braid.algorithms.recipes import RECIPES
from braid.config.train import TrainConfig
from braid.models.base import Output
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.rollout.engines.base import InProcess
from braid.training.backend import Diagnostics, Loss, StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss
from braid.types import UNKNOWN_EXPERT, Row

CPU = torch.device("cpu")
ROUNDING = 0.15
"""Of log-probs of bf16: a few times 2**-8 of logits of some 5 nats. Another expert changes them by more."""


@cache
def _sampled(
    dtype: torch.dtype, replies: tuple[int, ...] = (1, 2, 3), *, prefix_caching: bool = False
) -> list[Row]:
    """Rows of a turn, and another after `replies`, whose prompts differ in length, sampled in a type."""
    engine = make_engine(mixture(dtype), InProcess(str, records_experts=True), prefix_caching=prefix_caching)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, num).tolist() for num in (5, 9, 20)]
    rows = rows_of(sampled_turns(engine, prompts, group_size=4, num_new=20, replies=replies))
    engine.close()
    return rows


def _copies(rows: Sequence[Row], shift: int = 0) -> list[Row]:
    """With the experts of the token `shift` places before."""
    moved = (np.roll(row.inputs["experts"], shift, axis=0) for row in rows)
    return [
        replace(row, inputs=row.inputs | {"experts": experts}, fields=dict(row.fields))
        for row, experts in zip(rows, moved, strict=True)
    ]


def _replaying(lm: CausalLM) -> CausalLM:
    lm.prepare_routers("train.router_replay")
    lm.replays_experts = True
    return lm


def _step(lm: CausalLM, rows: Sequence[Row], **train: Any) -> tuple[StepReport, float]:
    """A step of PPO's loss with plain SGD at a learning rate of 1, by which weights change by their
    gradients; and the largest difference of a token's log-prob from that before the update."""
    differences: list[float] = []
    loss = policy_loss(RECIPES["ppo"])

    def compute(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
        change = (outputs["logprobs"] - batch.fields["old_logprobs"])[batch.mask]
        differences.append(change.abs().max().item())
        return loss.compute(outputs, batch)

    settings = {"optimizer": {"kind": "sgd", "lr": 1.0}, "max_grad_norm": None, **train}
    backend = SingleBackend(lm, TrainConfig.model_validate(settings), total_steps=1, device=CPU)
    weights = [1 / sum(row.num_tokens for row in rows)] * len(rows)
    return backend.train(rows, weights, Loss(loss.outputs, compute)), max(differences)


@pytest.mark.slow
@pytest.mark.parametrize("replies", [(), (1, 2, 3)])
def test_with_replay_the_first_ratio_is_1_to_rounding_in_bf16(replies: tuple[int, ...]) -> None:
    """With a cache of the first turn, which would be computed again otherwise, and choose other experts."""
    rows = _sampled(torch.bfloat16, replies, prefix_caching=True)
    _, replayed = _step(_replaying(mixture(torch.bfloat16)), rows)
    _, plain = _step(mixture(torch.bfloat16), rows)
    _, shifted = _step(_replaying(mixture(torch.bfloat16)), _copies(rows, 1))
    assert replayed < ROUNDING < plain
    assert shifted > 1, "the experts of the token before are other experts"


def test_in_fp32_replay_changes_nothing_in_the_first_step_and_shifted_choices_do() -> None:
    rows = _sampled(torch.float32)
    lms = [_replaying(mixture()), mixture(), _replaying(mixture())]
    pieces = [rows, rows, _copies(rows, 1)]
    steps = [_step(lm, part) for lm, part in zip(lms, pieces, strict=True)]
    assert max(difference for _, difference in steps[:2]) < 1e-4
    assert steps[2][1] > 1
    expected = dict(lms[1].named_weights())
    for name, weight in lms[0].named_weights():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_gradients_flow_to_the_router_through_replayed_experts() -> None:
    rows = _copies(_sampled(torch.float32), 1)
    lm, before = _replaying(mixture()), mixture()
    _step(lm, rows)
    old = dict(before.named_weights())
    changes = [(w - old[n]).abs().max() for n, w in lm.named_weights() if n.endswith("gate.weight")]
    assert len(changes) == LAYERS
    assert min(changes) > 1e-4


@pytest.mark.parametrize(
    "train",
    [{"micro_batch_rows": 1}, {"micro_batch_tokens": 150}, {"gradient_checkpointing": True}],
    ids=["rows", "tokens", "recomputed"],
)
@pytest.mark.parametrize("shift", [0, 1])
def test_micro_batches_and_recomputed_layers_change_no_replayed_step(
    train: dict[str, Any], shift: int
) -> None:
    rows, whole, cut = _copies(_sampled(torch.float32), shift), _replaying(mixture()), _replaying(mixture())
    cut.set_gradient_checkpointing(train.get("gradient_checkpointing", False))
    one, _ = _step(whole, rows, router_aux_coef=0.1)
    other, _ = _step(cut, rows, router_aux_coef=0.1, **train)
    assert other.loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6)
    for name in ("router/load_max", "router/load_min", "router/entropy", "router/aux_loss"):
        total, count = one.metrics[name]
        assert other.metrics[name][0] / other.metrics[name][1] == pytest.approx(total / count, rel=1e-5)
    expected = dict(whole.named_weights())
    for name, weight in cut.named_weights():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=2e-5)


def test_a_pass_before_the_update_gives_choices_that_it_replays() -> None:
    """R2: of whole rows, also where they share a prompt."""
    rows = [replace(row, inputs={"input_ids": row.inputs["input_ids"]}) for row in _sampled(torch.float32)]
    lm = _replaying(mixture())
    backend = SingleBackend(lm, TrainConfig(micro_batch_tokens=200), total_steps=1, device=CPU)
    outputs = backend.infer(rows, frozenset({"logprobs", "experts"}))
    alone = SingleBackend(lm, TrainConfig(micro_batch_rows=1), total_steps=1, device=CPU)
    for row, output, single in zip(rows, outputs, alone.infer(rows, frozenset({"experts"})), strict=True):
        assert output["experts"].shape == (len(row), LAYERS, CHOSEN)
        assert output["experts"].dtype == np.int8
        np.testing.assert_array_equal(output["experts"], single["experts"])
        row.inputs["experts"], row.fields["old_logprobs"] = output["experts"], output["logprobs"]
    _, difference = _step(lm, rows)
    assert difference < 1e-4


def test_rows_share_a_prompt_only_with_its_experts() -> None:
    first, second = _copies(_sampled(torch.float32)[:2])
    assert (first.inputs["experts"][:5] == second.inputs["experts"][:5]).all()
    lm = _replaying(mixture())
    backend = SingleBackend(lm, TrainConfig(), total_steps=0, device=CPU)
    second.inputs["experts"][:4] = (second.inputs["experts"][:4] + 1) % EXPERTS
    together = backend.infer([first, second], frozenset({"logprobs"}))
    alone = [backend.infer([row], frozenset({"logprobs"}))[0] for row in (first, second)]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], atol=1e-4)


def test_all_but_the_last_token_have_experts() -> None:
    for row in _sampled(torch.float32, prefix_caching=True):
        is_unknown = (row.inputs["experts"] == UNKNOWN_EXPERT).any(axis=(1, 2))
        assert is_unknown.nonzero()[0].tolist() == [len(row) - 1]


def test_the_balance_loss_and_its_gradient_are_those_of_transformers() -> None:
    """On rows of one length, of which transformers' batch has no padding."""
    lm, plain = mixture(), mixture().model
    plain.set_attn_implementation("eager")
    random, coef = np.random.default_rng(1), 0.5
    ids = random.integers(0, VOCAB, (6, 17))
    ids[1:3, :5] = ids[0, :5]  # a shared prompt counts for each row
    rows = [
        Row({"input_ids": row}, np.arange(17) >= 5, i // 3, i, fields=_without_advantage(17))
        for i, row in enumerate(ids)
    ]
    before = {name: weight.detach().clone() for name, weight in plain.named_parameters()}
    aux = plain(input_ids=torch.from_numpy(ids), output_router_logits=True).aux_loss
    aux.backward()
    lm.prepare_routers("train.router_aux_coef")
    report, _ = _step(lm, rows, router_aux_coef=coef)
    assert report.metrics["router/aux_loss"][0] == pytest.approx(coef * aux.item(), rel=1e-6)
    assert report.loss == pytest.approx(coef * aux.item(), rel=1e-6)
    for name, weight in lm.model.named_parameters():
        gradient = plain.get_parameter(name).grad
        change = torch.zeros_like(weight) if gradient is None else coef * gradient
        torch.testing.assert_close(before[name] - weight, change, rtol=1e-4, atol=1e-6)


def _without_advantage(num: int) -> dict[str, Any]:
    names = ("old_logprobs", "behavior_logprobs", "advantages")
    return {name: np.zeros(num, np.float32) for name in names}


def test_loads_are_relative_to_equal_shares() -> None:
    lm, rows = _replaying(mixture()), _copies(_sampled(torch.float32))
    for row in rows:  # half of the experts, in turn
        places = np.arange(row.inputs["experts"].size).reshape(row.inputs["experts"].shape)
        row.inputs["experts"] = (places % (EXPERTS // 2)).astype(np.int8)
    metrics = _step(lm, rows)[0].metrics
    total, count = metrics["router/load_max"]
    assert count == LAYERS
    assert 2 <= total / count < EXPERTS / CHOSEN
    assert metrics["router/load_min"][0] == 0
    assert 0 < metrics["router/entropy"][0] / metrics["router/entropy"][1] < np.log(EXPERTS)


def test_a_copy_of_the_model_replays_nothing_and_samples_as_it_does() -> None:
    lm = _replaying(mixture())
    reference = lm.frozen_copy()
    assert not reference.replays_experts
    assert deepcopy(lm).replays_experts
    for weight in lm.model.parameters():
        weight.data.zero_()  # not the copy's
    rows = _copies(_sampled(torch.float32), 1)
    one = SingleBackend(reference, TrainConfig(), total_steps=0, device=CPU)
    other = SingleBackend(mixture(), TrainConfig(), total_steps=0, device=CPU)
    outputs: frozenset[Output] = frozenset({"logprobs"})
    for mine, plain in zip(one.infer(rows, outputs), other.infer(rows, outputs), strict=True):
        np.testing.assert_array_equal(mine["logprobs"], plain["logprobs"])
