"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905): the updates of critics, policy and
temperature from a replay buffer.

The random numbers of an update depend only on the run's seed and on its number, so that a resumed run draws
the same transitions and the same actions."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from braid.cluster.workers import Place
from braid.config.sac import SacConfig, TemperatureConfig
from braid.config.schema import RunConfig
from braid.config.train import OptimizerConfig
from braid.errors import CheckpointError, DataError, ModelError, TrainingError
from braid.models.base import copy_weights
from braid.models.soft_actor_critic import QEnsemble, SquashedGaussian
from braid.report.metrics import Metrics
from braid.types import Trajectory

from .optimizer import build_optimizer, lr_factor, set_rate
from .replay import ReplayBuffer, Transitions, joined, read_transitions

_UNUSED_TOTAL = 1
"""Total steps of a schedule; the config allows only schedules that do not depend on it."""


def make_sac(place: Place, *, config: RunConfig, key: Sequence[int]) -> SoftActorCritic:
    """The learner beside the policy and the simulator in this process. Its random numbers are those of
    `key` and the number of an update."""
    policy, spaces = place.workers["policy"].model, place.workers["env"].spaces
    spec = config.model.mlp
    assert config.sac is not None, "the run is one of SAC"
    assert spec is not None, "the plan checks that the policy is a perceptron"
    critics = QEnsemble(spec, spaces, config.sac, seed=config.run.seed + 1)
    demonstrations: list[Transitions] = []
    if (folder := config.sac.demonstrations) is not None:
        name = "sac.demonstrations"
        demonstrations += read_transitions(Path(folder), name, spaces, spec.num_action_chunks)
        if not demonstrations:
            raise DataError(f"{name}={folder} has no episode of two frames or more")
    return SoftActorCritic(config.sac, policy, critics, key, demonstrations)


class SoftActorCritic:
    """Policy, critics with their targets, temperature and replay buffer."""

    def __init__(
        self,
        config: SacConfig,
        policy: SquashedGaussian,
        critics: QEnsemble,
        key: Sequence[int],
        demonstrations: Sequence[Transitions] = (),
    ) -> None:
        """`key` precedes the number of an update in its random key. Each batch has a part of the
        `demonstrations`, if there are any."""
        self._config, self._policy, self._key = config, policy, tuple(key)
        self._device = next(policy.module.parameters()).device
        self._critics = critics.to(self._device)
        self._targets = copy.deepcopy(critics).requires_grad_(False)
        self._temperature = Temperature(config.temperature, policy.size, self._device)
        self._steppers = {
            "policy": _Stepper(policy.module, config.optimizer, config.max_grad_norm),
            "critic": _Stepper(critics, config.critic_optimizer, config.critic_max_grad_norm),
        }
        self._buffer = ReplayBuffer(config.capacity)
        self._demonstrations = ReplayBuffer(sum(len(episode) + 1 for episode in demonstrations))
        for episode in demonstrations:
            self._demonstrations.add(episode)
        share = config.demonstration_fraction if demonstrations else 0.0
        self._num_demonstrated = math.ceil(share * config.batch_size)
        self._num_decisions = self._num_updates = 0
        self._set_uniform()

    def _set_uniform(self) -> None:
        self._policy.set_uniform(self._num_decisions < self._config.random_decisions)

    def learn(self, trajectories: Iterable[Trajectory]) -> tuple[int, Metrics]:
        """Add episodes to the buffer, and take the updates that are then due. Returns the number of updates
        so far, and metrics. Raises TrainingError if a loss is not finite."""
        for trajectory in trajectories:
            episode = Transitions.of(trajectory)
            self._buffer.add(episode)
            self._num_decisions += len(episode)
        metrics, config = Metrics(), self._config
        beyond, due = self._num_decisions - config.min_transitions, 0
        if beyond >= 0 and len(self._buffer):
            due = config.updates_per_round or int(config.updates_per_decision * beyond) - self._num_updates
        sums: dict[str, tuple[Tensor, int]] = {}
        for _ in range(max(0, due)):
            for name, value in self._update().items():
                total, count = sums.get(name, (torch.zeros((), device=self._device), 0))
                sums[name] = total + value, count + 1
        for name, (total, count) in sums.items():
            metrics.mean(name, total.item(), count)
        for name in ("critic/loss", "policy/loss"):
            if name in metrics and not math.isfinite(metrics.value(name)):
                role = name.partition("/")[0]
                prefix = "critic_" if role == "critic" else ""
                raise TrainingError(
                    f"the mean {role} loss of the updates up to {self._num_updates} is "
                    f"{metrics.value(name):g}; lower sac.{prefix}optimizer.lr, set "
                    f"sac.{prefix}max_grad_norm, or scale rewards down (env.reward_scale)"
                )
        metrics.mean("sac/alpha", self._temperature.alpha.item())
        metrics.add("sac/updates", max(0, due))
        metrics.mean("sac/transitions", len(self._buffer))
        self._set_uniform()
        return self._num_updates, metrics

    def _update(self) -> dict[str, Tensor]:
        """One update of the critics and, as often as the config says, of the other parts; returns
        metrics."""
        config = self._config
        rng = np.random.default_rng((*self._key, self._num_updates))
        batch = self._buffer.draw(rng, config.batch_size - self._num_demonstrated)
        if self._num_demonstrated:
            batch = joined([batch, self._demonstrations.draw(rng, self._num_demonstrated)])
        noise = torch.from_numpy(
            rng.standard_normal((2, config.batch_size, self._policy.size), np.float32)
        ).to(self._device)
        num_targets = config.num_target_critics or config.num_critics
        subset = torch.from_numpy(rng.permutation(config.num_critics)[:num_targets]).to(self._device)
        tensors = _on_device(batch, self._device)
        self._num_updates += 1
        metrics = self._update_critics(tensors, noise[0], subset)
        has_actor = self._num_decisions >= config.min_transitions_actor
        if has_actor and self._num_updates % config.actor_every_updates == 0:
            metrics |= self._update_actor(tensors["observations"], noise[1])
        if self._num_updates % config.target_every_updates == 0:
            with torch.no_grad():
                torch._foreach_lerp_(
                    list(self._targets.parameters()), list(self._critics.parameters()), config.tau
                )
        return metrics

    def _update_critics(self, batch: Mapping[str, Any], noise: Tensor, subset: Tensor) -> dict[str, Tensor]:
        """Squared errors from the target (eq. 5), averaged over transitions and critics."""
        with torch.no_grad():
            actions, logprobs = self._policy.sample(batch["next_observations"], noise)
            values = self._targets(batch["next_observations"], actions)[subset]
            target = td_target(
                batch["rewards"],
                batch["is_terminated"],
                values,
                logprobs,
                self._temperature.alpha,
                self._config,
            )
        predicted = self._critics(batch["observations"], batch["actions"])
        loss = (predicted - target).square().mean()
        norm = self._steppers["critic"].step(loss)
        means = {
            "critic/loss": loss,
            "critic/value_mean": predicted.mean(),
            "critic/return_mean": target.mean(),
        }
        return {name: value.detach() for name, value in means.items()} | {"critic/grad_norm": norm}

    def _update_actor(self, observations: Mapping[str, Tensor], noise: Tensor) -> dict[str, Tensor]:
        """Loss alpha log pi(a|s) - Q(s, a) of the policy (eq. 9), then that of the temperature."""
        actions, logprobs = self._policy.sample(observations, noise)
        with _frozen(self._critics):
            values = _reduced(self._critics(observations, actions), self._config.actor_reduce)
            loss = (self._temperature.alpha * logprobs - values).mean()
            norm = self._steppers["policy"].step(loss)
        entropy = -logprobs.detach().mean()
        self._temperature.step(entropy)
        return {"policy/loss": loss.detach(), "policy/entropy": entropy, "policy/grad_norm": norm}

    def state(self) -> dict[str, Any]:
        """Everything but the policy's weights that `load` needs to continue bit for bit; the live
        tensors."""
        return {
            "critics": self._critics.state_dict(),
            "targets": self._targets.state_dict(),
            "temperature": self._temperature.state(),
            "steppers": {name: stepper.state() for name, stepper in self._steppers.items()},
            "buffer": self._buffer.state(),
            "num_decisions": self._num_decisions,
            "num_updates": self._num_updates,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. Raises CheckpointError if it is of other critics."""
        try:
            copy_weights(state["critics"], self._critics.state_dict().items())
            copy_weights(state["targets"], self._targets.state_dict().items())
        except ModelError as error:
            raise CheckpointError(
                f"the checkpoint's critics do not fit model.mlp and sac: {error}"
            ) from error
        self._temperature.load(state["temperature"])
        for name, stepper in self._steppers.items():
            stepper.load(state["steppers"][name])
        self._buffer.load(state["buffer"])
        self._num_decisions, self._num_updates = state["num_decisions"], state["num_updates"]
        self._set_uniform()


def td_target(
    rewards: Tensor,
    is_terminated: Tensor,
    next_values: Tensor,
    next_logprobs: Tensor,
    alpha: Tensor,
    config: SacConfig,
) -> Tensor:
    """Targets [B] of the critics, from `rewards` [B], target critics' values [N, B] of actions drawn for
    the next observations, and log-probs [B] of these:

        y = r + gamma (1 - d) (min_j Q_j(s', a') - alpha log pi(a'|s'))

    (Haarnoja et al. 2018, eq. 3 and 5), where d is whether the task ended; 0 with bootstrap=always."""
    values = _reduced(next_values, config.target_reduce)
    if config.backup_entropy:
        values = values - alpha * next_logprobs
    if config.bootstrap == "truncated":
        values = torch.where(is_terminated, 0.0, values)
    return rewards + config.gamma * values


class Temperature:
    """The entropy temperature of a policy whose decisions have `num_components` components."""

    def __init__(self, config: TemperatureConfig, num_components: int, device: torch.device) -> None:
        self._kind, self._limit = config.kind, config.max_grad_norm
        target = config.target_entropy
        self._target = -float(num_components) if target is None else target
        start = math.log(config.initial) if config.initial else -math.inf
        if config.kind == "softplus":  # whose inverse is log(exp(x) - 1)
            start = config.initial + math.log(-math.expm1(-config.initial))
        self._number = torch.tensor(start, dtype=torch.float32, device=device, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._number], lr=config.lr)

    @property
    def alpha(self) -> Tensor:
        """The temperature, without a gradient."""
        return self._value().detach()

    def _value(self) -> Tensor:
        return self._number.exp() if self._kind != "softplus" else nn.functional.softplus(self._number)

    def step(self, entropy: Tensor) -> None:
        """A step on the loss alpha (entropy - target) of eq. 18: alpha falls while the entropy is above its
        target."""
        if self._kind == "fixed":
            return
        self._optimizer.zero_grad()
        (self._value() * (entropy - self._target)).backward()
        if self._limit is not None:
            nn.utils.clip_grad_norm_([self._number], self._limit)
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"number": self._number.detach(), "optimizer": self._optimizer.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self._number.copy_(state["number"])
        self._optimizer.load_state_dict(state["optimizer"])


class _Stepper:
    """The optimizer of a module, with its schedule."""

    def __init__(self, module: nn.Module, config: OptimizerConfig, max_grad_norm: float | None) -> None:
        self._config, self._limit = config, math.inf if max_grad_norm is None else max_grad_norm
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._optimizer = build_optimizer(module, config)
        self._num_steps = 0

    def step(self, loss: Tensor) -> Tensor:
        """Take a step on a loss; returns the gradient's norm before clipping."""
        self._optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters, self._limit)
        rate = self._config.lr * lr_factor(self._num_steps, _UNUSED_TOTAL, self._config.schedule)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._num_steps += 1
        return norm

    def state(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "num_steps": self._num_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(state["optimizer"])
        self._num_steps = state["num_steps"]


def _reduced(values: Tensor, how: str) -> Tensor:
    """[N, B] -> [B]"""
    return values.amin(0) if how == "min" else values.mean(0)


def _on_device(batch: Transitions, device: torch.device) -> dict[str, Any]:
    """The fields of a batch as tensors, under their names."""

    def moved(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device)

    return {
        "observations": {name: moved(values) for name, values in batch.observations.items()},
        "actions": moved(batch.actions),
        "rewards": moved(batch.rewards),
        "next_observations": {name: moved(values) for name, values in batch.next_observations.items()},
        "is_terminated": moved(batch.is_terminated),
    }


@contextmanager
def _frozen(module: nn.Module) -> Iterator[None]:
    """Without gradients of a module's parameters."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)
