"""The linear value head, with optional normalization of values (PopArt)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from braid.errors import ModelError

from .transfer import to_device

if TYPE_CHECKING:
    from braid.config.roles import TrainingRole
    from braid.config.schema import RunConfig

    from .base import Output
    from .batch import PackedBatch
    from .mlp import MlpPolicy
    from .vla.policy import VlaPolicy

Detaching = Literal["never", "alone", "always"]
"""When the value loss does not train the features that values are predicted from. alone: where a model
computes nothing but values, as in the warm-up of a critic, which must not change the policy whose features it
shares."""
RATE = 0.01
"""Weight of the newest returns in the running moments. With bias correction (arXiv 1602.07714, section 2.2),
so that early moments are plain means."""
VALUES: frozenset[Output] = frozenset({"values", "value_deviation"})
"""The outputs of a critic."""
MIN_DEVIATION = 1e-2
"""Lower bound on the deviation of returns, for returns that are nearly all equal."""


def head_of_robot(config: RunConfig) -> dict[str, Any]:
    """Arguments of the value head of a robot's critic."""
    num_values = config.model.num_action_chunks if config.algorithm.reward_level == "action" else 1
    return {"num_values": num_values, "normalizes": config.critic.normalize_values}


def add_head_of_robot(
    model: MlpPolicy | VlaPolicy, role: TrainingRole, config: RunConfig, **options: Any
) -> None:
    """Add a value head to a robot's model if it is the critic, or a policy that shares its features with
    it."""
    critic = config.critic
    if role == "critic" or critic.network != "own":
        detaches: dict[str, Detaching] = {"own": "never", "shared": "alone", "shared_detached": "always"}
        options |= head_of_robot(config)
        model.add_value_head(critic.head_name, detaches=detaches[critic.network], **options)


def detached(features: Tensor, detaches: Detaching, outputs: frozenset[Output]) -> Tensor:
    """The features, without their gradient where `detaches` says so."""
    return (
        features.detach() if detaches == "always" or (detaches == "alone" and outputs <= VALUES) else features
    )


class ValueHead(nn.Linear):
    """v = mean + deviation * (w . hidden + b), one value per hidden state, or one for each of `num_values`
    actions.

    Without `normalizes`, mean is 0 and deviation 1. With it they are those of the returns seen in training
    (PopArt, van Hasselt et al. 2016, arXiv 1602.07714): when the moments change, w and b are rescaled so that
    all values stay the same, and gradients are those of a loss on normalized values, independent of the scale
    of rewards. The moments are buffers and so part of the weights.
    """

    moments: Tensor

    def __init__(
        self,
        hidden_size: int,
        *,
        num_values: int = 1,
        normalizes: bool = False,
        has_bias: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Weights start at zero, so all initial values are 0. A head that normalizes has a bias."""
        super().__init__(hidden_size, num_values, bias=has_bias, device=device, dtype=dtype)
        nn.init.zeros_(self.weight)
        if has_bias:
            nn.init.zeros_(self.bias)
        self.normalizes = normalizes
        if normalizes:
            # [mean, mean of squares, accumulated weight of the two], always float64
            self.register_buffer("moments", torch.zeros(3, dtype=torch.float64, device=device))

    @property
    def moments_of_returns(self) -> tuple[float, float]:
        """Current mean and deviation of returns; 0 and 1 before the first update."""
        mean, deviation = self._mean_and_deviation().tolist() if self.normalizes else (0.0, 1.0)
        return mean, deviation

    def _mean_and_deviation(self) -> Tensor:
        """Mean and deviation of returns [2], in float64 on the head's device: forward passes don't wait for
        it."""
        mean, square = self.moments[:2] / self.moments[2]
        deviation = (square - mean * mean).clamp(min=0).sqrt().clamp(min=MIN_DEVIATION)
        is_new, first = self.moments[2] == 0, torch.zeros_like(mean)
        return torch.stack((torch.where(is_new, first, mean), torch.where(is_new, first + 1, deviation)))

    @property
    def deviation(self) -> float:
        """Reward units per unit of a normalized value; 1 for a head that does not normalize."""
        return self.moments_of_returns[1]

    def outputs(self, values: Tensor, names: Iterable[Output]) -> dict[str, Tensor]:
        """The outputs `names` of a critic, given its `values`."""
        deviation = torch.ones_like(values)
        if self.normalizes:
            deviation = deviation * self._mean_and_deviation()[1]
        computed = {"values": values, "value_deviation": deviation}
        return {name: computed[name] for name in names}

    def of_observations(
        self, values: Tensor, batch: PackedBatch, names: Iterable[Output]
    ) -> dict[str, Tensor]:
        """The critic's outputs among `names`, from the `values` of observations (see `of_positions`)."""
        return self.outputs(self.of_positions(values, batch), VALUES.intersection(names))

    def of_positions(self, values: Tensor, batch: PackedBatch) -> Tensor:
        """[K] of observations -> [T] of positions; or [K, num_values], of which a position has that of its
        action's place in the chunk."""
        at = values[batch.observed]
        return at if at.ndim == 1 else at.gather(1, batch.unit.unsqueeze(1) // batch.action_size).squeeze(1)

    def forward(self, input: Tensor) -> Tensor:
        """[N, D] -> values [N] in float32, or [N, num_values] for more than one."""
        values = super().forward(input).squeeze(-1).float()
        if not self.normalizes:
            return values
        mean, deviation = self._mean_and_deviation()
        return _Denormalized.apply(values, mean, deviation)

    @torch.no_grad()
    def observe(self, returns: NDArray[np.floating], copies: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
        """Update the moments with the returns of the upcoming optimizer step, and rescale the weights so that
        all values stay the same. Only for a head that normalizes. `copies` of weight and bias, or of parts of
        them, are rescaled too.

        Has no effect if a return is not finite; the step will be skipped.
        """
        exact = returns.astype(np.float64)
        if not len(exact) or not np.isfinite(exact).all():
            return
        old_mean, old_deviation = self.moments_of_returns
        newest = to_device(np.array([exact.mean(), np.square(exact).mean(), 1.0]), self.moments.device)
        self.moments.lerp_(newest, RATE)
        mean, deviation = self.moments_of_returns
        for weight, bias in ((self.weight, self.bias), *copies):
            weight.copy_(weight.double() * (old_deviation / deviation))
            bias.copy_((bias.double() * old_deviation + old_mean - mean) / deviation)


def taken_name(name: str) -> ModelError:
    return ModelError(
        f"critic.head_name={name} is the name of another part; choose another, such as value_head"
    )


def with_head(body: nn.Module, body_name: str, head: ValueHead, head_name: str) -> nn.Sequential:
    """Combine body and head in one module under these names. Raises ModelError if the names are equal."""
    if head_name == body_name:
        raise taken_name(head_name)
    return nn.Sequential(OrderedDict({body_name: body, head_name: head}))


class _Denormalized(torch.autograd.Function):
    """mean + deviation * x. A squared loss in reward units is deviation^2 times that in normalized units; the
    backward pass divides its gradient by this factor."""

    @staticmethod
    def forward(ctx: object, x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        ctx.deviation = deviation  # pyright: ignore[reportAttributeAccessIssue]
        return x * deviation + mean

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad / ctx.deviation, None, None  # pyright: ignore[reportAttributeAccessIssue]
