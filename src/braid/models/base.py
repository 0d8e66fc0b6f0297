"""Interface between training and models: per-position outputs for a packed batch. Rollout interfaces depend
on the kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.errors import ModelError, listed
from braid.types import DecisionLevel

from .batch import PackedBatch
from .flops import Flops
from .value_head import ValueHead

if TYPE_CHECKING:  # imports transformers
    from .vision import Vision

Output = Literal[
    "logprobs",
    "entropy",
    "kl",
    "forward_kl",
    "jensen_shannon",
    "top_tokens",
    "top_logprobs",
    "logprobs_of_top",
    "logits",
    "values",
    "value_deviation",
    "experts",
    "routed",
]


class Acted(NamedTuple):
    """A decision in each of E environments: chunks of `actions` for the simulator, [E, H] or [E, H, A]; and
    for training the model's `inputs` [E, P, ...] by name, and the log-probs [E, P] of its positions
    (types.EnvSteps)."""

    actions: NDArray[Any]
    inputs: dict[str, NDArray[Any]]
    logprobs: NDArray[np.float32]


class TrainableModel(ABC):
    """A policy or critic of any kind, as used by the training backends. `module` holds the trained
    parameters; `value_head` computes "values", None for a policy without one. `num_experts` is that of
    a layer of routed experts whose load is measured; 0 without. `vision` says how a language model reads
    images; None if it reads only text."""

    module: nn.Module
    value_head: ValueHead | None = None
    num_experts: int = 0
    vision: Vision | None = None

    @abstractmethod
    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Any]:
        """A [T] tensor for each requested output, aligned as in types.Row: index t refers to the token or
        action at t given everything before it. Entries at which `batch.mask` is False are 0 and carry no
        gradient, except that "values" of a simulator also covers the final observation.

        "value_deviation" is the unit in which the value head predicts (ValueHead.deviation), the same at
        every position. "kl", "forward_kl" and "jensen_shannon" are divergences over the whole vocabulary
        from CausalLM.reference, of which a call computes at most one. "top_tokens" and "top_logprobs" [T,
        K] are the CausalLM.top_k likeliest tokens and their log-probs, and "logprobs_of_top" [T, K] the
        log-probs of the tokens in the field top_tokens. "logits" is not a tensor but TiledLogits, those
        that predict the policy's tokens. "experts" [T, L, K] are the experts that L layers chose for each
        token, and "routed" is routing.Routed, over all tokens of all rows."""

    @abstractmethod
    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:
        """FLOPs for rows of `lengths` [B], with `num_outputs` positions written by the policy in total."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Weights by their names in a checkpoint folder."""
        return unique_weights(self.module)

    def leave_gradients_to_autograd(self) -> None:  # noqa: B027
        """Pass all gradients through autograd, for wrappers that hook parameters; takes more memory."""


def at_level(
    entropies: Tensor, num_positions: int, level: DecisionLevel | None, num_action_chunks: int
) -> Tensor:
    """Entropies [K, P] at the P positions of K decisions from those of all independent numbers [K, N] of a
    decision: the sum over the numbers of each position's token, action or chunk, or the mean of these if a
    position has several. None: the sum over each position's numbers."""
    num_units = {"token": entropies.shape[1], "action": num_action_chunks, "chunk": 1}
    count = num_positions if level is None else num_units[level]
    units = entropies.unflatten(1, (count, -1)).sum(-1)
    if count < num_positions:
        return units.repeat_interleave(num_positions // count, 1)
    return units.unflatten(1, (num_positions, -1)).mean(-1)


def choose(logits: Tensor, uniforms: Tensor | None) -> Tensor:
    """Choices [...] from logits [..., N] by inverse transform of `uniforms` [...] in [0, 1); the likeliest if
    None."""
    if uniforms is None:
        return logits.argmax(-1)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    below = cumulative <= uniforms.unsqueeze(-1) * cumulative[..., -1:]
    return below.sum(-1).clamp(max=logits.shape[-1] - 1)


def unique_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers by name, tied ones once."""
    yielded: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in yielded:
            yielded.add(id(tensor))
            yield name, tensor


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], target: Iterable[tuple[str, Tensor]]) -> None:
    """Copy the tensors of `source` into those of the same name in `target`. Raises ModelError, before any is
    copied, unless names and shapes are the same."""
    tensors = dict(target)
    check_fit(source, {name: tensor.shape for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        tensor.copy_(source[name])


def check_fit(
    weights: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], *, heads_differ: bool = False
) -> None:
    """Raise ModelError unless `weights` have the names and `shapes` of the model that is to take them.

    With `heads_differ` they are those of a policy for its critic: only parts that both have (the first
    components of the names) are compared, of which there must be one."""
    weight_shapes = {name: tensor.shape for name, tensor in weights.items()}
    if heads_differ:
        both = {name.partition(".")[0] for name in weight_shapes} & {
            name.partition(".")[0] for name in shapes
        }
        weight_shapes, shapes = (
            {
                name: shape
                for name, shape in named_shapes.items()
                if name.partition(".")[0] in both or not both
            }
            for named_shapes in (weight_shapes, shapes)
        )
    faults = {
        "missing": [name for name in shapes if name not in weight_shapes],
        "unknown to the model": [name for name in weight_shapes if name not in shapes],
        "of another shape": [
            f"{name} {tuple(weight_shapes[name])} instead of {tuple(shapes[name])}"
            for name in shapes
            if name in weight_shapes and weight_shapes[name] != shapes[name]
        ],
    }
    if any(faults.values()):
        raise ModelError(
            f"the weights are of a different model than the one that is to take them: {listed(faults)}; "
            "load them into the model (model.path or model.build, and model.lora) that they were trained "
            "with"
        )
