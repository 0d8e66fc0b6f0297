"""LLM judges: a language model scores the response, over HTTP or on an engine of the run.

Owns the prompt, the request, parsing the score from the reply, and the delay before a retry; scorer.py
retries. The server's key is read from the environment when the run is built; only the client keeps it, which
redacts it in everything that the server returns.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import count
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from random import Random
from string import Formatter
from typing import Any

import httpx2
import regex

from braid.errors import ConfigError, Problem, RewardError, ServerError, suggest
from braid.http import Client
from braid.images import data_uri
from braid.reasoning import without_reasoning
from braid.rewards.kinds import JudgeReward
from braid.types import Message, Trajectory, images_in

from .base import Generate, Later, Score, references_of, task_of
from .rules import extraction

SHOWN_CHARACTERS = 200
"""Maximum length of a reply quoted in an error message."""
NUMBER = r"(?<![\w./]|\d,)([-+]?\d+(?:\.\d+)?)(?!\w|[.,]\d)"
"""A standalone number; in 7/10 it is the 7."""

Chat = Callable[[list[Message], int], Awaitable[str]]
"""Model that answers messages, given the number of the attempt. Raises RewardError if there is no complete
reply."""


def judge(config: JudgeReward, chat: Chat, *, timeout_s: float, seed: int, base_dir: Path, key: str) -> Score:
    """Score each response by a request to `chat`. `timeout_s` is reward.timeout_s, the default if the judge
    sets none. Raises ConfigError for an invalid prompt or pattern."""
    timeout_key = "reward.timeout_s" if config.timeout_s is None else f"{key}.timeout_s"
    timeout_s = config.timeout_s or timeout_s
    template = read_template(config.prompt, base_dir, key=f"{key}.prompt")
    read = score_reader(config, timeout_s, key=key)

    async def ask(messages: list[Message], name: str, attempts: Iterator[int]) -> float:
        attempt = next(attempts)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await chat(messages, attempt)
            return read(reply)
        except TimeoutError:
            error = RewardError(f"no reply within {timeout_key}={timeout_s:g}")
        except RewardError as failure:
            error = failure
        if not config.is_on_engine:  # where an engine of the run would only stand idle
            error.wait_s = max(error.wait_s, backoff_s(config, seed, name, attempt))
        if error.wait_s > config.max_backoff_s:
            raise RewardError(
                f"{error}; the server asks to wait {error.wait_s:g} s, above {key}.max_backoff_s="
                f"{config.max_backoff_s:g}",
                is_final=True,
            ) from error
        raise error

    def score(trajectory: Trajectory) -> Later:
        question = fill_template(template, trajectory, key=f"{key}.prompt")
        content: Any = question
        if config.images and (images := images_in(trajectory.prompt.messages)):
            shown = [{"type": "image", "image": image} for image in images]
            content = [*shown, {"type": "text", "text": question}]
        messages = [Message(role="user", content=content)]
        if config.system is not None:
            messages.insert(0, Message(role="system", content=config.system))
        return partial(ask, messages, f"{trajectory.prompt.uid}:{trajectory.sample}", count())

    return score


def backoff_s(config: JudgeReward, seed: int, name: str, attempt: int) -> float:
    """Seconds to wait after failed attempt number `attempt`: between half and all of
    min(backoff_s * 2^attempt, max_backoff_s)."""
    longest = min(config.backoff_s * 2 ** min(attempt, 64), config.max_backoff_s)
    return longest * (1 + Random(f"{seed}:{name}:{attempt}").random()) / 2


def read_template(prompt: str, base_dir: Path, *, key: str) -> str:
    """The judge's prompt template, read from a file if `prompt` is the path of one. Raises ConfigError for a
    missing file, an invalid template, or one without {response}."""
    if prompt.endswith((".txt", ".md")) and "\n" not in prompt:
        file = base_dir / Path(prompt).expanduser()
        if not isfile(file):
            near = suggest(file.name, [p.name for p in file.parent.glob("*")])
            raise ConfigError([Problem(key, f"{prompt!r}: no such file: {file}{near}", "config")])
        prompt = file.read_text(encoding="utf-8")
    try:
        names = _names(prompt)
    except ValueError as error:
        problem = f"invalid template {prompt!r}: {error}; double literal braces"
        raise ConfigError([Problem(key, problem, "config")]) from error
    if "response" not in names:
        raise ConfigError([Problem(key, "does not contain the response; add {response}", "config")])
    return prompt


def _names(template: str) -> list[str]:
    """The columns in the placeholders of a template."""
    return [regex.split(r"[.\[]", name)[0] for _, name, _, _ in Formatter().parse(template) if name]


def fill_template(template: str, trajectory: Trajectory, *, key: str) -> str:
    """Fill the template for one response. Raises RewardError if a column is missing or cannot be
    formatted."""
    columns = {**trajectory.prompt.fields, "prompt": task_of(trajectory), "response": trajectory.answer_text}
    columns.setdefault("text", trajectory.sampled_text)
    columns.setdefault("reasoning", trajectory.reasoning_text)
    columns.setdefault("prefill", trajectory.prefill)
    columns.pop("answer", None)
    for name in _names(template):
        if name == "answer":
            columns[name] = " or ".join(references_of(trajectory.prompt))
        elif name not in columns:
            known = [*(column for column in columns if column != "answer"), "answer"]
            raise RewardError(
                f"the prompt has no column {name!r}{suggest(name, known)}; available: {', '.join(known)}",
                is_final=True,
            )
    try:
        return template.format_map(columns)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise RewardError(
            f"cannot fill {key}: {type(error).__name__}: {error}; double literal braces",
            is_final=True,
        ) from error


def score_reader(config: JudgeReward, timeout_s: float, *, key: str) -> Callable[[str], float]:
    """Return a function that parses the score from a judge's reply. A reply without a score raises
    RewardError and is never scored 0."""
    scores = {word.casefold(): score for word, score in config.scores.items()}
    words = "|".join(map(regex.escape, sorted(config.scores, key=len, reverse=True)))
    pattern = config.pattern or (rf"(?<!\w)({words})(?!\w)" if words else NUMBER)
    flags = regex.DOTALL | regex.IGNORECASE
    extract = extraction(pattern, timeout_s, key=f"{key}.pattern", flags=flags)

    def read(reply: str) -> float:
        extracted = extract(reply)
        try:
            score = scores[extracted.casefold()] if scores and extracted else float(extracted or "")
        except (KeyError, ValueError):
            raise RewardError(f"the judge's reply has no score: {_shown(reply)}") from None
        if not math.isfinite(score):
            raise RewardError(f"the judge's score is not a finite number: {_shown(reply)}")
        if config.range is None:
            return score
        low, high = config.range
        return (min(max(score, low), high) - low) / (high - low)

    return read


def _shown(text: str) -> str:
    """The end of a text for error messages, where scores usually are."""
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"...{text[-SHOWN_CHARACTERS:]}")


def engine_chat(config: JudgeReward, generate: Generate) -> Chat:
    """The policy, or a model of the judge's own, on an engine of the run. Sampling is seeded by messages and
    attempt number, so that a judgement neither depends on other requests nor affects them."""

    async def chat(messages: list[Message], attempt: int) -> str:
        digest = sha256(json.dumps(messages, default=lambda image: image.key).encode()).digest()
        return await generate(
            messages,
            max_tokens=config.max_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            key=(int.from_bytes(digest[:7]), attempt),
        )

    return chat


class HttpChat:
    """A server with OpenAI's chat completions API (POST {url}/chat/completions)."""

    def __init__(self, config: JudgeReward, *, key: str) -> None:
        """Raises ConfigError for an invalid URL, and if the environment variable of the key is not set."""
        secret = None if config.api_key_env is None else _secret(config.api_key_env, key=key)
        self._url = _endpoint(config.url or "", key=key)
        self._max_tokens_key = f"{key}.max_tokens"
        fields = {
            "model": config.model,
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
            **config.body,
        }
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._client = Client(self._url, timeout_s=None, secret=secret, uses_proxies=True)
        self.close = self._client.close

    async def __call__(self, messages: list[Message], attempt: int) -> str:  # noqa: ARG002  # no seed is sent
        body = {**self._fields, "messages": [_as_openai(message) for message in messages]}
        asked = self._client.start("POST", self._url, body, tries=1, is_new=False)  # scorer.py retries
        try:
            answer = await asyncio.wrap_future(asked)
        except ServerError as error:
            failure = f"the server failed: {error.why}"
            raise RewardError(failure, wait_s=error.wait_s, is_final=error.is_final) from None
        shown = _shown(self._client.redacted(json.dumps(answer)))
        try:
            choice = answer["choices"][0]
            text, reason = choice["message"]["content"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            raise RewardError(f"the server's reply is not a chat completion: {shown}") from None
        if reason == "length":
            raise RewardError(f"the judge's reply was truncated; raise {self._max_tokens_key}")
        if not isinstance(text, str):
            raise RewardError(f"the judge's reply has no text: {shown}")
        reply = without_reasoning(text)  # of servers without a parser for it
        if text and not reply:
            raise RewardError(f"the judge's reply is reasoning alone; raise {self._max_tokens_key}")
        return self._client.redacted(reply)


def _as_openai(message: Message) -> dict[str, Any]:
    """A message with its images as image_url parts."""
    if isinstance(message["content"], str):
        return dict(message)
    parts = [
        {"type": "image_url", "image_url": {"url": data_uri(part["image"])}}
        if part["type"] == "image"
        else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _secret(variable: str, *, key: str) -> str:
    secret = os.environ.get(variable, "").strip()
    if not secret:
        problem = (
            f"the environment variable {variable} is not set; set it to the server's API key, or remove "
            "api_key_env"
        )
    elif not secret.isascii() or not secret.isprintable() or " " in secret:
        problem = (
            f"the environment variable {variable} is not a valid API key: it contains spaces or non-ASCII "
            "characters"
        )
    else:
        return secret
    raise ConfigError([Problem(f"{key}.api_key_env", problem, "config")])


def _endpoint(url: str, *, key: str) -> str:
    try:
        base = httpx2.URL(url)
        if not base.host:
            raise httpx2.InvalidURL("it has no host")
    except httpx2.InvalidURL as error:
        raise ConfigError([Problem(f"{key}.url", f"invalid URL {url!r}: {error}", "config")]) from error
    path = base.path.rstrip("/")
    return str(
        base if path.endswith("/chat/completions") else base.copy_with(path=f"{path}/chat/completions")
    )
