"""Whether a row has the same log-probs alone as packed with others."""

from __future__ import annotations

from .base import Check, Evidence, most_k3

EVERY_ROUNDS = 10
"""The first round and every so many after it are measured."""
SHARE, MOST_ROWS = 0.01, 8
"""Share of a round's positions that is computed again, in at least two rows and at most so many."""


class Packing(Check):
    """Rows do not see each other."""

    name, sort = "packing", "identity"
    holds = "a row has the same log-probs alone as in a batch with others (1 % of a round, every tenth round)"
    threshold = "k3 of 1e-6 nats in float32 on CPUs, 1e-4 on GPUs, 1e-2 in half precision"
    is_off = "simulators; train.count_flops"
    causes = "attention across the rows of a batch, positions that go on from one row to the next"
    look_at = "model.attention, train.micro_batch_tokens"

    def why_off(self) -> str:
        if self.config.train.count_flops:
            return "train.count_flops would count its passes"
        return "rows of simulators are not packed" if self.config.env.is_simulator else ""

    def judge(self, evidence: Evidence) -> str | None:
        if not (count := evidence.sums.get("packed_tokens")):
            return None
        k3, most = evidence.sums["packed_k3"] / count, most_k3(self.config, self.plan)
        return f"k3 of rows alone and in a batch is {k3:.3g} nats, above {most:g}" if k3 > most else ""
