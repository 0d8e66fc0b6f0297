"""Settings of the native engine, and what follows from them: its dtype, and whether it compiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt

from braid.rollout.engines.base import Engine, InProcess

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.models.causal_lm import CausalLM
    from braid.plan import Plan

    from .engine import NativeEngine

MOST_PACKED = 2**29
"""Parameters up to which compiled steps have a packed copy of the weights: larger models gain little from
it."""
CPU_KV_BUDGET_TOKENS = 131_072


class Native(Engine):
    """braid's own engine, in the run's processes."""

    kind: Literal["native"] = "native"  # pyright: ignore[reportIncompatibleVariableOverride]
    """braid's own engine, in the run's processes."""
    kv_budget_tokens: PositiveInt | None = None
    """Capacity of the key/value cache in tokens; a request is admitted once its longest possible length fits.
    null: 80% of the free memory on CUDA devices, 131,072 tokens on CPUs."""
    prefill_tokens: PositiveInt = 8192
    """Maximum prompt tokens per forward pass."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype of the engine's weights and computation. auto: the arithmetic of training, with the trainer's
    tensors; under train.autocast (by default on CUDA), with a copy whose linear layers have its dtype. But
    where `compile` compiles steps of fp32 weights on CPUs without AMX, fp32, which is faster. Others keep a
    copy if they differ from model.dtype. Below training's precision: see algorithm.corrections."""
    cuda_graphs: bool = True
    """Capture the decode step in a CUDA graph, on CUDA devices."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile decode steps; results differ by rounding. On GPUs of Llama, Qwen2 and Qwen3, with Triton (auto:
    wherever it is installed). On CPUs under Linux in fp32, with Numba. auto there: if prompts_per_round *
    group_size * sampling.max_new_tokens * the number of parameters is at least 4e10, since the first
    compilation takes five seconds; the log has the choice."""
    prefix_caching: bool = True
    """Keep the key/value cache of a conversation for its next turn, for up to kv_budget_tokens tokens on top;
    on CUDA devices the default budget is halved for it."""
    recompute_cache: bool = False
    """Recompute the key/value cache of turns that continue with new weights
    (pipeline.on_new_weights=interrupt), instead of keeping it until the turn ends. The next turn recomputes
    it either way."""

    records_experts = True
    reads_images = True

    def build(self, lm: CausalLM, run: InProcess) -> NativeEngine:
        from .engine import NativeEngine

        return NativeEngine(lm, self, run)

    def dtype_in(self, config: RunConfig, num_parameters: int | None, *, has_gpus: bool) -> str:
        """See Engine. By default that of training, but that of fp32 weights where compiled steps, which are
        faster than bf16 on CPUs without AMX (docs/benchmarks.md), are worth it."""
        from braid.plan.machine import cpu_info
        from braid.plan.sizes import training_dtype

        if self.dtype != "auto":
            return self.dtype
        is_possible = not has_gpus and config.model.dtype == "fp32" and sys.platform == "linux"
        is_compiled = is_possible and self._is_compiling(config, num_parameters)
        is_faster = is_compiled and "amx_bf16" not in cpu_info("flags")
        return "fp32" if is_faster else training_dtype(config, has_gpus=has_gpus)

    def can_compile(self, config: RunConfig, num_parameters: int | None, *, has_gpus: bool) -> bool:
        """Whether the config allows that steps are compiled on CPUs."""
        is_allowed = self.compile != "never" and not has_gpus
        return is_allowed and self.dtype_in(config, num_parameters, has_gpus=False) == "fp32"

    def may_compile(self, config: RunConfig, num_parameters: int, *, has_gpus: bool) -> bool:
        """Whether steps are to be compiled on CPUs, if this machine can do that."""
        can_compile = self.can_compile(config, num_parameters, has_gpus=has_gpus)
        return can_compile and self._is_compiling(config, num_parameters)

    def _is_compiling(self, config: RunConfig, num_parameters: int | None) -> bool:
        from braid.plan.sizes import is_worth_compiling

        if self.compile != "auto":
            return self.compile == "always"
        return num_parameters is not None and is_worth_compiling(config, num_parameters)

    def kv_budget(self, *, has_gpus: bool) -> int | None:
        return self.kv_budget_tokens or (None if has_gpus else CPU_KV_BUDGET_TOKENS)

    def held_bytes(self, config: RunConfig, parameters: int, *, has_gpus: bool) -> Mapping[str, int]:
        from braid.plan.sizes import BYTES

        held, samples_in = dict[str, int](), self.dtype_in(config, parameters, has_gpus=has_gpus)
        if samples_in != config.model.dtype or config.pipeline:
            held["engine's copy"] = parameters * BYTES[samples_in]
        if parameters <= MOST_PACKED and self.may_compile(config, parameters, has_gpus=has_gpus):
            held["engine's packed weights"] = parameters * BYTES["fp32"]
        return held

    @staticmethod
    def has_conversations(config: RunConfig) -> bool:
        """Whether episodes have several turns, for whose next one a cache can be kept."""
        return (config.env.turn_limit or 1) > 1

    def unused(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        yield from super().unused(config, plan)
        pipeline = config.pipeline
        if not self.has_conversations(config):
            yield "episodes have a single turn", "rollout.engine.prefix_caching"
        if plan.layout.mode == "in_process":
            yield "the native engine reads the trainer's weights in place", "rollout.weight_sync.*"
        dtype = self.dtype_in(config, plan.num_parameters, has_gpus=plan.layout.has_gpus)
        if dtype != "fp32" and not plan.layout.has_gpus:
            yield "only decoding in fp32 on CPUs is compiled by Numba", "rollout.engine.compile"
        if pipeline is None or pipeline.on_new_weights == "finish":
            yield "running turns finish before engines get new weights", "rollout.engine.recompute_cache"
        elif pipeline.max_lag == 0:
            why = "with pipeline.max_lag=0 nothing runs when engines get new weights"
            yield why, "rollout.engine.recompute_cache"
