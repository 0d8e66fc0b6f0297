"""Whether the tokens were sampled from the distribution that the trainer computes.

d is the trainer's log-prob of a sampled token minus the engine's, H the entropy of the trainer's
distribution. Given the tokens before it, a token has E[exp(d)] = 1 and E[-log p - H] = 0, so sums over tokens
are martingales, and their standard errors those of independent terms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from .base import MIN_Z, Check, Evidence, is_selected, most_k3, why_not_the_trainers, z_score

if TYPE_CHECKING:
    from torch import Tensor

TOKEN_SUMS = (
    "tokens",
    "off_weight",
    "off_weight_squared",
    "k3",
    "surprise",
    "surprise_squared",
    "first_tokens",
    "first_k3",
    "later_tokens",
    "later_k3",
    "ref_k1",
    "ref_k1_squared",
    "ref_k3",
)
"""Names of the sums of `token_sums`, in order."""


def token_sums(
    logprobs: Tensor,
    entropy: Tensor,
    fields: Mapping[str, Tensor],
    decision: Tensor,
    trajectory: Tensor,
    kl_clamp: float | None = None,
) -> Tensor:
    """Sums over the tokens of a micro-batch [len(TOKEN_SUMS)], float64, on its device: of exp(d) -
    1, k3(d) and -log p - H and of squares; of k3 over the first token of each decision, and over the
    decisions after a trajectory's first; of log p - log p_ref with its square and k3. 0 without the
    field that they need; `kl_clamp` bounds those of the reference. `decision` and `trajectory` [T] are
    those of PackedBatch."""
    import torch

    from braid.algorithms.segments import first_positions

    mask, new = decision >= 0, logprobs.detach().double()
    one, nothing = torch.ones_like(new), torch.zeros_like(new)
    off = k3 = ref_k1 = ref_k3 = nothing
    if "behavior_logprobs" in fields:
        d = (new - fields["behavior_logprobs"]).clamp(-20, 20)
        off = d.expm1()
        k3 = off - d
    if "ref_logprobs" in fields:
        ref_k1 = (new - fields["ref_logprobs"]).clamp(-20, 20)
        ref_k3 = (-ref_k1).expm1() + ref_k1
        if kl_clamp is not None:
            ref_k1, ref_k3 = (kl.clamp(-kl_clamp, kl_clamp) for kl in (ref_k1, ref_k3))
    surprise = -new - entropy.detach()
    is_first = first_positions(decision)
    most = len(decision)
    firsts = decision.new_full((most,), most).scatter_reduce(
        0, trajectory, decision.where(mask, most), "amin"
    )
    is_later = mask & (decision > firsts[trajectory])
    sums = (
        *((mask, one), (mask, off), (mask, off.square()), (mask, k3)),
        *((mask, surprise), (mask, surprise.square())),
        *((is_first, one), (is_first, k3), (is_later, one), (is_later, k3)),
        *((mask, ref_k1), (mask, ref_k1.square()), (mask, ref_k3)),
    )
    return torch.stack([values.where(at, 0.0).sum() for at, values in sums])


class SamplerLogprobs(Check):
    """The engine's log-probs are the trainer's."""

    name, sort = "sampler_logprobs", "identity"
    holds = "the engine's log-prob of each sampled token is the trainer's: the mean k3 of the two is 0"
    threshold = "1e-6 nats in float32 on CPUs, 1e-4 on GPUs, 1e-2 in half precision"
    is_off = (
        "top-p, top-k, min-p, a repetition penalty or min_new_tokens (the engine's distribution is not the "
        "trainer's), and pipelines with a lag"
    )
    causes = (
        "temperature or truncation that one side applies alone, log-probs of other positions, an old "
        "key/value cache, old or unmerged weights, rows that attend to each other"
    )
    look_at = "rollout.sampling, rollout.check_weights=true, rollout.engine.dtype"

    def why_off(self) -> str:
        return why_not_the_trainers(self.config)

    def judge(self, evidence: Evidence) -> str | None:
        sums, most = evidence.first, most_k3(self.config, self.plan)
        if not sums.get("tokens"):
            return None
        k3 = sums["k3"] / sums["tokens"]
        if k3 <= most:
            return ""
        where = self._where(sums)
        return f"k3 of the trainer's and the engine's log-probs is {k3:.3g} nats{where}, above {most:g}"

    @staticmethod
    def _where(sums: Mapping[str, float]) -> str:
        """Where k3 is concentrated."""
        others = max(sums["k3"] - sums["later_k3"], 1e-12), max(sums["tokens"] - sums["later_tokens"], 1)
        if sums["later_tokens"] and sums["later_k3"] / sums["later_tokens"] > 10 * others[0] / others[1]:
            return " (in the turns after the first)"
        if sums["first_k3"] > 0.9 * sums["k3"] and sums["first_tokens"] < 0.5 * sums["tokens"]:
            return " (in the first token of turns)"
        return ""


class SamplerWeights(Check):
    """The importance weights of the trainer relative to the engine average 1."""

    name, sort, rounds = "sampler_weights", "statistic", 2
    holds = "importance weights exp(trainer's minus engine's log-prob) average 1"
    threshold = "1 % and 6 standard errors, in two rounds"
    is_off = "as sampler_logprobs"
    causes = "the engine leaves out tokens that the trainer counts (top-p, top-k, masks), or the reverse"
    look_at = "rollout.sampling, the engine's own defaults (generation_config.json)"

    def why_off(self) -> str:
        return why_not_the_trainers(self.config)

    def judge(self, evidence: Evidence) -> str | None:
        sums = evidence.first
        if not sums.get("tokens"):
            return None
        mean = sums["off_weight"] / sums["tokens"]
        z = z_score(sums["off_weight"], sums["off_weight_squared"], sums["tokens"])
        if abs(mean) <= 0.01 or abs(z) <= MIN_Z:
            return ""
        return f"importance weights of the trainer to the engine average {1 + mean:.4g}, not 1 (z {z:.1f})"


class SamplerEntropy(Check):
    """Sampled tokens are as surprising as the entropy says."""

    name, sort, rounds = "sampler_entropy", "statistic", 2
    holds = "the mean of -log p - H over sampled tokens is 0, H the trainer's entropy"
    threshold = "0.02 nats and 6 standard errors, in two rounds"
    is_off = "as sampler_weights; filters of groups and masks of answers; simulators"
    causes = (
        "the engine samples at another temperature, or restricts tokens, than its log-probs say; the same "
        "random numbers for several tokens"
    )
    look_at = "rollout.sampling.temperature, the engine's own defaults"

    def why_off(self) -> str:
        if self.config.env.is_simulator:
            return "policies of simulators may estimate their entropy"
        return why_not_the_trainers(self.config) or is_selected(self.config, self.plan)

    def judge(self, evidence: Evidence) -> str | None:
        sums = evidence.first
        if not sums.get("tokens"):
            return None
        mean = sums["surprise"] / sums["tokens"]
        z = z_score(sums["surprise"], sums["surprise_squared"], sums["tokens"])
        if abs(mean) <= 0.02 or abs(z) <= MIN_Z:
            return ""
        side = "more" if mean > 0 else "less"
        return (
            f"sampled tokens are {side} surprising than the trainer's entropy says, by {abs(mean):.3g} nats "
            f"(z {z:.1f})"
        )
