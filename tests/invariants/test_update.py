"""No number of an update depends on how its rows are cut, ordered, packed or padded, nor on the chunk of the
log-probs.

Every case is one optimizer step of a backend: its loss, gradient norm, every gradient, and every metric are
compared, in fp32, with those of one whole micro-batch; and with a plain computation on padded rows through
the Hugging Face forward, which shares no code with the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch
from tests.rounding import assert_near, rounding
from torch import Tensor
from torch.distributions import Categorical, kl_divergence
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from braid.algorithms.aggregate import row_weights
from braid.algorithms.policy_losses.policy_gradient import PolicyGradient
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.recipes import RECIPES, Recipe
from braid.config.model import MlpSpec
from braid.config.train import TrainConfig
from braid.models.base import TrainableModel
from braid.models.causal_lm import CausalLM
from braid.models.mlp import MlpPolicy, MlpValue
from braid.models.value import ValueModel
from braid.training.backend import Loss, StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, supervised_loss, value_loss_of, with_value_loss
from braid.types import ActionSpace, Aggregation, Row, Spaces

VOCAB, CONSTANT, TEMPERATURE = 64, 40.0, 0.8
LENGTHS = (9, 23, 4, 17, 2, 31, 12, 12, 6, 20)
TOLERANCE = rounding(sum(LENGTHS))
"""Of each tensor's own norm, or of the number's own size or 1 where that is larger: losses, metrics and
gradients are sums over the positions of all rows, in an order that changes."""
GROUPS = (0, 0, 0, 1, 1, 2, 2, 2, 3, 3)
MODES: tuple[Aggregation, ...] = get_args(Aggregation)

POLICY = replace(RECIPES["grpo"], policy_loss=PpoClip(dual_clip=1.5), kl_coef=0.1, entropy_coef=0.01)
FULL_KL = replace(POLICY, kl_estimator="full")
CRITIC = replace(RECIPES["ppo"], value_loss_coef=0.5)


@dataclass
class Update:
    """Everything that one step gives."""

    report: StepReport
    grads: dict[str, Tensor]


def _hf_model(seed: int = 0, *, is_tied: bool = True) -> PreTrainedModel:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=is_tied,
        initializer_range=0.1,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def _hf_reference() -> PreTrainedModel:
    return _hf_model(seed=1, is_tied=False)


def _policy(model: PreTrainedModel, **options: Any) -> CausalLM:
    """With a reference, for KL over the whole vocabulary."""
    policy = CausalLM(model, temperature=TEMPERATURE, **options)
    reference = CausalLM(_hf_reference(), temperature=TEMPERATURE)
    backend = SingleBackend(reference, TrainConfig(), total_steps=0, device=torch.device("cpu"))
    policy.reference = backend.logits
    return policy


def _critic(policy: CausalLM) -> ValueModel:
    critic = ValueModel.copy_of(policy)
    with torch.no_grad():
        dict(critic.named_weights())["value_head.weight"].normal_()
    return critic


def _text_rows() -> list[Row]:
    """Ragged rows with a prompt and, in some, a reply of the environment between two turns; one has nothing
    to learn."""
    rng = np.random.default_rng(0)
    rows = []
    for number, (length, group) in enumerate(zip(LENGTHS, GROUPS, strict=True)):
        mask = np.arange(length) >= min(3, length - 1)
        if length > 15:
            mask[8:12] = False
        if number == 6:
            mask[:] = False
        inputs = {"input_ids": rng.integers(0, VOCAB, length)}
        rows.append(Row(inputs, mask, group=group, trajectory=number, fields=_fields(mask, rng)))
    return rows


def _fields(mask: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    def at_mask(scale: float) -> np.ndarray:
        return np.where(mask, rng.normal(scale=scale, size=len(mask)), 0.0).astype(np.float32)

    return {"advantages": at_mask(1.0), "values": at_mask(1.0), "returns": at_mask(1.0)}


def _with_logprobs(rows: list[Row], model: TrainableModel) -> list[Row]:
    """Old, behaviour and reference log-probs near enough to the current ones that some ratios are clipped,
    some not."""
    rng = np.random.default_rng(1)
    backend = SingleBackend(model, TrainConfig(), total_steps=0, device=torch.device("cpu"))
    for row, result in zip(rows, backend.infer(rows, frozenset({"logprobs"})), strict=True):
        for name, scale in (("old_logprobs", 0.3), ("behavior_logprobs", 0.3), ("ref_logprobs", 0.5)):
            noise = rng.normal(scale=scale, size=len(row)).astype(np.float32)
            row.fields[name] = np.where(row.mask, result["logprobs"] + noise, np.float32(0))
    return rows


def _update(
    model: TrainableModel,
    rows: Sequence[Row],
    loss: Loss,
    mode: Aggregation = "token_mean",
    micro_batch_tokens: int = 10**6,
) -> Update:
    """One step of a backend; gradients are seen just before they are clipped."""
    model = deepcopy(model)
    grads: dict[str, Tensor] = {}
    for name, p in model.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: grads.update({name: p.grad.clone()}))
    counts, groups = [row.num_tokens for row in rows], [row.group for row in rows]
    weights = row_weights(counts, groups, mode=mode, constant=CONSTANT)
    config = TrainConfig(micro_batch_tokens=micro_batch_tokens)
    backend = SingleBackend(model, config, total_steps=1, device=torch.device("cpu"))
    return Update(backend.train(rows, weights, loss), grads)


def _assert_equal(one: Update, other: Update) -> None:
    def close(a: float, b: float, what: str) -> None:
        assert abs(a - b) <= TOLERANCE * max(1.0, abs(b)), f"{what}: {a} is not {b}"

    close(one.report.loss, other.report.loss, "loss")
    close(one.report.grad_norm, other.report.grad_norm, "gradient norm")
    assert one.report.metrics.keys() == other.report.metrics.keys()
    for name, (total, count) in one.report.metrics.items():
        expected, number = other.report.metrics[name]
        close(count, number, f"count of {name}")
        close(total / count, expected / number, name)
    assert one.report.maxima.keys() == other.report.maxima.keys()
    for name, value in one.report.maxima.items():
        close(value, other.report.maxima[name], name)
    _assert_equal_gradients(one.grads, other.grads)


def _assert_equal_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, grad in one.items():
        assert_near(grad, other[name], TOLERANCE, name)


ROLES: dict[str, Loss] = {
    "policy": policy_loss(POLICY),
    "reinforce": policy_loss(replace(POLICY, policy_loss=PolicyGradient(), kl_estimator="k2")),
    "full KL": policy_loss(FULL_KL),
    "critic": value_loss_of(CRITIC),
    "sft": supervised_loss(),
}


@cache
def _text(role: str) -> tuple[TrainableModel, list[Row], Loss]:
    policy = _policy(_hf_model())
    rows = _with_logprobs(_text_rows(), policy)
    return _critic(policy) if role == "critic" else policy, rows, ROLES[role]


@cache
def _whole(role: str, mode: Aggregation = "token_mean") -> Update:
    """Of all rows as one micro-batch, in their order."""
    return _update(*_text(role), mode)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch_tokens", [1, 70])  # 32: see the order of rows
def test_the_size_of_micro_batches_changes_nothing(
    role: str, mode: Aggregation, micro_batch_tokens: int
) -> None:
    _assert_equal(_update(*_text(role), mode, micro_batch_tokens), _whole(role, mode))


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("mode", MODES)
def test_the_order_of_rows_changes_nothing(role: str, mode: Aggregation) -> None:
    model, rows, loss = _text(role)
    shuffled = [rows[i] for i in np.random.default_rng(2).permutation(len(rows))]
    for micro_batch_tokens in (32, 10**6):
        _assert_equal(_update(model, shuffled, loss, mode, micro_batch_tokens), _whole(role, mode))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["policy", "reinforce", "full KL", "sft"])
@pytest.mark.parametrize("chunk_bytes", [4, 4 * 33, 4 * VOCAB * 7])
def test_the_chunk_of_the_logprobs_changes_nothing(role: str, chunk_bytes: int) -> None:
    _, rows, loss = _text(role)
    chunked = _policy(_hf_model(), chunk_bytes=chunk_bytes)
    _assert_equal(_update(chunked, rows, loss, micro_batch_tokens=70), _whole(role))


@pytest.mark.parametrize("role", ROLES)
def test_recomputing_layers_changes_nothing(role: str) -> None:
    model, rows, loss = _text(role)
    model = deepcopy(model)
    model.set_gradient_checkpointing(True)
    _assert_equal(_update(model, rows, loss, micro_batch_tokens=70), _whole(role))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("micro_batch_tokens", [1, 40])
def test_a_simulators_update_depends_on_neither_cut_nor_order(
    mode: Aggregation, micro_batch_tokens: int
) -> None:
    rng = np.random.default_rng(3)
    spec, spaces = MlpSpec(hidden_sizes=(16,)), Spaces(3, ActionSpace("continuous", 2))
    policy, critic = MlpPolicy(spec, spaces, seed=0), MlpValue(spec, spaces, seed=1)
    rows = []
    for number, length in enumerate(LENGTHS):
        mask = np.arange(length) < length - 1
        row = Row(
            {"actions": rng.normal(size=(length, 2)).astype(np.float32)},
            mask,
            GROUPS[number],
            number,
            fields=_fields(mask, rng),
            observations={"state": rng.normal(size=(length, 3)).astype(np.float32)},
            decision=np.where(mask, np.arange(length), -1).astype(np.int32),
        )
        rows.append(row)
    _with_logprobs(rows, policy)
    for model, loss in ((policy, policy_loss(POLICY)), (critic, value_loss_of(CRITIC))):
        whole = _update(model, rows, loss, mode)
        _assert_equal(_update(model, rows[::-1], loss, mode, micro_batch_tokens), whole)
    policy.add_value_head("value_head")
    torch.nn.init.ones_(policy.module.get_parameter("value_head.weight"))
    parts = policy_loss(POLICY), value_loss_of(CRITIC)
    together = _update(policy, rows, with_value_loss(parts[0], CRITIC), mode)
    _assert_equal(
        _update(policy, rows[::-1], with_value_loss(parts[0], CRITIC), mode, micro_batch_tokens), together
    )
    apart = [_update(policy, rows, loss, mode) for loss in parts]
    assert together.report.loss == pytest.approx(sum(update.report.loss for update in apart), rel=1e-5)
    loss, _ = together.report.metrics["critic/loss"]
    assert loss == pytest.approx(apart[1].report.loss, rel=1e-5)
    for name, gradient in together.grads.items():
        expected = sum(update.grads[name] for update in apart if name in update.grads)
        assert_near(gradient, expected, TOLERANCE, name)


# --- the same update on padded rows, written out plainly ---


def _padded(rows: Sequence[Row], name: str) -> Tensor:
    """[B, L]: an input or a field, with 0 where a row has ended."""
    arrays = [row.inputs[name] if name in row.inputs else row.fields[name] for row in rows]
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(a) for a in arrays], batch_first=True)


def _padded_mask(rows: Sequence[Row]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(row.mask) for row in rows], batch_first=True)


def _forward_padded(model: PreTrainedModel, rows: Sequence[Row]):
    """What the Hugging Face module gives for right-padded rows under an attention mask."""
    is_real = torch.arange(max(LENGTHS)) < torch.tensor([len(row) for row in rows])[:, None]
    ids = _padded(rows, "input_ids")
    return model(
        input_ids=ids, attention_mask=is_real.long(), use_cache=False, output_hidden_states=True
    ), ids


def _reduce(per_token: Tensor, rows: Sequence[Row], mode: Aggregation) -> Tensor:
    """The reduction as its name says it, over [B, L]."""
    mask = _padded_mask(rows)
    answers = [values[m] for values, m in zip(per_token, mask, strict=True) if m.any()]
    if mode == "token_mean":
        return torch.cat(answers).mean()
    if mode in ("sequence_mean_token_mean", "agent_mean_token_mean"):  # one agent
        return torch.stack([a.mean() for a in answers]).mean()
    if mode == "sequence_mean_token_sum":
        return torch.stack([a.sum() for a in answers]).mean()
    if mode == "token_sum_constant":
        return torch.stack([a.sum() / CONSTANT for a in answers]).mean()
    of_prompt = [[i for i, row in enumerate(rows) if row.group == g] for g in dict.fromkeys(GROUPS)]
    return torch.stack([per_token[i][mask[i]].mean() for i in of_prompt]).mean()


def _plain_policy_loss(
    model: PreTrainedModel, rows: Sequence[Row], recipe: Recipe, mode: Aggregation
) -> Tensor:
    output, ids = _forward_padded(model, rows)
    logp = (output.logits / TEMPERATURE).log_softmax(-1)[:, :-1]
    new = torch.nn.functional.pad(logp.gather(-1, ids[:, 1:, None]).squeeze(-1), (1, 0))
    entropy = torch.nn.functional.pad(-(logp.exp() * logp).sum(-1), (1, 0))
    old, ref, advantage = (_padded(rows, name) for name in ("old_logprobs", "ref_logprobs", "advantages"))
    ratio = (new - old).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    surrogate = torch.where(advantage < 0, torch.max(surrogate, 1.5 * advantage), surrogate)
    kl = (ref - new).exp() - 1 - (ref - new)
    if recipe.kl_estimator == "full":
        with torch.no_grad():
            base = _forward_padded(_hf_reference(), rows)[0].logits
        kl = torch.nn.functional.pad(
            kl_divergence(*(Categorical(logits=x / TEMPERATURE) for x in (output.logits, base)))[:, :-1],
            (1, 0),
        )
    return _reduce(-surrogate + 0.1 * kl - 0.01 * entropy, rows, mode)


def _plain_critic_loss(
    model: PreTrainedModel, score: torch.nn.Module, rows: Sequence[Row], mode: Aggregation
) -> Tensor:
    output, _ = _forward_padded(model, rows)
    value = torch.nn.functional.pad(score(output.hidden_states[-1])[:, :-1], (1, 0))
    old, target = _padded(rows, "values"), _padded(rows, "returns")
    kept = torch.minimum(torch.maximum(value, old - 0.2), old + 0.2)
    return _reduce(0.25 * torch.max((value - target) ** 2, (kept - target) ** 2), rows, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", [POLICY, FULL_KL], ids=["k3", "full KL"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_policys_packed_update_equals_the_plain_one_on_padded_rows(
    mode: Aggregation, recipe: Recipe, is_tied: bool
) -> None:
    plain, policy = _hf_model(is_tied=is_tied), _policy(_hf_model(is_tied=is_tied))
    rows = _with_logprobs(_text_rows(), policy)
    ours = _update(policy, rows, policy_loss(recipe), mode, micro_batch_tokens=40)
    loss = _plain_policy_loss(plain, rows, recipe, mode)
    loss.backward()
    assert ours.report.metrics["policy/clip_fraction"][0] > 0
    assert ours.report.metrics["policy/dual_clip_fraction"][0] > 0
    assert abs(ours.report.loss - loss.item()) <= TOLERANCE * max(1.0, abs(loss.item()))
    _assert_equal_gradients(ours.grads, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("mode", MODES)
def test_a_critics_packed_update_equals_the_plain_one_on_padded_rows(mode: Aggregation) -> None:
    plain = _hf_model()
    critic = _critic(CausalLM(_hf_model()))
    score = deepcopy(critic.value_head)
    rows = _text_rows()
    ours = _update(critic, rows, value_loss_of(CRITIC), mode, micro_batch_tokens=40)
    loss = _plain_critic_loss(plain, score, rows, mode)
    loss.backward()
    assert ours.report.metrics["critic/clip_fraction"][0] > 0
    assert abs(ours.report.loss - loss.item()) <= TOLERANCE * max(1.0, abs(loss.item()))
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    expected |= {f"value_head.{name}": p.grad for name, p in score.named_parameters()}
    _assert_equal_gradients(ours.grads, expected)
