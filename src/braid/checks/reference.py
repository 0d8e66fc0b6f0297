"""Whether the KL from the reference is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import MIN_Z, Check, Evidence, Sums, is_selected, most_k3, why_not_the_trainers, z_score

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from braid.algorithms.recipes import Recipe
    from braid.types import Row


def kl_sums(rows: Sequence[Row], kl: Sequence[NDArray[np.floating]], recipe: Recipe) -> Sums:
    """Sums over the tokens of a round of the `kl` that is subtracted from rewards or advantages, and of the
    same by its definition; empty for estimators of which a sum says nothing."""
    import numpy as np

    if recipe.kl_estimator not in ("k1", "k3"):
        return {}
    total, bound = 0.0, np.inf if recipe.kl_clamp is None else recipe.kl_clamp
    for row in rows:
        old, ref = (
            row.fields[name][row.mask].astype(np.float64) for name in ("old_logprobs", "ref_logprobs")
        )
        d = old - ref
        values = d if recipe.kl_estimator == "k1" else np.expm1(np.minimum(-d, 20)) + d
        total += float(values.clip(-bound, bound).sum())
    return {"kl": float(sum(values.sum() for values in kl)), "kl_by_definition": total}


class ReferenceStart(Check):
    """The reference is what the policy starts from."""

    name, sort = "reference_start", "identity"
    holds = "before its first step the policy is its reference: their KL is 0 in the first round"
    threshold = "1e-6 nats in float32 on CPUs, 1e-4 on GPUs, 1e-2 in half precision"
    is_off = "runs without a reference, or with reference.path; the estimator full; train.router_replay"
    causes = "a reference that is not copied after the warm-up, a fresh adapter, another model"
    look_at = "reference, sft, model.lora"

    def why_off(self) -> str:
        if self.config.train.router_replay != "none":
            return "train.router_replay changes the trainer's experts"
        return why_no_reference(self) or (
            "the reference is another model than the policy's" if self.config.reference.folders else ""
        )

    def judge(self, evidence: Evidence) -> str | None:
        warm_up = self.config.critic.warmup_rounds if self.plan.learns_values else 0
        if evidence.round != 1 + warm_up or not evidence.first.get("tokens"):
            return None
        k3, most = evidence.first["ref_k3"] / evidence.first["tokens"], most_k3(self.config, self.plan)
        return f"KL from the reference is {k3:.3g} nats before the first step" if k3 > most else ""


class KlFormula(Check):
    """KL is computed by its formula."""

    name, sort = "kl_formula", "identity"
    holds = "the KL of the loss, the reward or the advantage is that of the policy from the reference"
    threshold = "1e-3, relative"
    is_off = "runs without a reference; estimators other than k1 and k3"
    causes = "arguments of the KL that are swapped, or log-probs of other tokens"
    look_at = "algorithm.kl_estimator"

    def why_off(self) -> str:
        estimator = self.plan.recipe.kl_estimator
        unknown = "" if estimator in ("k1", "k3") else f"algorithm.kl_estimator={estimator}"
        return why_no_reference(self) or unknown

    def judge(self, evidence: Evidence) -> str | None:
        pairs = [(evidence.sums["kl"], evidence.sums["kl_by_definition"])] if "kl" in evidence.sums else []
        steps = evidence.steps_of("policy")
        if steps and "policy/kl" in steps[0].report.metrics:
            name = "ref_k1" if self.plan.recipe.kl_estimator == "k1" else "ref_k3"
            pairs.append((steps[0].report.metrics["policy/kl"][0], evidence.first[name]))
        tokens = max(evidence.first.get("tokens", 1.0), 1.0)
        for used, expected in pairs:
            if abs(used - expected) > 1e-3 * abs(expected) + 1e-6 * tokens:
                return f"KL from the reference sums to {used:.6g} nats, by its definition to {expected:.6g}"
        return "" if pairs else None


class ReferenceKl(Check):
    """The policy is not closer to the reference than to itself."""

    name, sort, rounds = "reference_kl", "statistic", 2
    holds = "over tokens sampled from the policy, the mean log-prob relative to the reference is not negative"
    threshold = "-1e-3 nats and -6 standard errors, in two rounds"
    is_off = "as sampler_entropy; runs without a reference"
    causes = "tokens that the policy did not sample (a mask), truncated sampling, swapped models"
    look_at = "rollout.sampling, reference"

    def why_off(self) -> str:
        return (
            why_no_reference(self) or why_not_the_trainers(self.config) or is_selected(self.config, self.plan)
        )

    def judge(self, evidence: Evidence) -> str | None:
        sums = evidence.first
        if not sums.get("tokens"):
            return None
        mean = sums["ref_k1"] / sums["tokens"]
        z = z_score(sums["ref_k1"], sums["ref_k1_squared"], sums["tokens"])
        if mean >= -1e-3 or z >= -MIN_Z:
            return ""
        return f"the mean log ratio of policy and reference is {mean:.3g} nats (z {z:.1f}), which is no KL"


def why_no_reference(check: Check) -> str:
    """Why rows have no log-probs of a reference; empty if they have."""
    if not check.plan.needs_reference:
        return "algorithm.kl_coef is 0: there is no reference"
    recipe = check.plan.recipe
    return f"algorithm.kl_estimator={recipe.kl_estimator}" if recipe.compares_distributions else ""
