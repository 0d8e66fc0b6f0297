"""Client of vLLM in a child process, over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from braid.errors import EngineError
from braid.models.vision import Vision
from braid.rollout.engine import Request, check_request, seed_of
from braid.rollout.engines.base import Process
from braid.rollout.engines.child import LONGEST_FOLDER, LoggedProcess
from braid.rollout.engines.remote import Answer, Part, RemoteEngine

from .options import receiver_name


class VllmEngine(RemoteEngine):
    """See SyncedEngine for the contract. The constructor starts the process; methods that need it wait
    until it is up."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        process: Process,
        *,
        name: str,
        environment: Mapping[str, str],
        detokenizes: bool = False,
        vision: Vision | None = None,
    ) -> None:
        """`arguments` are those of vLLM's EngineArgs (options.engine_arguments). With `detokenizes`, vLLM
        decodes all answers to text. `vision` is how the model reads images; None for one that reads only
        text. The folder of the `process` is for vLLM's runtime files. `name` as in RemoteEngine.

        A request or call fails if the process has been silent for its `timeout_s`.
        """
        super().__init__(name, process.sending)
        self._arguments, self._timeout_s = dict(arguments), process.timeout_s
        self._failure: str | None = None
        self._numbers = itertools.count()
        self._pending: dict[str, Future[Answer]] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._outbox: list[tuple[Any, ...]] = []
        self._is_up: Future[None] = Future()
        self._heard_s = time.monotonic()
        self._start_timeout_s = process.start_timeout_s
        if len(str(process.folder)) < LONGEST_FOLDER:
            environment = {**environment, "VLLM_RPC_BASE_PATH": str(process.folder)}
        self._process, self._channel = LoggedProcess.of_module(
            "braid.rollout.engines.vllm.process",
            log=process.log,
            environment=environment,
            folder=process.folder,
        )
        self._channel.send(pickle.dumps((self._arguments, detokenizes, vision)))
        threading.Thread(target=self._read, name=f"{name} reader", daemon=True).start()

    def _check(self, request: Request) -> None:
        longest = int(self._arguments["max_model_len"])
        check_request(request, longest=longest, key="rollout.engine.max_model_tokens")

    async def _ask(self, request: Request, version: int) -> Answer:
        """See RemoteEngine. Raises EngineError if vLLM rejects the request, fails, or stops responding."""
        name = f"{self.name}-{next(self._numbers)}"
        if self._failure is not None or not self._is_up.done():
            await asyncio.to_thread(self.wait_until_up)
        future: Future[Answer] = Future()
        if not self._pending:
            self._heard_s = time.monotonic()
        self._pending[name] = future
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        seed = seed_of(request.key)
        self._outbox.append((name, request.prompt_ids, request.images, request.sampling, seed))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._drop(name)
            raise
        finally:
            self._pending.pop(name, None)

    @property
    def receivers(self) -> Sequence[str]:
        """See RemoteEngine. One name per vLLM worker. Raises EngineError if the process does not come up,
        before a sender waits for it."""
        self.wait_until_up()
        size = int(self._arguments["tensor_parallel_size"]) * int(self._arguments["pipeline_parallel_size"])
        return [receiver_name(self.name, rank) for rank in range(size)]

    def _receive(self, version: int, ticket: Mapping[str, Any]) -> Future[Any]:
        self.wait_until_up()
        return self._start_call("receive_weights", version, dict(ticket), self.name, self._timeout_s)

    def _interrupt(self) -> None:
        self._call("interrupt")

    def _release(self) -> None:
        """See RemoteEngine. vLLM can free only GPU memory."""
        if self._arguments["enable_sleep_mode"]:
            self._call("sleep")

    def _regain(self, parts: tuple[Part, ...]) -> None:
        if self._arguments["enable_sleep_mode"]:
            self._call("wake", parts)

    def close(self) -> None:
        """See RolloutEngine. Kills the process and those started by vLLM."""
        self._failure = None
        self._fail(f"{self.name} is closed; create a new one")
        super().close()
        self._process.end()
        self._channel.close()

    def wait_until_up(self) -> None:
        """Wait until the process is up. Raises EngineError if it is not up in time, or has exited."""
        if self._failure is not None:
            raise EngineError(self._failure)
        try:
            self._is_up.result(self._start_timeout_s)
        except FutureTimeoutError:
            self._fail(
                f"{self.name} did not start within {self._start_timeout_s:g} s; raise "
                f"cluster.start_timeout_s if it needs more time. {self._process.last_words()}"
            )
            self._process.end()
            raise EngineError(self._failure) from None

    def _call(self, method: str, *args: Any) -> Any:
        self.wait_until_up()
        return self._wait(self._start_call(method, *args), method)

    def _start_call(self, method: str, *args: Any) -> Future[Any]:
        number, future = next(self._numbers), Future[Any]()
        self._calls[number] = future
        self._send("call", number, method, args)
        return future

    def _wait(self, future: Future[Any], doing: str) -> Any:
        try:
            return future.result(self._timeout_s)
        except FutureTimeoutError:
            raise EngineError(
                f"{self.name} did not answer within {self._timeout_s:g} s while {doing}; raise "
                "cluster.call_timeout_s if it needs more time"
            ) from None

    def _flush(self) -> None:
        """Send all requests of one iteration of the event loop in one message, so that they are scheduled
        together."""
        requests, self._outbox = self._outbox, []
        requests = [r for r in requests if r[0] in self._pending]
        if requests:
            with contextlib.suppress(EngineError):  # the waiting callers have been failed already
                self._send("generate", requests)

    def _drop(self, name: str) -> None:
        """Abort a cancelled request."""
        with contextlib.suppress(EngineError):
            self._send("abort", [name])

    def _send(self, *message: Any) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)
        try:
            self._channel.send(pickle.dumps(message))
        except OSError:
            self._fail(f"{self.name} has exited. {self._process.last_words()}")
            raise EngineError(self._failure) from None

    def _read(self) -> None:
        """Process the child's messages until it exits, or stops responding while requests are pending."""
        try:
            while self._failure is None:
                if self._channel.poll(1.0):
                    message = pickle.loads(self._channel.receive())
                    self._heard_s = time.monotonic()
                    getattr(self, f"_on_{message[0]}")(*message[1:])
                elif self._pending and time.monotonic() - self._heard_s > self._timeout_s:
                    self._fail(
                        f"{self.name} has not responded for {self._timeout_s:g} s with {len(self._pending)} "
                        "pending requests; raise cluster.call_timeout_s if it needs more time. "
                        f"{self._process.last_words()}"
                    )
                    self._process.end()
        except (EOFError, OSError):
            if self._failure is None:
                self._fail(f"{self.name} exited {self._process.how_it_ended()}")

    def _on_ready(self) -> None:
        self._process.watch(self.name)
        self._is_up.set_result(None)

    def _on_alive(self) -> None:
        """Handle a heartbeat: receiving it is all that counts."""

    def _on_done(self, name: str, token_ids: list[int], logprobs: list[float], reason: Any) -> None:
        _settle(self._pending.get(name), (token_ids, logprobs, reason))

    def _on_failed(self, name: str, why: str) -> None:
        _settle(self._pending.get(name), EngineError(f"{self.name}: {why}"))

    def _on_returned(self, number: int, value: Any) -> None:
        _settle(self._calls.pop(number, None), value)

    def _on_raised(self, number: int, why: str) -> None:
        _settle(self._calls.pop(number, None), EngineError(f"{self.name}: {why}"))

    def _on_dead(self, why: str) -> None:
        self._fail(f"{self.name} failed: {why}. {self._process.last_words()}")

    def _fail(self, why: str) -> None:
        """Mark the engine as failed, and fail everything that waits with the reason."""
        if self._failure is None:
            self._failure = why
        for future in (self._is_up, *list(self._pending.values()), *list(self._calls.values())):
            _settle(future, EngineError(self._failure))


def _settle(future: Future[Any] | None, result: Any) -> None:
    """Set a future's result or exception, unless it is None or already done."""
    if future is None:
        return
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
