"""Ranks that cannot reach each other, and the deadlines of their collectives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from braid.cluster.workers import Place
from braid.config.load import load_config
from braid.errors import ModelError, TrainingError
from braid.training import worker
from braid.training.backend import Work
from braid.training.backends.fsdp.kind import Fsdp2

CPU = torch.device("cpu")


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The place of a rank that has joined."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    threads, place = torch.get_num_threads(), Place(0, 1)
    worker._join(
        place, load_config(None, ["model.build={}", "cluster.call_timeout_s=1234", "run.device=cpu"]).config
    )
    yield place
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def test_the_runs_deadline_is_that_of_every_group(place: Place) -> None:
    assert distributed_c10d.default_pg_nccl_timeout is distributed_c10d.default_pg_timeout
    made: Any = dist.new_group([place.rank])
    assert made._get_backend(CPU).options._timeout.total_seconds() == 1234


def test_ranks_that_cannot_reach_each_other_are_reported_before_a_model_is_built(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.check_reach(CPU, place, 60.0)
    never = threading.Event()
    monkeypatch.setattr(dist, "all_reduce", lambda _: never.wait())
    monkeypatch.setattr(worker, "_join", lambda *_: CPU)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    overrides = ["model.build={}", "run.device=cpu", "cluster.start_timeout_s=0.01"]
    with pytest.raises(
        TrainingError, match=r"rank 0 of 1 on .* by gloo .*interface is eth7; set GLOO_SOCKET_IFNAME"
    ):
        worker.Rank(place, config=load_config(None, overrides).config)
    never.set()


TINY = "model.build={hidden_size: 32, intermediate_size: 48, num_layers: 2, num_heads: 2, head_dim: 16}"


@pytest.mark.parametrize(
    "options",
    [{"autocast": "bf16"}, {"backend": {"kind": "fsdp2", "param_dtype": "bf16"}}, {"backend": "fsdp"}],
    ids=str,
)
def test_a_wrapped_model_agrees_with_its_own_forward_pass_up_to_rounding(
    place: Place, options: dict[str, Any]
) -> None:
    train = {"backend": "fsdp2", **options}
    config = load_config(
        None, [TINY, "run.device=cpu", f"train={train}", "rollout.sampling.temperature=0.7"]
    ).config
    backend = worker.make_backend(place, role="policy", config=config, total_steps=3)
    assert backend.take_work() == Work()


def test_a_model_that_its_wrapper_changes_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As mixed precision would that rounds rotary frequencies."""
    build = Fsdp2.build

    def damaging(kind: Any, model: Any, *args: Any, **options: Any) -> Any:
        model.backbone.rotary_emb.inv_freq.mul_(1.5)
        return build(kind, model, *args, **options)

    monkeypatch.setattr(Fsdp2, "build", damaging)
    config = load_config(None, [TINY, "run.device=cpu", "train.backend=fsdp2"]).config
    with pytest.raises(ModelError, match=r"train.backend=fsdp2 gives different log-probs"):
        worker.make_backend(place, role="policy", config=config, total_steps=3)
