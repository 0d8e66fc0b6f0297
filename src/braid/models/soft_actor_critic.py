"""The models of soft actor-critic: a squashed Gaussian policy, and an ensemble of critics of state and
action. training.soft_actor_critic trains them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from braid.config.sac import SacConfig
from braid.errors import ConfigError, Problem
from braid.types import Spaces

from .base import Acted, Output, TrainableModel
from .batch import PackedBatch
from .flops import Flops
from .kinds import MlpSpec
from .mlp import ACTIVATIONS, Body, Net, padded_to_act

MIN_LOG_STD, MAX_LOG_STD = -5.0, 2.0
"""Bounds of the policy's log standard deviations, reached by tanh, as in CleanRL and RLinf."""


class SquashedGaussian(TrainableModel):
    """The policy of soft actor-critic: actions in (-1, 1), the tanh of a Gaussian with independent
    components whose means and standard deviations depend on the observation (Haarnoja et al. 2018, arXiv
    1812.05905, appendix C).

    A chunk of H actions of A components is one decision of K = H * A numbers. While the buffer `is_uniform`
    is true, sampled actions are uniformly random in (-1, 1).
    """

    def __init__(self, spec: MlpSpec, spaces: Spaces, *, seed: int) -> None:
        """Initializes weights as Net does, with a small last layer. Raises ConfigError for discrete
        actions."""
        if spaces.actions.kind == "discrete":
            why = "SAC's policy has continuous actions, and those of this environment are discrete; remove it"
            raise ConfigError([Problem("sac", why, "env")])
        self._shape = (spec.num_action_chunks, spaces.actions.size)
        self.size = math.prod(self._shape)
        self._net = self.module = Net(spec, spaces, 2 * self.size, head_gain=0.01, seed=seed)
        self._net.register_buffer("is_uniform", torch.zeros((), dtype=torch.bool))

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """Not defined: losses of soft actor-critic are of actions that `sample` draws anew."""
        raise AssertionError(f"{outputs} of {len(batch.mask)} stored positions are asked of SAC's policy")

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:  # noqa: ARG002  # all are computed
        return self._net.flops(sum(lengths))

    def observe(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> Mapping[str, Any]:  # noqa: ARG002
        """See ActingPolicy; instructions are not read."""
        return observations

    @property
    def num_uniforms(self) -> int:
        """Number of uniform random numbers per decision."""
        return self.size

    @torch.no_grad()
    def act(
        self,
        observations: Mapping[str, Any],
        uniforms: NDArray[Any] | None,
        temperature: float | None = None,  # noqa: ARG002  # has none
    ) -> Acted:
        """Actions [E, H, A] for observations [E, ...] from `uniforms` [E, K] in [0, 1) by inverse
        transform, or the tanh of the means if None; and their log-probs [E, 1]."""
        device = self._net.head.weight.device
        padded, count = padded_to_act(observations, device)
        mean, log_std = (part[:count] for part in self._distribution(padded))
        if uniforms is None:
            actions, logprobs = squashed(mean, log_std, torch.zeros_like(mean))
        else:
            drawn = torch.from_numpy(uniforms).to(device)
            if self._net.get_buffer("is_uniform"):
                actions = (2 * drawn - 1).to(mean.dtype)
                logprobs = torch.full((count,), -self.size * math.log(2), device=device)
            else:
                normal = torch.special.ndtri(drawn.clamp(min=torch.finfo(torch.float64).tiny))
                actions, logprobs = squashed(mean, log_std, normal.to(mean.dtype))
        chunks = actions.unflatten(1, self._shape).cpu().numpy()
        return Acted(chunks, {"actions": chunks[:, None]}, logprobs[:, None].cpu().numpy())

    def set_uniform(self, is_uniform: bool) -> None:
        """Sample uniformly random actions from now on, or those of the policy."""
        self._net.get_buffer("is_uniform").fill_(is_uniform)

    def sample(self, observations: Mapping[str, Tensor], noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, K] from standard normal `noise` [B, K], and their log-probs [B], both with
        gradients."""
        return squashed(*self._distribution(observations), noise)

    def _distribution(self, observations: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Means and log standard deviations [B, K] before tanh."""
        mean, raw = self._net.head(self._net.body(observations)).chunk(2, dim=-1)
        return mean, MIN_LOG_STD + (MAX_LOG_STD - MIN_LOG_STD) / 2 * (raw.tanh() + 1)


def squashed(mean: Tensor, log_std: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Actions a = tanh(u) [B, K] of u = mean + std * noise, and their log-probs [B]:

        log pi(a) = sum_k log N(u_k; mean_k, std_k) - log(1 - tanh(u_k)^2)

    (Haarnoja et al. 2018, arXiv 1812.05905, eq. 26), with the last term as 2 (log 2 - u - softplus(-2 u)),
    which does not overflow."""
    u = mean + log_std.exp() * noise
    gaussian = -0.5 * (noise.square() + math.log(2 * math.pi)) - log_std
    slope = 2 * (math.log(2) - u - functional.softplus(-2 * u))
    return u.tanh(), (gaussian - slope).sum(-1)


class QEnsemble(nn.Module):
    """N critics of observation and action, perceptrons with weights of their own that are multiplied
    together. Images pass through convolutions that they share."""

    def __init__(self, spec: MlpSpec, spaces: Spaces, config: SacConfig, *, seed: int) -> None:
        """Initializes weights as orthogonal matrices, and biases as zeros."""
        super().__init__()
        self.encoder = Body(spec.model_copy(update={"hidden_sizes": ()}), spaces)
        self._activation = ACTIVATIONS[spec.activation]()
        self._has_norm = config.critic_norm == "layer"
        sizes = (self.encoder.width + spec.num_action_chunks * spaces.actions.size, *spec.hidden_sizes, 1)
        num = config.num_critics
        self.weights = nn.ParameterList(torch.empty(num, before, after) for before, after in pairwise(sizes))
        self.biases = nn.ParameterList(torch.zeros(num, 1, after) for after in sizes[1:])
        widths = spec.hidden_sizes if self._has_norm else ()
        self.scales = nn.ParameterList(torch.ones(num, 1, width) for width in widths)
        self.shifts = nn.ParameterList(torch.zeros(num, 1, width) for width in widths)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.encoder.convolutions:
            if isinstance(layer, nn.Conv2d):
                nn.init.orthogonal_(layer.weight, math.sqrt(2), generator=generator)
                assert layer.bias is not None, "all layers have one"
                nn.init.zeros_(layer.bias)
        for i, weight in enumerate(self.weights):
            gain = 1.0 if i == len(spec.hidden_sizes) else math.sqrt(2)
            for of_critic in weight:
                nn.init.orthogonal_(of_critic, gain, generator=generator)

    def forward(self, observations: Mapping[str, Tensor], actions: Tensor) -> Tensor:
        """Values [N, B] of actions [B, K] in observations [B, ...]."""
        features = torch.cat([self.encoder(observations), actions], dim=-1)
        hidden = features.expand(len(self.weights[0]), *features.shape)
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if i + 1 < len(self.weights):
                if self._has_norm:
                    hidden = functional.layer_norm(hidden, hidden.shape[-1:])
                    hidden = hidden * self.scales[i] + self.shifts[i]
                hidden = self._activation(hidden)
        return hidden.squeeze(-1)
