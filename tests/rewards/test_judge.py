"""Judges with a real local server, and the policy as a judge, replaced by a function."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from email.utils import formatdate
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from tests.leftovers import LIMIT_S
from tests.pictures import picture

from braid.config.reward import RewardConfig
from braid.errors import ConfigError, RewardError
from braid.http import retry_after_s
from braid.images import opened
from braid.report.metrics import Metrics
from braid.rewards.base import Services
from braid.rewards.judge import backoff_s
from braid.rewards.kinds import JudgeReward
from braid.rewards.scorer import Scorer, build_scorer
from braid.types import Image, Message, Status, Trajectory

from .server import Answer, completion, serving

Answered = Callable[..., Trajectory]
Score = Callable[..., list[Trajectory]]
Build = Callable[..., Scorer]

PROMPT = "Task: {prompt}\nReference: {answer}\nAnswer: {response}\nScore from 1 to 10?"


def judge(url: str, **settings: Any) -> dict[str, Any]:
    """A judge with short delays between retries."""
    return {"kind": "judge", "url": url, "model": "m", "prompt": PROMPT, "backoff_s": 0.001, **settings}


def run(scorer: Scorer, *trajectories: Trajectory) -> Metrics:
    return asyncio.run(scorer.score(trajectories))


def test_the_judge_sees_the_answer_and_its_last_number_is_the_score(answered: Answered, score: Score) -> None:
    with serving(lambda *_: completion("It has 2 flaws, so 7/10")) as server:
        (scored,) = score(
            [answered("42", answer="41")],
            judge(server.url, system="Be strict.", max_tokens=64, body={"seed": 3, "temperature": None}),
        )
    assert scored.reward_parts == {"judge": 7.0}
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions"
    assert "authorization" not in headers
    assert body == {
        "model": "m",
        "max_tokens": 64,
        "seed": 3,
        "messages": [
            {"role": "system", "content": "Be strict."},
            {
                "role": "user",
                "content": "Task: the task\nReference: 41\nAnswer: 42\nScore from 1 to 10?",
            },
        ],
    }


def _looked(answered: Answered, *images: Image) -> Trajectory:
    """An answer to a prompt with these images."""
    trajectory = answered("42", answer="41")
    shown = [{"type": "image", "image": image} for image in images]
    content = [*shown, {"type": "text", "text": "the task"}]
    prompt = replace(trajectory.prompt, messages=({"role": "user", "content": content},))
    trajectory.prompt = prompt
    return trajectory


def test_a_judge_of_images_gets_those_of_the_prompt_before_the_text(answered: Answered, score: Score) -> None:
    png, bmp = picture(0), BytesIO()
    opened(picture(1)).save(bmp, "BMP")
    with serving(lambda *_: completion("7")) as server:
        (scored,) = score([_looked(answered, png, Image.of(bmp.getvalue()))], judge(server.url, images=True))
        score([_looked(answered, png)], judge(server.url))
        score([answered("42", answer="41")], judge(server.url, images=True))
    assert scored.reward == 7.0
    shown, text_only, without = (body["messages"][0]["content"] for _, _, body in server.requests)
    question = "Task: the task\nReference: 41\nAnswer: 42\nScore from 1 to 10?"
    assert text_only == without == question
    *images, text = shown
    assert text == {"type": "text", "text": question}
    assert [part["type"] for part in images] == ["image_url"] * 2
    heads, files = zip(*(part["image_url"]["url"].split(",", 1) for part in images), strict=True)
    assert heads == ("data:image/png;base64",) * 2
    assert base64.b64decode(files[0]) == png.data
    sent = [opened(Image.of(base64.b64decode(file))).tobytes() for file in files]
    assert sent == [opened(picture(number)).tobytes() for number in (0, 1)]


@pytest.mark.parametrize(
    ("settings", "reply", "score_"),
    [
        ({}, "8", 8.0),
        ({}, "Score: 3.5.", 3.5),
        ({}, "7-8, say 7", 7.0),
        ({"range": [1, 10]}, "10", 1.0),
        ({"range": [1, 10]}, "0", 0.0),
        ({"range": [1, 5]}, "4", 0.75),
        ({"pattern": r"\[\[(\d+)\]\]"}, "[[3]] of 10, no, [[4]]\nbest is 9", 4.0),
        ({"scores": {"yes": 1, "no": 0.0}}, "No... wait, YES.", 1.0),
        ({"scores": {"good": 1, "not good": -1}}, "This is not good", -1.0),
        ({"pattern": r"verdict: (\w+)", "scores": {"a": 1, "b": 0}}, "b\nVerdict: A", 1.0),
    ],
)
def test_scores_are_read_as_configured(
    answered: Answered, score: Score, settings: dict[str, Any], reply: str, score_: float
) -> None:
    with serving(lambda *_: completion(reply)) as server:
        (scored,) = score([answered("42", answer="41")], judge(server.url, **settings))
    assert scored.reward == score_


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (completion("I cannot say."), "the judge's reply has no score: 'I cannot say.'"),
        (completion("12,5"), "the judge's reply has no score: '12,5'"),
        (
            completion("7", reason="length"),
            "the judge's reply was truncated; raise reward.parts[0].max_tokens",
        ),
        (completion(None), "the judge's reply has no text"),
        (Answer("<html>"), "the server failed: the answer is not JSON: '<html>'"),
        (Answer('{"choices": []}'), "the server's reply is not a chat completion"),
        (Answer('["choices"]'), "the server's reply is not a chat completion"),
        (Answer("busy", status=500), "the server failed: answered 500: 'busy'"),
        (Answer("x" * 64, cut=True), "the server failed: RemoteProtocolError: "),
    ],
)
def test_a_reply_without_a_score_is_a_failure_that_is_retried(
    answered: Answered, build: Build, answer: Answer, fault: str
) -> None:
    with serving(lambda number, _: answer if number < 2 else completion("9")) as server:
        patient, hasty = (build(judge(server.url, retries=n)) for n in (2, 1))
        good = answered("42", answer="41")
        metrics = run(patient, good)
        server.requests.clear()
        bad = answered("42", answer="41")
        run(hasty, bad)
    assert (good.reward, metrics.value("reward/retries/judge")) == (9.0, 2)
    assert metrics.value("reward/time/judge_s") > 0
    assert (bad.reward, bad.status) == (None, Status.INVALID)
    assert bad.reason.startswith(f"reward judge: {fault}")


def test_a_client_error_is_not_retried(answered: Answered, score: Score) -> None:
    with serving(lambda *_: Answer('{"error": "no such model"}', status=404)) as server:
        (scored,) = score([answered("42", answer="41")], judge(server.url))
    assert len(server.requests) == 1
    assert scored.reason == 'reward judge: the server failed: answered 404: \'{"error": "no such model"}\''


def test_a_server_that_is_not_there_is_a_failure(answered: Answered, score: Score) -> None:
    with serving(lambda *_: completion("9")) as server:
        pass
    (scored,) = score([answered("42", answer="41")], judge(server.url, retries=1))
    assert scored.reason.startswith("reward judge: the server failed: ConnectError: ")


def test_retry_after_is_waited_for_unless_it_is_too_long(
    answered: Answered, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Answer("slow down", status=429, headers={"retry-after": "0.3"})
    with serving(lambda number, _: busy if number == 0 else completion("9")) as server:
        patient = answered("42", answer="41")
        start = time.perf_counter()
        run(build(judge(server.url)), patient)
        waited = time.perf_counter() - start
        server.requests.clear()
        hasty = answered("42", answer="41")
        run(build(judge(server.url, max_backoff_s=0.2)), hasty)
    assert patient.reward == 9.0
    assert waited >= 0.3  # a wait asked for is a lower bound, not a measure of speed
    assert hasty.reason == (
        "reward judge: the server failed: answered 429: 'slow down'; the server asks to wait 0.3 s, above "
        "reward.parts[0].max_backoff_s=0.2"
    )


def test_retry_after_may_be_a_date() -> None:
    headers = {"retry-after": formatdate(1_000_030, usegmt=True)}
    assert retry_after_s(headers, now=lambda: 1_000_000) == 30.0
    assert retry_after_s(headers, now=lambda: 2_000_000) == 0.0
    assert [retry_after_s({"retry-after": text}) for text in ("soon", "", "-1", "nan", "1e9", "2")] == [
        0, 0, 0, 0, 0, 2,
    ]  # fmt: skip


def test_waits_grow_and_depend_on_the_seed() -> None:
    config = JudgeReward.model_validate(judge("http://127.0.0.1:9", backoff_s=2.0, max_backoff_s=8.0))
    first, again, other = (
        [backoff_s(config, seed, "a:0:0", attempt) for attempt in range(4)] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert all(low <= wait <= 2 * low for wait, low in zip(first, (1.0, 2.0, 4.0, 4.0), strict=True))


@pytest.mark.slow
def test_a_slow_judge_is_a_failure_and_delays_no_other(answered: Answered, score: Score) -> None:
    never = threading.Event()

    def answer(_: int, body: dict[str, Any]) -> Answer:
        slow = completion("9")
        slow.wait = never if "Answer: slow" in body["messages"][0]["content"] else None
        return slow

    with serving(answer) as server:
        slow, fast = score(
            [answered("slow", answer="41"), answered("fast", answer="41")],
            judge(server.url, retries=0, timeout_s=3.0),
        )
    assert slow.reason == "reward judge: no reply within reward.parts[0].timeout_s=3"
    assert fast.reward == 9.0


def test_concurrent_calls_are_limited(answered: Answered, score: Score) -> None:
    lock, most, now = threading.Lock(), 0, 0
    three = threading.Barrier(3)

    def answer(*_: Any) -> Answer:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        three.wait(timeout=LIMIT_S)
        with lock:
            now -= 1
        return completion("9")

    with serving(answer) as server:
        score(
            [answered("42", answer="41") for _ in range(9)], judge(server.url, concurrency=3), concurrency=1
        )
    assert most == 3


def test_a_cancelled_call_closes_its_connection(answered: Answered, build: Build) -> None:
    never = threading.Event()
    arrived = threading.Event()

    def answer(*_: Any) -> Answer:
        arrived.set()
        return Answer(wait=never)

    async def cancelled(scorer: Scorer) -> None:
        task = asyncio.create_task(scorer.score([answered("42", answer="41")]))
        await asyncio.to_thread(arrived.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(answer) as server:
        asyncio.run(cancelled(build(judge(server.url))))


@pytest.mark.parametrize(
    "echo", ["sk-very-secret", "c2stdmVyeS1zZWNyZXQ=", "sk%2Dvery%2dsecret", "736B2D766572792D736563726574"]
)
def test_the_api_key_is_sent_and_never_shown(
    echo: str,
    answered: Answered,
    score: Score,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = "sk-very-secret"
    monkeypatch.setenv("JUDGE_KEY", f" {secret}\n")
    caplog.set_level(logging.DEBUG)
    refusal = Answer(f'{{"error": "the key {echo} has no credit left"}}', status=401)
    with serving(lambda *_: refusal) as server:
        (scored,) = score([answered("42", answer="41")], judge(server.url, api_key_env="JUDGE_KEY"))
    ((_, headers, _),) = server.requests
    assert headers["authorization"] == f"Bearer {secret}"
    assert re.search(r"the key \*\*\*.{0,2} has no credit left", scored.reason)
    assert secret not in caplog.text
    assert echo not in caplog.text


@pytest.mark.parametrize(
    ("settings", "key", "fault"),
    [
        ({"api_key_env": "NO_SUCH_KEY"}, "api_key_env", "the environment variable NO_SUCH_KEY is not set; set it"),
        ({"api_key_env": "BAD_KEY"}, "api_key_env", "the environment variable BAD_KEY is not a valid API "
"key"),
        ({"url": "http://"}, "url", "invalid URL 'http://': it has no host"),
        ({"url": "http://[::"}, "url", "invalid URL 'http://[::'"),
        ({"url": "policy", "model": None}, "url", "needs a text policy"),
        ({"prompt": "Is {prompt} right?"}, "prompt", "does not contain the response; add {response}"),
        ({"prompt": "{response} {"}, "prompt", "invalid template "),
        ({"prompt": "rubrik.md"}, "prompt", "'rubrik.md': no such file"),
        ({"pattern": "("}, "pattern", "invalid regular expression"),
        ({"pattern": "[0-9]"}, "pattern", "has no group"),
    ],
)  # fmt: skip
def test_an_invalid_judge_is_a_config_problem(
    build: Build, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], key: str, fault: str
) -> None:
    monkeypatch.setenv("BAD_KEY", "sk-bad key")
    with pytest.raises(ConfigError) as caught:
        build(judge("http://127.0.0.1:9") | settings)
    assert str(caught.value).startswith(f"reward.parts[0].{key}: ")
    assert fault in str(caught.value)
    assert "sk-bad" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"url": "ftp://x"}, "must be http(s)://... or policy"),
        ({"url": "http://me:secret@host/v1"}, "url contains a password"),
        ({"model": None}, "model is missing"),
        ({"url": "policy"}, "url=policy uses the policy as the judge, so model does not apply; remove it"),
        ({"range": [3, 3]}, "is empty; set [lowest, highest]"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match="Value error") as caught:
        RewardConfig.model_validate({"parts": [judge("http://127.0.0.1:9") | settings]})
    assert fault in str(caught.value)


def test_the_question_may_use_any_column_and_come_from_a_file(
    answered: Answered, score: Score, tmp_path: Path
) -> None:
    (tmp_path / "rubric.md").write_text("{rubric[0]}: {response} {{0}}")
    with serving(lambda *_: completion("9")) as server:
        (scored,) = score([answered("42 {x}", rubric=["be right"])], judge(server.url, prompt="rubric.md"))
    assert scored.reward == 9.0
    assert server.requests[0][2]["messages"][0]["content"] == "be right: 42 {x} {0}"


def test_the_judge_reads_the_answer_and_the_rest_only_if_asked(answered: Answered, score: Score) -> None:
    prompt = "{response}|{prefill}|{text}|{reasoning}"
    turn = {"prefill": "<think>", "sampled": "hm</think>42", "reasoning": "a column"}
    with serving(lambda *_: completion("9")) as server:
        trajectories = [answered("42", **turn), answered("42", **turn)]
        trajectories[1].prompt.fields["reasoning"] = "of the data"  # pyright: ignore[reportIndexIssue]
        score(trajectories, judge(server.url, prompt=prompt))
    asked = sorted(request[2]["messages"][0]["content"] for request in server.requests)
    assert asked == ["42|<think>|hm</think>42|a column", "42|<think>|hm</think>42|of the data"]


@pytest.mark.parametrize("reply", ["<think>0? No, 3.</think>\n9", "0? No, 3.\n</think>\n\n9"])
def test_reasoning_that_a_server_leaves_in_its_reply_is_not_scored(
    answered: Answered, score: Score, reply: str
) -> None:
    pattern = r"\A\s*(\d+)"
    with serving(lambda *_: completion(reply)) as server:
        (scored,) = score([answered("42", answer="42")], judge(server.url, pattern=pattern))
    assert (scored.reward, scored.reason) == (9.0, "")
    with serving(lambda *_: completion("<think>9? Or")) as server:
        (scored,) = score([answered("42", answer="42")], judge(server.url), retries=0)
    assert scored.reward is None
    assert "is reasoning alone; raise" in str(scored.reason)


@pytest.mark.parametrize(
    ("prompt", "fault"),
    [
        (
            "{rubrik} {response}",
            "the prompt has no column 'rubrik', did you mean 'rubric'?; available: rubric, prompt",
        ),
        ("{answer} {response}", "the prompt has no reference answer"),
        ("{rubric.x} {response}", "cannot fill reward.parts[0].prompt: AttributeError"),
    ],
)
def test_a_prompt_that_cannot_be_filled_is_not_a_wrong_answer(
    answered: Answered, score: Score, prompt: str, fault: str
) -> None:
    (scored,) = score([answered("42", rubric="r")], judge("http://127.0.0.1:9", prompt=prompt))
    assert scored.reason.startswith(f"reward judge: {fault}")


def test_the_policy_judges_by_its_own_engine(answered: Answered, tmp_path: Path) -> None:
    asked: list[tuple[Any, ...]] = []

    async def generate(
        messages: Sequence[Message],
        *,
        max_tokens: int,
        temperature: float,
        key: tuple[int, ...],
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> str:
        assert (top_p, top_k) == (0.9, 4)
        asked.append((json.dumps(messages), max_tokens, temperature, key))
        if len(asked) == 1:
            raise RewardError("the judge's reply was truncated")
        return "yes"

    part = {
        "kind": "judge", "url": "policy", "prompt": "Is {response} good?", "scores": {"yes": 1, "no": 0},
        "max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
    }  # fmt: skip
    scorer = build_scorer(
        RewardConfig.model_validate({"parts": [part]}), base_dir=tmp_path, services=Services({}, generate)
    )
    first, second, other = answered("42"), answered("42"), answered("41")
    for trajectory in (first, second, other):
        run(scorer, trajectory)
    scorer.close()
    assert [t.reward for t in (first, second, other)] == [1.0] * 3
    messages, max_tokens, temperature, keys = zip(*asked, strict=True)
    assert messages[0] == '[{"role": "user", "content": "Is 42 good?"}]'
    assert set(max_tokens) == {8}
    assert set(temperature) == {0.5}
    # The question and the number of the try seed the draws: another try draws anew, the same question draws
    # the same.
    assert keys[1] == (keys[0][0], 1)
    assert keys[2] == keys[0]
    assert keys[3][0] != keys[0][0]


def test_a_greedy_policy_is_not_retried(answered: Answered, tmp_path: Path) -> None:
    asked = []

    async def generate(messages: Sequence[Message], **settings: Any) -> str:
        asked.append(messages)
        return "hm"

    config = RewardConfig.model_validate(
        {"parts": [{"kind": "judge", "url": "policy", "prompt": "{response}"}]}
    )
    scorer = build_scorer(config, base_dir=tmp_path, services=Services({}, generate))
    trajectory = answered("42")
    run(scorer, trajectory)
    scorer.close()
    assert (len(asked), trajectory.reason) == (1, "reward judge: the judge's reply has no score: 'hm'")
