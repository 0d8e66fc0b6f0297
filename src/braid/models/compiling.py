"""torch.compile for the elementwise operations between logits and log-probs (`train.compile`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from braid.errors import ModelError


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile `function` for dynamic sizes; compilation happens at the first call, once per process."""
    return torch.compile(function, dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Raise ModelError if torch.compile does not work for `device` on this machine; compiles a small
    function."""
    try:
        torch.compile(_probe)(torch.zeros(8, device=device))
    except Exception as error:  # inductor's components raise many different classes
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        needed = "a C++ compiler and Python's headers" if device.type == "cpu" else "a C compiler and triton"
        raise ModelError(
            f"train.compile=true, but torch.compile does not work on this machine ({reason}); install "
            f"{needed}, or set train.compile=false"
        ) from error


def _probe(x: torch.Tensor) -> torch.Tensor:
    return (x + 1.0).exp()
