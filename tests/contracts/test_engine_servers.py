"""Servers that fail, and several of them as one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from braid.errors import EngineError
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.router import Router
from braid.rollout.engines.sglang import SglangServer
from braid.weights.sender import SendOptions

from .engines import MAX_TOKENS, MODEL, SglangLike, free_port

REQUEST = Request((3, 4, 5), Sampling(max_new_tokens=4), (0,))


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return load_policy(MODEL, temperature=1.0, seed=0, device=torch.device("cpu"))


@contextmanager
def connected(server: SglangLike, folder: Path, timeout_s: float = 30.0) -> Iterator[SglangServer]:
    sending = SendOptions(transport="files", bucket_bytes=2**20, timeout_s=30.0, folder=str(folder))
    engine = SglangServer(server.url, max_tokens=MAX_TOKENS, sending=sending, timeout_s=timeout_s)
    with closing(engine):
        yield engine


def ask(engine: SglangServer | Router, *requests: Request) -> list[Completion | BaseException]:
    async def gather() -> list[Completion | BaseException]:
        return await asyncio.gather(*(engine.generate(r) for r in requests), return_exceptions=True)

    return asyncio.run(gather())


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    sending = SendOptions(transport="files", bucket_bytes=2**20, timeout_s=5.0, folder=str(tmp_path))
    with pytest.raises(EngineError, match=f"{url} failed on GET /health"):
        SglangServer(url, max_tokens=MAX_TOKENS, sending=sending, timeout_s=5.0)


def test_a_request_outlives_an_error_and_a_cut_line(lm: CausalLM, tmp_path: Path) -> None:
    with SglangLike() as server, connected(server, tmp_path) as engine:
        engine.load_weights(1, lm.named_weights())
        (expected,) = ask(engine, REQUEST)
        server.faults = ["500", "cut"]
        (completion,) = ask(engine, REQUEST)
        assert isinstance(expected, Completion)
        assert isinstance(completion, Completion)
        assert completion.token_ids == expected.token_ids
        assert server.num_asked == 4


def test_a_server_that_goes_on_failing_is_an_error_that_says_what_it_did(
    lm: CausalLM, tmp_path: Path
) -> None:
    with SglangLike() as server, connected(server, tmp_path) as engine:
        engine.load_weights(1, lm.named_weights())
        server.faults = ["500"] * 4
        (error,) = ask(engine, REQUEST)
        assert isinstance(error, EngineError)
        assert f"{server.url} failed on POST /generate (4 tries): answered 500" in str(error)


def test_a_server_without_the_right_weights_gives_no_answer(lm: CausalLM, tmp_path: Path) -> None:
    with SglangLike() as server, connected(server, tmp_path) as engine:
        (error,) = ask(engine, REQUEST)
        assert "has no weights" in str(error)
        engine.load_weights(1, lm.named_weights())
        server.update_weights_from_disk(
            {"model_path": str(tmp_path / "version_000001"), "weight_version": "7"}
        )
        (error,) = ask(engine, REQUEST)
        assert "version 7 of the weights in place of 1" in str(error)


@pytest.mark.slow
def test_a_router_shares_prompts_out_and_keeps_those_of_a_group_together(
    lm: CausalLM, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(SglangLike()) for _ in range(2)]
        engines = [stack.enter_context(connected(s, tmp_path / str(i))) for i, s in enumerate(servers)]
        router = Router(engines)
        router.load_weights(1, lm.named_weights())
        groups = [Request((n, 4), Sampling(max_new_tokens=4), (n, i)) for n in range(3, 7) for i in range(3)]
        answers = ask(router, *groups)
        assert all(isinstance(answer, Completion) for answer in answers)
        assert [server.num_asked for server in servers] == [6, 6]
        servers[0].faults = ["500"] * 4
        failed = [answer for answer in ask(router, groups[0], groups[3]) if isinstance(answer, EngineError)]
        assert [servers[0].url in str(error) for error in failed] == [True]
        (answer,) = ask(router, groups[0])
        assert isinstance(answer, Completion)
        assert servers[1].num_asked == 8, "the engine that failed is asked last"
