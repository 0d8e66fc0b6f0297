"""Python runs this at its start where this folder is on PYTHONPATH: Megatron-core, once imported, takes the
CPU for its GPU.

Megatron-core names CUDA devices and CUDA's random state outright. Here those calls answer with the CPU, so
that tests on gloo processes run its own schedules, layers, gradient buffers and optimizers. Nothing in the
package knows of this.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class _BeforeMegatron(MetaPathFinder):
    """Finds nothing; sees the first import of Megatron-core."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "megatron":
            sys.meta_path.remove(self)
            os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its small fused functions would each be compiled first
            _use_cpu()


class _Stream:
    """A CUDA stream, and an event on it, of a machine that does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _for_cpu(make: Any, *args: Any, device_type: str) -> Any:  # it is CUDA's
    return make(*args, device_type="cpu")


def _use_cpu() -> None:
    import torch

    cpu = torch.device("cpu")

    def here(device: Any) -> Any:
        return cpu if device is not None and str(device).startswith("cuda") else device

    def on_cpu(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if "device" in kwargs:
                kwargs["device"] = here(kwargs["device"])
            return make(*args, **kwargs)

        return made

    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    cuda_types = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}
    plain_type, plain_to = torch.Tensor.type, torch.Tensor.to

    def tensor_type(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = plain_type(self, *args, **kwargs)
        return cuda_types.get(named, named) if isinstance(named, str) else named

    def tensor_to(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_to(
            self, *map(here, args), **{k: here(v) if k == "device" else v for k, v in kwargs.items()}
        )

    torch.Tensor.type, torch.Tensor.to = tensor_type, tensor_to  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    answers = {
        "current_device": lambda: cpu,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.default_generator.manual_seed,
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "Stream": _Stream,
        "default_generators": {cpu: torch.default_generator},
        "_lazy_call": lambda call, **_: call(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    for name in ("custom_fwd", "custom_bwd"):  # backward passes take the precision that autocast has for CUDA
        make = getattr(torch.amp, name)
        setattr(torch.amp, name, functools.partial(_for_cpu, make))
    exchange = torch.distributed.all_to_all_single

    def all_to_all_single(output: Any, input: Any, *splits: Any, **kwargs: Any) -> Any:
        # Megatron makes lists of split sizes where it copies them from a GPU
        lists = (split.tolist() if isinstance(split, torch.Tensor) else split for split in splits)
        kwargs = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
        return exchange(output, input, *lists, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single
    torch.cuda.random.get_rng_state = lambda **_: torch.get_rng_state()  # type: ignore[assignment]


sys.meta_path.insert(0, _BeforeMegatron())
