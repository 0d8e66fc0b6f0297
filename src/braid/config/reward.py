"""Rewards: parts, each a score with a weight."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .backends import DType
from .base import Section


class _Part(Section):
    name: str = ""
    """Names the part in metrics (`reward/part/NAME`); its kind when empty, or the function's name."""
    weight: float = 1.0
    """Factor in the sum."""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose trajectories it scores; all when empty."""


class MathReward(_Part):
    """1 if math-verify finds the answer equal to the reference, else 0. The answer is the number after `####`, where there
    is one."""

    kind: Literal["math"]
    """Mathematical equality by math-verify."""


class ReasoningGymReward(_Part):
    """The generator's own scorer, for procedural sources."""

    kind: Literal["reasoning_gym"]
    """The scorer that belongs to the procedural source."""
    pattern: str | None = None
    """Regular expression whose last match's first group is the answer to score; the whole text when absent."""


class ExactReward(_Part):
    """1 if the answer equals the reference, else 0."""

    kind: Literal["exact"]
    """Equality of text."""
    pattern: str | None = None
    """Regular expression whose last match's first group is the answer; the whole text when absent."""
    ignore_case: bool = False
    """Compare without regard to case."""
    ignore: str = ""
    """Characters that do not count, such as the comma of 1,000."""


class PatternReward(_Part):
    """1 if the text matches, else 0: for format rewards."""

    kind: Literal["pattern"]
    """A regular expression to find in the text."""
    pattern: str
    """Searched for in the whole answer (dot matches newlines)."""


class FunctionReward(_Part):
    """A Python function of yours."""

    kind: Literal["function"]
    """Any function, plain or async."""
    path: str
    """Dotted path, `package.module.function`, or `file.py:function` relative to the config."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Passed as keyword arguments."""


class ChoiceReward(_Part):
    """1 if the answer's letter is that of the reference, else 0. The answer's letter is the one in the last box, else after
    the last "answer is" or "answer:", else the last that stands alone."""

    kind: Literal["choice"]
    """Multiple choice."""
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,}$")
    """The letters that an answer can be."""


class LengthReward(_Part):
    """0 up to `start`, falling linearly to -1 at `end`; -1 from there on."""

    kind: Literal["length"]
    """A penalty of long answers."""
    unit: Literal["tokens", "characters"] = "tokens"
    """tokens: what the policy wrote in all turns. characters: the text of the last turn."""
    start: NonNegativeInt = 0
    """Length from which it falls."""
    end: PositiveInt
    """Length at which it is -1."""

    @model_validator(mode="after")
    def _start_before_end(self) -> LengthReward:
        if self.start >= self.end:
            raise ValueError(f"start={self.start} is not below end={self.end}; lower start or raise end")
        return self


class CodeReward(_Part):
    """Runs the answer's Python code against the row's tests, in a process with limits on time, memory and files.

    Tests are Python text with assertions; a list of such texts; a list of {input, output} for programs that read and
    print; {inputs, outputs} with two lists; or any of these as JSON text.
    """

    kind: Literal["code"]
    """Python code that must pass tests."""
    tests_key: str = "tests"
    """Column of the tests."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every test passes, else 0. fraction: share of tests that pass."""
    pattern: str = r"```(?:python|py)?[ \t]*\n(.*?)```"
    """Regular expression whose last match's first group is the code (dot matches newlines); without a match the score is 0."""
    test_timeout_s: PositiveFloat = 5.0
    """Limit for one test; one that takes longer has failed. Stands in for reward.timeout_s."""
    memory_bytes: int = Field(default=2**30, ge=2**26, le=2**32)
    """Address space of one test's process; a test that needs more has failed."""


class ModelReward(_Part):
    """The score that a sequence classifier gives to the conversation with the answer as its last message."""

    kind: Literal["model"]
    """A reward model: a folder that transformers' AutoModelForSequenceClassification loads."""
    path: str
    """Its folder or hub name."""
    label: NonNegativeInt | None = None
    """Number of the output that is the score; needed when the classifier has more than one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What is made of the outputs: the score as it is, its sigmoid, or its share in a softmax over all labels."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own when null."""
    template: str | None = None
    """Chat template as Jinja text, or path to a .jinja file; the tokenizer's own when null."""
    max_tokens: PositiveInt | None = None
    """Longest input; what model and tokenizer take when null."""
    overlong: Literal["error", "left", "right"] = "error"
    """What to do with longer ones: make the trajectory invalid, or cut tokens off their left or right end (counted)."""
    batch_tokens: PositiveInt = 16_384
    """Tokens of one forward pass, padding counted; a longer input goes alone."""
    dtype: DType = "fp32"
    """Type of its weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where it runs; auto: on run.device."""
    trust_remote_code: bool = False
    """Allow the folder to bring its own Python code."""


class JudgeReward(_Part):
    """The score that a language model gives to the answer when asked.

    A reply without a score, one that was cut off at max_tokens, and a server's failure count as failed calls: they are
    repeated, then the trajectory is invalid.
    """

    kind: Literal["judge"]
    """A language model as judge."""
    url: str
    """Base URL of an OpenAI-compatible server, such as http://localhost:8000/v1; or `policy`: the policy itself, as it was
    when it wrote the answer."""
    model: str | None = None
    """The model's name on the server."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's key; none is sent when null."""
    prompt: str
    """The question. `{prompt}` is the task (its last message), `{response}` the text to judge, `{answer}` the reference,
    `{column}` any column; a brace that is text is written twice. Or path to a .txt or .md file that holds it."""
    system: str | None = None
    """System message before it."""
    pattern: str | None = None
    """Regular expression whose last match's first group is the score; when null, the reply's last number or last word of
    `scores`."""
    scores: dict[str, float] = Field(default_factory=dict)
    """What words stand for, such as {yes: 1, no: 0}, without regard to case; numbers speak for themselves when empty."""
    range: tuple[float, float] | None = None
    """Lowest and highest score: what lies outside is clamped, then mapped to 0..1; the score as it is when null."""
    temperature: NonNegativeFloat = 0.0
    """Of the judge's sampling; 0 takes the likeliest token."""
    max_tokens: PositiveInt = 1024
    """Longest reply."""
    body: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request to the server; null removes a field."""
    timeout_s: PositiveFloat | None = None
    """Limit for one call; reward.timeout_s when null."""
    retries: NonNegativeInt = 4
    """Further tries after a failed call, in place of reward.retries; none with url=policy at temperature 0, which would say the
    same again."""
    backoff_s: NonNegativeFloat = 1.0
    """Wait before the second try, doubled before each further one; between half of it and all of it, drawn from the run's
    seed. A server's Retry-After is waited for when it is longer."""
    max_backoff_s: PositiveFloat = 60.0
    """Longest wait; a server that asks for a longer one has failed for good."""
    concurrency: PositiveInt | None = None
    """Calls of this judge in flight, beside reward.concurrency; as many as that when null."""

    @model_validator(mode="after")
    def _fits_its_kind(self) -> JudgeReward:
        if self.url == "policy":
            if given := [name for name in ("model", "api_key_env", "body") if getattr(self, name)]:
                raise ValueError(f"url=policy asks the policy itself, which has no {given[0]}; remove it")
        elif not self.url.startswith(("http://", "https://")):
            raise ValueError(
                f"url={self.url!r} is neither http(s)://... nor policy; give the server's base URL, such as "
                "http://localhost:8000/v1"
            )
        elif "@" in self.url.split("/")[2]:
            raise ValueError(
                "url holds a password, which would be written to the run's folder; name an environment variable in "
                "api_key_env instead"
            )
        elif not self.model:
            raise ValueError("model is missing; give the name by which the server knows it")
        if self.range is not None and self.range[0] >= self.range[1]:
            raise ValueError(f"range={list(self.range)} is empty; write [lowest, highest]")
        return self


RewardPart = Annotated[
    MathReward
    | ReasoningGymReward
    | ExactReward
    | PatternReward
    | ChoiceReward
    | LengthReward
    | CodeReward
    | ModelReward
    | JudgeReward
    | FunctionReward,
    Field(discriminator="kind"),
]


class OverlongConfig(Section):
    """A penalty that grows linearly over the last tokens before the limit (DAPO, arXiv 2503.14476)."""

    buffer_tokens: PositiveInt
    """Tokens before rollout.sampling.max_new_tokens over which it grows, for the longest turn."""
    penalty: PositiveFloat = 1.0
    """What is taken off at the limit."""


class CodeConfig(Section):
    """How programs of parts of kind code are kept apart from everything else."""

    isolation: Literal["auto", "bubblewrap", "sandlock", "process"] = "auto"
    """Sandbox of each program: bubblewrap, sandlock, or with auto the first of these that works here. A run without one is
    refused. process: limits on time, memory and files alone; the program can read files, use the network and kill processes."""


class RewardConfig(Section):
    """How trajectories are scored. The parts are summed with their weights, then added to the environment's own. Training sees
    this sum zeroed (`truncated`), penalised (`overlong`), scaled, shifted and clipped, in this order; evaluation and
    `reward/mean` keep it as it is."""

    parts: tuple[RewardPart, ...] = ()
    """Scores of the final text."""
    truncated: Literal["keep", "zero"] = "keep"
    """zero: in training a trajectory that a limit cut off has reward 0."""
    overlong: OverlongConfig | None = None
    """Penalty of long answers, in training only."""
    scale: float = 1.0
    """Factor of the reward, in training only."""
    shift: float = 0.0
    """Added to it after scaling, in training only."""
    clip: PositiveFloat | None = None
    """Bound on its absolute value, in training only; null for none."""
    timeout_s: PositiveFloat = 30.0
    """Limit for one call of one part."""
    retries: NonNegativeInt = 1
    """Further tries after a failed call before the trajectory becomes invalid."""
    concurrency: PositiveInt = 16
    """Calls of functions and processes in flight at a time."""
    code: CodeConfig = CodeConfig()
    """Sandbox of programs that are run for rewards."""
