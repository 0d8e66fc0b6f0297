"""Compiled log-probs are the plain ones; a machine that cannot compile says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import torch
from tests.rounding import assert_near, rounding
from torch import Tensor

from braid.models.logprobs import Head, TiledLogits, token_logprobs

_PROBE = """
import torch
from braid.errors import ModelError
from braid.models.compiling import check_compiler
try:
    check_compiler(torch.device("cpu"))
except ModelError as error:
    print(error)
"""

pytestmark = pytest.mark.slow


def _outputs(compiles: bool, *, softcap: float | None, chunk_bytes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 16, generator=generator, requires_grad=True)
    weight = torch.randn(300, 16, generator=generator, requires_grad=True)
    targets = torch.randint(300, (70,), generator=generator)
    reference = torch.randn(70, 16, generator=generator), torch.randn(300, 16, generator=generator)
    logprobs, entropy, kl = token_logprobs(
        hidden,
        Head(weight, softcap=softcap),
        targets,
        temperature=0.7,
        with_entropy=True,
        reference=TiledLogits(reference[0], Head(reference[1], softcap=softcap), 0.7),
        chunk_bytes=chunk_bytes,
        compiles=compiles,
    )
    assert entropy is not None
    assert kl is not None
    loss = (logprobs * torch.linspace(-1, 1, 70)).sum() + 0.3 * entropy.sum() + 0.2 * kl.square().sum()
    return [logprobs.detach(), entropy.detach(), kl.detach(), *torch.autograd.grad(loss, [hidden, weight])]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on CPU")
@pytest.mark.parametrize("softcap", [pytest.param(None, marks=pytest.mark.nightly), 5.0])
@pytest.mark.parametrize("chunk_bytes", [2**12, pytest.param(2**20, marks=pytest.mark.nightly)])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # inductor's own
def test_compiling_does_not_change_results(softcap: float | None, chunk_bytes: int) -> None:
    plain, compiled = (_outputs(c, softcap=softcap, chunk_bytes=chunk_bytes) for c in (False, True))
    for one, other in zip(plain, compiled, strict=True):
        assert_near(other, one, rounding(300 + 70))  # sums over 300 tokens of the vocabulary and 70 rows


def test_without_a_compiler_the_error_says_what_to_install() -> None:
    # a process of its own: inductor remembers the compiler that it found, and kernels that it built
    empty = {"PATH": "/nonexistent", "CXX": "/nonexistent/g++", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    result = subprocess.run(
        [sys.executable, "-c", _PROBE],
        capture_output=True,
        text=True,
        env={**os.environ, **empty},
        check=True,
    )
    assert "train.compile=true, but torch.compile does not work on this machine" in result.stdout
    assert "C++ compiler" in result.stdout
    assert "train.compile=false" in result.stdout
