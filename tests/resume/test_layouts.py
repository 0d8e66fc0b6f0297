"""Every layout of ranks resumes from checkpoints of the others: FSDP, FSDP2, replicas of shards, host memory,
DeepSpeed, Megatron's tensor and pipeline parallelism, one process.

Two processes run all layouts in turn, by what a training group's workers call. Megatron's have two of their
own, with the CPU in place of its GPU.
"""

from __future__ import annotations

import copy
import itertools
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.contracts.megatron_ranks import leave_groups
from tests.forks import run_ranks, use_megatron_on_cpu

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.config.schema import RunConfig
from braid.errors import CheckpointError
from braid.models.loading import load_policy
from braid.training.backend import StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss
from braid.training.shards import read_weights
from braid.types import Row

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2", "offload": {"weights": True, "optimizer": True}},
    "fsdp": {"backend": "fsdp", "offload": {"weights": True, "optimizer": True}},
    "fsdp2, replicas": {"backend": {"kind": "fsdp2", "size": 1}},
    "fsdp2 in host memory": {"backend": {"kind": "fsdp2", "cpu_offload": True}},
    "fsdp, nothing sharded": {"backend": {"kind": "fsdp", "sharding": "none"}},
    "fsdp, gradients and optimizer": {"backend": {"kind": "fsdp", "sharding": "grad_op"}},
    "deepspeed": {"backend": "deepspeed"},
}
MEGATRON: dict[str, dict[str, Any]] = {
    "megatron, tensors": {
        "backend": {"kind": "megatron", "tensor_parallel": 2, "sequence_parallel": True},
    },
    "megatron, pipeline": {"backend": {"kind": "megatron", "pipeline_parallel": 2}},
    "megatron, copies": {"backend": "megatron"},
}
_ODD = {
    # three heads of 24: rows that two ranks cannot halve evenly
    "hidden_size": 64,
    "intermediate_size": 93,
    "num_layers": 2,
    "num_heads": 3,
    "num_kv_heads": 1,
    "head_dim": 24,
}
BUILDS: dict[str, dict[str, Any]] = {
    "odd": _ODD,
    "narrow": {**_ODD, "hidden_size": 32},
    # heads that tensor parallelism can share out: two queries for each key
    "even": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 8,
    },
}
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


def _layouts(lora: dict[str, Any] | None) -> list[str]:
    """FSDP without shards loses track of tied weights beside adapters, and is refused (plan.available)."""
    return [name for name in LAYOUTS if lora is None or name != "fsdp, nothing sharded"]


def _config(train: dict[str, Any], lora: dict[str, Any] | None, build: str = "odd") -> RunConfig:
    train = {"optimizer": {"lr": 1e-3, "eps": 1e-5}, "micro_batch_tokens": 64, **train}
    return RunConfig.model_validate({"model": {"build": BUILDS[build], "lora": lora}, "train": train})


def _backend(name: str, lora: dict[str, Any] | None, build: str = "odd", **train: Any) -> SingleBackend:
    config = _config((LAYOUTS | MEGATRON).get(name, {}) | train, lora, build)
    model = load_policy(config.model, temperature=1.0, seed=0, device=CPU)
    if config.train.backend.kind == "single":
        return SingleBackend(model, config.train, total_steps=9, device=CPU)
    made: Any = config.train.backend.build(model, config.train, total_steps=9, device=CPU)
    return made


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group in range(4):
        prompt = rng.integers(0, 90, 6)
        for _ in range(2):
            ids = np.concatenate([prompt, rng.integers(0, 90, rng.integers(3, 30))])
            mask = np.arange(len(ids)) >= len(prompt)
            fields = {"advantages": rng.normal(size=len(ids)).astype(np.float32) * mask}
            rows.append(Row({"input_ids": ids}, mask, group, len(rows), fields=fields))
    return rows


def _step(backend: SingleBackend) -> StepReport:
    """One step of all rows, of which every rank has each second."""
    rows = _rows()
    weights = row_weights(
        [row.num_tokens for row in rows], [row.group for row in rows], mode="token_mean", constant=None
    )
    loss = policy_loss(RECIPES["grpo"])
    if not dist.is_initialized():
        return backend.train(rows, weights, loss)
    rank, size = backend.data_place()
    return backend.train(rows[rank::size], weights[rank::size], loss, rows[0])


def _assert_close(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    # The same sums in another order, divided by AdamW by their own size: a hundredth of a step of 1e-3.
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _assert_loss_scale_goes_on(name: str, build: str, folder: Path) -> None:
    """Steps that overflow are left out, on all ranks alike, until the scale is low enough; a checkpoint goes
    on with it, and with what is left until it rises."""
    layout = (LAYOUTS | MEGATRON)[name]
    chosen = layout["backend"]
    backend = {"kind": chosen} if isinstance(chosen, str) else chosen
    if backend["kind"] == "megatron":
        backend = {**backend, "dynamic_loss_scale_window": 2}
    scaler = {"init_scale": 2.0**24, "growth_interval": 2}
    backend = _backend(name, None, build, autocast="fp16", grad_scaler=scaler, backend=backend)
    before = {n: tensor.clone() for n, tensor in backend.full_weights().items()}
    first = _step(backend)
    assert (first.is_overflow, first.is_skipped, first.loss_scale) == (True, True, 2.0**24), first
    assert all(torch.equal(before[n], tensor) for n, tensor in backend.full_weights().items())
    while (report := _step(backend)).is_overflow:
        assert report.loss_scale is not None
        assert report.loss_scale > 1.0
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, (report.loss, report.grad_norm, report.loss_scale))
    assert gathered[0] == gathered[1]
    counters = _save(backend, folder)
    assert counters["loss_scale"] == {"value": report.loss_scale, "num_finite": 1}
    last = [_step(backend), _step(backend)]
    assert report.loss_scale is not None
    assert [step.loss_scale for step in last] == [report.loss_scale, 2 * report.loss_scale]
    backend.restore(counters, str(folder))
    again = [_step(backend), _step(backend)]
    assert [(step.loss_scale, repr(step.grad_norm)) for step in again] == [
        (step.loss_scale, repr(step.grad_norm)) for step in last
    ]


def _save(backend: SingleBackend, folder: Path) -> dict[str, Any]:
    written = backend.save(str(folder))
    assert written.error is None, written.error
    assert all((folder / name).stat().st_size == line["bytes"] for name, line in written.files.items())
    dist.barrier()  # as the driver waits for all
    return written.state


def _join(rank: int, folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def _go_round(rank: int, folder: Path, lora: dict[str, Any] | None) -> None:
    """Go on from one process' second step in each layout, save the third, and go on from that in the same and
    the next."""
    _join(rank, folder)
    course: Course = pickle.loads((folder / "course").read_bytes())
    report = course.report
    layouts = _layouts(lora)
    counters: dict[str, Any] = {}
    for name, following in itertools.pairwise([*layouts, layouts[0]]):
        backend = _backend(name, lora)
        backend.restore(course.saved, "")
        assert _step(backend).num_tokens == report.num_tokens
        counters = _save(backend, folder / name)
        assert counters == {"num_steps": 3, "skipped_in_row": 0, "loss_scale": None}
        if rank == 0:
            _assert_close(read_weights(folder / name), course.third)
        backend.to_host()
        backend.to_device()
        last = _step(backend)
        assert last.loss == pytest.approx(report.loss, abs=1e-6)
        unbroken = backend.full_weights()
        for other in (name, following):
            resumed = _backend(other, lora)
            _step(resumed)  # what it had is of no matter
            resumed.infer(_rows()[rank::2], frozenset({"logprobs"}), _rows()[0])  # gathers weights
            resumed.restore(counters, str(folder / name))
            again = _step(resumed)
            weights = resumed.full_weights()
            if other == name:  # to the bit
                assert (again.loss, again.grad_norm) == (last.loss, last.grad_norm)
                assert all(torch.equal(weights[n], tensor) for n, tensor in unbroken.items())
            elif rank == 0:
                _assert_close(weights, course.fourth)
        if rank == 0:
            _assert_close(unbroken, course.fourth)
        whole = backend.state()  # the form of one process
        if rank == 0:
            assert all(torch.equal(whole["weights"][n], tensor) for n, tensor in unbroken.items())
            assert whole["optimizer"].keys() == course.saved["optimizer"].keys()
    if lora is None:
        _assert_loss_scale_goes_on("deepspeed", "odd", folder / "scaled")
    other = _backend("fsdp2", None, "narrow")
    with pytest.raises(CheckpointError, match="of a different model"):
        other.restore(counters, str(folder / "fsdp2"))
    dist.destroy_process_group()


@dataclass(frozen=True)
class Course:
    """States of one process after each of its steps."""

    saved: dict[str, Any]
    """All of its state after the second."""
    third: dict[str, torch.Tensor]
    fourth: dict[str, torch.Tensor]
    report: StepReport
    """Of the fourth."""


def _course(lora: dict[str, Any] | None, build: str = "odd") -> Course:
    def weights() -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in alone.named_weights()}

    alone = _backend("one process", lora, build)
    for _ in range(2):
        _step(alone)
    saved = copy.deepcopy(alone.save("").state)
    _step(alone)
    third = weights()
    report = _step(alone)
    return Course(saved, third, weights(), report)


@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, id="all weights"), pytest.param(LORA, id="adapters", marks=pytest.mark.nightly)],
)
def test_each_layout_resumes_from_checkpoints_of_the_others(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    course = _course(lora)
    (tmp_path / "course").write_bytes(pickle.dumps(course))
    run_ranks(_go_round, tmp_path, lora)
    for name in _layouts(lora):
        _assert_one_process_goes_on(tmp_path / name, lora, course)


def _assert_one_process_goes_on(
    folder: Path, lora: dict[str, Any] | None, course: Course, build: str = "odd"
) -> None:
    resumed = _backend("one process", lora, build)
    resumed.restore(THIRD, str(folder))
    _step(resumed)
    _assert_close(dict(resumed.named_weights()), course.fourth)


@pytest.mark.nightly
def test_megatron_and_other_layouts_resume_from_each_other(tmp_path: Path) -> None:
    """One process -> FSDP2 -> Megatron -> FSDP2 and one process, each with a step of its own."""
    course = _course(None, "even")
    (tmp_path / "course").write_bytes(pickle.dumps(course))
    run_ranks(_save_third, tmp_path)
    run_ranks(_go_round_in_megatron, tmp_path)
    run_ranks(_go_on_from_megatron, tmp_path)
    for name in MEGATRON:
        _assert_one_process_goes_on(tmp_path / name, None, course, "even")


THIRD = {"num_steps": 3, "skipped_in_row": 0, "loss_scale": None}
"""What a checkpoint of the third step has beside tensors."""


def _save_third(rank: int, folder: Path) -> None:
    _join(rank, folder)
    course: Course = pickle.loads((folder / "course").read_bytes())
    backend = _backend("fsdp2", None, "even")
    backend.restore(course.saved, "")
    _step(backend)
    _save(backend, folder / "fsdp2")
    dist.destroy_process_group()


def _go_round_in_megatron(rank: int, folder: Path) -> None:
    use_megatron_on_cpu()
    (folder / "Megatron's rendezvous").mkdir(exist_ok=True)
    _join(rank, folder / "Megatron's rendezvous")
    course: Course = pickle.loads((folder / "course").read_bytes())
    for name in MEGATRON:
        _go_on_in_megatron(rank, folder, name, course)
        leave_groups()
    dist.destroy_process_group()


def _go_on_in_megatron(rank: int, folder: Path, name: str, course: Course) -> None:
    backend = _backend(name, None, "even")
    backend.restore(course.saved, "")
    _step(backend)
    assert _save(backend, folder / name) == THIRD
    if rank == 0:
        written = [path.stat().st_size for path in (folder / name).glob("__*")]
        assert len(written) == 2
        assert max(written) < 0.75 * sum(written)  # each its part
        _assert_close(read_weights(folder / name), course.third)
    last = _step(backend)
    unbroken = {n: tensor.clone() for n, tensor in backend.full_weights().items()}
    backend.restore(THIRD, str(folder / name))
    again = _step(backend)
    assert (again.loss, again.grad_norm) == (last.loss, last.grad_norm)  # to the bit
    for n, tensor in backend.full_weights().items():
        assert torch.equal(unbroken[n], tensor)
    backend.restore(THIRD, str(folder / "fsdp2"))
    _step(backend)
    weights = backend.full_weights()
    if rank == 0:
        _assert_close(unbroken, course.fourth)
        _assert_close(weights, course.fourth)
    _assert_loss_scale_goes_on(name, "even", folder / f"{name}, scaled")


def _go_on_from_megatron(rank: int, folder: Path) -> None:
    (folder / "last rendezvous").mkdir(exist_ok=True)
    _join(rank, folder / "last rendezvous")
    course: Course = pickle.loads((folder / "course").read_bytes())
    for name in MEGATRON:
        backend = _backend("fsdp2", None, "even")
        backend.restore(THIRD, str(folder / name))
        _step(backend)
        weights = backend.full_weights()
        if rank == 0:
            _assert_close(weights, course.fourth)
    dist.destroy_process_group()


def test_both_ranks_report_a_full_disk_of_one(tmp_path: Path) -> None:
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {tmp_path} 2>/dev/null"):
        pytest.skip("a small file system cannot be mounted here")
    try:
        run_ranks(_fill, tmp_path)
    finally:
        os.system(f"umount {tmp_path}")


def _fill(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    written = _backend("fsdp2", None).save(str(folder / "policy"))
    assert isinstance(written.error, OSError)
    assert written.error.strerror == "No space left on device"
    dist.destroy_process_group()
