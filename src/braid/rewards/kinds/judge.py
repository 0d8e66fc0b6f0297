"""Language models as judges."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import parse_qsl

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from braid.config.backends import DType
from braid.config.kinds import KindOf
from braid.rollout.engines import ENGINES, Engine
from braid.rollout.engines.base import ServedEngine
from braid.rollout.engines.native.kind import Native
from braid.types import Prompt, Trajectory

from .base import RewardPart

if TYPE_CHECKING:
    from braid.config.reward import RewardConfig
    from braid.rewards.base import Making, Part

    EngineKind = Engine
else:
    EngineKind = KindOf(Engine, ENGINES, "native").field()

_OF_MODEL = ("tokenizer", "template", "dtype", "engine", "trust_remote_code")
"""Keys of a model that the run loads."""
_OF_SERVER = ("model", "api_key_env", "body")
"""Keys of a request to a server."""
_OF_SAMPLING = ("top_p", "top_k")
"""Keys of sampling on an engine; a server gets those that it knows in `body`."""


class JudgeReward(RewardPart):
    """Score that a language model gives to the response.

    A reply without a score, a reply truncated at max_tokens, and a server error count as failed calls: they
    are retried, then the trajectory becomes invalid.
    """

    kind: Literal["judge"]
    """A language model as judge."""
    url: str | None = None
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1; or `policy` for the policy
    itself, with the weights that wrote the response. Set either `url` or `path`."""
    path: str | None = None
    """Folder or hub name of a language model that the run loads as the judge, on the devices of
    cluster.placement's role `reward`, or of rollout."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name for `path`; the model's own when null."""
    template: str | None = None
    """Chat template for `path` as Jinja text, or the path of a .jinja file; the tokenizer's own when null."""
    dtype: DType = "fp32"
    """Dtype of the weights of `path`."""
    engine: EngineKind = Native()
    """Inference engine of `path`, as in rollout.engine. Judges of the same model and engine share one."""
    trust_remote_code: bool = False
    """Allow the folder `path` to run its own Python code."""
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
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling of a judge with `path` or url=policy, as in rollout.sampling."""
    top_k: NonNegativeInt = 0
    """Most likely tokens that a judge with `path` or url=policy samples from; 0 for all."""
    max_tokens: PositiveInt = 1024
    """Maximum length of a reply, in tokens."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Additional fields of the request to the server; null removes a field."""
    timeout_s: PositiveFloat | None = None
    """Timeout of one call, in seconds; reward.timeout_s when null."""
    retries: NonNegativeInt = 4
    """Retries after a failed call, instead of reward.retries; none with `path` or url=policy at temperature
    0, where a retry would give the same reply."""
    backoff_s: NonNegativeFloat = 1.0
    """Base delay before the first retry of a server in seconds, doubled for each further one; the actual
    delay is drawn between half and all of it, by the run's seed. A longer Retry-After of the server takes
    precedence."""
    max_backoff_s: PositiveFloat = 60.0
    """Longest delay between retries, in seconds; a server that asks for more counts as failed permanently."""
    concurrency: PositiveInt | None = None
    """Maximum concurrent calls of this judge, within reward.concurrency, which applies when null."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> JudgeReward:
        self._check_source()
        if self.temperature == 0 and (needless := self._set(_OF_SAMPLING)):
            raise ValueError(f"temperature=0 is greedy decoding, without {needless[0]}; remove it")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range={list(self.range)} is empty; set [lowest, highest]")
        return self

    def _check_source(self) -> None:
        """Raise ValueError unless the settings are those of one judge: a model of its own, the policy, or a
        server."""
        if (self.url is None) == (self.path is None):
            which = "both are" if self.url else "neither is"
            raise ValueError(
                f"{which} set: either url, a server's base URL or policy, or path, a model's folder; set one"
            )
        if self.path is not None:
            self._refuse(_OF_SERVER, "path names a model that the run loads")
            if self.images:
                raise ValueError(
                    "images are read by a judge with url, not by one with path; set url, or remove images"
                )
            if isinstance(self.engine, ServedEngine) and self.engine.servers:
                raise ValueError("engine.servers: set url for a judge on a server, instead of path")
        elif self.url == "policy":
            self._refuse((*_OF_MODEL, *_OF_SERVER), "url=policy uses the policy as the judge")
        else:
            self._refuse(_OF_MODEL, "url names a server")
            self._refuse(_OF_SAMPLING, "a server gets its own settings in body")
            self._check_url(self.url or "")

    def _check_url(self, url: str) -> None:
        """Raise ValueError unless a server's URL is complete and has no password."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(
                f"url={url!r} must be http(s)://... or policy; set it to the server's base URL, such as "
                "http://localhost:8000/v1"
            )
        if "@" in url.split("/")[2]:
            raise ValueError(
                "url contains a password, which would be stored in the run folder; use api_key_env with "
                "the name of an environment variable instead"
            )
        if not self.model:
            raise ValueError("model is missing; set it to the name of the model on the server")

    def _set(self, names: tuple[str, ...]) -> list[str]:
        """Which of these keys have another value than their default."""
        return [
            name
            for name in names
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        if needless := self._set(names):
            raise ValueError(f"{why}, so {needless[0]} does not apply; remove it")

    has_own_limits: ClassVar[bool] = True
    reads_files: ClassVar[bool] = True
    reads_messages: ClassVar[bool] = True

    @property
    def shows_images(self) -> bool:
        return self.images

    @property
    def weights_dtype(self) -> DType:
        """Dtype of the weights of `path` on its engine."""
        return self.dtype if self.engine.dtype == "auto" else self.engine.dtype

    @property
    def engine_key(self) -> str:
        """Equal for judges that share an engine."""
        return self.model_dump_json(include={"path", "tokenizer", "dtype", "engine", "trust_remote_code"})

    @property
    def is_on_engine(self) -> bool:
        """Whether an engine of the run generates its replies, not a server."""
        return self.path is not None or self.url == "policy"

    def limits(self, config: RewardConfig) -> tuple[int, int]:
        is_certain = self.is_on_engine and self.temperature == 0  # the reply would be the same
        return 0 if is_certain else self.retries, self.concurrency or config.concurrency

    def build(self, making: Making) -> Part:
        from braid.rewards.base import Part
        from braid.rewards.judge import HttpChat, engine_chat, judge

        score = partial(
            judge,
            self,
            timeout_s=making.timeout_s,
            seed=making.seed,
            base_dir=making.base_dir,
            key=making.key,
        )
        if not self.is_on_engine:
            chat = HttpChat(self, key=making.key)
            return Part(score(chat), chat.close)
        services = making.services
        generate = services.generate if self.path is None else services.judges.get(making.number)
        if generate is None:
            key, what = ("url", "a text policy") if self.path is None else ("path", "an engine")
            raise making.without_service(f"{making.key}.{key}", what)
        return Part(score(engine_chat(self, generate)))

    def reader(self, key: str, base_dir: Path) -> Callable[[Prompt], object]:
        from braid.rewards.judge import fill_template, read_template

        template = read_template(self.prompt, base_dir, key=f"{key}.prompt")
        return lambda prompt: fill_template(template, Trajectory(prompt, 0), key=f"{key}.prompt")

    def problems(self, key: str, max_tokens: int | None) -> Iterator[tuple[str, str]]:
        if self.url == "policy" and max_tokens is not None and self.max_tokens >= max_tokens:
            why = f"{self.max_tokens} tokens for the reply leave no room for the question"
            fix = f"the policy accepts {max_tokens} tokens in total; lower it below {max_tokens}"
            yield f"{key}.max_tokens", f"{why}: {fix}"

    def secrets(self, key: str) -> Iterator[tuple[str, str]]:
        yield from (
            (f"{key}.body.{name}", name) for name, value in self.body.items() if isinstance(value, str)
        )
        yield from ((f"{key}.url", name) for name, _ in parse_qsl((self.url or "").partition("?")[2]))
