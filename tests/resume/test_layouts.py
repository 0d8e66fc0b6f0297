"""What one layout of ranks has saved, every other goes on from: FSDP, FSDP2, replicas of shards, host memory, one process.

Two processes run all layouts in turn, by the classes that a training group's workers have.
"""

from __future__ import annotations

import itertools
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.config.schema import RunConfig
from braid.errors import CheckpointError
from braid.models.loading import load_policy
from braid.training.backend import StepReport
from braid.training.backends.fsdp import FsdpBackend
from braid.training.backends.single import SingleBackend
from braid.training.losses import policy_loss
from braid.training.shards import read_whole
from braid.types import Row

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CPU = torch.device("cpu")
LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2", "offload": {"weights": True, "optimizer": True}},
    "fsdp": {"backend": "fsdp", "offload": {"weights": True, "optimizer": True}},
    "fsdp2, replicas": {"backend": "fsdp2", "fsdp": {"size": 1}},
    "fsdp2 in host memory": {"backend": "fsdp2", "fsdp": {"cpu_offload": True}},
    "fsdp, nothing sharded": {"backend": "fsdp", "fsdp": {"sharding": "none"}},
    "fsdp, gradients and optimizer": {"backend": "fsdp", "fsdp": {"sharding": "grad_op"}},
}
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


def _layouts(lora: dict[str, Any] | None) -> list[str]:
    """FSDP without shards loses track of tied weights beside adapters, and is refused (plan.available)."""
    return [name for name in LAYOUTS if lora is None or name != "fsdp, nothing sharded"]


def _config(train: dict[str, Any], lora: dict[str, Any] | None, width: int = 64) -> RunConfig:
    # three heads of 24: rows that two ranks cannot halve evenly
    build = {
        "hidden_size": width,
        "intermediate_size": 93,
        "num_layers": 2,
        "num_heads": 3,
        "num_kv_heads": 1,
        "head_dim": 24,
    }
    train = {"optimizer": {"lr": 1e-3, "eps": 1e-5}, "micro_batch_tokens": 64, **train}
    return RunConfig.model_validate({"model": {"build": build, "lora": lora}, "train": train})


def _backend(name: str, lora: dict[str, Any] | None, width: int = 64) -> SingleBackend:
    config = _config(LAYOUTS.get(name, {}), lora, width)
    model = load_policy(config.model, temperature=1.0, seed=0, device=CPU)
    kind = config.train.backend
    if kind == "single":
        return SingleBackend(model, config.train, total_steps=9, device=CPU)
    assert kind in ("fsdp", "fsdp2")
    return FsdpBackend(model, config.train, total_steps=9, device=CPU, kind=kind)


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
    if not isinstance(backend, FsdpBackend):
        return backend.train(rows, weights, loss)
    rank, size = backend.data_place()
    return backend.train(rows[rank::size], weights[rank::size], loss, rows[0])


def _assert_close(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    # The same sums in another order, divided by AdamW by their own size: a hundredth of a step of 1e-3.
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def _save(backend: SingleBackend, folder: Path) -> dict[str, Any]:
    written = backend.save(str(folder))
    assert written.error is None
    assert all((folder / name).stat().st_size == line["bytes"] for name, line in written.files.items())
    dist.barrier()  # as the controller waits for all
    return written.state


def _go_round(rank: int, folder: Path, lora: dict[str, Any] | None) -> None:
    """Go on from one process' second step in each layout, save the third, and go on from that in the same and the next."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    saved, third, fourth, report = pickle.loads((folder / "one_process").read_bytes())
    layouts = _layouts(lora)
    counters: dict[str, Any] = {}
    for name, following in itertools.pairwise([*layouts, layouts[0]]):
        backend = _backend(name, lora)
        backend.restore(saved, "")
        assert _step(backend).num_tokens == report.num_tokens
        counters = _save(backend, folder / name)
        assert counters == {"num_steps": 3, "skipped_in_row": 0, "loss_scale": None}
        if rank == 0:
            _assert_close(read_whole(folder / name)["weights"], third)
            (folder / f"{name}.pickle").write_bytes(pickle.dumps(counters))
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
                _assert_close(weights, fourth)
        if rank == 0:
            _assert_close(unbroken, fourth)
        whole = backend.state()  # the form of one process
        if rank == 0:
            assert all(torch.equal(whole["weights"][n], tensor) for n, tensor in unbroken.items())
            assert whole["optimizer"].keys() == saved["optimizer"].keys()
    other = _backend("fsdp2", None, width=32)
    with pytest.raises(CheckpointError, match="of another model"):
        other.restore(counters, str(folder / "fsdp2"))
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_each_layout_goes_on_from_what_another_has_saved(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    alone = _backend("one process", lora)
    for _ in range(2):
        _step(alone)
    saved = pickle.dumps(alone.save("").state)
    _step(alone)
    third = {name: tensor.detach().clone() for name, tensor in alone.named_weights()}
    report = _step(alone)
    fourth = {name: tensor.detach().clone() for name, tensor in alone.named_weights()}
    (tmp_path / "one_process").write_bytes(pickle.dumps((pickle.loads(saved), third, fourth, report)))
    mp.spawn(_go_round, (tmp_path, lora), 2)
    for name in _layouts(lora):
        resumed = _backend("one process", lora)
        resumed.restore(pickle.loads((tmp_path / f"{name}.pickle").read_bytes()), str(tmp_path / name))
        _step(resumed)
        _assert_close(dict(resumed.named_weights()), fourth)


def test_both_ranks_say_when_one_of_them_has_no_room(tmp_path: Path) -> None:
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {tmp_path} 2>/dev/null"):
        pytest.skip("a small file system cannot be mounted here")
    try:
        mp.spawn(_fill, (tmp_path,), 2)
    finally:
        os.system(f"umount {tmp_path}")


def _fill(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    written = _backend("fsdp2", None).save(str(folder / "policy"))
    assert isinstance(written.error, OSError)
    assert written.error.strerror == "No space left on device"
    dist.destroy_process_group()
