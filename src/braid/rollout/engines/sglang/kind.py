"""Settings of SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from braid.rollout.engines.base import Model, Process, ServedEngine

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.plan import Plan
    from braid.weights.sending import SendOptions

    from .engine import SglangEngine
    from .server import SglangServer


class Sglang(ServedEngine):
    """SGLang (extra `sglang`)."""

    kind: Literal["sglang"] = "sglang"  # pyright: ignore[reportIncompatibleVariableOverride]
    """SGLang (extra `sglang`)."""
    deterministic: bool = True
    """Give every request its own random numbers, independent of others in the batch; false is faster."""
    decode_log_interval: PositiveInt = 40
    """Decode steps between two log lines of SGLang."""
    torch_compile: bool = False
    """Apply torch.compile to SGLang's decode step."""
    torch_compile_max_batch: PositiveInt = 32
    """Largest batch size that is compiled."""

    package = "sglang"
    install = "'braid-rl[sglang]' on a GPU machine"
    needs_gpu = True
    reads_folders = True
    unused_while = (
        *ServedEngine.unused_while,
        ("torch_compile", False, "torch_compile_max_batch"),
    )

    def start(self, number: int, model: Model, process: Process) -> SglangEngine:
        from .engine import SglangEngine
        from .options import server_arguments

        return SglangEngine(
            server_arguments(self, model),
            process,
            name=f"SGLang engine {number}",
            max_tokens=self.max_model_tokens or model.longest,
        )

    def connect(self, url: str, *, max_tokens: int, sending: SendOptions, timeout_s: float) -> SglangServer:
        from .server import SglangServer

        return SglangServer(url, max_tokens=max_tokens, sending=sending, timeout_s=timeout_s)

    def unused(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        yield from super().unused(config, plan)
        yield "SGLang always detokenizes, to find stop strings", "rollout.engine.detokenize"
        yield "SGLang reads weights from files", "rollout.weight_sync.{transport,existing_group}"
