"""Whether ratios compare the policy with itself before the update."""

from __future__ import annotations

from .base import Check, Evidence, Step, most_k3


class FirstRatio(Check):
    """Before the first step the policy is what it was."""

    name, sort = "first_ratio", "identity"
    holds = "in the first step of a round the policy's log-probs are those of before the update: k3 is 0"
    threshold = "1e-6 nats in float32 on CPUs, 1e-4 on GPUs, 1e-2 in half precision"
    is_off = "train.router_replay; old_logprobs of the engine in pipelines with a lag"
    causes = "log-probs of before the update from other weights, positions, temperature or padding"
    look_at = "algorithm.old_logprobs, inference"

    def why_off(self) -> str:
        if self.config.train.router_replay != "none":
            return "train.router_replay changes the trainer's experts"
        if self.config.max_lag and self.plan.old_logprobs in ("behavior", "interpolated"):
            return "algorithm.old_logprobs are those of earlier weights (pipeline.max_lag)"
        return ""

    def judge(self, evidence: Evidence) -> str | None:
        steps = evidence.steps_of("policy")
        total, count = steps[0].report.metrics.get("policy/approx_kl", (0.0, 0.0)) if steps else (0.0, 0.0)
        if not count:
            return None
        k3, most = total / count, most_k3(self.config, self.plan)
        if k3 <= most:
            return ""
        return f"KL of the policy from itself is {k3:.3g} nats in the first step of the round, above {most:g}"


class LaterRatios(Check):
    """After the first step the policy has moved."""

    name, sort, rounds = "later_ratios", "identity", 2
    holds = "after the first step of a round, some ratio of the policy to before the update differs from 1"
    threshold = "all exactly 1, in two rounds"
    is_off = "rounds of one step; old_logprobs=current"
    causes = "log-probs of before the update are those of the current pass, so nothing is ever clipped"
    look_at = "algorithm.old_logprobs"

    def why_off(self) -> str:
        if self.plan.old_logprobs == "current":
            return "algorithm.old_logprobs=current: all ratios are 1"
        return "" if self.plan.steps_per_round > 1 else "rounds have one step"

    def judge(self, evidence: Evidence) -> str | None:
        steps, has_moved, later = evidence.steps_of("policy"), False, list[Step]()
        for step in steps:
            if has_moved and "policy/ratio_max" in step.report.maxima:
                later.append(step)
            report = step.report
            has_moved |= (
                report.grad_norm > 0 and report.lr > 0 and not (report.is_skipped or report.is_stopped)
            )
        if not later:
            return None
        is_one = [
            step.report.maxima["policy/ratio_max"] == 1.0
            and step.report.metrics["policy/approx_kl"][0] == 0.0
            for step in later
        ]
        return f"in {len(later)} steps after the first all ratios are exactly 1" if all(is_one) else ""
