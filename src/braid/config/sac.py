"""Soft actor-critic: off-policy reinforcement learning in simulators, from a replay buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from braid.sections import Section, Unused

from .train import OptimizerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from braid.plan.plan import Plan

    from .schema import RunConfig


class TemperatureConfig(Section):
    """The entropy temperature alpha, by which the policy's entropy is weighed against returns. It is tuned
    to a target entropy (Haarnoja et al. 2018, arXiv 1812.05905, eq. 18), or fixed."""

    unused_while = (("kind", "fixed", "lr target_entropy max_grad_norm"),)

    kind: Literal["exp", "softplus", "fixed"] = "exp"
    """How alpha follows from the number that is learned: exp or softplus of it. fixed: alpha is
    `initial`."""
    initial: NonNegativeFloat = 1.0
    """Alpha at the start; 0 only with fixed: no entropy term."""
    target_entropy: float | None = None
    """Entropy of a decision to which alpha is tuned, in nats. null: minus the number of components of a
    decision (an action's size times the actions of a chunk)."""
    lr: PositiveFloat = 3e-4
    """Learning rate of Adam for that number."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum size of its gradient; null for none."""

    @model_validator(mode="after")
    def _check(self) -> TemperatureConfig:
        if self.initial == 0 and self.kind != "fixed":
            raise ValueError(f"initial=0 has no {self.kind}; set a positive number, or kind to fixed")
        return self


class SacConfig(Section):
    """Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905) in place of on-policy learning: every
    round samples episodes into a replay buffer, and then trains a squashed Gaussian policy, an ensemble of
    critics and the entropy temperature on transitions drawn from it. One transition is one decision."""

    gamma: float = Field(default=0.99, ge=0.0, le=1.0)
    """Discount of the next decision's value."""
    tau: float = Field(default=0.005, gt=0.0, le=1.0)
    """Share of the critics' weights that the target critics take at an update."""
    target_every_updates: PositiveInt = 1
    """Critic updates between two updates of the target critics."""
    batch_size: PositiveInt = 256
    """Transitions per update."""
    updates_per_decision: PositiveFloat = 1.0
    """Critic updates for each decision that was sampled beyond `min_transitions` (update-to-data ratio)."""
    updates_per_round: PositiveInt | None = None
    """Critic updates per round, in place of `updates_per_decision`."""
    actor_every_updates: PositiveInt = 1
    """Critic updates between two updates of policy and temperature."""
    capacity: PositiveInt = 1_000_000
    """Observations in the replay buffer, of which an episode of D decisions has D + 1. The oldest are
    overwritten."""
    random_decisions: NonNegativeInt = 1000
    """Decisions of the start of training whose actions are uniformly random; rounds that begin after as
    many decisions sample from the policy."""
    min_transitions: NonNegativeInt = 1000
    """Decisions sampled before the first update."""
    min_transitions_actor: NonNegativeInt = 0
    """Decisions sampled before the first update of policy and temperature."""
    num_critics: PositiveInt = 2
    """Critics in the ensemble, perceptrons of the policy's sizes."""
    num_target_critics: PositiveInt | None = None
    """Target critics of an update, a random subset drawn for each (REDQ, arXiv 2101.05982); null for
    all."""
    target_reduce: Literal["min", "mean"] = "min"
    """What the target takes from the target critics' values: the least, or the mean."""
    actor_reduce: Literal["min", "mean"] = "min"
    """What the policy maximises of the critics' values: the least, or the mean."""
    critic_norm: Literal["none", "layer"] = "none"
    """Normalization of the critics' hidden layers before the activation; layer: layer norm (RLPD, arXiv
    2302.02948)."""
    backup_entropy: bool = True
    """Subtract alpha times the next action's log-prob from the target. If false, only the policy's own loss
    has the entropy."""
    bootstrap: Literal["truncated", "always"] = "truncated"
    """Which ends of episodes have a next value: those by a time limit; or always, also where the task
    itself has ended."""
    temperature: TemperatureConfig = TemperatureConfig()
    """The entropy temperature."""
    demonstrations: str | None = None
    """LeRobot folder of episodes with rewards (the columns next.reward, and next.done where the task
    ended), of which every batch has a part (RLPD, arXiv 2302.02948). Their actions are the policy's,
    between -1 and 1."""
    demonstration_fraction: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of a batch that is drawn from the demonstrations."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=3e-4)
    """Optimizer and learning rate schedule of the policy, in its own updates."""
    critic_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    """Optimizer and learning rate schedule of the critics."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum gradient norm of the policy; null for none."""
    critic_max_grad_norm: PositiveFloat | None = None
    """Maximum gradient norm of all critics together; null for none."""

    only_for_training: ClassVar[str] = "sac.*"
    unused_while = (("demonstrations", None, "demonstration_fraction"),)

    @model_validator(mode="after")
    def _check(self) -> SacConfig:
        subset = self.num_target_critics
        if subset is not None and subset > self.num_critics:
            raise ValueError(
                f"num_target_critics={subset} is more than num_critics={self.num_critics}; lower it, or "
                "raise num_critics"
            )
        if self.batch_size > self.capacity:
            raise ValueError(
                f"batch_size={self.batch_size} is more than capacity={self.capacity}; lower it, or raise "
                "capacity"
            )
        for name in ("optimizer", "critic_optimizer"):
            schedule = getattr(self, name).schedule
            needs_end = schedule.decay not in ("constant", "inverse_sqrt") and schedule.decay_steps is None
            if needs_end or schedule.warmup_fraction:
                raise ValueError(
                    f"{name}.schedule needs the number of all updates, which depends on the episodes' "
                    "lengths; set decay_steps, and warmup_steps in place of warmup_fraction"
                )
        return self

    def problems(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        """(key, message) of what the rest of the config has that SAC cannot run with."""
        if not config.env.is_simulator or not config.model.kind.trains_off_policy:
            yield (
                "sac",
                "SAC trains perceptrons (model.mlp) in simulators (env.kind=gymnasium, metaworld, ...); set "
                "both, or remove sac",
            )
            return
        if plan.verb in ("sft", "prefer") or config.sft is not None:
            yield "sft", "SAC's policy does not imitate; remove sft, or sac"
        if plan.layout.mode != "in_process":
            why = "SAC runs in one process on one device in this version"
            yield "sac", f"{why}; remove cluster.placement and set train.backend=single, or remove sac"
        if config.pipeline is not None:
            yield "pipeline", "SAC samples and trains in turns in this version; remove it"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.verb != "train":
            return
        train = ",".join(
            name
            for name in type(config.train).model_fields
            if name not in ("backend", "offload", "count_flops", "record_memory", "optimizer", "grad_scaler")
        )
        yield (
            "SAC reads the section sac instead",
            "algorithm.* critic.* reference.* inference.* checks.* train.optimizer.* train.grad_scaler "
            f"train.{{{train}}} train.offload.{{weights,gradients,optimizer}} model.mlp.initial_std",
        )
        if self.updates_per_round is not None:
            yield "sac.updates_per_round sets their number", "sac.updates_per_decision"
        yield "the policy has no value head", "sac.{optimizer,critic_optimizer}.value_lr"
