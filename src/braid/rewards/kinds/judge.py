"""Language models as judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import parse_qsl

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from braid.types import Prompt, Trajectory

from .base import RewardPart

if TYPE_CHECKING:
    from braid.config.reward import RewardConfig
    from braid.rewards.base import Making, Part


class JudgeReward(RewardPart):
    """Score that a language model gives to the response.

    A reply without a score, a reply truncated at max_tokens, and a server error count as failed calls: they
    are retried, then the trajectory becomes invalid.
    """

    kind: Literal["judge"]
    """A language model as judge."""
    url: str
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1; or `policy` for the policy
    itself, with the weights that wrote the response."""
    model: str | None = None
    """Name of the model on the server."""
    api_key_env: str | None = None
    """Environment variable that holds the server's API key; no key is sent when null."""
    prompt: str
    """Judge prompt, or the path of a .txt or .md file that holds it. `{prompt}` is the task (its last
    message), `{response}` the policy's answer without its reasoning, `{answer}` the reference, `{column}` any
    column; a literal brace is doubled. `{text}`, `{reasoning}` and `{prefill}` are as for functions, unless
    the data have columns of these names."""
    system: str | None = None
    """System message of the judge; none when null."""
    images: bool = False
    """Send the images of the prompt's messages too, before the text: to a server as image_url parts with data
    URIs. Those of an environment's replies are not sent."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match is the score. When null, the last number in the reply, or
    the last word that is in `scores`."""
    scores: dict[str, float] = Field(default_factory=dict)
    """Scores of words, such as {yes: 1, no: 0}, in any case; when empty, the reply must contain a number."""
    range: tuple[float, float] | None = None
    """Lowest and highest score: scores are clamped to this range and mapped to 0..1; unchanged when null."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge; 0 for greedy decoding."""
    max_tokens: PositiveInt = 1024
    """Maximum length of a reply, in tokens."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the request to the server; null removes a field."""
    timeout_s: PositiveFloat | None = None
    """Timeout of one call, in seconds; reward.timeout_s when null."""
    retries: NonNegativeInt = 4
    """Retries after a failed call, instead of reward.retries; none with url=policy at temperature 0, where a
    retry would give the same reply."""
    backoff_s: NonNegativeFloat = 1.0
    """Base delay before the first retry in seconds, doubled for each further one; the actual delay is drawn
    between half and all of it, by the run's seed. A longer Retry-After of the server takes precedence."""
    max_backoff_s: PositiveFloat = 60.0
    """Longest delay between retries, in seconds; a server that asks for more counts as failed permanently."""
    concurrency: PositiveInt | None = None
    """Maximum concurrent calls of this judge, within reward.concurrency, which applies when null."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> JudgeReward:
        if self.url == "policy":
            if needless := [name for name in ("model", "api_key_env", "body") if getattr(self, name)]:
                raise ValueError(
                    f"url=policy uses the policy as the judge, so {needless[0]} does not apply; remove it"
                )
        elif not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"url={self.url!r} must be http(s)://... or policy; set it to the server's base URL, such as "
                "http://localhost:8000/v1"
            )
        elif "@" in self.url.split("/")[2]:
            raise ValueError(
                "url contains a password, which would be stored in the run folder; use api_key_env with "
                "the name of an environment variable instead"
            )
        elif not self.model:
            raise ValueError("model is missing; set it to the name of the model on the server")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range={list(self.range)} is empty; set [lowest, highest]")
        return self

    has_own_limits: ClassVar[bool] = True
    reads_files: ClassVar[bool] = True
    reads_messages: ClassVar[bool] = True

    @property
    def asks_policy(self) -> bool:
        return self.url == "policy"

    @property
    def shows_images(self) -> bool:
        return self.images

    def limits(self, config: RewardConfig) -> tuple[int, int]:
        is_certain = self.asks_policy and self.temperature == 0  # the reply would be the same
        return 0 if is_certain else self.retries, self.concurrency or config.concurrency

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.judge import HttpChat, judge, policy_chat

        score = partial(
            judge,
            self,
            timeout_s=making.timeout_s,
            seed=making.seed,
            base_dir=making.base_dir,
            key=making.key,
        )
        if not self.asks_policy:
            chat = HttpChat(self, key=making.key)
            return Part(score(chat), chat.close)
        if making.services.generate is None:
            raise making.without_service(f"{making.key}.url", "a text policy")
        return Part(score(policy_chat(self, making.services.generate)))

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.judge import fill_template, read_template

        template = read_template(self.prompt, base_dir, key=f"{key}.prompt")
        return lambda prompt: fill_template(template, Trajectory(prompt, 0), key=f"{key}.prompt")

    def problems(self, key: str, max_tokens: int | None) -> Iterator[tuple[str, str]]:
        if self.asks_policy and max_tokens is not None and self.max_tokens >= max_tokens:
            why = f"{self.max_tokens} tokens for the reply leave no room for the question"
            fix = f"the policy accepts {max_tokens} tokens in total; lower it below {max_tokens}"
            yield f"{key}.max_tokens", f"{why}: {fix}"

    def secrets(self, key: str) -> Iterator[tuple[str, str]]:
        yield from (
            (f"{key}.body.{name}", name) for name, value in self.body.items() if isinstance(value, str)
        )
        yield from ((f"{key}.url", name) for name, _ in parse_qsl(self.url.partition("?")[2]))
