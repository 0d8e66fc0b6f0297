"""Time of a round by stage, from rates that were measured on the machine that it will run on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig

from .memory import LOGPROBS, ROLLOUT, SYNC, update_of
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a typical prompt, and of a typical answer: all that the policy writes in a trajectory."""

    prompt: int
    answer: int


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of parts of a round at certain lengths, on one device: the forward and backward pass of a
    packed position, what an optimizer step takes beside its passes, a position's pass without gradients, the
    prompts of `running` sequences and a decode step of them; bytes per second of copies in memory and to
    disk. Those of sampling are None for engines in other processes."""

    train_token_s: float
    step_s: float
    infer_token_s: float
    running: int
    prefill_s: float | None
    decode_step_s: float | None
    copy_bytes_per_s: float
    disk_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of a stage in a round, None if unknown, and how they come about."""

    stage: str
    seconds: float | None
    how: str


def typical_lengths(plan: Plan, prompt: int | None, answer: int | None) -> Lengths | None:
    """The lengths given, or the longest possible ones; None if these are not bounded."""
    longest, written = plan.max_trajectory_tokens, plan.max_output_tokens
    if longest is None or written is None:
        return None
    return Lengths(max(1, longest - written) if prompt is None else prompt, answer or written)


def plan_times(config: RunConfig, plan: Plan, rates: Rates, lengths: Lengths) -> list[StageTime]:
    """The stages of a round of `braid train` in order. Rewards and environments are not among them: their
    time is their own. Sharded ranks are taken to share the work evenly, without what they send."""
    rows, group = plan.trajectories_per_round, config.rollout.group_size
    tokens = rows * lengths.answer + rows // group * lengths.prompt
    times = [_rollout(plan, rates, lengths)]
    passes = [name for name, is_needed in _passes(plan) if is_needed]
    if passes:
        ranks = _num_ranks(plan, "policy")
        how = f"{len(passes)} x {tokens:,} tokens ({', '.join(passes)})"
        times.append(StageTime(LOGPROBS, len(passes) * tokens * rates.infer_token_s / ranks, how))
    trained: tuple[TrainingRole, ...] = ("critic", "policy") if plan.needs_critic else ("policy",)
    for role in trained:
        train = train_config(config, role)
        steps = train.steps_per_pass * train.passes_per_round
        seconds = train.passes_per_round * tokens * rates.train_token_s / _num_ranks(plan, role)
        how = f"{steps} steps, {train.passes_per_round * tokens:,} tokens"
        times.append(StageTime(update_of(role), seconds + steps * rates.step_s, how))
    copied = 0 if plan.layout.mode == "in_process" else plan.memory[0].weights_bytes
    how = "the engine reads the trained tensors" if not copied else f"{copied:,} bytes, gathered and loaded"
    times.append(StageTime(SYNC, 2 * copied / rates.copy_bytes_per_s, how))
    return times


def round_s(plan: Plan, times: list[StageTime]) -> float | None:
    """Seconds of a round: the sum of its stages, or with a pipeline the longer of rollout and the rest; None
    if that of a stage is unknown."""
    seconds = {time.stage: time.seconds for time in times}
    if None in seconds.values():
        return None
    known = {stage: value for stage, value in seconds.items() if value is not None}
    total = sum(known.values())
    rollout = known[ROLLOUT]
    return max(rollout, total - rollout - known[SYNC]) + known[SYNC] if plan.is_pipelined else total


def _passes(plan: Plan) -> list[tuple[str, bool]]:
    return [
        ("policy", plan.old_logprobs in ("recompute", "interpolated")),
        ("reference", plan.needs_reference),
        ("critic", plan.needs_critic),
    ]


def _num_ranks(plan: Plan, role: str) -> int:
    layout = plan.layout.role(role)
    return 1 if layout is None else max(1, len(layout.workers))


def _rollout(plan: Plan, rates: Rates, lengths: Lengths) -> StageTime:
    if rates.prefill_s is None or rates.decode_step_s is None:
        return StageTime(ROLLOUT, None, "the engine runs in other processes, which are not measured")
    per_engine = math.ceil(plan.trajectories_per_round / _num_ranks(plan, "rollout"))
    waves = per_engine / min(rates.running, per_engine)
    seconds = waves * (rates.prefill_s + lengths.answer * rates.decode_step_s)
    how = f"{waves:.3g} x {lengths.answer:,} steps of {rates.running} sequences"
    return StageTime(ROLLOUT, seconds, how)
