"""aot: alignment by optimal transport."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from .base import Pairs, ReferenceLoss, Smoothing, Tensor
from .sigmoid import smoothed


class Aot(ReferenceLoss):
    """Alignment by optimal transport (Melnyk et al. 2024, arXiv 2406.05882): the policy's differences of
    log-probs are to dominate the reference's as distributions.

        loss = -log s(beta (d_(k) - q_(k))), smoothed as `sigmoid`

    d are the differences of log-probs of preferred and rejected responses under the policy, q those under the
    reference, both sorted over all pairs of the step. TRL sorts within a device's batch, so that its loss
    depends on the number of devices.
    """

    matches_pairs = True

    kind: Literal["aot"] = "aot"
    """Alignment by optimal transport: differences are compared in sorted order."""
    label_smoothing: Smoothing = 0.0
    """Assumed share of pairs whose responses are the wrong way round."""

    @model_validator(mode="after")
    def _check(self) -> Aot:
        for name in ("reference_free", "length_normalized", "f_divergence"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"aot sorts the log-probs of policy and reference as they are; remove {name}"
                )
        return self

    def match(self, policy: Tensor, reference: Tensor) -> Tensor:
        """The reference's difference of the same rank as each pair's under the policy."""
        ranks = policy.argsort(stable=True).argsort(stable=True)
        return reference.sort().values[ranks]

    def per_pair(self, pairs: Pairs) -> Tensor:
        difference, matched = pairs.chosen - pairs.rejected, pairs.matched
        if matched is None:  # the pairs are the whole step
            matched = self.match(difference.detach(), pairs.ref_chosen - pairs.ref_rejected)
        return smoothed(self.beta * (difference - matched), self.label_smoothing)
