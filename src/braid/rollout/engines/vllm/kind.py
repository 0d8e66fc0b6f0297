"""Settings of vLLM, and what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from braid.errors import EngineError
from braid.json_text import read_json
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

FAMILIES_WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl")
"""Types of models whose log-probs with images were compared with the trainer's."""


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

    reads_images = True
    package = "vllm"
    install = "'braid-rl[vllm]' (on a CPU: make vllm)"

    def start(self, number: int, model: Model, process: Process) -> VllmEngine:
        from .engine import VllmEngine
        from .options import engine_arguments, environment, threads

        if model.vision is not None and (why := _unknown_family(model.vision.config.model_type)):
            raise EngineError(why)
        return VllmEngine(
            engine_arguments(self, model, on_gpu=process.on_gpu),
            process,
            name=f"vLLM engine {number}",
            environment={**threads(), **environment(self)},
            detokenizes=self.detokenize,
            vision=model.vision,
        )

    def connect(self, url: str, *, max_tokens: int, sending: SendOptions, timeout_s: float) -> VllmServer:
        from .server import VllmServer

        return VllmServer(url, max_tokens=max_tokens, sending=sending, timeout_s=timeout_s)

    def problems(self, config: RunConfig, plan: Plan, *, on_cpu: bool) -> Iterator[tuple[str, str]]:
        if config.model.vision is not None and not self.servers and not has_torchvision():
            why = (
                "vLLM imports torchvision for models that read images, and it is not installed; install the "
                "build that fits torch (on a CPU from https://download.pytorch.org/whl/cpu), or set it to "
                "native"
            )
            yield "rollout.engine", why
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

    def image_problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        if self.servers:
            why = "vLLM's servers do not get images as braid places them; remove it, and braid starts engines"
            yield "rollout.engine.servers", f"{why}, or set rollout.engine=native"
            return
        if not self.in_process:
            why = "images reach vLLM only in the engine's process; set it to true, or rollout.engine=native"
            yield "rollout.engine.in_process", why
        for key in ("tensor_parallel", "pipeline_parallel"):
            if (size := getattr(self, key)) > 1:
                why = f"vLLM with images was not tested on {size} devices per engine; set it to 1, and use"
                yield f"rollout.engine.{key}", f"{why} rollout.engine.replicas for more engines"
        if (why := _unknown_family(_model_type(config))) is not None:
            yield "rollout.engine.kind", why

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


def has_torchvision() -> bool:
    """Whether vLLM can import what its models that read images need."""
    return find_spec("torchvision") is not None


def _model_type(config: RunConfig) -> str | None:
    """The type of the policy's model; None if its files do not tell before it is loaded."""
    if config.model.build is not None:
        return config.model.build.architecture
    try:
        model_type = read_json(Path(config.model.source or "") / "config.json").get("model_type")
    except (OSError, ValueError):
        return None
    return model_type if isinstance(model_type, str) else None


def _unknown_family(model_type: str | None) -> str | None:
    """Why vLLM does not get images for models of this type; None if it does, or if the type is unknown."""
    if model_type is None or model_type in FAMILIES_WITH_IMAGES:
        return None
    families = ", ".join(FAMILIES_WITH_IMAGES)
    return (
        f"vLLM with images was not tested with models of type {model_type}, only with {families}; set it to "
        "native, or choose one of these models"
    )
