"""The fake device does what CUDA does, and refuses what CUDA refuses."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tests.fake_cuda import waits

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _no_waits() -> None:
    waits.clear()


def test_gradients_optimizers_and_autocast_see_the_device() -> None:
    layer = torch.nn.Linear(5, 3).to(CUDA)
    layer(torch.randn(4, 5, device=CUDA)).relu().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.device == torch.device("cuda:0")
    before = layer.weight.detach().cpu()
    torch.optim.AdamW(layer.parameters(), fused=True).step()
    assert not torch.equal(layer.weight.detach().cpu(), before)
    with torch.autocast("cuda", torch.bfloat16):
        assert layer(torch.ones(1, 5, device=CUDA)).dtype == torch.bfloat16


def test_views_share_memory_and_new_memory_is_not_zero() -> None:
    x = torch.zeros(4, 5, device=CUDA)
    x.view(-1)[3:5].add_(1.0)
    assert x.sum().item() == 2.0
    assert torch.empty(8, dtype=torch.uint8, device=CUDA).tolist() == [255] * 8


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda: torch.ones(3, device=CUDA) + torch.ones(3), "at least two devices, cuda:0 and cpu"),
        (lambda: torch.ones(2, 2, dtype=torch.long, device=CUDA) @ torch.ones(2, 2, dtype=torch.long, device=CUDA), "integers"),
        (lambda: torch.ones(3, device=CUDA).numpy(), "can't convert cuda:0"),
        (lambda: torch.ones(2**32, device=CUDA), "CUDA out of memory"),
        (lambda: torch.rand(3, device=CUDA, generator=torch.Generator()), "generator"),
    ],
)  # fmt: skip
def test_what_cuda_refuses_is_refused(operation: Callable[[], object], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        operation()


def test_each_wait_is_counted_with_its_line() -> None:
    x, mask = torch.ones(3, device=CUDA), torch.tensor([True, False, True], device=CUDA)
    waits.clear()
    x.sum().item()
    x.cpu()
    x[mask]
    x.to("cpu", non_blocking=True)  # pageable memory: waits all the same
    assert sum(waits.values()) == 4
    assert {place.rpartition(" ")[2] for _, place in waits} == {"test_each_wait_is_counted_with_its_line"}


def test_asynchronous_copies_do_not_wait() -> None:
    pinned = torch.ones(3).pin_memory()
    waits.clear()
    on_device = pinned.to(CUDA, non_blocking=True)
    pinned.copy_(on_device, non_blocking=True)
    torch.arange(3).to(CUDA, non_blocking=True)
    assert not waits


def test_a_graph_replays_on_the_same_memory() -> None:
    x, graph = torch.zeros(3, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2 + 1
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [11.0] * 3


def test_a_capture_refuses_waits_and_allocations_of_other_threads() -> None:
    x, errors = torch.zeros(3, device=CUDA), list[str]()

    def allocate() -> None:
        try:
            torch.empty(1, device=CUDA)
        except RuntimeError as error:
            errors.append(str(error))

    for mode, num_errors in (("global", 1), ("thread_local", 0)):
        errors.clear()
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
            x.add_(1)
            with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
                x.sum().item()
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        assert len(errors) == num_errors, mode


def test_memory_is_counted() -> None:
    before = torch.cuda.memory_allocated()
    x = torch.empty(1000, device=CUDA)
    assert torch.cuda.memory_allocated() == before + 4096
    del x
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() >= before + 4096
