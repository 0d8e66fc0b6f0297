"""A training step that runs out of memory is taken again in smaller micro-batches."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from braid.config.model import BuildSpec
from braid.config.train import TrainConfig
from braid.models.batch import PackedBatch
from braid.models.build import build_model
from braid.models.causal_lm import CausalLM
from braid.models.tokenizer import character_tokenizer
from braid.training.backend import Diagnostics, Loss
from braid.training.backends.single.backend import SingleBackend
from braid.types import Row

SPEC = BuildSpec(hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16)
NUM_ROWS, ROW_TOKENS = 8, 16
ERRORS: list[Callable[[], RuntimeError]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory"),
]


def backend(micro_batch_tokens: int) -> SingleBackend:
    model = build_model(SPEC, character_tokenizer(SPEC.characters), dtype=torch.float32, seed=0)
    train = TrainConfig.model_validate({"micro_batch_tokens": micro_batch_tokens, "optimizer": {"lr": 1e-3}})
    return SingleBackend(CausalLM(model), train, total_steps=3, device=torch.device("cpu"))


def rows() -> list[Row]:
    generator = np.random.default_rng(0)
    mask = np.arange(ROW_TOKENS) > 0
    ids = generator.integers(len(SPEC.characters), size=(NUM_ROWS, ROW_TOKENS))
    return [Row({"input_ids": row}, mask, group=i, trajectory=i) for i, row in enumerate(ids)]


class Memory:
    """A loss of a machine that has room for micro-batches of `room` tokens, and for its first pass."""

    def __init__(self, room: int, error: Callable[[], RuntimeError] = ERRORS[0]) -> None:
        self.room, self.error = room, error
        self.sizes: list[int] = []
        self.alive: list[int] = []
        self._outputs: list[weakref.ref[Tensor]] = []

    def __call__(self, outputs: dict[str, Any], batch: PackedBatch) -> tuple[Tensor, Diagnostics]:
        self.alive.append(sum(output() is not None for output in self._outputs))
        self._outputs.append(weakref.ref(outputs["logprobs"]))
        self.sizes.append(batch.num_positions)
        if batch.num_positions > self.room and len(self.sizes) > 1:
            raise self.error()
        assert batch.weights is not None
        return -(outputs["logprobs"] * batch.weights).sum(), Diagnostics({})


def step(trainer: SingleBackend, memory: Memory) -> float:
    loss = Loss(frozenset({"logprobs"}), memory)
    return trainer.train(rows(), [1.0 / (NUM_ROWS * ROW_TOKENS)] * NUM_ROWS, loss).grad_norm


def weights(trainer: SingleBackend) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.full_weights().items()}


@pytest.mark.parametrize("error", ERRORS, ids=["GPU", "CPU"])
def test_the_step_is_taken_again_with_the_same_gradient(
    error: Callable[[], RuntimeError], caplog: pytest.LogCaptureFixture
) -> None:
    """The first pass succeeds, so that gradients of the failed attempt are there when the second fails."""
    memory, trainer = Memory(32, error), backend(64)
    with caplog.at_level(logging.WARNING):
        norm = step(trainer, memory)
    assert memory.sizes == [64, 64, 32, 32, 32, 32]
    assert "step 1 of 3 ran out of memory" in caplog.text
    assert "set train.micro_batch_tokens=32" in caplog.text
    small, whole = backend(32), backend(64)
    assert step(small, Memory(64)) == norm
    step(whole, Memory(64))
    for name, tensor in weights(trainer).items():
        assert torch.equal(tensor, weights(small)[name]), "the bits of a run in small micro-batches"
        # AdamW's first step has the sign of the gradient, so only rounding of a step of 1e-3 is left.
        torch.testing.assert_close(tensor, weights(whole)[name], rtol=0, atol=1e-5)


def test_later_steps_stay_at_the_size_that_fits(caplog: pytest.LogCaptureFixture) -> None:
    memory, trainer = Memory(32), backend(64)
    step(trainer, memory)
    memory.sizes.clear()
    caplog.clear()
    step(trainer, memory)
    assert memory.sizes == [32] * 4
    assert not caplog.records


def test_it_halves_until_it_fits() -> None:
    memory = Memory(16)
    step(backend(64), memory)
    assert memory.sizes == [64, 64, 32, *[16] * 8]


def test_a_row_that_does_not_fit_fails_with_what_to_do() -> None:
    trainer = backend(64)
    before = weights(trainer)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(trainer, Memory(8))
    assert "train.gradient_checkpointing=true" in caught.value.__notes__[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_other_errors_are_not_retried() -> None:
    memory = Memory(32, lambda: RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"):
        step(backend(64), memory)
    assert memory.sizes == [64, 64]


def test_the_graph_of_the_failed_attempt_is_freed_before_the_next() -> None:
    memory = Memory(32)
    step(backend(64), memory)
    assert memory.alive == [0] * 6
