"""Failing servers, several servers behind a router, and servers started by the run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.leftovers import LIMIT_S

from braid import http
from braid.errors import EngineError
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy, load_tokenizer
from braid.rollout.engine import Completion, Request, RolloutEngine, Sampling
from braid.rollout.engines import remote
from braid.rollout.engines.base import Model
from braid.rollout.engines.http import ServerEngine
from braid.rollout.engines.router import Router
from braid.rollout.engines.sglang.engine import SglangEngine
from braid.rollout.engines.sglang.kind import Sglang
from braid.rollout.engines.sglang.options import server_arguments
from braid.rollout.engines.sglang.server import SglangServer
from braid.rollout.engines.vllm.server import VllmServer
from braid.weights.sender import open_sender
from braid.weights.sending import SendOptions

from .engines import MAX_TOKENS, MODEL, free_port, process_in, write_folder
from .sglang_like import SglangLike
from .unruly import ANSWERS, TOKENS, Protocol, UnrulyServer

pytestmark = pytest.mark.slow

REQUEST = Request((3, 4, 5), Sampling(max_new_tokens=4), (0,))
ENGINES: dict[Protocol, type[ServerEngine]] = {"vllm": VllmServer, "sglang": SglangServer}


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return load_policy(MODEL, temperature=1.0, seed=0, device=torch.device("cpu"))


@pytest.fixture(params=["vllm", "sglang"])
def protocol(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Protocol:
    """Protocol of the servers; clients wait only briefly between retries."""
    monkeypatch.setattr(http, "_BACKOFF_S", 0.05)
    return request.param


@contextmanager
def connected(
    url: str, folder: Path, timeout_s: float = LIMIT_S, protocol: Protocol = "sglang"
) -> Iterator[ServerEngine]:
    sending = SendOptions(transport="files", bucket_bytes=2**20, timeout_s=LIMIT_S, folder=str(folder))
    engine = ENGINES[protocol](url, max_tokens=MAX_TOKENS, sending=sending, timeout_s=timeout_s)
    with closing(engine):
        yield engine


@contextmanager
def unruly(
    protocol: Protocol, folder: Path, timeout_s: float = LIMIT_S
) -> Iterator[tuple[UnrulyServer, ServerEngine]]:
    """A server that answers, and an engine that has given it weights."""
    with UnrulyServer(protocol) as server, connected(server.url, folder, timeout_s, protocol) as engine:
        engine.load_weights(1, [("w", torch.ones(2))])
        yield server, engine


def ask(engine: RolloutEngine, *requests: Request) -> list[Completion | BaseException]:
    async def gather() -> list[Completion | BaseException]:
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    return asyncio.run(gather())


def tokens_of(answers: Sequence[Completion | BaseException]) -> list[list[int]]:
    return [answer.token_ids for answer in answers if isinstance(answer, Completion)]


def test_a_server_that_is_not_there_is_named(tmp_path: Path, protocol: Protocol) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with (
        pytest.raises(EngineError, match=f"{url} failed on GET .* \\(4 attempts\\)"),
        connected(url, tmp_path, LIMIT_S, protocol),
    ):
        pass


def test_a_server_that_does_not_answer_at_startup_is_named(tmp_path: Path, protocol: Protocol) -> None:
    with UnrulyServer(protocol) as server:
        server.greeting = "hang"
        with pytest.raises(EngineError, match=f"{server.url} failed on GET .* no answer within"):  # noqa: SIM117
            with connected(server.url, tmp_path, 0.3, protocol):
                pass


@pytest.mark.parametrize(
    "faults", [["500"], ["429", "503", "502"], ["cut"], ["silent"], ["noise"], ["garbage"]]
)
def test_a_request_survives_transient_failures(tmp_path: Path, protocol: Protocol, faults: list[str]) -> None:
    with unruly(protocol, tmp_path) as (server, engine):
        server.faults = list(faults)
        assert tokens_of(ask(engine, REQUEST)) == [TOKENS]
        assert server.num_asked == len(faults) + 1


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (["500"] * 4, r"failed on POST /\S+ \(4 attempts\): answered 500"),
        (["429"] * 4, r"\(4 attempts\): answered 429"),
        (["garbage"] * 4, r"\(4 attempts\): the answer is not JSON"),
        (["cut"] * 4, r"\(4 attempts\): RemoteProtocolError"),
        (["400"], r"failed on POST /\S+: answered 400"),
        (["hang"], r"failed on POST /\S+: no answer within 3 s"),
        (["drip"], r"failed on POST /\S+: no answer within"),
        (["503", "hang"], r"\(2 attempts\): no answer within .*; before: answered 503"),
    ],
)
def test_persistent_failures_of_a_server_are_an_error_with_the_cause(
    tmp_path: Path, protocol: Protocol, faults: list[str], message: str
) -> None:
    limit_s = 3.0 if "hang" in faults or "drip" in faults else LIMIT_S
    with unruly(protocol, tmp_path, limit_s) as (server, engine):
        server.faults = list(faults)
        (error,) = ask(engine, REQUEST)
        assert isinstance(error, EngineError)
        with pytest.raises(EngineError, match=message):
            raise error
        assert server.url in str(error)
        assert server.num_asked == len(faults)
        assert tokens_of(ask(engine, REQUEST)) == [TOKENS], "the next request is a new one"


def _changed(protocol: Protocol, tokens: Any, logprobs: Any, reason: str = "length") -> Any:
    if protocol == "vllm":
        return {
            "choices": [
                {"finish_reason": reason, "token_ids": tokens, "logprobs": {"token_logprobs": logprobs}}
            ]
        }
    about = ANSWERS["sglang"]["meta_info"] | {"finish_reason": {"type": reason}}
    return {"meta_info": about | {"output_token_logprobs": list(zip(logprobs, tokens, strict=True))}}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: ["ok"], "in an unknown format"),
        (lambda _: None, "in an unknown format"),
        (lambda p: _changed(p, [], []), "0 tokens"),
        (lambda p: _changed(p, [], [], "abort"), "aborted a request that had no tokens"),
        (lambda p: _changed(p, [1] * 5, [-1.0] * 5), "5 tokens, outside 1 to 4"),
        (lambda p: _changed(p, [1.5], [-1.0]), "invalid token id"),
        (lambda p: _changed(p, [1], [None]), "a log-prob is not a number"),
        (lambda p: _changed(p, [1], [float("nan")]), "not finite"),
    ],
)
def test_an_answer_that_is_not_a_completion_is_an_error_that_shows_it(
    tmp_path: Path, protocol: Protocol, answer: Callable[[Protocol], Any], message: str
) -> None:
    with unruly(protocol, tmp_path) as (server, engine):
        server.answer = answer(protocol)
        (error,) = ask(engine, REQUEST)
        assert isinstance(error, EngineError)
        assert message in str(error)
        assert server.num_asked == 1


def test_a_server_that_recovers_within_the_retries_answers(
    tmp_path: Path, protocol: Protocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_BACKOFF_S", 0.4)
    with ExitStack() as stack:
        with UnrulyServer(protocol) as first:
            engine = stack.enter_context(connected(first.url, tmp_path, 10.0, protocol))
            engine.load_weights(1, [("w", torch.ones(2))])
        again = UnrulyServer(protocol, first.port)
        threading.Timer(0.1, lambda: stack.enter_context(again)).start()
        assert tokens_of(ask(engine, REQUEST)) == [TOKENS]


def test_a_weight_sync_that_a_server_does_not_answer_times_out_and_leaves_no_version(
    tmp_path: Path, protocol: Protocol
) -> None:
    with unruly(protocol, tmp_path, timeout_s=3.0) as (server, engine):
        server.greeting = "hang"
        with pytest.raises(EngineError, match="no answer within"):
            engine.load_weights(2, [("w", torch.ones(2))])
        (error,) = ask(engine, REQUEST)
        assert "has no weights" in str(error)
        server.greeting, server.answer = None, _versioned(protocol, "3")
        engine.load_weights(3, [("w", torch.ones(2))])
        assert tokens_of(ask(engine, REQUEST)) == [TOKENS]


def _versioned(protocol: Protocol, version: str) -> Any:
    if protocol == "vllm":
        return ANSWERS["vllm"]
    return {"meta_info": ANSWERS["sglang"]["meta_info"] | {"weight_version": version}}


def test_requests_of_a_hanging_server_move_to_the_others(tmp_path: Path, protocol: Protocol) -> None:
    with ExitStack() as stack:
        pairs = [stack.enter_context(unruly(protocol, tmp_path / str(i), 4.0)) for i in range(2)]
        (hung, _), (well, _) = pairs
        router = Router([engine for _, engine in pairs])
        hung.faults = ["hang"] * 9
        requests = [Request((n, 4), Sampling(max_new_tokens=4), (n,)) for n in range(3, 9)]
        errors = [answer for answer in ask(router, *requests) if not isinstance(answer, Completion)]
        assert len(errors) == 3
        assert all(isinstance(error, EngineError) and hung.url in str(error) for error in errors)
        assert tokens_of(ask(router, *requests)) == [TOKENS] * 6, "who has failed is asked last"
        assert (hung.num_asked, well.num_asked) == (3, 9)


def test_a_server_without_the_right_weights_gives_no_answer(lm: CausalLM, tmp_path: Path) -> None:
    with sglang_like() as server, connected(server.url, tmp_path) as engine:
        (error,) = ask(engine, REQUEST)
        assert "has no weights" in str(error)
        engine.load_weights(1, lm.named_weights())
        server.update_weights_from_disk(
            {"model_path": str(tmp_path / "version_000001"), "load_format": "auto", "weight_version": "7"}
        )
        (error,) = ask(engine, REQUEST)
        assert "version 7 of the weights instead of 1" in str(error)


def sglang_like() -> SglangLike:
    decode: Any = load_tokenizer(MODEL).decode
    return SglangLike(load_policy(MODEL, temperature=1.0, seed=7, device=torch.device("cpu")), decode)


def test_files_for_several_servers_are_written_once_and_groups_stay_together(
    lm: CausalLM, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(sglang_like()) for _ in range(2)]
        engines = [stack.enter_context(connected(server.url, tmp_path)) for server in servers]
        router = Router(engines)
        num_reads = 0

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal num_reads
            num_reads += 1
            yield from lm.named_weights()

        for version in (1, 2):
            router.load_weights(version, weights())
        asyncio.run(router.set_weights(2))
        assert num_reads == 2, "once per version, not per server"
        sender = open_sender(router.receivers, engines[0].sending)  # from ranks in other processes
        with ThreadPoolExecutor(1) as pool, closing(sender):
            taken = pool.submit(router.receive, 3, sender.ticket.as_dict())
            sender.send(3, lm.named_weights())
            taken.result(30)
        asyncio.run(router.set_weights(3))
        groups = [Request((n, 4), Sampling(max_new_tokens=4), (n, i)) for n in range(3, 7) for i in range(3)]
        answers = ask(router, *groups)
        assert len(tokens_of(answers)) == len(groups)
        assert [server.num_answers for server in servers] == [6, 6]
        alone = [ask(engine, Request((3, 4), Sampling(8, greedy=True), (0,))) for engine in engines]
        assert tokens_of(alone[0]) == tokens_of(alone[1])
        router.close()


ABORTED = {"meta_info": {"finish_reason": {"type": "abort"}}}
"""SGLang's answer to a request that was aborted in its queue."""


def test_a_request_that_arrives_after_an_interrupt_is_interrupted_again(
    lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_AGAIN_S", 0.01)
    interrupts = threading.Semaphore(0)

    def ends_at_the_second(_: Any) -> dict[str, Any]:
        monkeypatch.setattr(server, "generate", generate)
        for _ in range(2):
            interrupts.acquire(timeout=LIMIT_S)
        return ABORTED

    async def scenario() -> Completion:
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)  # it has begun
        await engine.set_weights(2, "interrupt", lambda: engine.load_weights(2, lm.named_weights()))
        return await running

    with sglang_like() as server, connected(server.url, tmp_path) as engine:
        engine.load_weights(1, lm.named_weights())
        (expected,) = tokens_of(ask(engine, REQUEST))
        generate = server.generate
        monkeypatch.setattr(server, "abort_request", lambda _: interrupts.release())
        monkeypatch.setattr(server, "generate", ends_at_the_second)
        completion = asyncio.run(scenario())
        assert (completion.token_ids, completion.policy_version) == (expected, 2)


def test_a_cancelled_interrupt_has_no_effect_on_requests(
    lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, is_cancelled, is_interrupted = threading.Event(), threading.Event(), threading.Event()

    def interrupts_late() -> None:
        has_begun.set()
        is_cancelled.wait(LIMIT_S)
        is_interrupted.set()

    def is_aborted(_: Any) -> dict[str, Any]:
        monkeypatch.setattr(server, "generate", generate)
        is_interrupted.wait(LIMIT_S)
        return ABORTED

    async def scenario() -> Completion:
        running = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)  # it has begun
        switch = asyncio.create_task(engine.set_weights(2, "interrupt"))
        await asyncio.to_thread(has_begun.wait, LIMIT_S)
        switch.cancel()
        await asyncio.wait([switch])
        is_cancelled.set()
        return await running

    with sglang_like() as server, connected(server.url, tmp_path) as engine:
        engine.load_weights(1, lm.named_weights())
        (expected,) = tokens_of(ask(engine, REQUEST))
        generate = server.generate
        monkeypatch.setattr(server, "generate", is_aborted)
        monkeypatch.setattr(engine, "_interrupt", interrupts_late)
        assert asyncio.run(scenario()).token_ids == expected


def test_a_server_that_cannot_be_interrupted_does_not_block_the_others(
    lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()

    def answers(generate: Callable[[Any], Any], body: dict[str, Any]) -> Any:
        if tuple(body["input_ids"]) != REQUEST.prompt_ids:
            may_answer.wait(LIMIT_S)
        return generate(body)

    def fails() -> None:
        raise EngineError("it does not answer")

    async def scenario() -> list[Completion]:
        running = [
            asyncio.create_task(router.generate(replace(REQUEST, prompt_ids=(n, 4)))) for n in range(3, 7)
        ]
        await asyncio.sleep(0)  # they have begun
        with pytest.raises(EngineError, match="it does not answer"):
            await router.set_weights(1, "interrupt")
        others = [await engine.generate(REQUEST) for engine in engines]
        may_answer.set()
        return others + await asyncio.gather(*running)

    with ExitStack() as stack:
        servers = [stack.enter_context(sglang_like()) for _ in range(2)]
        engines = [stack.enter_context(connected(server.url, tmp_path)) for server in servers]
        router = Router(engines)
        router.load_weights(1, lm.named_weights())
        for server in servers:
            monkeypatch.setattr(server, "generate", partial(answers, server.generate))
        monkeypatch.setattr(engines[0], "_interrupt", fails)
        monkeypatch.setattr(engines[1], "_interrupt", lambda: None)
        assert len(asyncio.run(scenario())) == 6
        router.close()


@pytest.fixture
def sglang_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in for SGLang is where Python looks for packages."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here / 'sglang_package'}:{here.parent.parent}")


def start_sglang(lm: CausalLM, folder: Path, **options: Any) -> SglangEngine:
    path = str(write_folder(lm, folder))
    model = Model(
        path, tokenizer=path, dtype="fp32", longest=MAX_TOKENS, trust_remote_code=False, sleeps=True, seed=0
    )
    arguments = server_arguments(Sglang.model_validate({"max_running": 8, **options}), model)
    sending = SendOptions(
        transport="files", bucket_bytes=2**20, timeout_s=LIMIT_S, folder=str(folder / "weights")
    )
    return SglangEngine(
        arguments,
        process_in(folder, sending),
        name="SGLang engine 0",
        max_tokens=MAX_TOKENS,
    )


@pytest.mark.usefixtures("sglang_installed")
def test_a_server_of_the_run_is_started_reported_when_it_dies_and_stopped(
    lm: CausalLM, tmp_path: Path
) -> None:
    before = set(psutil.Process().children(recursive=True))
    with closing(start_sglang(lm, tmp_path)) as engine:
        started = set(psutil.Process().children(recursive=True)) - before
        assert len(started) == 2, "the server, and what ends it with this process"
        engine.load_weights(1, lm.named_weights())
        asyncio.run(engine.set_weights(1))
        (completion,) = ask(engine, REQUEST)
        assert isinstance(completion, Completion)
        assert completion.policy_version == 1
        (server,) = [process for process in started if not process.children()]
        server.kill()
        (error,) = ask(engine, REQUEST)
        assert "SGLang engine 0 exited (killed by SIGKILL)" in str(error)
        assert "fired up" in str(error), "its log ends the message"
    assert not psutil.wait_procs(list(started), timeout=LIMIT_S)[1]


def test_a_server_that_does_not_start_is_an_error_with_its_last_log_lines(
    lm: CausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text("raise SystemExit('there is no GPU here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"exited during startup \(exit status 1\)(?s:.*)no GPU here"):
        start_sglang(lm, tmp_path)


def test_a_process_with_a_guard_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from braid.rollout.engines.child import LoggedProcess;"
        "LoggedProcess.of_command([sys.executable, '-c', 'import time; print(1, flush=True); time.sleep(99)'], "
        "log=Path(sys.argv[1]), environment={});time.sleep(99)"
    )
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", code, str(log)]) as parent:
        while not (log.exists() and log.read_text()):
            time.sleep(0.02)
        started = psutil.Process(parent.pid).children(recursive=True)
        assert len(started) == 2
        parent.kill()
    assert not psutil.wait_procs(started, timeout=LIMIT_S)[1]
