"""A packed forward is the model's own forward, row by row, in values and in gradients."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from tests.rounding import assert_near, rounding
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from braid.errors import ModelError
from braid.models.attention import PackedAttention
from braid.models.batch import PackedBatch
from braid.models.causal_lm import CausalLM
from braid.models.value import ValueModel

Make = Callable[..., PreTrainedModel]
Pack = Callable[..., PackedBatch]
Plain = Callable[..., dict[str, Tensor]]

VOCAB = 97  # no other size is equal to it
BOTH = frozenset({"logprobs", "entropy"})
TOLERANCE = rounding(3 * (32 + 48 + 17))  # 3 layers: sums over 32 and 48 features and up to 17 positions


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def _loss(outputs: dict[str, Tensor]) -> Tensor:
    """Every position with a weight of its own."""
    weights = torch.linspace(-1.0, 1.0, len(outputs["logprobs"]))
    return (outputs["logprobs"] * weights).sum() + 0.3 * (outputs["entropy"] * weights.flip(0)).sum()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_packed_forward_equals_the_models_own_row_by_row(
    architecture: str, checkpointing: bool, tiny_model: Make, packed: Pack, plain_outputs: Plain
) -> None:
    plain_model, batch = tiny_model(architecture), packed()
    lm = CausalLM(deepcopy(plain_model), temperature=0.7)
    lm.set_gradient_checkpointing(checkpointing)
    ours, plain = lm.forward(batch, BOTH), plain_outputs(plain_model, batch, 0.7)
    for name in BOTH:
        torch.testing.assert_close(ours[name], plain[name], rtol=0, atol=TOLERANCE)
    ours_grads, plain_grads = _gradients(lm.module, _loss(ours)), _gradients(plain_model, _loss(plain))
    assert ours_grads.keys() == plain_grads.keys()
    largest = max(g.abs().max().item() for g in plain_grads.values())
    for name, expected in plain_grads.items():
        assert not ours_grads[name].is_sparse
        torch.testing.assert_close(ours_grads[name], expected, rtol=0, atol=TOLERANCE * largest, msg=name)


def test_how_rows_are_packed_changes_nothing(architecture: str, tiny_model: Make, packed: Pack) -> None:
    lm, batch = CausalLM(tiny_model(architecture)), packed()
    together = lm.forward(batch, BOTH)
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        alone = PackedBatch(
            {"input_ids": batch.inputs["input_ids"][start:end]}, batch.mask[start:end], (end - start,)
        )
        for name, value in lm.forward(alone, BOTH).items():
            torch.testing.assert_close(value, together[name][start:end], rtol=0, atol=TOLERANCE)


def test_hidden_and_logits_give_what_forward_gives(architecture: str, tiny_model: Make, packed: Pack) -> None:
    lm, batch = CausalLM(tiny_model(architecture), temperature=2.0), packed()
    ids = batch.inputs["input_ids"]
    with torch.no_grad():
        logits = lm.logits(lm.hidden(ids, batch.positions, PackedAttention(batch.lengths, batch.device)))
        logprobs = lm.forward(batch, frozenset({"logprobs"}))["logprobs"]
    assert logits.shape == (batch.num_positions, lm.vocab_size)
    expected = (logits / 2.0).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0] * batch.mask[1:]
    torch.testing.assert_close(logprobs[1:], expected, rtol=0, atol=TOLERANCE)


def test_gradients_add_up_over_micro_batches_of_a_tied_model(tiny_model: Make, packed: Pack) -> None:
    lm, batches = CausalLM(tiny_model("qwen2")), [packed(seed=1), packed(seed=2)]
    apart = []
    for batch in batches:
        grads = _gradients(lm.module, _loss(lm.forward(batch, BOTH)))
        apart.append({name: grad.clone() for name, grad in grads.items()})
    lm.module.zero_grad()
    for batch in batches:
        _loss(lm.forward(batch, BOTH)).backward()
    for name, p in lm.module.named_parameters():
        expected = apart[0][name] + apart[1][name]
        assert p.grad is not None
        assert_near(p.grad, expected, TOLERANCE, name)


class _LikeTheHead(TorchDispatchMode):
    """Counts dense tensors of a weight's shape that are made while it is on."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        assert weight.grad is not None
        self._shape, self._known = weight.shape, {weight.data_ptr(), weight.grad.data_ptr()}
        self.num_made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.shape == self._shape and leaf.layout == torch.strided:
                self.num_made += leaf.data_ptr() not in self._known
        return out


@pytest.mark.parametrize("architecture", ["qwen2", "gemma"])
def test_the_gradient_of_a_tied_head_takes_no_memory_beside_itself(
    architecture: str, tiny_model: Make, packed: Pack
) -> None:
    lm = CausalLM(tiny_model(architecture, vocab_size=VOCAB))
    _loss(lm.forward(packed(), BOTH)).backward()
    with _LikeTheHead(lm.head.weight) as made:
        _loss(lm.forward(packed(), BOTH)).backward()
    assert made.num_made == 0


def test_hooks_on_the_head_see_its_whole_gradient(tiny_model: Make, packed: Pack) -> None:
    lm, batch = CausalLM(tiny_model("qwen2")), packed()
    expected = _gradients(lm.module, _loss(lm.forward(batch, BOTH)))["model.embed_tokens.weight"].clone()
    gradients: list[Tensor] = []
    lm.head.weight.register_hook(gradients.append)
    _gradients(lm.module, _loss(lm.forward(batch, BOTH)))
    (grad,) = gradients
    assert_near(grad, expected, TOLERANCE)


def test_a_batch_without_written_tokens_has_zero_outputs_and_gradients(
    tiny_model: Make, packed: Pack
) -> None:
    lm, batch = CausalLM(tiny_model("qwen2")), packed()
    empty = PackedBatch(batch.inputs, torch.zeros_like(batch.mask), batch.lengths)
    outputs = lm.forward(empty, BOTH)
    grads = _gradients(lm.module, _loss(outputs))
    assert all(not value.any() for value in outputs.values())
    assert all(not grad.is_sparse and not grad.any() for grad in grads.values())


def test_tied_weights_are_named_once_and_as_in_a_checkpoint(tiny_model: Make) -> None:
    tied, apart = CausalLM(tiny_model("qwen2")), CausalLM(tiny_model("qwen3"))
    assert "lm_head.weight" not in dict(tied.named_weights())
    assert "lm_head.weight" in dict(apart.named_weights())
    assert dict(apart.named_weights()).keys() == apart.model.state_dict().keys()
    assert dict(tied.named_weights())["model.embed_tokens.weight"] is tied.head.weight


def test_a_frozen_copy_keeps_its_weights_when_the_policy_learns(tiny_model: Make, packed: Pack) -> None:
    lm, batch = CausalLM(tiny_model("gemma"), temperature=0.5), packed()
    lm.set_gradient_checkpointing(True)
    reference = lm.frozen_copy()
    before = lm.forward(batch, BOTH)
    with torch.no_grad():
        for p in lm.module.parameters():
            p.add_(0.01)
    frozen = reference.forward(batch, BOTH)
    assert not any(p.requires_grad for p in reference.module.parameters())
    torch.testing.assert_close(frozen, {n: v.detach() for n, v in before.items()}, rtol=0, atol=0)


def test_dropout_stays_off(tiny_model: Make, packed: Pack) -> None:
    lm, batch = CausalLM(tiny_model("llama", attention_dropout=0.5)), packed()
    torch.testing.assert_close(lm.forward(batch, BOTH), lm.forward(batch, BOTH), rtol=0, atol=0)


def test_checkpointing_can_be_switched_off_again(tiny_model: Make) -> None:
    lm = CausalLM(tiny_model("qwen3"))
    lm.set_gradient_checkpointing(True)
    assert any("forward" in vars(m) for m in lm.model.modules())
    lm.set_gradient_checkpointing(False)
    assert not any("forward" in vars(m) for m in lm.model.modules())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("indexed_attention", "indexed_attention with an indexer of another form than DeepSeek-V3.2's"),
        ("compressed_sparse_attention", r"compressed_sparse_attention \(.+\), which braid does not support"),
        ("new_attention", "new_attention, which braid does not know: it packs rows"),
        ("mamba", "mamba whose code takes no cache for their state"),
    ],
)
def test_layers_of_an_unknown_type_are_refused(tiny_model: Make, kind: str, why: str) -> None:
    model = tiny_model("qwen3")
    model.config.layer_types = [kind] * 3
    with pytest.raises(ModelError, match=f"Qwen3ForCausalLM has layers of type {why}"):
        CausalLM(model)


def test_values_start_at_zero_and_read_the_state_before_each_token(tiny_model: Make, packed: Pack) -> None:
    policy, batch = CausalLM(tiny_model("qwen2")), packed()
    critic = ValueModel.copy_of(policy)
    assert not critic.forward(batch, frozenset({"values"}))["values"].any()
    score = dict(critic.named_weights())["value_head.weight"]
    with torch.no_grad():
        score.normal_()
    values = critic.forward(batch, frozenset({"values"}))["values"]
    hidden = policy.hidden(
        batch.inputs["input_ids"], batch.positions, PackedAttention(batch.lengths, batch.device)
    )
    expected = torch.zeros(batch.num_positions)
    expected[1:] = (hidden @ score[0])[:-1] * batch.mask[1:]
    torch.testing.assert_close(values, expected, rtol=0, atol=TOLERANCE)
    assert not values[~batch.mask].any()


def test_a_critic_learns_without_touching_the_policy(tiny_model: Make, packed: Pack) -> None:
    policy, batch = CausalLM(tiny_model("qwen2")), packed()
    critic = ValueModel.copy_of(policy)
    critic.set_gradient_checkpointing(True)
    with torch.no_grad():
        dict(critic.named_weights())["value_head.weight"].normal_()
    grads = _gradients(critic.module, critic.forward(batch, frozenset({"values"}))["values"].square().sum())
    assert all(not g.is_sparse for g in grads.values())
    assert "model.embed_tokens.weight" in grads
    assert all(p.grad is None for p in policy.module.parameters())


def test_a_config_that_another_model_has_changed_is_refused(tiny_model: Make, packed: Pack) -> None:
    """transformers writes the attention of the new model into the config that it is given."""
    lm = CausalLM(tiny_model("qwen3"))
    AutoModelForCausalLM.from_config(lm.model.config, attn_implementation="sdpa")
    with pytest.raises(ModelError, match=r"the attention 'sdpa'.*copy\.deepcopy of the config"):
        lm.forward(packed(), BOTH)
