"""Two ranks with a sharded model send the weights that one process has, with every backend."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from tests.on_ranks import OnRanks
from torch import Tensor

from braid.cluster.ray import RayGroup, connect, disconnect
from braid.config.schema import RunConfig
from braid.models.lora import named_adapters
from braid.models.roles import make_policy
from braid.training.backends.single.backend import SingleBackend
from braid.training.worker import Rank
from braid.weights.receiver import Receiver, open_receiver
from braid.weights.sending import SendOptions
from braid.weights.wire import Ticket

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

CPU = torch.device("cpu")
BACKENDS = ("fsdp2", "fsdp", "deepspeed")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RayGroup]:
    config = _config("fsdp2")
    connect(config.cluster, num_processes=2)
    group = RayGroup("policy", 2, config.cluster).make(partial(Rank, config=config))
    yield group
    group.close()
    disconnect()


@pytest.fixture(scope="module")
def receiver(ranks: RayGroup) -> Iterator[Receiver]:
    ticket = ranks.call(Rank.open_sender, ["engine"], SendOptions("shared_memory", 2**14, 60.0))[0]
    receiver = open_receiver(Ticket(**ticket), engine="engine", timeout_s=300.0)
    yield receiver
    receiver.close()


def _config(backend: str, **model: Any) -> RunConfig:
    build = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}
    return RunConfig.model_validate(
        {
            "model": {"build": build, **model},
            "train": {"backend": backend, "optimizer": {"lr": 1e-3}},
            "run": {"device": "cpu"},
        }
    )


def _published(ranks: RayGroup, receiver: Receiver, config: RunConfig, *, merged: bool) -> dict[str, Tensor]:
    """Weights that an engine receives of a new policy whose adapters, if any, are non-zero."""
    policy = OnRanks(ranks, "policy", config)
    if config.model.lora is not None:
        policy.load_weights(_adapters(config))
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(ranks.call, Rank.send_weights, 0, merged)
        taken = {name: tensor.clone() for name, tensor in receiver.receive(0)}
        sent.result(timeout=300)
    policy.close()
    return taken


def _adapters(config: RunConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    module = make_policy(config, CPU).module
    return {
        name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in named_adapters(module)
    }


def _single(config: RunConfig) -> SingleBackend:
    backend = SingleBackend(make_policy(config, CPU), config.train, total_steps=9, device=CPU)
    if config.model.lora is not None:
        backend.load_weights(_adapters(config))
    return backend


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_adapters_are_sent_merged_or_separately(
    backend: str, dtype: str, ranks: RayGroup, receiver: Receiver
) -> None:
    config = _config(backend, dtype=dtype, lora={"rank": 4, "alpha": 8.0, "targets": ["q_proj", "down_proj"]})
    plain = dict(_single(_config(backend, dtype=dtype)).iter_weights())
    for merged in (True, False):
        taken = _published(ranks, receiver, config, merged=merged)
        expected = dict(_single(config).iter_weights(merged=merged))
        assert taken.keys() == expected.keys()
        for name, tensor in expected.items():
            assert taken[name].dtype == tensor.dtype
            torch.testing.assert_close(
                taken[name], tensor, rtol=0, atol=0
            )  # the same sum of the same numbers
        if merged:
            changed = {name for name in plain if not torch.equal(taken[name], plain[name])}
            assert {name.split(".")[-2] for name in changed} == {"q_proj", "down_proj"}
            assert taken.keys() == plain.keys()
