"""Half-precision weights are trained through float32 master weights, by every backend.

bf16 has 8 bits of precision: at a rate of 1e-6, weights of 0.02 (built models') that are updated in bf16
themselves stay where they are, since an update must be half of their last bit, 4e-5, to change them.
"""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.forks import run_ranks, use_megatron_on_cpu
from torch import Tensor

from braid.algorithms.recipes import RECIPES
from braid.config.schema import RunConfig
from braid.models.roles import make_critic, make_policy
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, value_loss_of
from braid.types import Row

CPU = torch.device("cpu")
LOWER = 1e-6
RATES = (LOWER, 1e-5)
BUILD = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


def _backend(
    kind: Any = "single", dtype: str = "bf16", *, lr: float = 1e-5, role: Any = "policy", **keys: Any
) -> SingleBackend:
    model = {"build": BUILD, "dtype": dtype, "lora": keys.pop("lora", None)}
    train = {"backend": kind, "optimizer": {"lr": lr, "value_lr": lr}, "micro_batch_tokens": 64, **keys}
    critic = {"normalize_values": True}
    config = RunConfig.model_validate(
        {"model": model, "train": train, "critic": critic, "run": {"device": "cpu"}}
    )
    made = (make_policy if role == "policy" else make_critic)(config, CPU)
    if kind == "single":
        return SingleBackend(made, config.train, total_steps=99, device=CPU)
    wrapped: Any = config.train.backend.build(made, config.train, total_steps=99, device=CPU)
    return wrapped


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group in range(4):
        ids = rng.integers(0, 90, rng.integers(12, 30))
        mask = np.arange(len(ids)) >= 6
        fields = {
            name: rng.normal(size=len(ids)).astype(np.float32) * mask
            for name in ("advantages", "values", "returns")
        }
        rows.append(Row({"input_ids": ids}, mask, group, group, fields=fields))
    return rows


def _step(backend: SingleBackend, loss: Any = None) -> Any:
    rows, loss = _rows(), loss or policy_loss(RECIPES["grpo"])
    weights = [1 / sum(row.num_tokens for row in rows)] * len(rows)
    if not dist.is_initialized():
        return backend.train(rows, weights, loss)
    rank, size = backend.data_place()
    return backend.train(rows[rank::size], weights[rank::size], loss, rows[0])


def _weights(backend: SingleBackend) -> dict[str, Tensor]:
    """In the precision that is trained; whole, on the first rank."""
    return copy.deepcopy(backend.state()["weights"])


def _mean_move(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    moves = torch.cat([(after[name].double() - before[name].double()).abs().flatten() for name in before])
    return float(moves.mean())


@pytest.fixture(scope="module")
def exact() -> dict[float, float]:
    """Mean move of a weight over 20 steps in float32, by the rate."""
    moves: dict[float, float] = {}
    for lr in RATES:
        backend = _backend(dtype="fp32", lr=lr)
        before = _weights(backend)
        for _ in range(20):
            _step(backend)
        moves[lr] = _mean_move(before, _weights(backend))
    return moves


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("lr", RATES)
def test_half_precision_weights_move_as_far_as_float32_ones(
    exact: dict[float, float], lr: float, dtype: str
) -> None:
    backend = _backend(dtype=dtype, lr=lr)
    before = _weights(backend)
    for _ in range(20):
        _step(backend)
    assert _mean_move(before, _weights(backend)) == pytest.approx(exact[lr], rel=0.1)


def test_passes_use_the_master_weights_rounded() -> None:
    backend = _backend(lr=1e-3)
    _step(backend)
    masters = _weights(backend)
    for name, used in backend.named_weights():
        assert (masters[name].dtype, used.dtype) == (torch.float32, torch.bfloat16)
        assert torch.equal(masters[name].bfloat16(), used)
        assert not torch.equal(masters[name], used.float()), f"{name} has lost its lower bits"


def test_parameters_stay_the_tensors_that_the_engine_shares() -> None:
    backend = _backend()
    before = [tensor.data_ptr() for _, tensor in backend.named_weights()]
    _step(backend)
    backend.load(copy.deepcopy(backend.state()))
    assert [tensor.data_ptr() for _, tensor in backend.named_weights()] == before


@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapters"])
def test_a_resumed_run_has_the_lower_bits_of_its_weights(lora: dict[str, Any] | None) -> None:
    unbroken, resumed = _backend(lora=lora), _backend(lora=lora, offload={"weights": True, "optimizer": True})
    for _ in range(3):
        _step(unbroken)
    resumed.to_host()
    resumed.load(copy.deepcopy(unbroken.state()))
    resumed.to_device()
    for _ in range(2):
        assert _step(resumed) == _step(unbroken)
    for name, tensor in _weights(unbroken).items():
        assert torch.equal(_weights(resumed)[name], tensor), name


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    whole, cut = _backend(micro_batch_tokens=10_000), _backend(micro_batch_tokens=1)
    assert {g.dtype for g in _gradients(whole)} == {torch.float32}
    one, other = (torch.cat([g.flatten() for g in _gradients(b)]) for b in (whole, cut))
    # in both, activations and the products of a micro-batch are rounded to bf16, by 2^-9 relative, some ten
    # times in a row
    assert float((one - other).norm() / one.norm()) < 10 * 2**-9


def _gradients(backend: SingleBackend) -> list[Tensor]:
    gradients: list[Tensor] = []
    backend._update = lambda report: gradients.extend(g.clone() for g in backend._gradients())  # type: ignore[method-assign]
    _step(backend)
    return gradients


def test_a_normalizing_critic_keeps_its_values_in_both_copies_of_its_head() -> None:
    backend = _backend(role="critic", lr=1e-3)
    _step(backend, value_loss_of(RECIPES["ppo"]))
    state = _weights(backend)
    for name, used in backend.named_weights():
        if used.dtype == torch.bfloat16:
            assert torch.equal(state[name].bfloat16(), used), name


def test_held_bytes_count_the_masters() -> None:
    backend = _backend()
    parameters = sum(tensor.numel() for _, tensor in backend.named_weights())
    held = backend.held_bytes()
    assert (held.weights, held.gradients, held.optimizer) == (2 * parameters, 4 * parameters, 4 * parameters)


# -- backends of several processes

SHARDED: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2", "offload": {"weights": True, "optimizer": True}},
    "fsdp": {"backend": "fsdp", "offload": {"weights": True, "optimizer": True}},
    "fsdp, nothing sharded": {"backend": {"kind": "fsdp", "sharding": "none"}},
    "deepspeed": {"backend": "deepspeed"},
}
MEGATRON: dict[str, dict[str, Any]] = {
    "megatron, tensors": {"backend": {"kind": "megatron", "tensor_parallel": 2}},
    "megatron, copies": {"backend": "megatron"},
}


def _sharded(name: str, lr: float, **keys: Any) -> SingleBackend:
    options = dict((SHARDED | MEGATRON)[name])
    return _backend(options.pop("backend"), lr=lr, **options, **keys)


def _go_on(rank: int, folder: Path, names: list[str], lora: dict[str, Any] | None) -> None:
    """From one process's state after 10 steps 10 more, through a checkpoint of this layout after 8 of them,
    at the lower of the rates: it is where weights without masters stand still."""
    if names[0] in MEGATRON:
        use_megatron_on_cpu()
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    place = folder / f"rendezvous of {names[0]}"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    before, halfway = pickle.loads((folder / "halfway").read_bytes())
    moves: dict[str, float] = {}
    for name in names:
        backend = _sharded(name, LOWER, lora=lora)
        backend.restore(halfway, "")
        for _ in range(8):
            _step(backend)
        saved = folder / name
        written = backend.save(str(saved))
        dist.barrier()
        backend.to_host()
        backend.to_device()
        for _ in range(2):
            _step(backend)
        held = backend.held_bytes()
        if name == "megatron, tensors":  # masters and two moments; copies share them, but not the weights
            assert held.optimizer >= (2 + 4) * held.weights
        unbroken, used = _weights(backend), backend.full_weights()
        backend.restore(written.state, str(saved))
        for _ in range(2):
            _step(backend)
        again = _weights(backend)
        if rank == 0:
            moves[name] = _mean_move(before, unbroken)
            for weight, tensor in unbroken.items():
                assert torch.equal(again[weight], tensor), (name, weight)
                assert (tensor.dtype, used[weight].dtype) == (torch.float32, torch.bfloat16), (name, weight)
                assert torch.equal(tensor.bfloat16(), used[weight].cpu()), (name, weight)
    if rank == 0:
        (folder / "moves").write_bytes(pickle.dumps(moves))
    dist.destroy_process_group()


def _assert_all_move_alike(folder: Path, names: list[str], lora: dict[str, Any] | None = None) -> None:
    backend, whole = _backend(lr=LOWER, lora=lora), _backend(dtype="fp32", lr=LOWER, lora=lora)
    before, start = _weights(backend), _weights(whole)
    for _ in range(10):
        _step(backend)
    (folder / "halfway").write_bytes(pickle.dumps((before, copy.deepcopy(backend.state()))))
    for _ in range(20):
        _step(whole)
    run_ranks(_go_on, folder, names, lora)
    moves = pickle.loads((folder / "moves").read_bytes())
    assert list(moves) == names
    for name, move in moves.items():
        assert move == pytest.approx(_mean_move(start, _weights(whole)), rel=0.1), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "lora",
    [pytest.param(None, id="all weights"), pytest.param(LORA, id="adapters", marks=pytest.mark.nightly)],
)
def test_every_backend_moves_half_precision_weights_as_far_as_float32(
    tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    names = [name for name in SHARDED if lora is None or "nothing" not in name]
    _assert_all_move_alike(tmp_path, names, lora)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_megatron_moves_half_precision_weights_as_far_as_float32(tmp_path: Path) -> None:
    for name in MEGATRON:
        _assert_all_move_alike(tmp_path, [name])
