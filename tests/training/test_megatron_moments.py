"""The step count of optimizers that keep it in their parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from braid.config.train import TrainConfig

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::Warning")]


class FusedAdam(torch.optim.Optimizer):
    """Laid out as that of Transformer Engine and Apex: moments in the state, the number of steps in the
    group."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                assert "step" not in state
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                state["exp_avg"].lerp_(torch.ones_like(p), 0.1)
                # the correction of the bias of the first steps
                p.data -= state["exp_avg"] / (1 - 0.9 ** group["step"])


def _backend(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Any:
    from braid.training.backends.megatron.backend import MegatronBackend

    class Names:
        shapes = {"w": parameter.shape}  # noqa: RUF012
        shards = (SimpleNamespace(parameter=parameter, is_copy=False, is_expert=False,
                                  pieces=[SimpleNamespace(name="w")]),)  # fmt: skip

        def boxes(self, _: Any, values: Tensor, start: int) -> Iterator[tuple[str, list[int], Tensor]]:
            yield "w", [start], values

    backend: Any = MegatronBackend.__new__(MegatronBackend)
    backend._optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=optimizer)])
    backend._names, backend._config = Names(), TrainConfig()
    return backend


@pytest.mark.parametrize("make", [FusedAdam, lambda ps: torch.optim.AdamW(ps, lr=0.1)])
def test_a_restored_optimizer_goes_on_with_its_step_count(make: Any) -> None:
    pytest.importorskip("megatron.core")
    weights = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    saved, restored = (make([p]) for p in weights)
    for p in weights:
        p.grad = torch.ones(3)
    for _ in range(3):
        saved.step()
    restored.step()  # what it had counted is replaced
    moments = _backend(saved, weights[0])._moments(with_copies=True)["w"]
    assert float(moments["step"].parts[0][1]) == 3

    backend = _backend(restored, weights[1])
    like = {"w": {key: (box.shape, box.dtype) for key, box in moments.items()}}
    for key, box in backend._moment_boxes(like)["w"].items():
        box.take(moments[key].parts[0][1])
    backend._rest_optimizer()
    weights[1].data.copy_(weights[0].data)
    for optimizer in (saved, restored):
        optimizer.step()
    assert torch.equal(weights[1], weights[0])
