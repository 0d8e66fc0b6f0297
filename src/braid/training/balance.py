"""The load-balancing loss of routed experts, and the metrics of their load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from braid.models.routing import Routed


@dataclass(slots=True)
class Balance:
    """The load-balancing loss of an optimizer step:

        coef * E * sum over experts e of f_e P_e

    (Switch Transformers, Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6; over several layers and choices as
    transformers' `load_balancing_loss_func` computes it for a batch without padding). f_e is the mean number
    of choices of e, per token and layer, and P_e the mean softmax of the router's logits. Both are means over
    all tokens of all rows of the step, so that the loss does not depend on micro-batches: `counts` [L, E] are
    the choices of the whole step, from which no gradient comes, and `num_tokens` its tokens. With one
    micro-batch `counts` may be None, for those of its own pass."""

    coef: float
    num_tokens: int
    counts: Tensor | None

    def share(self, routed: Routed) -> Tensor:
        """The part of a micro-batch in the step's loss."""
        assert routed.probs is not None, "CausalLM.check_balance refuses other routers"
        counts = routed.counts if self.counts is None else self.counts
        (num_layers, num_experts), probs = counts.shape, routed.probs.sum(0)
        chosen = counts.sum(0).to(probs) / (num_layers * self.num_tokens)
        return self.coef * num_experts * (chosen * probs).sum() / (num_layers * self.num_tokens)


class Load:
    """What routers chose over a step: tokens by layer and expert [L, E], and the sums of entropies (over
    tokens and layers) and of the load-balancing loss."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}

    def add(self, routed: Routed, loss: Tensor | None) -> None:
        """Count a micro-batch, and its part of the load-balancing `loss`."""
        entropy = None if routed.entropy is None else routed.entropy.sum()
        parts = {"counts": routed.counts, "entropy": entropy, "aux_loss": loss}
        for name, part in parts.items():
            if part is not None:
                before = self._sums.get(name)
                self._sums[name] = part.detach().double() + (0.0 if before is None else before)

    def numbers(self) -> dict[str, NDArray[np.float64]]:
        """The sums in host memory."""
        return {name: value.cpu().numpy() for name, value in self._sums.items()}


def load_metrics(
    parts: Sequence[dict[str, NDArray[np.float64]]], num_tokens: int
) -> dict[str, tuple[float, float]]:
    """Metrics (sum, count) from the numbers of the Load of each rank, over `num_tokens` in total. Loads are
    relative to equal shares: 1 if all experts of a layer get as many tokens."""
    names = {name for part in parts for name in part}
    sums = {name: np.sum([part[name] for part in parts if name in part], axis=0) for name in names}
    if "counts" not in sums:
        return {}
    counts, metrics = sums["counts"], dict[str, tuple[float, float]]()
    num_layers, num_experts = counts.shape
    loads = counts / counts.sum(1, keepdims=True) * num_experts
    metrics["router/load_max"] = float(loads.max(1).sum()), float(num_layers)
    metrics["router/load_min"] = float(loads.min(1).sum()), float(num_layers)
    if "entropy" in sums:
        metrics["router/entropy"] = float(sums["entropy"]), float(num_layers * num_tokens)
    if "aux_loss" in sums:
        metrics["router/aux_loss"] = float(sums["aux_loss"]), 1.0
    return metrics
