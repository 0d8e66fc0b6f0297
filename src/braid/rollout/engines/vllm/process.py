"""The child process that runs vLLM: receives requests (braid.processes), and returns tokens and log-probs.

Between two engine steps all messages that have arrived are processed in order, so that requests that arrived
together are scheduled together. The process ends with its parent, and vLLM's processes with it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm import SamplingParams, TokensPrompt  # noqa: TID251
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: TID251
from vllm.engine.arg_utils import EngineArgs  # noqa: TID251
from vllm.exceptions import VLLMClientError  # noqa: TID251
from vllm.inputs.engine import MultiModalInput  # noqa: TID251
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts  # noqa: TID251
from vllm.model_executor.layers.linear import (  # noqa: TID251
    MergedColumnParallelLinear,
    QKVParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # noqa: TID251
from vllm.model_executor.model_loader.reload import (  # noqa: TID251
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info  # noqa: TID251
from vllm.outputs import RequestOutput  # noqa: TID251
from vllm.sampling_params import RequestOutputKind  # noqa: TID251
from vllm.v1.engine import FinishReason  # noqa: TID251
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: TID251

from braid.errors import EngineError
from braid.models.vision import Vision
from braid.processes import Channel, connect, end_this_process
from braid.rollout.engine import Sampling
from braid.types import Placed
from braid.weights.receiver import open_receiver
from braid.weights.wire import Ticket

from .images import ImageInputs
from .options import receiver_name

_log = logging.getLogger(__name__)

_SIGN_OF_LIFE_S = 2.0
_NEVER = -100.0
"""Added to logits; the least that vLLM accepts. Probabilities become too small for float32."""


class WeightReceiver:
    """Mixin of vLLM's workers (`worker_extension_cls`) that receives weights.

    A server receives weights directly from the trainer if it was started with
    `--worker-extension-cls braid.rollout.engines.vllm.process.WeightReceiver`.
    """

    rank: int
    vllm_config: Any
    model_runner: Any
    _braid_receiver: Any = None

    def receive_weights(self, version: int, ticket: Mapping[str, Any], engine: str, timeout_s: float) -> None:
        """Receive `version` from the sender of `ticket`. Raises EngineError if the data that arrives differs
        from the data that was sent."""
        if self._braid_receiver is None or self._braid_receiver[0] != ticket:
            if self._braid_receiver is not None:
                self._braid_receiver[1].close()
            receiver = open_receiver(
                Ticket(**ticket),
                engine=receiver_name(engine, self.rank),
                timeout_s=timeout_s,
                device=next(self.model_runner.get_model().parameters()).device,
            )
            self._braid_receiver = ticket, receiver
        self.load_checked(self._braid_receiver[1].receive(version))

    def load_checked(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Reload all weights of vLLM's model, from tensors in checkpoint format."""
        with set_current_vllm_config(self.vllm_config):
            model = self.model_runner.get_model()
            expected = {name for name, _ in model.named_parameters()}
            for layer in model.modules():
                if isinstance(layer, RoutedExperts) and next(layer.parameters()).device.type == "cpu":
                    # Kernels of experts on a CPU read packed weights, which vLLM packs only while it makes
                    # the kernel.
                    layer.quant_method.moe_kernel = None
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(weights)
                parts = list(missing_parts(model))
            finally:
                # Also after a partial load: otherwise no further version could be loaded.
                finalize_layerwise_reload(model, self.vllm_config.model_config)
            for head in model.modules():
                if isinstance(head, ParallelLMHead):
                    # A head tied to the embedding is not loaded itself, and on CPU uses a packed copy of the
                    # weights.
                    head.quant_method.process_weights_after_loading(head)
        if missing := [*parts, *sorted(expected - (expected if loaded is None else loaded))]:
            raise EngineError(
                f"the weight sync lacked {len(missing)} weights of vLLM's {type(model).__name__}, among "
                f"them {missing[0]}; the model folder of vLLM has a different architecture than the "
                "trainer's model"
            )


def missing_parts(model: nn.Module) -> Iterator[str]:
    """The parts of fused parameters that a reload under way has not loaded, such as k of a layer's qkv: vLLM
    counts the parameter as loaded with any of them, and keeps the other parts' memory as it is."""
    for name, layer in model.named_modules():
        reload = get_layerwise_info(layer)
        if not reload.can_load():
            continue  # all of the layer is loaded
        loaded: dict[str, set[Any]] = {}
        for parameter, call in reload.loaded_weights:
            loaded.setdefault(parameter, set()).update(_parts_of(call.arguments))
        for parameter, parts in loaded.items():
            if None not in parts:  # the parameter as a whole
                yield from (
                    f"{name}.{parameter} ({part})"
                    for part in _all_parts(layer, parameter)
                    if part not in parts
                )


def _parts_of(arguments: Mapping[str, Any]) -> list[Any]:
    """What a call of a weight loader loads: [None] for a whole parameter."""
    if arguments.get("expert_id") is not None and arguments["shard_id"] is not None:
        is_of_all = arguments["loaded_weight"].ndim == 3
        return [None] if is_of_all else [f"{arguments['shard_id']} of expert {arguments['expert_id']}"]
    shard = arguments.get("loaded_shard_id")
    return list(shard) if isinstance(shard, tuple | list) else [shard]


def _all_parts(layer: Any, parameter: str) -> list[Any]:
    if isinstance(layer, QKVParallelLinear):
        return ["q", "k", "v"]
    if isinstance(layer, MergedColumnParallelLinear):
        return list(range(len(layer.output_sizes)))
    if isinstance(layer, RoutedExperts):
        config = layer.moe_config
        gated = ["w1", "w3"] if config.is_act_and_mul else ["w1"]
        shards = gated if parameter.startswith("w13") else ["w2"]
        return [f"{shard} of expert {n}" for n in range(config.num_logical_experts) for shard in shards]
    return []


class EngineProcess:
    """vLLM's engine and its request loop."""

    def __init__(
        self, channel: Channel, arguments: Mapping[str, Any], detokenizes: bool, vision: Vision | None
    ) -> None:
        """`arguments` are those of EngineArgs; with `detokenizes`, all answers are decoded to text; `vision`
        is how the model reads images."""
        self._channel, self._detokenizes = channel, detokenizes
        self._reserved = () if vision is None else vision.reserved
        self._arrived: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        config = engine_config(arguments)
        self._images = None if vision is None else ImageInputs(vision, config)
        self._engine = LLMEngine.from_vllm_config(
            config, disable_log_stats=arguments.get("disable_log_stats", False)
        )
        self._told_s = 0.0

    def run(self) -> None:
        """Serve requests until the connection is closed."""
        self._tell("ready")
        while True:
            for message in self._messages(waits=not self._engine.has_unfinished_requests()):
                getattr(self, f"_on_{message[0]}")(*message[1:])
            if self._engine.has_unfinished_requests():
                self._step()
            if time.monotonic() - self._told_s > _SIGN_OF_LIFE_S:
                self._tell("alive")

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished and isinstance(output, RequestOutput):
                self._answer(output)

    def _answer(self, output: RequestOutput) -> None:
        (answer,) = output.outputs
        reason = answer.finish_reason
        if reason not in ("stop", "length", "abort") or answer.logprobs is None:
            self._tell("failed", output.request_id, f"vLLM ended the request with finish_reason={reason}")
            return
        token_ids = list(answer.token_ids)
        steps = zip(answer.logprobs, token_ids, strict=True)
        logprobs = [step[token].logprob for step, token in steps if step is not None]
        self._tell("done", output.request_id, token_ids, logprobs, reason)

    def _on_generate(
        self, requests: list[tuple[str, tuple[int, ...], tuple[Placed, ...], Sampling, int]]
    ) -> None:
        for name, prompt_ids, images, sampling, seed in requests:
            params = sampling_params(sampling, seed, self._detokenizes, self._reserved)
            try:
                self._engine.add_request(name, self._prompt(prompt_ids, images), params)
            except (ValueError, VLLMClientError) as error:
                self._tell("failed", name, f"vLLM rejects the request: {error}")

    def _prompt(
        self, prompt_ids: tuple[int, ...], images: tuple[Placed, ...]
    ) -> TokensPrompt | MultiModalInput:
        if not images:
            return TokensPrompt(prompt_token_ids=list(prompt_ids))
        assert self._images is not None, "the plan refuses images for models that read only text"
        return self._images.request(prompt_ids, images)

    def _on_abort(self, names: list[str]) -> None:
        self._engine.abort_request(names)

    def _on_call(self, number: int, method: str, args: tuple[Any, ...]) -> None:
        try:
            value = getattr(self, f"_{method}")(*args)
        except Exception as error:  # reported to the caller
            _log.exception("%s failed", method)
            self._tell("raised", number, f"{error}")
        else:
            self._tell("returned", number, value)

    def _receive_weights(
        self, version: int, ticket: Mapping[str, Any], engine: str, timeout_s: float
    ) -> None:
        self._engine.collective_rpc("receive_weights", args=(version, ticket, engine, timeout_s))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):  # cancelled ones
            raise EngineError("vLLM did not empty its prefix cache, which has entries of the old weights")
        if self._images is not None:
            self._engine.reset_encoder_cache()

    def _interrupt(self) -> None:
        states = list(self._engine.output_processor.request_states.values())
        for state in states:
            output = state.make_request_output([], None, FinishReason.ABORT, None)
            assert isinstance(output, RequestOutput), "a final output always has the tokens so far"
            self._answer(output)
        self._engine.abort_request([state.external_req_id for state in states])

    def _sleep(self) -> None:
        self._engine.sleep(1)

    def _wake(self, parts: tuple[str, ...]) -> None:
        self._engine.wake_up(list(parts))

    def _messages(self, *, waits: bool) -> Iterator[tuple[Any, ...]]:
        """Messages that have arrived; with `waits`, waits up to _SIGN_OF_LIFE_S for the first."""
        with contextlib.suppress(queue.Empty):
            if waits:
                yield self._arrived.get(timeout=_SIGN_OF_LIFE_S)
            while True:
                yield self._arrived.get_nowait()

    def _read(self) -> None:
        for message in self._channel.messages():
            self._arrived.put(pickle.loads(message))
        end_this_process()

    def _tell(self, *message: Any) -> None:
        self._told_s = time.monotonic()
        self._channel.reply(pickle.dumps(message))


def engine_config(arguments: Mapping[str, Any]) -> VllmConfig:
    """vLLM's config. On CPU the cache size is what the longest requests can use, at most
    gpu_memory_utilization of the free memory; vLLM's default would be that fraction of all memory."""
    args = EngineArgs(**arguments)
    config = args.create_engine_config()
    if not torch.cuda.is_available():
        model, cache = config.model_config, config.cache_config
        per_token = (
            2 * model.get_num_layers(config.parallel_config) * model.get_num_kv_heads(config.parallel_config)
        )
        per_token *= model.get_head_size() * torch.finfo(model.dtype).bits // 8
        block = cache.block_size
        blocks = config.scheduler_config.max_num_seqs * -(-model.max_model_len // block) + 2
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = int(cache.gpu_memory_utilization * pages)
        cache.kv_cache_memory_bytes = min(blocks * block * per_token, free)
    return config


def sampling_params(
    sampling: Sampling, seed: int, detokenizes: bool, reserved: Sequence[int] = ()
) -> SamplingParams:
    """Convert the sampling settings to vLLM's; `reserved` tokens are never sampled. Stop strings always need
    detokenization."""
    return SamplingParams(
        max_tokens=sampling.max_new_tokens,
        min_tokens=sampling.min_new_tokens,
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        min_p=0.0 if sampling.greedy else sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        stop=list(sampling.stop_strings),
        stop_token_ids=list(sampling.stop_token_ids),
        include_stop_str_in_output=True,
        ignore_eos=True,
        skip_special_tokens=False,  # stop strings may contain them
        spaces_between_special_tokens=False,
        seed=seed,
        logprobs=0,
        logit_bias=dict.fromkeys(reserved, _NEVER) if reserved else None,
        detokenize=detokenizes or bool(sampling.stop_strings),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def main() -> None:
    """Serve the requests of the parent. The first message has the arguments of EngineProcess."""
    channel, _ = connect()
    try:
        EngineProcess(channel, *pickle.loads(channel.receive())).run()
    except Exception as error:  # the log has the rest
        _log.exception("the engine failed")
        channel.reply(pickle.dumps(("dead", f"{type(error).__name__}: {error}")))
        raise SystemExit(1) from error


if __name__ == "__main__":
    main()
