"""The transport of weights depends on the locations of trainer and engine."""

from __future__ import annotations

import pytest
import torch

from braid.config.load import load_config
from braid.config.rollout import WeightSyncConfig
from braid.errors import ConfigError
from braid.plan import derive
from braid.trainer.weight_sync import send_options
from braid.weights.transports import Meeting, choose_transport, on_existing

CASES = [
    ("auto", Meeting(), "shared_memory"),
    ("auto", Meeting(is_one_machine=False), "gloo"),
    ("auto", Meeting(is_cuda=True), "nccl"),
    ("auto", Meeting(is_cuda=True, is_one_device=True), "cuda_ipc"),
    ("auto", Meeting(is_cuda=True, is_one_machine=False), "nccl"),
    ("auto", Meeting(reads_folders=True), "files"),
    ("gloo", Meeting(), "gloo"),
    ("files", Meeting(), "files"),
    ("nccl", Meeting(is_cuda=True, is_one_device=True), "cuda_ipc"),
    ("shared_memory", Meeting(is_cuda=True), "shared_memory"),
]


@pytest.mark.parametrize(("asked", "meeting", "chosen"), CASES)
def test_the_cheapest_possible_transport_is_chosen(asked: str, meeting: Meeting, chosen: str) -> None:
    config = WeightSyncConfig.model_validate({"transport": asked})
    assert choose_transport(config, meeting) == chosen


@pytest.mark.parametrize(
    ("asked", "meeting", "message"),
    [
        ("nccl", Meeting(), "NCCL needs GPUs"),
        ("shared_memory", Meeting(is_one_machine=False), "shared_memory works only within a machine"),
    ],
)
def test_an_impossible_transport_is_refused(asked: str, meeting: Meeting, message: str) -> None:
    config = WeightSyncConfig.model_validate({"transport": asked})
    with pytest.raises(ConfigError, match=f"rollout.weight_sync.transport: {message}.*set it to auto"):
        choose_transport(config, meeting)


@pytest.mark.parametrize(("dtype", "sent"), [("bf16", torch.bfloat16), ("auto", None)])
def test_engines_get_weights_in_their_own_type(dtype: str, sent: torch.dtype | None) -> None:
    options = ["model.build={}", "rollout.engine=vllm", f"rollout.engine.dtype={dtype}", "run.device=cpu"]
    config = load_config(None, options).config
    layout = derive(config, None, "train").layout
    assert send_options(config, layout, "unused", torch.device("cpu")).dtype == sent


def test_servers_replace_connections_of_earlier_runs_and_own_engines_refuse() -> None:
    assert on_existing(WeightSyncConfig(), is_server=True) == "replace"
    assert on_existing(WeightSyncConfig(), is_server=False) == "refuse"
    assert on_existing(WeightSyncConfig(existing_group="replace"), is_server=False) == "replace"
    assert on_existing(WeightSyncConfig(existing_group="refuse"), is_server=True) == "refuse"
