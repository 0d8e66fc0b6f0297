"""Client of a running vLLM server: the OpenAI completions API with token ids in and out, and vLLM's endpoints
for everything else.

The server must be started so that it accepts control requests, and with log-probs of the distribution sampled
from:

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls braid.rollout.engines.vllm.process.WeightReceiver [--load-format dummy]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from braid.errors import EngineError
from braid.rollout.engine import Request, seed_of
from braid.rollout.engines.http import ServerEngine
from braid.rollout.engines.remote import Answer, Part

from .options import EXTENSION, receiver_name

_START = (
    "start it with VLLM_SERVER_DEV_MODE=1 vllm serve ... --logprobs-mode processed_logprobs "
    f"--generation-config vllm --worker-extension-cls {EXTENSION}"
)


class VllmServer(ServerEngine):
    """A vLLM server that was started elsewhere; its workers receive weights through braid's worker
    extension."""

    _num_workers: int
    _model: str

    @property
    def receivers(self) -> Sequence[str]:
        """See RemoteEngine. One name per vLLM worker."""
        return [receiver_name(self.name, rank) for rank in range(self._num_workers)]

    def _interrupt(self) -> None:
        """See RemoteEngine. /abort_requests would reach only one of several API server processes."""
        self._client.call("POST", "/pause", params={"mode": "abort"})
        self._client.call("POST", "/resume")

    def _release(self) -> None:
        """See RemoteEngine. The server needs --enable-sleep-mode."""
        self._client.call("POST", "/sleep", params={"level": "1"}, tries=1)

    def _regain(self, parts: tuple[Part, ...]) -> None:
        self._client.call("POST", "/wake_up", params={"tags": parts}, tries=1)

    @property
    def _limit_key(self) -> str:
        return "rollout.engine.max_model_tokens"

    def _greet(self) -> None:
        (model, *_) = self._about("/v1/models")["data"]
        self._model = model["id"]
        if (longest := model.get("max_model_len")) is not None and longest < self._max_tokens:
            raise EngineError(
                f"{self.name} accepts sequences of {longest} tokens, but this run needs {self._max_tokens}; "
                f"start it with --max-model-len {self._max_tokens}, or lower "
                "rollout.sampling.max_new_tokens or data.max_prompt_tokens"
            )
        try:
            self._num_workers = int(self._about("/get_world_size")["world_size"])
            config = self._about("/server_info", {"config_format": "json"})["vllm_config"]
        except EngineError as error:
            raise EngineError(f"{self.name} does not provide the control API ({error}); {_START}") from error
        if config["model_config"]["logprobs_mode"] != "processed_logprobs":
            raise EngineError(
                f"{self.name} returns log-probs of a different distribution than it samples from "
                f"(logprobs_mode={config['model_config']['logprobs_mode']}); {_START}"
            )
        if config["parallel_config"]["worker_extension_cls"] != EXTENSION:
            raise EngineError(f"{self.name} cannot receive weights from a trainer; {_START}")

    def _question(self, request: Request) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        return "/v1/completions", {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": sampling.min_new_tokens,
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            "min_p": 0.0 if sampling.greedy else sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": list(sampling.stop_strings),
            "stop_token_ids": list(sampling.stop_token_ids),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "skip_special_tokens": False,  # stop strings may contain them
            "spaces_between_special_tokens": False,
            "seed": seed_of(request.key),
            "logprobs": 0,
            "return_token_ids": True,
        }

    def _read(self, answer: Any, version: int) -> Answer:
        (choice,) = answer["choices"]
        reason = choice["finish_reason"]
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{self.name} ended a request with finish_reason={reason}")
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], reason

    def _receive(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        args = [version, dict(ticket), self.name, self.sending.timeout_s]
        return self._client.start(
            "POST",
            "/collective_rpc",
            {"method": "receive_weights", "args": args, "timeout": self.sending.timeout_s},
            tries=1,
        )

    def finish_receiving(self, version: int, receiving: Future[Any]) -> None:
        """See RemoteEngine. Also resets the prefix cache, whose entries come from the old weights."""
        super().finish_receiving(version, receiving)
        self._version = None
        params = {"reset_running_requests": "true"}  # cancelled ones, which the server may still have
        if not self._client.call("POST", "/reset_prefix_cache", params=params)["success"]:
            raise EngineError(
                f"{self.name} did not empty its prefix cache, which has entries of the old weights"
            )
        self._version = version
