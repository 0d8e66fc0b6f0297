"""Whether rows and scores are those of the sampled trajectories. Measured on the rollout workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from braid.types import Group, Row, Segment, Status, Trajectory

from .base import MIN_Z, Check, Evidence, Sums

if TYPE_CHECKING:
    from braid.data.sampler import PromptSampler

NUM_SCORES = 4
"""Trajectories of each round, on each rollout worker, that are scored again."""


def rollout_sums(group: Group, rows: Sequence[Row], bos_id: int | None) -> Sums:
    """Counts over the trajectories of a group of text, whose training rows are `rows`: those compared with
    their rows, and those whose rows have other tokens or log-probs than were sampled; finished ones with a
    turn that was cut; rows that begin with `bos_id`, and with two; and over all but the first, how many
    answers equal the first, how many are expected to, and the variance of that."""
    valid = [t for t in group.valid if t.segments]
    if not valid:
        return {}
    segments = [s for t in valid for s in t.segments if s.turns and s.is_trained]
    sums: Sums = {
        "rows": len(segments),
        "rows_of_other_tokens": 0 if _are_sampled(segments, rows) else _num_of_other_tokens(segments, rows),
        "cut_finished": sum(
            t.status is Status.FINISHED and any(turn.stop_reason == "length" for turn in t.turns)
            for t in valid
        ),
    }
    if bos_id is not None:
        starts = [row.inputs["input_ids"][:2].tolist() for row in rows]
        sums["rows_with_bos"] = sum(start[:1] == [bos_id] for start in starts)
        sums["rows_with_two_bos"] = sum(start == [bos_id, bos_id] for start in starts)
    if len(valid) > 1:
        first, *others = ([turn.output_ids for turn in t.turns] for t in valid)
        logp = sum(x for turn in valid[0].turns for x in turn.logprobs)
        chance = math.exp(min(logp, 0.0)) if math.isfinite(logp) else 1.0
        sums["answers"] = len(others)
        sums["answers_equal"] = sum(other == first for other in others)
        sums["answers_expected"] = len(others) * chance
        sums["answers_variance"] = len(others) * chance * (1 - chance)
    return sums


def _num_of_other_tokens(segments: Sequence[Segment], rows: Sequence[Row]) -> int:
    """Rows that train on other tokens than their segment has, or with other log-probs."""
    return sum(not _are_sampled([s], [row]) for s, row in zip(segments, rows, strict=True))


def _are_sampled(segments: Sequence[Segment], rows: Sequence[Row]) -> bool:
    """Whether rows train on the tokens of their segments, with the log-probs that the engine returned;
    compared at once, since a round has thousands."""
    lengths = [sum(len(turn.output_ids) for turn in s.turns) for s in segments]
    if [row.num_tokens for row in rows] != lengths:
        return False
    turns = [turn for s in segments for turn in s.turns]
    ids = [i for turn in turns for i in turn.output_ids]
    logprobs = np.array([x for turn in turns for x in turn.logprobs], np.float32)
    trained = [row.inputs["input_ids"][row.mask] for row in rows]
    theirs = [row.fields["behavior_logprobs"][row.mask] for row in rows]
    return bool(
        not rows
        or (
            np.concatenate(trained).tolist() == ids
            and len(logprobs) == len(ids)
            and np.array_equal(np.concatenate(theirs), logprobs, equal_nan=True)
        )
    )


def score_sums(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Sums:
    """Counts of trajectories that were scored twice, and of those with two rewards."""
    pairs = [
        (a.reward, b.reward)
        for a, b in zip(before, after, strict=True)
        if a.reward is not None and b.reward is not None
    ]
    return {
        "rescored": len(pairs),
        "rescored_otherwise": sum(not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in pairs),
    }


class TrainedTokens(Check):
    """The trained tokens are the sampled ones."""

    name, sort = "trained_tokens", "identity"
    holds = "the tokens under a row's mask, and their log-probs, are those that the engine returned"
    threshold = "exact"
    is_off = "simulators"
    causes = "a mask that covers the environment's tokens or misses end tokens, text that is tokenised again"
    look_at = "braid samples RUN, env"

    def why_off(self) -> str:
        return "simulators have no tokens" if self.config.env.is_simulator else ""

    def judge(self, evidence: Evidence) -> str | None:
        if not (count := evidence.sums.get("rows")):
            return None
        wrong = evidence.sums["rows_of_other_tokens"]
        if not wrong:
            return ""
        return f"{wrong:.0f} of {count:.0f} rows train on other tokens or log-probs than were sampled"


class StopReasons(Check):
    """An answer that was cut is truncated."""

    name, sort = "stop_reasons", "identity"
    holds = "no finished trajectory has a turn that max_new_tokens cut"
    threshold = "exact"
    is_off = "simulators, programs, env.cut_turns=continue"
    causes = "cut answers are taken for finished ones, so that their rewards and masks are wrong"
    look_at = "rollout.sampling.max_new_tokens, model.eos_token_id"

    def why_off(self) -> str:
        return "" if self.config.env.ends_cut_turns else "episodes go on after a turn that was cut"

    def judge(self, evidence: Evidence) -> str | None:
        if not evidence.sums.get("rows"):
            return None
        wrong = evidence.sums["cut_finished"]
        return f"{wrong:.0f} trajectories count as finished, although their turn was cut" if wrong else ""


class PromptOpening(Check):
    """A context begins with one BOS."""

    name, sort = "prompt_opening", "identity"
    holds = "no context begins with two BOS tokens"
    threshold = "exact"
    is_off = "simulators, tokenizers without a BOS token"
    causes = "the chat template writes BOS, and the tokenizer or the engine adds another"
    look_at = "model.chat_template"

    def why_off(self) -> str:
        return "simulators have no tokens" if self.config.env.is_simulator else ""

    def judge(self, evidence: Evidence) -> str | None:
        if "rows_with_two_bos" not in evidence.sums:
            return None
        wrong = evidence.sums["rows_with_two_bos"]
        return f"{wrong:.0f} contexts begin with two BOS tokens" if wrong else ""


class RepeatedAnswers(Check):
    """Answers of a group are drawn independently."""

    name, sort, rounds = "repeated_answers", "statistic", 2
    holds = "answers of a group equal its first one as often as that one's probability says"
    threshold = "10 % of the answers and 6 standard errors more, in two rounds"
    is_off = "simulators, greedy sampling, groups of one"
    causes = "the same random numbers for all answers of a group, or for all ranks"
    look_at = "rollout.group_size, the engine's seed"

    def why_off(self) -> str:
        if self.config.env.is_simulator:
            return "simulators have no tokens"
        if self.config.rollout.sampling.greedy:
            return "rollout.sampling.greedy is set"
        return "groups have one answer" if self.config.rollout.group_size == 1 else ""

    def judge(self, evidence: Evidence) -> str | None:
        sums = evidence.sums
        if not (count := sums.get("answers")):
            return None
        more = sums["answers_equal"] - sums["answers_expected"]
        z = more / math.sqrt(sums["answers_variance"] + 1)  # 1: for counts far below 1, which are not normal
        if more <= 0.1 * count or z <= MIN_Z:
            return ""
        return (
            f"{sums['answers_equal']:.0f} of {count:.0f} answers equal the first of their group, where "
            f"{sums['answers_expected']:.1f} are expected (z {z:.1f})"
        )


class RepeatedScores(Check):
    """A trajectory that is scored again, alone, has the same reward."""

    name, sort = "repeated_scores", "identity"
    holds = f"{NUM_SCORES} trajectories of each rollout worker have the same reward when scored again, alone"
    threshold = "exact"
    is_off = "rewards that may be random, cost time or have effects: functions, judges, models, programs"
    causes = "scores that go to another trajectory, or depend on the others of the group"
    look_at = "reward.parts"

    def why_off(self) -> str:
        parts = self.config.reward.parts
        if not parts:
            return "there are no reward.parts"
        random = [part.metric_name for part in parts if not part.is_deterministic]
        return f"reward part {random[0]} may be random, or costs time" if random else ""

    def judge(self, evidence: Evidence) -> str | None:
        if not (count := evidence.sums.get("rescored")):
            return None
        wrong = evidence.sums["rescored_otherwise"]
        return (
            f"{wrong:.0f} of {count:.0f} trajectories have another reward when scored again" if wrong else ""
        )


class PolicyVersions(Check):
    """Tokens were written by the weights that they should be."""

    name, sort = "policy_versions", "identity"
    holds = "every trained token was written by the newest weights, or those that pipeline.max_lag allows"
    threshold = "exact"
    causes = "a weight sync that was skipped, or whose version the engine did not take over"
    look_at = "rollout.check_weights=true, pipeline.max_lag"

    def judge(self, evidence: Evidence) -> str | None:
        newest, pipeline = evidence.round - 1, self.config.pipeline
        oldest = newest - self.config.max_lag
        if pipeline is not None and pipeline.over_lag == "keep":
            oldest = 0
        written = [v for group in evidence.groups for t in group.valid for v, _ in t.lengths.versions]
        if not written:
            return None
        if oldest <= min(written) and max(written) <= newest:
            return ""
        return f"tokens were written by versions {min(written)} to {max(written)}, not {oldest} to {newest}"


class RepeatedPrompts(Check):
    """No prompt is drawn twice in an epoch."""

    name, sort = "repeated_prompts", "identity"
    holds = "no prompt is drawn twice in an epoch, also across resumes"
    threshold = "exact"
    is_off = "data.mix, where each source has its own epochs"
    causes = "a resume that begins the epoch again, or an order that repeats"
    look_at = "data.shuffle, run.resume"
    _drawn = _repeats = 0
    _seen: np.ndarray | None = None

    def why_off(self) -> str:
        return "each source of data.mix has its own epochs" if self.config.data.mix else ""

    def draw(self, sampler: PromptSampler, count: int) -> list[int]:
        """Take prompts from the sampler, and count those that it has given before in this epoch. Without the
        record of a part of the epoch (a checkpoint of before this check), it begins with the next one."""
        if self._seen is None:
            self._drawn, self._seen = sampler.num_drawn, np.zeros(sampler.num_prompts, np.bool_)
        taken = sampler.take(count)
        for prompt in taken:
            self._repeats += bool(self._seen[prompt])
            self._seen[prompt] = True
            self._drawn += 1
            if self._drawn % len(self._seen) == 0:
                self._seen[:] = False
        return taken

    def judge(self, evidence: Evidence) -> str | None:  # noqa: ARG002
        repeats, self._repeats = self._repeats, 0
        return f"{repeats} prompts were drawn for a second time in the epoch" if repeats else ""

    def state(self) -> dict[str, object]:
        """The prompts drawn in this epoch, one bit each, as text."""
        if self._seen is None:
            return {}
        bits = np.packbits(self._seen).tobytes().hex()
        return {"drawn": self._drawn, "seen": bits, "num_prompts": len(self._seen)}

    def load(self, state: Mapping[str, object]) -> None:
        """Resume from a `state()`."""
        self._seen = None
        if state:
            bits = np.frombuffer(bytes.fromhex(str(state["seen"])), np.uint8)
            self._drawn = int(str(state["drawn"]))
            self._seen = np.unpackbits(bits, count=int(str(state["num_prompts"]))).astype(np.bool_)
