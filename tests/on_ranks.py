"""A model on ranks with the methods of one in this process, for tests that compare the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from braid.cluster.ray import RayGroup
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.models.base import Output
from braid.training.backend import TrainingBackend
from braid.training.group import ModelGroup
from braid.training.worker import Rank, make_backend
from braid.types import Row


class OnRanks:
    def __init__(
        self,
        processes: RayGroup[Rank],
        role: TrainingRole,
        config: RunConfig,
        total_steps: int = 9,
        *,
        balances: bool = True,
    ) -> None:
        made = partial(make_backend, role=role, config=config, total_steps=total_steps)
        self.model = ModelGroup.of(processes.add(role, made), balances=balances)
        self.train, self.close = self.model.train, self.model.ranks.close

    def infer(self, rows: Sequence[Row], outputs: frozenset[Output]) -> list[dict[str, Any]]:
        shares = self.model.shares(rows)
        arguments = [([rows[i] for i in share], outputs, rows[0]) for share in self.model.by_rank(shares)]
        results = self.model.by_share(self.model.ranks.scatter(TrainingBackend.infer, arguments))
        by_index = {
            i: r
            for indices, share in zip(shares, results, strict=True)
            for i, r in zip(indices, share, strict=True)
        }
        return [by_index[i] for i in range(len(rows))]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(TrainingBackend, name)
        return lambda *args, **kwargs: self.model.ranks.call(method, *args, **kwargs)[0]
