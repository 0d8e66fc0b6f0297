"""The memory that a plan predicts, against the bytes that PyTorch allocates in a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from braid.config.load import load_config
from braid.config.roles import TrainingRole, train_config
from braid.config.schema import RunConfig
from braid.models.base import TrainableModel
from braid.models.batch import PackedBatch
from braid.models.roles import make_critic, make_policy
from braid.plan import Plan, resolve
from braid.plan.memory import LOGPROBS, DeviceMemory, plan_memory, update_of
from braid.training.backend import Diagnostics, Loss
from braid.training.backends.single.backend import SingleBackend
from braid.types import Row

CPU = torch.device("cpu")
BASE = [
    "model.build={hidden_size: 128, intermediate_size: 352, num_layers: 3, num_heads: 4, num_kv_heads: 2}",
    "model.build.head_dim=32",
    "run.max_rounds=10",
    "run.device=cpu",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "data.max_prompt_tokens=16",
    "reward.parts=[{kind: exact}]",
    "rollout.prompts_per_round=2",
    "rollout.group_size=4",
    "rollout.sampling.max_new_tokens=64",
]
ROWS, PROMPT, ANSWER, VOCAB = 8, 16, 64, 96


def planned(*overrides: str) -> tuple[RunConfig, Plan]:
    config = load_config(None, [*BASE, *overrides]).config
    return config, resolve(config, num_gpus=0)


def memory(*overrides: str, capacity: int | None = None) -> DeviceMemory:
    config, plan = planned(*overrides)
    (device,) = plan_memory(config, plan, capacity=capacity)
    return device


def predicted(device: DeviceMemory, role: str, stage: str) -> int:
    return sum(use.num_bytes for use in device.uses if use.role == role and stage in use.stages)


def allocated(action: Callable[[], object]) -> int:
    """The most bytes that PyTorch has allocated during the action, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    events = record.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    changes = [
        cast("Any", e).nbytes() for e in sorted(events, key=lambda e: e.start_ns()) if e.name() == "[memory]"
    ]
    return int(np.cumsum(changes).max())


def some_rows() -> list[Row]:
    """The rows of a step at full length; those of a group of four have the same prompt."""
    generator = np.random.default_rng(0)
    prompts = generator.integers(VOCAB, size=(ROWS // 4, PROMPT))
    mask = np.arange(PROMPT + ANSWER) >= PROMPT
    ids = [np.concatenate([prompts[i // 4], generator.integers(VOCAB, size=ANSWER)]) for i in range(ROWS)]
    return [Row({"input_ids": row}, mask, group=i // 4, trajectory=i) for i, row in enumerate(ids)]


def _loss(outputs: dict[str, Tensor], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
    assert batch.weights is not None
    value = outputs["values"] if "values" in outputs else outputs["logprobs"] + 0.01 * outputs["entropy"]
    return -(value * batch.weights).sum(), Diagnostics({})


def measured(config: RunConfig, role: TrainingRole) -> int:
    """Bytes at the peak of a role's second step, weights and optimizer states among them."""
    model: TrainableModel = make_policy(config, CPU)
    if role == "critic":
        model = make_critic(config, CPU, make_policy(config, CPU))
    backend = SingleBackend(model, train_config(config, role), total_steps=2, device=CPU)
    rows = some_rows()
    outputs = frozenset({"values"} if role == "critic" else {"logprobs", "entropy"})
    loss = Loss(outputs, _loss)  # pyright: ignore[reportArgumentType]  # outputs are literals
    backend.train(rows[:1], [0.1], loss)
    held = backend.held_bytes()
    step = allocated(lambda: backend.train(rows, [0.1] * ROWS, loss))
    return held.weights + held.optimizer + step


CASES = {
    "full": [],
    "deeper": ["model.build.num_layers=6"],
    "wide": ["model.build.hidden_size=256"],
    "feed-forward": ["model.build.intermediate_size=704"],
    "heads": ["model.build.num_heads=8"],
    "llama": ["model.build.architecture=llama"],
    "several micro-batches": ["train.micro_batch_tokens=128"],
    "one row at a time": ["train.micro_batch_rows=1"],
    "recomputed": ["train.gradient_checkpointing=true", "model.build.num_layers=6"],
    "bf16": ["model.dtype=bf16"],
    "bf16 recomputed": ["model.dtype=bf16", "train.gradient_checkpointing=true", "model.build.num_layers=6"],
    "autocast": ["train.autocast=bf16"],
    "sgd": ["train.optimizer.kind=sgd"],
    "untied": ["model.build.tie_embeddings=false"],
    "vocabulary": [f"model.build.characters={''.join(map(chr, range(0x4E00, 0x4E00 + 8000)))}"],
    "adapters": ["model.lora={rank: 8}"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_a_step_allocates_what_the_plan_says(overrides: list[str]) -> None:
    config, plan = planned(*overrides)
    (device,) = plan_memory(config, plan)
    expected = predicted(device, "policy", update_of("policy"))
    assert measured(config, "policy") == pytest.approx(expected, rel=0.1)


def test_a_critics_step_allocates_what_the_plan_says() -> None:
    config, plan = planned("algorithm.recipe=ppo")
    (device,) = plan_memory(config, plan)
    expected = predicted(device, "critic", update_of("critic"))
    assert measured(config, "critic") == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("case", ["full", "wide", "feed-forward", "heads", "vocabulary"])
def test_a_reference_allocates_what_the_plan_says(case: str) -> None:
    config, plan = planned("algorithm.kl_coef=0.1", *CASES[case])
    (device,) = plan_memory(config, plan)
    backend = SingleBackend(make_policy(config, CPU), config.train, total_steps=0, device=CPU)
    rows = some_rows()
    backend.infer(rows[:1], frozenset({"logprobs"}))
    step = allocated(lambda: backend.infer(rows, frozenset({"logprobs"})))
    total = backend.held_bytes().weights + step
    assert total == pytest.approx(predicted(device, "reference", LOGPROBS), rel=0.1)


def test_ranks_share_what_the_backend_shards() -> None:
    """16 bytes for each parameter in fp32, and two whole layers gathered in passes."""
    over = ["train.backend=fsdp2", "cluster.placement={policy: 0-3, rollout: 0-3}"]
    whole = memory()
    config, plan = planned(*over, "rollout.prompts_per_round=8")
    (shard,) = plan_memory(config, plan, capacity=2**34)
    assert shard.devices == (0, 1, 2, 3)
    bytes_of = {(use.role, use.part): use.num_bytes for use in shard.uses}
    of_whole = {(use.role, use.part): use.num_bytes for use in whole.uses}
    for part in ("weights", "optimizer states", "gradients"):
        assert bytes_of["policy", part] == pytest.approx(of_whole["policy", part] / 4, rel=1e-3)
    assert bytes_of["policy", "activations"] == of_whole["policy", "activations"]  # two prompts a rank
    assert bytes_of["policy", "gathered weights"] == pytest.approx(of_whole["policy", "weights"] * 2 / 3)


def test_what_limits_is_the_stage_that_needs_most() -> None:
    device = memory(capacity=2**20)
    assert device.fits is False
    assert device.stage == update_of("policy")
    assert device.largest.part == "activations"
    assert device.peak == sum(use.num_bytes for use in device.uses if device.stage in use.stages)
    assert memory(capacity=2**33).fits is True


def test_a_simulators_memory_is_not_guessed() -> None:
    config = load_config("examples/cartpole.yaml").config
    assert plan_memory(config, resolve(config, num_gpus=0)) == []
