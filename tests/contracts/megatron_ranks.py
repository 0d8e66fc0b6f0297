"""Training workers that hold one model after another, each with new Megatron process groups."""

from __future__ import annotations

from braid.training.worker import Rank


class SuccessiveRanks(Rank):
    """Megatron has one set of groups in a process; a run's roles share it, the layouts of a test cannot."""

    def leave(self) -> None:
        leave_groups()


def leave_groups() -> None:
    """The next model makes Megatron's groups anew."""
    from braid.training.backends.megatron import ranks

    ranks.groups.destroy_model_parallel()
    ranks._set_up_with.clear()
