"""An engine that samples beside an update has a stream and leaves room for the update's memory."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.live_runs import RUNS, write_files
from tests.native_engines import COPY, PLAIN, make_engine

from braid.config.load import load_config
from braid.config.model import ModelConfig
from braid.config.train import TrainConfig
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.native.engine import NativeEngine
from braid.trainer import commands
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import supervised_loss
from braid.types import Row

CUDA = torch.device("cuda")
ROW = Row({"input_ids": np.arange(3, 40)}, np.arange(37) > 4, group=0, trajectory=0)


def language_model(dtype: Any = "fp32") -> CausalLM:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "head_dim": 32,
        "max_positions": 256,
    }
    config = ModelConfig.model_validate({"build": sizes, "dtype": dtype})
    return load_policy(config, temperature=1.0, seed=0, device=CUDA)


def backend_of(lm: CausalLM, **train: Any) -> SingleBackend:
    config = TrainConfig.model_validate({"autocast": "none", "optimizer": {"lr": 1e-2}, **train})
    return SingleBackend(lm, config, total_steps=9, device=CUDA)


def sample(engine: NativeEngine) -> list[int]:
    request = Request((3, 4, 5), Sampling(max_new_tokens=6, greedy=True), (0,))
    return asyncio.run(engine.generate(request)).token_ids


def test_an_update_runs_beside_the_capture_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """It allocates memory meanwhile, in another thread."""
    lm = language_model()
    engine, backend, errors = (
        make_engine(lm, COPY),
        backend_of(lm),
        list[Exception](),
    )
    is_over, num_steps = threading.Event(), list[int]()

    def update() -> None:
        try:
            while not is_over.is_set():
                backend.train([ROW], [1.0], supervised_loss())
                num_steps.append(1)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=update)
    monkeypatch.setenv("FAKE_CUDA_CAPTURE_S", "0.5")
    thread.start()
    try:
        sample(engine)
    finally:
        is_over.set()
        thread.join()
    assert not errors
    assert num_steps
    assert engine._decoder._has_graphs
    assert engine._decoder._graphs


def is_default(stream: torch.Stream) -> bool:
    return stream.stream_id == 0


@pytest.mark.parametrize("owns_weights", [True, False])
def test_steps_run_on_a_stream_if_an_update_may_run_beside_them(owns_weights: bool) -> None:
    lm = language_model()
    engine = make_engine(lm, COPY if owns_weights else PLAIN, cuda_graphs=False)
    places = list[bool]()
    engine._lm.backbone.register_forward_hook(
        lambda *_: places.append(is_default(torch.cuda.current_stream()))
    )
    sample(engine)
    assert set(places) == {not owns_weights}
    assert is_default(torch.cuda.current_stream())


def test_new_weights_pass_between_the_streams_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's stream waits for the update, and the next update for the copies."""
    lm, order = language_model(), list[str]()
    waits_for = torch.cuda.Stream.wait_stream

    def wait_stream(self: Any, other: Any) -> None:
        order.append("the update waits" if is_default(self) else "the engine waits")
        assert is_default(self) != is_default(other)
        waits_for(self, other)

    engine = make_engine(lm, COPY)
    backend = backend_of(lm)
    before = sample(engine)
    backend.train([ROW], [1.0], supervised_loss())
    assert sample(engine) == before, "the engine's weights are copies"
    monkeypatch.setattr(torch.cuda.Stream, "wait_stream", wait_stream)
    embedding = engine._lm.model.get_parameter("model.embed_tokens.weight")
    copy = embedding.copy_

    def copied(*arguments: Any) -> Any:
        assert not is_default(torch.cuda.current_stream())
        order.append("weights are copied")
        return copy(*arguments)

    monkeypatch.setattr(embedding, "copy_", copied)
    asyncio.run(engine.set_weights(1))
    assert list(dict.fromkeys(order)) == ["the engine waits", "weights are copied", "the update waits"]
    assert torch.equal(embedding, lm.model.get_parameter("model.embed_tokens.weight"))


@pytest.mark.parametrize(
    ("dtype", "train"),
    [
        ("fp32", {}),
        ("bf16", {}),
        ("fp32", {"optimizer": {"kind": "sgd", "lr": 1e-2}}),
        ("bf16", {"offload": {"optimizer": True}}),
    ],
)
def test_the_memory_that_an_update_will_take_is_known_in_advance(dtype: str, train: dict[str, Any]) -> None:
    backend = backend_of(language_model(dtype), **train)
    backend._rest_optimizer()  # as after a step
    before, expected = torch.cuda.memory_allocated(), backend.bytes_to_come()
    taken = list[int]()
    step = backend._step

    def watched() -> None:
        step()
        taken.append(torch.cuda.memory_allocated() - before)

    backend._step = watched  # type: ignore[method-assign]
    backend.train([ROW], [1.0], supervised_loss())
    num_tensors = 3 * len(list(backend.model.module.parameters()))
    # the allocator rounds sizes up, and AdamW counts steps
    assert expected <= taken[0] <= expected + 1024 * num_tensors
    gradients = backend.held_bytes().gradients
    assert backend.bytes_to_come() == (expected if train.get("offload") else gradients)


def test_an_engine_leaves_the_memory_that_others_will_take() -> None:
    lm, budgets = language_model(), list[int]()
    for to_come in (0, torch.cuda.mem_get_info()[0] // 2):
        engine = make_engine(lm, COPY._replace(bytes_to_come=lambda num=to_come: num))
        sample(engine)
        assert engine._cache.budget_tokens is not None
        budgets.append(engine._cache.budget_tokens)
        engine.close()
    assert budgets[1] == pytest.approx(budgets[0] / 2, rel=0.01)


def test_the_engine_of_a_pipelined_run_knows_the_update_of_its_process(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_come, affordable = list[int](), NativeEngine._affordable_tokens

    def watched(self: NativeEngine) -> int:
        assert self._bytes_to_come is not None
        to_come.append(self._bytes_to_come())
        return affordable(self)

    monkeypatch.setattr(NativeEngine, "_affordable_tokens", watched)
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    commands.train(load_config("tiny.yaml", ["run.device=cuda", *RUNS["pipelined"]]))
    assert to_come
    assert min(to_come) > 0
