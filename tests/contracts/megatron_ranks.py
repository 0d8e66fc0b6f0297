"""Training workers that hold one model after another, each with new Megatron process groups."""

from __future__ import annotations

from braid.training.worker import Ranks


class SuccessiveRanks(Ranks):
    """Megatron has one set of groups in a process; a run's roles share it, the layouts of a test cannot."""

    def drop(self, name: str) -> None:
        super().drop(name)
        leave_groups()


def leave_groups() -> None:
    """The next model makes Megatron's groups anew."""
    from braid.training.backends.megatron import ranks

    ranks.groups.destroy_model_parallel()
    ranks._set_up_with.clear()
