"""CPU threads of the processes of a run (`run.num_threads: auto`)."""

from __future__ import annotations

import os

from braid.config.cluster import Role
from braid.config.schema import RunConfig
from braid.cores import num_cores, num_threads

from .layout import Layout
from .plan import Plan

_SAMPLING = ("rollout", "env", "reward")
"""Roles that work during rollout; the others work between rollouts, or beside them in a pipeline."""


def num_sharing(config: RunConfig, layout: Layout, role: Role, node: int, *, is_pipelined: bool) -> int:
    """Number of processes of machine `node` that compute at the same time as a worker of `role` there, itself
    included. An engine of several devices has a process for each; a server that was started elsewhere counts
    for nothing."""
    if layout.mode == "in_process":
        has_child = config.rollout.engine.is_served and config.rollout.engine.num_devices() > 0
        return 2 if has_child and is_pipelined else 1
    policy = layout.role("policy")
    num_processes = 0
    for role_layout in layout.roles:
        is_beside = is_pipelined or (role_layout.role in _SAMPLING) == (role in _SAMPLING)
        is_apart = role_layout is policy or policy is None or not role_layout.shares_processes(policy)
        if is_beside and is_apart:
            num_processes += sum(len(worker.devices) for worker in role_layout.workers if worker.node == node)
    return max(1, num_processes)


def thread_counts(config: RunConfig, plan: Plan) -> tuple[str, str]:
    """(CPU threads of each process, the reason), for roles on this machine."""
    if config.run.num_threads != "auto":
        return f"{config.run.num_threads}", "run.num_threads, in each process"
    if "OMP_NUM_THREADS" in os.environ:
        return f"{num_threads()}", "OMP_NUM_THREADS, in each process"
    cores = num_cores()
    sharing = {
        role_layout.role: num_sharing(
            config, plan.layout, role_layout.role, 0, is_pipelined=plan.is_pipelined
        )
        for role_layout in plan.layout.roles
        if plan.layout.mode != "in_process" or role_layout.role in ("policy", "rollout")
    }
    if set(sharing.values()) <= {1}:
        return f"{cores}", "run.num_threads=auto: the cores of this machine"
    counts = {role: max(1, cores // number) for role, number in sharing.items()}
    names = ", ".join(f"{role} {count}" for role, count in counts.items())
    value = f"{cores // max(sharing.values()) or 1} per process" if len(set(counts.values())) == 1 else names
    at_a_time = ", ".join(f"{role} {number}" for role, number in sharing.items())
    how = f"run.num_threads=auto: {cores} cores / processes that compute at the same time ({at_a_time})"
    return value, how
