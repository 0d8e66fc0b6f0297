"""Whether steps weigh their tokens as the aggregation says, and change the weights."""

from __future__ import annotations

import math

from .base import Check, Evidence


class LossWeights(Check):
    """The weights of a step's tokens sum to the constant of its aggregation."""

    name, sort = "loss_weights", "identity"
    holds = (
        "the weights that tokens have in a step's gradient, over all micro-batches and ranks, sum to the "
        "constant of algorithm.aggregation: 1 for means"
    )
    threshold = "1e-4, relative"
    causes = "means of micro-batches or ranks instead of the step, or one division too many"
    look_at = "algorithm.aggregation, train.backend"

    def judge(self, evidence: Evidence) -> str | None:
        steps = [step for step in evidence.steps if "loss_weight" in step.report.checks and step.weight]
        for number, step in enumerate(steps, 1):
            weight = step.report.checks["loss_weight"]
            if math.isfinite(weight) and abs(weight - step.weight) > 1e-4 * step.weight:
                return (
                    f"the weights of the tokens of the {step.role}'s step {number} of the round sum to "
                    f"{weight:.6g} in the gradient, not {step.weight:.6g}"
                )
        return "" if steps else None


class WeightUpdates(Check):
    """Steps have a gradient and a learning rate, and change the weights."""

    name, sort, rounds = "weight_updates", "identity", 2
    holds = "where advantages are not 0, steps have a gradient and a rate and change weights"
    threshold = "a norm or rate of exactly 0, under 2 % of the weights changed; in two rounds"
    is_off = "changed weights: DeepSpeed and Megatron, whose optimizers own them"
    causes = (
        "a schedule that is at 0, a loss that is detached from the model, updates below the resolution of "
        "the weights (half precision without float32 masters)"
    )
    look_at = "train.optimizer.lr, train.optimizer.schedule, model.dtype"

    def judge(self, evidence: Evidence) -> str | None:
        policy = [s.report for s in evidence.steps_of("policy") if not s.report.is_skipped]
        critic = [s.report for s in evidence.steps_of("critic") if not s.report.is_skipped]
        schedule = self.config.train.optimizer.schedule
        may_end = schedule.decay_steps is not None and schedule.min_ratio == 0
        if policy and not may_end and all(report.lr == 0 for report in policy):
            return "the policy's learning rate is 0"
        has_signal = evidence.sums.get("advantage", 0.0) > 0 and self.plan.recipe.policy_loss_coef > 0
        if policy and has_signal and all(report.grad_norm == 0 for report in policy):
            return "the policy's gradient is 0, although advantages are not"
        if critic and all(report.grad_norm == 0 and report.loss > 1e-12 for report in critic):
            return f"the critic's gradient is 0 at a loss of {critic[0].loss:.3g}"
        probed = evidence.first.get("probed_weights", 0.0)
        changed = evidence.first.get("changed_weights", 0.0)
        if probed and changed < 0.02 * probed:
            return f"a step changes {changed / probed:.2%} of the weights that have a gradient"
        return "" if policy or critic else None


class ExplainedVariance(Check):
    """The critic explains returns better than their mean does."""

    name, sort, rounds = "explained_variance", "heuristic", 10
    holds = "the critic's values explain returns better than their mean does"
    threshold = "explained variance below 0 in ten rounds"
    is_off = "algorithms without values"
    causes = "values that start far from the returns, or learn too slowly"
    look_at = "critic.warmup_rounds, critic.train.optimizer.lr, algorithm.advantage.gae_lambda"

    def why_off(self) -> str:
        return "" if self.plan.learns_values else "algorithm.advantage reads no values"

    def judge(self, evidence: Evidence) -> str | None:
        value = evidence.metrics.get("critic/explained_variance", math.nan)
        if math.isnan(value):
            return None
        return f"critic/explained_variance is {value:.3g}" if value < 0 else ""
