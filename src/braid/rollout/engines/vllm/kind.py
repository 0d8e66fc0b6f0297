"""Settings of vLLM, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from braid.rollout.engines.base import Model, Process, ServedEngine

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.plan import Plan
    from braid.weights.sending import SendOptions

    from .engine import VllmEngine
    from .server import VllmServer

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads for which vLLM has kernels on CPUs (vllm/v1/attention/backends/cpu_attn.py of vLLM
0.32)."""


class Vllm(ServedEngine):
    """vLLM (extra `vllm`)."""

    kind: Literal["vllm"] = "vllm"  # pyright: ignore[reportIncompatibleVariableOverride]
    """vLLM (extra `vllm`)."""
    block_size: PositiveInt | None = None
    """Tokens per cache block; vLLM's default when null."""
    log_stats: bool = True
    """Let vLLM log its statistics."""
    executor: Literal["mp", "ray", "uni"] = "mp"
    """vLLM's distributed executor backend."""
    in_process: bool = True
    """Run vLLM's scheduler in the engine's process, which makes the order of requests reproducible."""

    package = "vllm"
    install = "'braid-rl[vllm]' (on a CPU: make vllm)"

    def start(self, number: int, model: Model, process: Process) -> VllmEngine:
        from .engine import VllmEngine
        from .options import engine_arguments, environment, threads

        return VllmEngine(
            engine_arguments(self, model, on_gpu=process.on_gpu),
            process,
            name=f"vLLM engine {number}",
            environment={**threads(), **environment(self)},
            detokenizes=self.detokenize,
        )

    def connect(self, url: str, *, max_tokens: int, sending: SendOptions, timeout_s: float) -> VllmServer:
        from .server import VllmServer

        return VllmServer(url, max_tokens=max_tokens, sending=sending, timeout_s=timeout_s)

    def problems(self, config: RunConfig, plan: Plan, *, on_cpu: bool) -> Iterator[tuple[str, str]]:
        if not on_cpu or self.servers:
            return
        if (why := missing_system_library()) is not None:
            yield "rollout.engine", f"{why}, or set it to native"
        size = plan.model_size
        if size is None or size.is_latent or size.head_dim in CPU_HEAD_SIZES:
            return
        key = "model.path" if config.model.build is None else "model.build.head_dim"
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        why = (
            f"the model's attention heads have size {size.head_dim}, and vLLM on CPUs has kernels for {sizes}"
        )
        yield key, f"{why} only; use a model with one of these, or set rollout.engine=native"

    def unused(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        yield from super().unused(config, plan)
        if self.tensor_parallel * self.pipeline_parallel == 1:
            yield "each engine has a single device", "rollout.engine.executor"


def missing_system_library() -> str | None:
    """What vLLM's CPU build needs and pip does not install, with the remedy; None if nothing is missing.
    Without it vLLM starts, and fails at the first of its own operators."""
    try:
        CDLL("libnuma.so.1")
    except OSError:
        fix = "install libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora)"
        return f"vLLM on CPUs needs the system library libnuma.so.1; {fix}"
    return None
