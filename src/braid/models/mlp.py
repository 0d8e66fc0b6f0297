"""Perceptrons over states and images, policy and value model for simulators."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from braid.config.model import MlpSpec
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.errors import ConfigError, Problem
from braid.types import DecisionLevel, Spaces

from .base import Acted, Output, TrainableModel, at_level, choose
from .batch import PackedBatch
from .flops import Flops, flops_of_linear
from .value_head import (
    VALUES,
    Detaching,
    ValueHead,
    add_head_of_robot,
    detached,
    head_of_robot,
    taken_name,
    with_head,
)

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_MIN_ROWS = 16
"""Minimum batch size when acting: matrix products give bit-identical rows in any batch of at least 16."""


def make_mlp(spec: MlpSpec, role: TrainingRole, config: RunConfig, spaces: Spaces) -> MlpPolicy | MlpValue:
    """Make the model of a role. A separate critic shares nothing with the policy."""
    seed = config.run.seed
    if role == "critic":
        options = head_of_robot(config)
        return MlpValue(spec, spaces, seed=seed + 1, head_name=config.critic.head_name, **options)
    entropy_level = config.algorithm.entropy_level
    policy = MlpPolicy(spec, spaces, seed=seed, level=config.robot_logprob_level, entropy_level=entropy_level)
    add_head_of_robot(policy, role, config)
    return policy


class MlpPolicy(TrainableModel):
    """A distribution over chunks of H actions given an observation.

    Discrete actions: categorical distributions with the outputs as logits. Continuous actions: independent
    Gaussians with the outputs as means, and standard deviations that are parameters independent of the
    observation; or, with `num_bins`, for each component a categorical distribution over evenly spaced values
    from -1 to 1. A position of a row is a component of an action (`level` token), an action (None), or a
    chunk. Entropies are those of `entropy_level` (see base.at_level).
    """

    def __init__(
        self,
        spec: MlpSpec,
        spaces: Spaces,
        *,
        seed: int,
        level: DecisionLevel | None = None,
        entropy_level: DecisionLevel | None = None,
    ) -> None:
        """Initializes weights as random orthogonal matrices, with a small last layer so that the initial
        policy is close to uniform (Andrychowicz et al. 2021, section 3.2)."""
        self._chunk, self._size = spec.num_action_chunks, spaces.actions.size
        self._is_discrete, self._num_bins = spaces.actions.kind == "discrete", spec.num_bins
        if self._is_discrete and self._num_bins:
            why = "the environment's actions are discrete already; remove it"
            raise ConfigError([Problem("model.mlp.num_bins", why, "model")])
        if self._is_discrete and spec.initial_std != 1.0:
            why = "the environment's actions are discrete; remove it"
            raise ConfigError([Problem("model.mlp.initial_std", why, "model")])
        self._is_categorical = self._is_discrete or self._num_bins is not None
        self._level = "action" if level is None or (level == "token" and self._is_discrete) else level
        self._entropy_level: DecisionLevel | None = entropy_level
        width = self._chunk * self._size * (self._num_bins or 1)
        self._net = self.module = Net(spec, spaces, width, head_gain=0.01, seed=seed)
        if not self._is_categorical:
            self._net.register_parameter(
                "log_std", nn.Parameter(torch.full((self._size,), math.log(spec.initial_std)))
            )

    def add_value_head(
        self, name: str, *, num_values: int = 1, normalizes: bool = False, detaches: Detaching = "never"
    ) -> None:
        """Add a head that predicts values from the hidden layers of the policy. `num_values` and `normalizes`
        as in ValueHead."""
        if hasattr(self._net, name):
            raise taken_name(name)
        self.value_head = ValueHead(self._net.head.in_features, num_values=num_values, normalizes=normalizes)
        self._net.add_module(name, self.value_head)
        self._detaches: Detaching = detaches

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:  # noqa: ARG002  # all are computed
        return self._net.flops(sum(lengths))

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`logprobs` [T] and `entropy` [T], 0 where the mask is False; with a value head also the outputs of
        MlpValue."""
        features, computed = self._net.body(batch.observations), {}
        if self.value_head is not None and outputs & VALUES:
            values = self.value_head(detached(features, self._detaches, outputs))
            computed = self.value_head.of_observations(values, batch, outputs)
        if outputs <= VALUES:
            return computed
        return computed | self._of_actions(features, batch, outputs - VALUES)

    def _of_actions(
        self, features: Tensor, batch: PackedBatch, outputs: frozenset[Output]
    ) -> dict[str, Tensor]:
        assert batch.observed is not None, "batches of simulators have observations"
        of_decisions, log_std, unit = self._head(features), self._log_std, batch.unit
        head = of_decisions[batch.observed]
        if self._level != "chunk":
            index = torch.arange(len(head), device=head.device)
            if self._level == "action":
                head = head[index, unit]
            else:
                head = head.flatten(1, 2)[index, unit]
                log_std = log_std if self._is_categorical else log_std[unit % self._size]

        def entropy() -> Tensor:
            each = self._entropy(of_decisions, self._log_std).flatten(1)
            width = {"token": each.shape[1], "action": self._chunk, "chunk": 1}[self._level]
            return at_level(each, width, self._entropy_level, self._chunk)[batch.observed, unit]

        computed = {
            "logprobs": lambda: _per_row(self._logprobs(head, log_std, batch.inputs["actions"])),
            "entropy": entropy,
        }
        return {name: torch.where(batch.mask, computed[name](), 0.0) for name in outputs}

    def observe(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> Mapping[str, Any]:  # noqa: ARG002
        """See ActingPolicy; instructions are not read."""
        return observations

    @property
    def num_uniforms(self) -> int:
        """Number of uniform random numbers per decision."""
        return self._chunk * (1 if self._is_discrete else self._size)

    @torch.no_grad()
    def act(
        self,
        observations: Mapping[str, Any],
        uniforms: NDArray[np.float64] | None,
        temperature: float | None = None,  # noqa: ARG002  # has none
    ) -> Acted:
        """Actions ([E, H] int64, or [E, H, A] float32) for observations [E, ...], and their log-probs.

        Sampled from `uniforms` [E, num_uniforms] in [0, 1) by inverse transform; the most likely action if
        None. An action does not depend on the other observations in the call.
        """
        device = self._net.head.weight.device
        padded, count = padded_to_act(observations, device)
        head = self._head(self._net.body(padded))[:count]
        drawn = None if uniforms is None else torch.from_numpy(uniforms).to(device)
        actions = self._draw(head, drawn)
        each = self._logprobs(head, self._log_std, actions)
        if self._level == "chunk":
            inputs, logprobs = actions.unsqueeze(1), _per_row(each).unsqueeze(1)
        elif self._level == "action":
            inputs, logprobs = actions, each if self._is_discrete else each.sum(-1)
        else:
            inputs, logprobs = actions.flatten(1), each.flatten(1)
        if self._num_bins:
            actions = actions * (2 / (self._num_bins - 1)) - 1
        return Acted(actions.cpu().numpy(), {"actions": inputs.cpu().numpy()}, logprobs.cpu().numpy())

    def _head(self, features: Tensor) -> Tensor:
        """[K, D] -> [K, H, A], or [K, H, A, num_bins]."""
        bins = () if self._num_bins is None else (self._num_bins,)
        return self._net.head(features).unflatten(-1, (self._chunk, self._size, *bins))

    @property
    def _log_std(self) -> Tensor:
        return self._net.head.bias[:0] if self._is_categorical else self._net.log_std

    def _draw(self, head: Tensor, uniforms: Tensor | None) -> Tensor:
        if self._is_categorical:
            return choose(head, None if uniforms is None else uniforms.view(head.shape[:-1]))
        if uniforms is None:
            return head
        tiny = torch.finfo(torch.float64).tiny
        normal = torch.special.ndtri(uniforms.clamp(min=tiny)).to(head.dtype)
        return head + self._log_std.exp() * normal.view_as(head)

    def _logprobs(self, head: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
        """Log-probs of discrete actions, or of each component of continuous ones."""
        if self._is_categorical:
            return head.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        scaled = (actions - head) / log_std.exp()
        return -0.5 * (scaled.square() + math.log(2 * math.pi)) - log_std

    def _entropy(self, head: Tensor, log_std: Tensor) -> Tensor:
        """Entropies of the distributions that `_logprobs` evaluates, in the same shape."""
        if self._is_categorical:
            logprobs = head.log_softmax(-1)
            return -(logprobs.exp() * logprobs).sum(-1)
        return (0.5 + 0.5 * math.log(2 * math.pi) + log_std).expand_as(head)


class MlpValue(TrainableModel):
    """The value of an observation, with a network separate from the policy's."""

    def __init__(
        self,
        spec: MlpSpec,
        spaces: Spaces,
        *,
        seed: int,
        head_name: str = "value_head",
        normalizes: bool = False,
        num_values: int = 1,
    ) -> None:
        """`head_name` is the name of the output layer's weights; `normalizes` and `num_values` as in
        ValueHead."""
        net = Net(spec, spaces, num_values, head_gain=1.0, seed=seed)
        self._net = net
        self._head = self.value_head = ValueHead(
            net.head.in_features, num_values=num_values, normalizes=normalizes
        )
        self._head.load_state_dict(net.head.state_dict(), strict=False)
        self.module = with_head(net.body, "body", self._head, head_name)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:  # noqa: ARG002  # all are computed
        return self._net.flops(sum(lengths))

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`values` and `value_deviation` [T] of each position's observation, including the final one."""
        return self._head.of_observations(self.module(batch.observations), batch, outputs)


class Body(nn.Module):
    """Convolutions over the images, if there are any, and the hidden layers over their features and the
    state."""

    def __init__(self, spec: MlpSpec, spaces: Spaces) -> None:
        super().__init__()
        sizes = {shape[:2] for shape in spaces.images.values()}
        if bool(sizes) != bool(spec.channels) or len(sizes) > 1:
            images = ", ".join(f"{name} {shape}" for name, shape in spaces.images.items()) or "no images"
            fix = "set it, e.g. to [16, 32, 64]" if sizes else "remove it"
            fix = "images must have equal heights and widths" if len(sizes) > 1 else fix
            why = f"the environment's observations have {images}; {fix}"
            raise ConfigError([Problem("model.mlp.channels", why, "model")])
        self._names = list(spaces.images)
        wide, activation = spaces.state_size, ACTIVATIONS[spec.activation]
        self.convolutions = nn.Sequential()
        channels = (sum(shape[2] for shape in spaces.images.values()), *spec.channels)
        self.sizes = [
            (math.ceil(h / 2**k), math.ceil(w / 2**k)) for h, w in sizes for k in range(len(channels))
        ]
        for before, after in pairwise(channels):
            self.convolutions.extend([nn.Conv2d(before, after, 3, stride=2, padding=1), activation()])
        if self.sizes:
            wide += channels[-1] * math.prod(self.sizes[-1])
        self.layers, self.width = nn.Sequential(), wide
        for before, after in pairwise((wide, *spec.hidden_sizes)):
            self.layers.extend([nn.Linear(before, after), activation()])
            self.width = after

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        parts = [observations["state"]] if "state" in observations else []
        if self._names:
            images = torch.cat([observations[name] for name in self._names], dim=-1)
            scaled = images.permute(0, 3, 1, 2).float() / 127.5 - 1
            parts.append(self.convolutions(scaled).flatten(1))
        return self.layers(torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0])


class Net(nn.Module):
    """Perceptron with orthogonal weights and zero biases."""

    log_std: Tensor

    def __init__(self, spec: MlpSpec, spaces: Spaces, outputs: int, *, head_gain: float, seed: int) -> None:
        super().__init__()
        self.body = Body(spec, spaces)
        self.head = nn.Linear(spec.hidden_sizes[-1], outputs)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                gain = head_gain if layer is self.head else math.sqrt(2)
                nn.init.orthogonal_(layer.weight, gain, generator=generator)
                assert layer.bias is not None, "all layers have one"
                nn.init.zeros_(layer.bias)

    def flops(self, num_observations: int) -> Flops:
        convolutions = [m for m in self.body.convolutions if isinstance(m, nn.Conv2d)]
        of_images = sum(
            2 * m.weight.numel() * math.prod(size)
            for m, size in zip(convolutions, self.body.sizes[1:], strict=True)
        )
        images = Flops(num_observations * of_images, 3 * num_observations * of_images)
        return images + flops_of_linear(self, num_observations)


def padded_to_act(observations: Mapping[str, Any], device: torch.device) -> tuple[dict[str, Tensor], int]:
    """Observations [E, ...] as tensors of at least _MIN_ROWS rows, so that what follows for one depends on
    no other; and E."""
    count = len(next(iter(observations.values())))
    padding = max(_MIN_ROWS - count, 0)
    padded = {
        name: functional.pad(
            torch.as_tensor(values, device=device), [0, 0] * (values.ndim - 1) + [0, padding]
        )
        for name, values in observations.items()
    }
    return padded, count


def _per_row(values: Tensor) -> Tensor:
    """[T, ...] -> [T]"""
    return values.flatten(1).sum(-1) if values.ndim > 1 else values
