"""Training on CUDA: offloaded states, fp16 with a loss scale, compiled log-probs, flash attention, memory
snapshots."""

from __future__ import annotations

import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from braid.cluster.memory_record import MemoryRecorder
from braid.config.backends import GradScalerConfig, OffloadConfig
from braid.config.model import ModelConfig
from braid.config.train import OptimizerConfig, TrainConfig
from braid.models import fused
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import supervised_loss
from braid.types import Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none"),
]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "head_dim": 32, "max_positions": 512}
LOGPROBS = frozenset({"logprobs", "entropy"})


def _lm(*, compiles: bool = False, **model: Any) -> CausalLM:
    config = ModelConfig.model_validate({"build": SIZES, **model})
    return load_policy(
        config, temperature=1.0, seed=0, device=torch.device("cuda"), train=TrainConfig(compile=compiles)
    )


def _backend(lm: CausalLM, **train: Any) -> SingleBackend:
    settings = {"optimizer": OptimizerConfig(lr=0.01), "autocast": "none", **train}
    return SingleBackend(lm, TrainConfig(**settings), total_steps=20, device=torch.device("cuda"))


def _rows() -> list[Row]:
    rng = np.random.default_rng(0)
    return [
        Row({"input_ids": rng.integers(3, 60, n)}, np.arange(n) > 1, group=i, trajectory=i)
        for i, n in enumerate((40, 17, 60))
    ]


def _step(backend: SingleBackend) -> float:
    rows = _rows()
    weights = [1.0 / sum(row.num_tokens for row in rows)] * len(rows)
    return backend.train(rows, weights, supervised_loss()).loss


def test_offloaded_states_leave_the_device_and_return_bit_exactly() -> None:
    backend = _backend(_lm(), offload=OffloadConfig(weights=True, optimizer=True))
    _step(backend)
    before = {name: tensor.detach().clone() for name, tensor in backend.named_weights()}
    allocated = torch.cuda.memory_allocated()
    backend.to_host()
    assert all(tensor.device.type == "cpu" and tensor.is_pinned() for _, tensor in backend.named_weights())
    assert torch.cuda.memory_allocated() <= allocated - backend.held_bytes().weights
    assert not backend.held_bytes().is_on_device
    optimizer = backend.state()["optimizer"]
    assert all(tensor.device.type == "cpu" for state in optimizer.values() for tensor in state.values())
    backend.to_device()
    for name, tensor in backend.named_weights():
        assert tensor.is_cuda
        assert torch.equal(tensor, before[name])


def test_whole_weights_for_other_processes_are_in_host_memory() -> None:
    """A process that receives pickled CUDA tensors needs a GPU, and holds a second copy there."""
    backend = _backend(_lm())
    weights = backend.full_weights()
    assert weights
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}
    other = _backend(_lm())
    _step(backend)
    other.load_weights(pickle.loads(pickle.dumps(backend.full_weights())))
    for (name, mine), (_, theirs) in zip(other.named_weights(), backend.named_weights(), strict=True):
        assert mine.is_cuda
        assert torch.equal(mine, theirs), name


def test_offloading_changes_no_step() -> None:
    still = _backend(_lm())
    moved = _backend(_lm(), offload=OffloadConfig(weights=True, optimizer=True))
    for _ in range(4):
        moved.to_host()
        moved.to_device()
        assert _step(moved) == pytest.approx(_step(still), rel=1e-5)  # atomic sums of CUDA's backward pass


def test_fp16_with_a_loss_scale_learns() -> None:
    backend = _backend(_lm(), autocast="fp16", grad_scaler=GradScalerConfig())
    losses = [_step(backend) for _ in range(12)]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.skipif("FAKE_CUDA" in os.environ, reason="torch.compile needs a real device")
def test_compiled_log_probs_are_the_plain_ones() -> None:
    rows = _rows()
    plain, compiled = (_backend(_lm(compiles=c)).infer(rows, LOGPROBS) for c in (False, True))
    for one, other in zip(plain, compiled, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=1e-4)  # fp32
        np.testing.assert_allclose(one["entropy"], other["entropy"], rtol=0, atol=1e-4)


@pytest.mark.skipif(find_spec("flash_attn") is None, reason="needs the package flash-attn")
def test_flash_attention_gives_the_log_probs_of_the_default_kernel() -> None:
    rows = _rows()
    plain, flash = (
        _backend(_lm(attention=kind), autocast="bf16").infer(rows, LOGPROBS)
        for kind in ("sdpa", "flash_attention_2")
    )
    for one, other in zip(plain, flash, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=0.05)  # bf16


@pytest.mark.parametrize("kind", ["auto", "sdpa"])
def test_attention_in_bf16_gives_the_log_probs_of_eager_attention(kind: str) -> None:
    """`auto` is the variable-length kernel here."""
    rows = _rows()
    eager, ours = (_backend(_lm(attention=k), autocast="bf16").infer(rows, LOGPROBS) for k in ("eager", kind))
    for one, other in zip(eager, ours, strict=True):
        np.testing.assert_allclose(one["logprobs"], other["logprobs"], rtol=0, atol=0.05)  # bf16


@pytest.mark.skipif(find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_updates_with_fused_kernels_are_those_of_the_models_own_layers(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = {**SIZES, "architecture": architecture}
    rows, made = _rows(), list[tuple[float, float]]()
    weights = [1.0 / sum(row.num_tokens for row in rows)] * len(rows)
    for has_kernels in (True, False):
        monkeypatch.setattr(fused, "has_kernels", lambda _, has=has_kernels: has)
        done = _backend(_lm(build=build), autocast="bf16").train(rows, weights, supervised_loss())
        made.append((done.loss, done.grad_norm))
    assert made[0] == pytest.approx(made[1], rel=0.02)  # bf16


def test_a_memory_record_has_the_allocators_snapshot(tmp_path: Path) -> None:
    recorder = MemoryRecorder(tmp_path, torch.device("cuda"), lambda: {"policy": {"weights": 0}})
    with recorder.phase("update"):
        _step(_backend(_lm()))
    recorder.write(1)
    torch.cuda.memory._record_memory_history(enabled=None)
    snapshot = pickle.loads((tmp_path / "round_000001.pickle").read_bytes())
    assert {"segments", "device_traces"} <= snapshot.keys()
