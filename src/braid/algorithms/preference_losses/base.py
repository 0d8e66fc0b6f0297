"""The base of preference losses: what one declares, and the log ratios that most of them read. Nothing here
imports torch before it computes, so that a config is read quickly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat

from braid.kinds import Kind

if TYPE_CHECKING:
    from torch import Tensor

    from braid.algorithms.pairs import Pairs
else:
    Pairs = Tensor = Any

__all__ = ["Pairs", "PreferenceLoss", "ReferenceLoss", "Smoothing", "Tensor"]

Smoothing = Annotated[float, Field(ge=0.0, lt=0.5)]
"""The assumed share of pairs whose responses are the wrong way round."""


class PreferenceLoss(Kind):
    """A loss of pairs of a preferred and a rejected response.

    In formulas, `s` is the logistic function, c and r are the log ratios of the preferred and the rejected
    response (ReferenceLoss), h = c - r, and n_c and n_r the responses' numbers of tokens.
    """

    config_key = "prefer.loss"
    trains_reward_model: ClassVar[bool] = False
    """Whether it trains a reward model, by the scores of whole conversations, and not a policy."""
    matches_pairs: ClassVar[bool] = False
    """Whether it compares pairs with each other, as `match` says."""

    @classmethod
    def of_function(cls, function: Callable[..., Any]) -> PreferenceLoss:
        from .function import FunctionLoss

        return FunctionLoss.calling(function)

    @property
    def needs_reference(self) -> bool:
        """Whether it reads log-probs of the reference."""
        return False

    def per_pair(self, pairs: Pairs) -> Tensor:
        """The loss of each pair [N], to be minimised; its mean over the step is the loss."""
        raise NotImplementedError(f"{type(self).__name__} must define per_pair(self, pairs)")

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """The implicit rewards of preferred and rejected responses [N], for metrics."""
        return pairs.chosen, pairs.rejected

    def diagnostics(self, pairs: Pairs) -> Mapping[str, Tensor]:  # noqa: ARG002  # for kinds with metrics
        """The metrics of each pair [N] that `metrics` declares."""
        return {}

    def match(self, policy: Tensor, reference: Tensor) -> Tensor:
        """For a loss that compares pairs: a number of each pair [N], from the differences of log-probs of
        preferred and rejected responses under policy and reference [N], over the whole step."""
        raise NotImplementedError(f"{type(self).__name__} must define match(self, policy, reference)")

    def must_define(self) -> tuple[str, ...]:
        return ("per_pair", "match") if self.matches_pairs else ("per_pair",)


class ReferenceLoss(PreferenceLoss):
    """A loss of the log ratios of policy and reference."""

    beta: PositiveFloat = 0.1
    """Scale of the log ratios: the higher, the nearer the policy stays to the reference."""
    reference_free: bool = False
    """Take the log-probs of the policy alone, as with a reference under which all responses are equally
    likely."""
    f_divergence: Literal["reverse_kl", "forward_kl", "js"] = "reverse_kl"
    """The divergence from the reference that the policy is kept near by (arXiv 2309.16240): a log ratio x
    counts as x, as -exp(-x), or as log s(x)."""
    length_normalized: bool = False
    """Divide the log ratio of each response by its number of tokens."""

    @property
    def needs_reference(self) -> bool:
        return not self.reference_free

    def ratios(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """c and r [N]: log(policy / reference) of preferred and rejected responses, as `f_divergence` and
        `length_normalized` say."""
        from torch.nn.functional import logsigmoid

        chosen, rejected = self._log_ratios(pairs)
        if self.f_divergence == "forward_kl":
            chosen, rejected = -(-chosen).exp(), -(-rejected).exp()
        elif self.f_divergence == "js":
            chosen, rejected = logsigmoid(chosen), logsigmoid(rejected)
        if self.length_normalized:
            chosen, rejected = chosen / pairs.num_chosen, rejected / pairs.num_rejected
        return chosen, rejected

    def difference(self, pairs: Pairs) -> Tensor:
        """h [N]."""
        chosen, rejected = self.ratios(pairs)
        return chosen - rejected

    def rewards(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        """beta times the log ratios of whole responses."""
        chosen, rejected = self._log_ratios(pairs)
        return self.beta * chosen, self.beta * rejected

    def _log_ratios(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        if self.reference_free:
            return pairs.chosen, pairs.rejected
        return pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected
