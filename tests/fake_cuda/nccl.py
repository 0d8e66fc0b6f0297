"""A process group "nccl" over gloo, for tensors of the device alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_ops = torch.ops.fake_cuda


class Done(torch._C._distributed_c10d.Work):
    """A collective that has ended."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


def _on_host(argument: Any) -> Any:
    """Host tensors over the memory of device tensors, also in lists; other arguments as they are."""
    if isinstance(argument, list):
        return [_on_host(element) for element in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    if not argument.is_cuda:
        raise RuntimeError("No backend type associated with device type cpu (NCCL)")
    if not argument.is_contiguous():
        raise RuntimeError("Tensors must be contiguous (NCCL)")
    if _ops.is_capturing():
        raise NotImplementedError("a collective inside a graph of the fake device")
    return _ops.host(argument)


class ProcessGroupNCCL(dist.ProcessGroup):
    class Options:
        def __init__(self, **_: Any) -> None:
            self._timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any = None) -> None:
        super().__init__(rank, size)
        timeout = getattr(options, "_timeout", None) or c10d.default_pg_timeout
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("fake-nccl", store), rank, size, timeout)
        self._group_name = self._group_desc = ""

    group_name = property(lambda self: self._group_name)
    group_desc = property(lambda self: self._group_desc)
    _device_types = property(lambda self: [torch.device("cuda")])
    bound_device_id = property(lambda self: None, lambda self, value: None)

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    def _set_sequence_number_for_group(self) -> None:
        """NCCL counts collectives."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return "nccl"

    def getSize(self) -> int:
        return self.size()

    def abort(self) -> None:
        """Nothing is under way."""

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Done:
        parts = list(_on_host(output).view(self.size(), *source.shape).unbind(0))
        self._gloo.allgather([parts], [_on_host(source)]).wait()
        return Done(output)

    def all_gather_single_coalesced(self, outputs: Any, sources: Any, opts: Any = None) -> Done:
        for output, source in zip(outputs, sources, strict=True):
            self.all_gather_single(output, source)
        return Done(outputs)

    def reduce_scatter(self, outputs: Any, sources: Any, opts: Any) -> Done:
        output, is_mean = outputs[0], opts.reduceOp == dist.ReduceOp.AVG
        parts = torch.stack([part.reshape(-1) for part in _on_host(sources[0])])
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if is_mean else opts.reduceOp
        self._gloo.allreduce([parts], options).wait()
        reduced = parts[self.rank()].view(output.shape)
        _on_host(output).copy_(reduced / self.size() if is_mean else reduced)
        return Done(outputs)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any) -> Done:
        return self.reduce_scatter([output], [list(source.chunk(self.size()))], opts)

    def reduce_scatter_single_coalesced(self, outputs: Any, sources: Any, opts: Any) -> Done:
        for output, source in zip(outputs, sources, strict=True):
            self.reduce_scatter_single(output, source, opts)
        return Done(outputs)

    # Their names before PyTorch 2.13, which its own code still uses.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _by_gloo(name: str) -> Callable[..., Done]:
    """The collective of that name. Gloo has no mean: a sum, divided."""

    def collective(self: ProcessGroupNCCL, *arguments: Any, opts: Any = None, **_: Any) -> Done:
        passed = [_on_host(argument) for argument in arguments] + ([] if opts is None else [opts])
        reduction = next((argument for argument in passed if hasattr(argument, "reduceOp")), None)
        is_mean = reduction is not None and reduction.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            reduction.reduceOp = dist.ReduceOp.SUM
        getattr(self._gloo, name)(*passed).wait()
        for tensor in passed[0] if is_mean else ():
            tensor.div_(self.size())
        return Done(arguments[0] if arguments else None)

    return collective


_BY_GLOO = (
    "broadcast", "allreduce", "reduce", "allgather", "gather", "scatter", "alltoall", "send", "recv", "barrier", "alltoall_base",
    "allreduce_coalesced",
)  # fmt: skip


def install() -> None:
    for name in _BY_GLOO:
        setattr(ProcessGroupNCCL, name, _by_gloo(name))
    ProcessGroupNCCL.all_to_all_single = ProcessGroupNCCL.alltoall_base

    def create(store: Any, rank: int, size: int, timeout: Any) -> ProcessGroupNCCL:
        options = ProcessGroupNCCL.Options()
        options._timeout = timeout
        return ProcessGroupNCCL(store, rank, size, options)

    dist.ProcessGroupNCCL = c10d.ProcessGroupNCCL = ProcessGroupNCCL
    if "nccl" in dist.Backend.backend_list:
        dist.Backend.backend_list.remove("nccl")
    if hasattr(dist.Backend, "NCCL"):
        delattr(dist.Backend, "NCCL")
    dist.Backend.register_backend("nccl", create, devices=["cuda"])
    dist.Backend.NCCL = "nccl"
    c10d._NCCL_AVAILABLE = True
    dist.is_nccl_available = c10d.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 5)
