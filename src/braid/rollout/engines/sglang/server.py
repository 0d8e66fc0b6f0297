"""Client of a running SGLang server: /generate with token ids in and out, weights through a shared folder.

SGLang needs a GPU; without one, this adapter is tested for the engine contract against a small server with
the same interface. SGLang's log-probs are computed after temperature and before top-k, top-p and min-p, so
sampling that truncates the distribution is refused. A request's seed takes effect only if the server runs
with --enable-deterministic-inference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from braid.errors import EngineError
from braid.rollout.engine import Request, seed_of
from braid.rollout.engines.http import ServerEngine
from braid.rollout.engines.remote import PARTS, Answer, Part
from braid.weights.files import folder_of
from braid.weights.receiver import open_receiver
from braid.weights.wire import Ticket


class SglangServer(ServerEngine):
    """See SyncedEngine for the contract. `sending.transport` is `files`, with a folder that the server can
    read."""

    _reader: ThreadPoolExecutor

    _version_of_start: str | None = None
    """What the server calls the version of the weights that it started with, if these are used."""

    def use_loaded_weights(self) -> None:
        super().use_loaded_weights()
        self._version_of_start = "default"

    @property
    def receivers(self) -> Sequence[str]:
        """See RemoteEngine. One name: the server reads files and opens no connections."""
        return [self.name]

    def _interrupt(self) -> None:
        self._client.call("POST", "/abort_request", {"abort_all": True})

    def _release(self) -> None:
        """See RemoteEngine. The server needs --enable-memory-saver and --enable-weights-cpu-backup."""
        self._client.call("POST", "/release_memory_occupation", {"tags": PARTS}, tries=1)

    def _regain(self, parts: tuple[Part, ...]) -> None:
        self._client.call("POST", "/resume_memory_occupation", {"tags": parts}, tries=1)

    @property
    def _limit_key(self) -> str:
        return "rollout.engine.max_model_tokens"

    def _greet(self) -> None:
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=f"weights for {self.name}")
        self._about("/health")

    def _question(self, request: Request) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling
        if not sampling.greedy and (sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0):
            raise EngineError(
                "SGLang computes log-probs before applying top_p, top_k and min_p; set "
                "rollout.sampling.top_p=1, top_k=0 and min_p=0, or rollout.engine=vllm"
            )
        return "/generate", {
            "input_ids": list(request.prompt_ids),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "min_new_tokens": sampling.min_new_tokens,
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "repetition_penalty": sampling.repetition_penalty,
                "stop": list(sampling.stop_strings),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "skip_special_tokens": False,  # stop strings may contain them
                "spaces_between_special_tokens": False,
                "no_stop_trim": True,
                "sampling_seed": seed_of(request.key) % 2**31,
            },
        }

    def _read(self, answer: Any, version: int) -> Answer:
        about = answer["meta_info"]
        reason = about["finish_reason"]["type"]
        if reason not in ("stop", "length", "abort"):
            raise EngineError(f"{self.name} ended a request with {about['finish_reason']}")
        if reason == "abort" and not about.get("output_token_logprobs"):  # in SGLang's queue
            return [], [], reason
        if about["weight_version"] not in (str(version), self._version_of_start):
            raise EngineError(
                f"{self.name} answered with version {about['weight_version']} of the weights instead of "
                f"{version}: another process has updated them"
            )
        pairs = [(token, logprob) for logprob, token, *_ in about["output_token_logprobs"]]
        return [token for token, _ in pairs], [logprob for _, logprob in pairs], reason

    def _receive(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        return self._reader.submit(self._read_folder, version, ticket)

    def _read_folder(self, version: int, ticket: Mapping[str, Any]) -> None:
        """Wait for the sender's folder, verify its files, and have the server load them."""
        receiver = open_receiver(Ticket(**ticket), engine=self.name, timeout_s=self.sending.timeout_s)
        with closing(receiver):
            for _ in receiver.receive(version):
                pass
        folder = folder_of(Path(ticket["folder"]), version)
        answer = self._client.call(
            "POST",
            "/update_weights_from_disk",
            # The default is the format of the server's start; with `dummy` it would read nothing.
            {
                "model_path": str(folder),
                "load_format": "auto",
                "weight_version": str(version),
                "flush_cache": True,
            },
            tries=1,
        )
        if not answer["success"]:
            raise EngineError(f"{self.name} failed to load version {version}: {answer['message']}")

    def close(self) -> None:
        """See RolloutEngine. Leaves the server running."""
        super().close()
        self._reader.shutdown(wait=False, cancel_futures=True)
