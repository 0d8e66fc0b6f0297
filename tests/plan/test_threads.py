"""How the processes of a run divide the cores of a machine."""

from __future__ import annotations

import os

import pytest
from tests.plan.test_layout import TEXT

from braid.config.load import load_config
from braid.config.schema import RunConfig
from braid.plan import Plan, resolve
from braid.plan.threads import num_sharing, thread_counts


def _plan_of(*overrides: str) -> tuple[RunConfig, Plan]:
    config = load_config(None, [*TEXT, *overrides]).config
    return config, resolve(config, num_gpus=0)


APART = ["train.backend=fsdp2", "cluster.placement={policy: 0-2, rollout: 3-4}"]


@pytest.mark.parametrize(
    ("overrides", "policy", "rollout"),
    [
        ([], 1, 1),
        (["rollout.engine=vllm"], 1, 1),  # its process and this one take turns
        (["rollout.engine=vllm", "pipeline.max_lag=1"], 2, 2),
        (["pipeline.max_lag=1"], 1, 1),  # in threads of one process
        (APART, 3, 2),
        ([*APART, "pipeline.max_lag=1"], 5, 5),
        (["train.backend=fsdp2", "cluster.placement={'policy, rollout': 0-3}"], 4, 4),
        ([*APART, "cluster.num_nodes=2", "cluster.devices_per_node=4"], 3, 1),
        (["rollout.engine=vllm", "rollout.engine.tensor_parallel=2", "cluster.placement={policy: 0, rollout: 1-4}"], 1, 4),
    ],
)  # fmt: skip
def test_the_cores_of_a_machine_are_for_processes_that_compute_at_the_same_time(
    overrides: list[str], policy: int, rollout: int
) -> None:
    config, plan = _plan_of(*overrides)
    for role, number in (("policy", policy), ("rollout", rollout)):
        placed = plan.layout.role(role)
        assert placed is not None
        node = placed.workers[0].node
        assert num_sharing(config, plan.layout, role, node, is_pipelined=plan.is_pipelined) == number  # type: ignore[arg-type]


def test_models_in_the_policys_processes_count_once_and_others_by_themselves() -> None:
    ppo = ["algorithm.recipe=ppo", "train.backend=fsdp2"]
    for placement, number in (
        ("{policy: 0-1, rollout: 2}", 2),
        ("{policy: 0-1, critic: 2-3, rollout: 4}", 4),
    ):
        config, plan = _plan_of(*ppo, f"cluster.placement={placement}")
        assert num_sharing(config, plan.layout, "policy", 0, is_pipelined=False) == number


def test_the_division_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    assert thread_counts(*_plan_of())[0] == "16"
    assert thread_counts(*_plan_of(*APART)) == (
        "policy 5, rollout 8",
        "run.num_threads=auto: 16 cores / processes that compute at the same time (policy 3, rollout 2)",
    )
    assert thread_counts(*_plan_of(*APART, "pipeline.max_lag=1"))[0] == "3 per process"
    assert thread_counts(*_plan_of(*APART, "run.num_threads=7"))[0] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert thread_counts(*_plan_of(*APART)) == ("6", "OMP_NUM_THREADS, in each process")


def test_more_processes_than_cores_have_one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert (
        thread_counts(*_plan_of("train.backend=fsdp2", "cluster.placement={'policy, rollout': 0-3}"))[0]
        == "1 per process"
    )


def test_null_of_older_configs_is_auto() -> None:
    assert load_config(None, [*TEXT, "run.num_threads=null"]).config.run.num_threads == "auto"
