"""Multilayer perceptrons over flat observations: policy and value model for simulators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.config.model import MlpSpec
from braid.types import ActionSpace

from .base import Output, TrainableModel
from .batch import PackedBatch
from .flops import Flops, flops_of_linear
from .value_head import ValueHead, with_head

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
_MIN_ROWS = 16
"""Minimum batch size when acting: matrix products give bit-identical rows in any batch of at least 16."""


class MlpPolicy(TrainableModel):
    """A distribution over actions given an observation.

    Discrete actions: a categorical distribution with the outputs as logits. Continuous actions: independent
    Gaussians with the outputs as means, and standard deviations that are parameters independent of the
    observation.
    """

    def __init__(self, spec: MlpSpec, observation_size: int, actions: ActionSpace, *, seed: int) -> None:
        """Initializes weights as random orthogonal matrices, with a small last layer so that the initial
        policy is close to uniform (Andrychowicz et al. 2021, section 3.2)."""
        self.action_space = actions
        self._net = self.module = _Net(spec, observation_size, actions.size, head_gain=0.01, seed=seed)
        self._log_std = nn.Parameter(torch.zeros(actions.size)) if actions.kind == "continuous" else None
        if self._log_std is not None:
            self._net.register_parameter("log_std", self._log_std)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:  # noqa: ARG002  # all are computed
        return flops_of_linear(self._net, sum(lengths))

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`logprobs` [T] (summed over action dimensions) and `entropy` [T]; 0 where the mask is False."""
        head = self._net(batch.observations["state"])[batch.observed]
        computed = {
            "logprobs": lambda: self._logprobs(head, batch.inputs["actions"]),
            "entropy": lambda: self._entropy(head),
        }
        return {name: torch.where(batch.mask, computed[name](), 0.0) for name in outputs}

    @property
    def num_uniforms(self) -> int:
        """Number of uniform random numbers per action."""
        return 1 if self._log_std is None else self.action_space.size

    @torch.no_grad()
    def act(
        self, observations: NDArray[np.float32], uniforms: NDArray[np.float64] | None
    ) -> tuple[NDArray, NDArray[np.float32]]:
        """Actions ([E] int64, or [E, A] float32) for `observations` [E, D], and their log-probs [E].

        Sampled from `uniforms` [E, num_uniforms] in [0, 1) by inverse transform; the most likely action if
        None. An action does not depend on the other observations in the call.
        """
        count = len(observations)
        device = next(self._net.parameters()).device
        padded = np.zeros((max(count, _MIN_ROWS), observations.shape[1]), np.float32)
        padded[:count] = observations
        head = self._net(torch.from_numpy(padded).to(device))[:count]
        drawn = None if uniforms is None else torch.from_numpy(uniforms).to(device)
        actions = self._draw(head, drawn)
        return actions.cpu().numpy(), self._logprobs(head, actions).cpu().numpy()

    def _draw(self, head: Tensor, uniforms: Tensor | None) -> Tensor:
        if self._log_std is None:
            if uniforms is None:
                return head.argmax(-1)
            cumulative = head.double().softmax(-1).cumsum(-1)
            return (cumulative <= uniforms * cumulative[:, -1:]).sum(-1).clamp(max=head.shape[-1] - 1)
        if uniforms is None:
            return head
        tiny = torch.finfo(torch.float64).tiny
        return head + self._log_std.exp() * torch.special.ndtri(uniforms.clamp(min=tiny)).to(head.dtype)

    def _logprobs(self, head: Tensor, actions: Tensor) -> Tensor:
        if self._log_std is None:
            return head.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        scaled = (actions - head) / self._log_std.exp()
        return (-0.5 * (scaled.square() + math.log(2 * math.pi)) - self._log_std).sum(-1)

    def _entropy(self, head: Tensor) -> Tensor:
        if self._log_std is None:
            logprobs = head.log_softmax(-1)
            return -(logprobs.exp() * logprobs).sum(-1)
        return (0.5 + 0.5 * math.log(2 * math.pi) + self._log_std).sum().expand(len(head))


class MlpValue(TrainableModel):
    """The value of an observation, with a network separate from the policy's."""

    def __init__(
        self,
        spec: MlpSpec,
        observation_size: int,
        *,
        seed: int,
        head_name: str = "value_head",
        normalizes: bool = False,
    ) -> None:
        """`head_name` is the name of the output layer's weights; `normalizes` as in ValueHead."""
        net = _Net(spec, observation_size, 1, head_gain=1.0, seed=seed)
        self._head = self.value_head = ValueHead(net.head.in_features, normalizes=normalizes)
        self._head.load_state_dict(net.head.state_dict(), strict=False)
        self.module = with_head(net.body, "body", self._head, head_name)

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:  # noqa: ARG002  # all are computed
        return flops_of_linear(self.module, sum(lengths))

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`values` and `value_deviation` [T] of each position's observation, including the final one."""
        return self._head.outputs(self.module(batch.observations["state"])[batch.observed], outputs)


class _Net(nn.Module):
    """Multilayer perceptron with orthogonal weights and zero biases."""

    def __init__(self, spec: MlpSpec, inputs: int, outputs: int, *, head_gain: float, seed: int) -> None:
        super().__init__()
        sizes = (inputs, *spec.hidden_sizes)
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), _ACTIVATIONS[spec.activation]()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], outputs)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                gain = head_gain if layer is self.head else math.sqrt(2)
                nn.init.orthogonal_(layer.weight, gain, generator=generator)
                nn.init.zeros_(layer.bias)

    def forward(self, observations: Tensor) -> Tensor:
        """[T, D] -> [T, outputs]."""
        return self.head(self.body(observations))
