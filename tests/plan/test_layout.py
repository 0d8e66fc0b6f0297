"""The layout of a run: placement of every role, modes, parallel groups, and refusals whose suggestions
work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.config.load import load_config
from braid.config.model import BuildSpec
from braid.plan import Plan, resolve
from braid.plan.layout import Layout, Needs, lay_out
from braid.plan.placement import MAX_DEVICES, format_numbers, parse_devices
from braid.plan.repair import with_values
from braid.plan.sizes import size_of_spec

TEXT = [
    "model.build={}",
    "run.max_rounds=10",
    "run.device=cpu",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
]


def plan_of(*overrides: str, num_gpus: int = 0) -> Plan:
    return resolve(load_config(None, [*TEXT, *overrides]).config, num_gpus=num_gpus)


def laid_out(*overrides: str, num_gpus: int = 0, roles: tuple[Any, ...] = ("policy", "rollout")) -> Layout:
    """Regardless of other problems of the config."""
    config = load_config(None, [*TEXT, *overrides]).config
    return lay_out(config, Needs(roles, {}, has_workers=True, num_gpus=num_gpus))


def ranks_of(layout: Layout, role: str) -> list[tuple[int, int, tuple[int, ...]]]:
    placed = layout.role(role)
    assert placed is not None
    return [(worker.rank, worker.node, worker.devices) for worker in placed.workers]


def test_without_a_placement_everything_is_in_one_process() -> None:
    layout = plan_of().layout
    assert layout.mode == "in_process"
    assert ranks_of(layout, "policy") == ranks_of(layout, "rollout") == [(0, 0, (0,))]


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        (["cluster.runtime=ray"], "collocated"),
        (["train.backend=fsdp2", "cluster.devices_per_node=2"], "collocated"),
        (["train.backend=fsdp2", "cluster.placement={'policy, rollout': 0-3}"], "collocated"),
        (["train.backend=fsdp2", "cluster.placement={policy: 0-3, rollout: 4-5}"], "disaggregated"),
        (["train.backend=fsdp2", "cluster.placement={policy: 0-3, rollout: 2-5}"], "hybrid"),
        (["cluster.placement={policy: 0, rollout: 1}"], "disaggregated"),
        (["cluster.placement={policy: 0, rollout: 0}"], "in_process"),
    ],
)
def test_the_mode_follows_from_shared_devices(overrides: list[str], mode: str) -> None:
    assert laid_out(*overrides).mode == mode


def test_devices_are_numbered_through_the_machines_and_engines_take_several() -> None:
    layout = laid_out(
        "train.backend=fsdp2",
        "cluster.num_nodes=2",
        "cluster.devices_per_node=4",
        "cluster.placement={policy: 0-3, rollout: 4-7}",
        "rollout.engine=vllm",
        "rollout.engine.tensor_parallel=2",
    )
    assert ranks_of(layout, "policy") == [(rank, 0, (rank,)) for rank in range(4)]
    assert ranks_of(layout, "rollout") == [(0, 1, (4, 5)), (1, 1, (6, 7))]


def test_all_devices_are_those_that_the_machine_has() -> None:
    layout = laid_out("train.backend=fsdp2", "run.device=auto", num_gpus=8)
    assert [len(ranks_of(layout, role)) for role in ("policy", "rollout")] == [8, 8]
    assert laid_out("run.device=auto", num_gpus=8).mode == "in_process"


def test_a_role_that_is_not_named_is_placed_with_the_policy() -> None:
    roles = ("policy", "critic", "reference", "inference", "rollout")
    layout = laid_out(
        "train.backend=fsdp2",
        "critic.train={backend: single}",
        "cluster.placement={policy: 2-3, rollout: 0-1}",
        roles=roles,
    )
    assert ranks_of(layout, "reference") == ranks_of(layout, "policy")
    assert ranks_of(layout, "critic") == [(0, 0, (2,))], "single has one process"
    assert layout.role("inference") is None, "the policy itself infers"


def test_inference_has_workers_only_on_devices_other_than_the_policys() -> None:
    roles = ("policy", "inference", "rollout")
    shared = laid_out(
        "train.backend=fsdp2", "cluster.placement={'policy,inference,rollout': 0-3}", roles=roles
    )
    assert shared.role("inference") is None
    apart = laid_out(
        "train.backend=fsdp2", "cluster.placement={policy: 0-1, inference: 2, rollout: 3}", roles=roles
    )
    assert ranks_of(apart, "inference") == [(0, 0, (2,))]


@pytest.mark.parametrize(
    ("env", "rollout", "devices"),
    [
        ("2-5", "0-1", [2, 3, 4, 5]),
        ("4-5", "0-3", [4, 4, 5, 5]),
        ("0", "0-1", [0, 0]),
        ("0-1", "0-1", None),
        (None, "0-1", None),
    ],
)
def test_simulators_have_workers_if_they_are_placed_apart_from_rollout(
    env: str | None, rollout: str, devices: list[int] | None
) -> None:
    named = f", env: {env}" if env else ""
    layout = laid_out(
        f"cluster.placement={{policy: 6, rollout: {rollout}{named}}}", roles=("policy", "rollout", "env")
    )
    assert (
        [device for _, _, (device,) in ranks_of(layout, "env")] == devices
        if devices
        else not layout.role("env")
    )


def test_processes_of_simulators_that_cannot_be_divided_among_rollout_workers_are_refused() -> None:
    placement = "cluster.placement={policy: 6, rollout: 0-1, env: 2-4}"
    (refusal,) = laid_out(placement, roles=("policy", "rollout", "env")).refusals
    assert "env has 3 processes and rollout 2 workers" in refusal.message
    assert refusal.fix["cluster.placement"] == {"policy": "6", "rollout": "0-1", "env": "2-3"}


def test_running_servers_have_their_own_devices() -> None:
    layout = laid_out(
        "train.backend=fsdp2",
        "cluster.placement={policy: 0-1}",
        "rollout.engine=vllm",
        "rollout.engine.servers=[http://localhost:1]",
    )
    assert ranks_of(layout, "rollout") == [(0, 0, ())]
    assert layout.mode == "collocated"


def test_replicas_of_an_engine_that_is_not_placed_take_the_first_devices_of_the_policy() -> None:
    layout = laid_out(
        "train.backend=fsdp2",
        "cluster.placement={policy: 0-3}",
        "rollout.engine=vllm",
        "rollout.engine={kind: vllm, replicas: 1, tensor_parallel: 2}",
    )
    assert ranks_of(layout, "rollout") == [(0, 0, (0, 1))]
    assert layout.mode == "hybrid"


def test_parallel_groups_are_numbered_as_the_backends_number_them() -> None:
    train = load_config(
        None,
        [*TEXT, "train={backend: {kind: megatron, tensor_parallel: 2, pipeline_parallel: 2}}"],
    ).config.train
    assert train.backend.groups(train, 8) == {
        "tensor": ((0, 1), (2, 3), (4, 5), (6, 7)),
        "data": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "pipeline": ((0, 4), (1, 5), (2, 6), (3, 7)),
    }
    experts = with_values(
        load_config(None, [*TEXT, "train.backend=megatron"]).config,
        {"train.backend.expert_parallel": 2},
    ).train
    groups = experts.backend.groups(experts, 4)
    assert groups["expert"] == ((0, 1), (2, 3))
    assert groups["expert data"] == ((0, 2), (1, 3))
    hybrid = load_config(None, [*TEXT, "train={backend: {kind: fsdp2, size: 2}, sequence_parallel: 2}"])
    train = hybrid.config.train
    assert train.backend.groups(train, 4) == {
        "sequence": ((0, 1), (2, 3)),
        "data": ((0, 2), (1, 3)),
        "shard": ((0, 1), (2, 3)),
        "replica": ((0, 2), (1, 3)),
    }


MEGATRON = ["train.backend=megatron", "cluster.devices_per_node=8"]
REFUSED = [
    (["cluster.placement={policy: 0-1}"], "train.backend", "single uses one"),
    (
        ["cluster.placement={policy: 0, rollout: 9}", "cluster.devices_per_node=8"],
        "cluster.placement",
        "no device 9",
    ),
    (["cluster.placement={policy: 0-a}"], "cluster.placement", "invalid placement"),
    (["cluster.placement={polcy: 0}"], "cluster.placement", "did you mean 'policy'"),
    (
        [
            *MEGATRON,
            "train.backend={kind: megatron, tensor_parallel: 2, pipeline_parallel: 2}",
            "cluster.placement={policy: 0-5}",
        ],
        "train.backend.tensor_parallel",
        "4 devices (tensor 2 x pipeline 2",
    ),
    (
        [*MEGATRON, "train.backend.expert_parallel=4", "cluster.placement={policy: 0-5}"],
        "train.backend.expert_parallel",
        "a replica of the experts needs 4",
    ),
    (
        ["train.backend=fsdp2", "train.backend.size=2", "cluster.placement={policy: 0-2}"],
        "train.backend.size",
        "a shard group needs 2 devices, but the policy has 3",
    ),
    (
        ["train.backend=deepspeed", "train.backend.hpz_partition_size=4", "cluster.devices_per_node=2"],
        "train.backend.hpz_partition_size",
        "needs 4 devices, but the policy has 2",
    ),
    (
        ["train.backend=fsdp2", "train.sequence_parallel=2", "cluster.placement={policy: 0-2}"],
        "train.sequence_parallel",
        "a sequence-parallel group needs 2 devices, but the policy has 3",
    ),
    (
        [
            "rollout.engine=vllm",
            "rollout.engine.tensor_parallel=2",
            "cluster.placement={policy: 0, rollout: 1-3}",
        ],
        "rollout.engine.tensor_parallel",
        "an engine needs 2 devices (tensor 2 x pipeline parallel 1), but the rollout has 3",
    ),
    (
        ["rollout.engine=vllm", "rollout.engine.replicas=2", "cluster.placement={policy: 0, rollout: 1-3}"],
        "rollout.engine.replicas",
        "2 engines of 1 need 2 devices, but the rollout has 3",
    ),
    (
        [
            "rollout.engine=vllm",
            "rollout.engine.tensor_parallel=2",
            "cluster.num_nodes=2",
            "cluster.devices_per_node=2",
            "cluster.placement={policy: 0, rollout: 1-2}",
        ],
        "cluster.placement",
        "on machines 0, 1 of 2 devices each",
    ),
    (
        ["train.backend=fsdp2", "cluster.placement={policy: '0-3:0-1', rollout: 0-3}"],
        "cluster.placement",
        "has 2 devices, but a rank uses one",
    ),
    (
        ["cluster.runtime=in_process", "cluster.placement={policy: 0, rollout: 1}"],
        "cluster.runtime",
        "rollout is on 1",
    ),
    (
        ["cluster.runtime=in_process", "train.backend=fsdp2"],
        "cluster.runtime",
        "backend fsdp2 runs in separate processes",
    ),
]


def suggested(message: str) -> list[str]:
    """The overrides that a message ends with."""
    _, separator, text = message.partition(". This works: ")
    assert separator, message
    return re.split(r" (?=[a-z_.]+=)", text)


@pytest.mark.parametrize(("overrides", "key", "words"), REFUSED)
def test_a_refusal_names_the_rule_and_values_that_fit(overrides: list[str], key: str, words: str) -> None:
    layout = laid_out(*overrides)
    refusals = {refusal.key: refusal for refusal in layout.refusals}
    assert words in refusals[key].message
    repaired = laid_out(*overrides, *suggested(refusals[key].message))
    assert repaired.refusals == ()
    assert repaired.roles


def test_sizes_that_do_not_divide_the_model_are_refused_with_the_next_lower() -> None:
    for overrides, key, lower in (
        (["train.backend=fsdp2", "train.sequence_parallel=3"], "train.sequence_parallel", 2),
        (["train.backend=megatron", "train.backend.tensor_parallel=8"], "train.backend.tensor_parallel", 4),
        (
            ["train.backend=megatron", "train.backend.pipeline_parallel=3"],
            "train.backend.pipeline_parallel",
            2,
        ),
        (["train.backend=megatron", "train.backend.expert_parallel=2"], "train.backend.expert_parallel", 1),
    ):
        config = load_config(None, [*TEXT, "cluster.placement={policy: 0-23}", *overrides]).config
        needs = Needs(
            ("policy", "rollout"), {"policy": size_of_spec(BuildSpec())}, has_workers=True, num_gpus=0
        )
        (refusal,) = lay_out(config, needs).refusals
        assert refusal.key == key
        assert f"; {lower} would work" in refusal.message
        assert refusal.fix[key] == lower
        assert lay_out(with_values(config, refusal.fix), needs).refusals == ()


def test_two_ranks_on_one_gpu_are_refused_but_allowed_on_a_cpu() -> None:
    shared = ["train.backend=fsdp2", "run.device=auto", "cluster.placement={policy: '0:0-1', rollout: '0'}"]
    assert "NCCL" in laid_out(*shared, num_gpus=1).refusals[0].message
    assert len(ranks_of(laid_out(*shared), "policy")) == 2


@given(st.sets(st.integers(0, 200), min_size=1))
def test_numbers_are_written_as_they_are_read(numbers: set[int]) -> None:
    devices = parse_devices(format_numbers(numbers))
    assert devices is not None
    assert devices.numbers == tuple(sorted(numbers))
    assert max(numbers) < MAX_DEVICES


@st.composite
def clusters(draw: st.DrawFn) -> list[str]:
    """Overrides of a cluster, a placement and parallel sizes, possible or not."""
    nodes, per_node = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    number = st.integers(0, nodes * per_node)
    ranges = st.tuples(number, number).map(lambda pair: f"{min(pair)}-{max(pair)}")
    text = st.one_of(st.just("all"), number.map(str), ranges, st.sets(number, min_size=1).map(format_numbers))
    shared = st.tuples(ranges, st.integers(1, 4)).map(lambda pair: f"{pair[0]}:0-{pair[1] - 1}")
    lines = draw(
        st.dictionaries(
            st.sampled_from(["policy", "rollout", "reference", "critic", "inference", "reward,env"]),
            st.one_of(text, shared),
        )
    )
    sizes = st.sampled_from([1, 1, 1, 2, 3, 4])
    backend = draw(st.sampled_from(["single", "fsdp", "fsdp2", "deepspeed", "megatron"]))
    engine = draw(st.sampled_from(["native", "vllm", "sglang"]))
    out = [
        f"cluster.num_nodes={nodes}",
        f"cluster.runtime={draw(st.sampled_from(['auto', 'ray', 'in_process']))}",
        f"train.backend={backend}",
        f"rollout.engine={engine}",
        *(f"cluster.placement.{line}='{value}'" for line, value in lines.items()),
    ]
    out += [f"cluster.devices_per_node={per_node}"] if draw(st.booleans()) else []
    if engine != "native":
        out += [f"rollout.engine.tensor_parallel={draw(sizes)}"]
        out += [f"rollout.engine.replicas={draw(sizes)}"] if draw(st.booleans()) else []
    if backend == "megatron":
        names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
        out += [f"train.backend.{name}={draw(sizes)}" for name in names]
    elif backend != "single":
        out += [f"train.sequence_parallel={draw(sizes)}"]
        key = "hpz_partition_size" if backend == "deepspeed" else "size"
        out += [f"train.backend.{key}={draw(sizes)}"] if draw(st.booleans()) else []
    return out


ALL_ROLES = ("policy", "critic", "reference", "inference", "rollout")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(clusters(), st.sampled_from([0, 0, 1, 4, 8]))
def test_every_cluster_is_laid_out_soundly_or_refused_with_values_that_fit(
    overrides: list[str], num_gpus: int
) -> None:
    config = load_config(None, [*TEXT, "run.device=auto", *overrides]).config
    needs = Needs(ALL_ROLES, {}, has_workers=True, num_gpus=num_gpus)
    layout = lay_out(config, needs)
    for refusal in layout.refusals:
        assert lay_out(with_values(config, refusal.fix), needs).refusals == ()
    if layout.refusals:
        layout = lay_out(with_values(config, layout.refusals[0].fix), needs)
    assert {role.role for role in layout.roles} >= {"policy", "critic", "reference", "rollout"}
    total = layout.num_nodes * layout.devices_per_node
    for role in layout.roles:
        assert [worker.rank for worker in role.workers] == list(range(len(role.workers)))
        for worker in role.workers:
            assert worker.devices
            assert max(worker.devices) < total
            assert {device // layout.devices_per_node for device in worker.devices} == {worker.node}
        for groups in role.groups.values():
            assert sorted(rank for group in groups for rank in group) == list(range(len(role.workers)))
    sets = [set(role.devices) for role in layout.roles]
    if layout.mode == "in_process":
        assert all(devices == {0} for devices in sets)
        assert all(len(role.workers) == 1 for role in layout.roles)
    else:
        assert (layout.mode == "collocated") == all(devices == sets[0] for devices in sets)
        is_apart = sum(map(len, sets)) == len(set[int]().union(*sets))
        assert (layout.mode == "disaggregated") == (is_apart and layout.mode != "collocated")


JUDGE = "reward.parts=[{{kind: judge, path: judge, prompt: '{{response}}', engine: {}}}]"


def test_judges_have_workers_on_devices_apart_from_rollout() -> None:
    apart = plan_of(JUDGE.format("native"), "cluster.placement={policy: 0, rollout: 1, reward: 2-3}")
    assert apart.layout.mode == "disaggregated"
    assert ranks_of(apart.layout, "reward") == [(0, 0, (2,)), (1, 0, (3,))]
    assert apart.judges_in_turns == ()
    in_turns = plan_of(JUDGE.format("native"), "cluster.placement={policy: 0, rollout: 1, reward: 0}")
    assert in_turns.judges_in_turns == (0,)
    beside = plan_of(JUDGE.format("native"), "cluster.placement={policy: 0, rollout: 1-2, reward: 1}")
    assert beside.layout.role("reward") is None
    assert plan_of(JUDGE.format("native")).layout.mode == "in_process"


def test_a_judges_engine_takes_its_devices_on_one_worker() -> None:
    of_two = JUDGE.format("{kind: vllm, tensor_parallel: 2}")
    layout = laid_out(
        of_two,
        "cluster.placement={policy: 0, rollout: 1, reward: 2-5}",
        roles=("policy", "rollout", "reward"),
    )
    assert ranks_of(layout, "reward") == [(0, 0, (2, 3)), (1, 0, (4, 5))]
    (refusal,) = laid_out(
        of_two,
        "cluster.placement={policy: 0, rollout: 1, reward: 2-4}",
        roles=("policy", "rollout", "reward"),
    ).refusals
    assert "rank 1 of reward has 1 devices, but an engine uses 2" in refusal.message
