"""Rewards: a weighted sum of parts."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from braid.sections import Section

from .backends import DType


class _Part(Section):
    name: str = ""
    """Name of the part in metrics (`reward/part/NAME`); its kind, or the function's name, when empty."""
    weight: float = 1.0
    """Weight in the sum."""
    sources: tuple[str, ...] = ()
    """Names of the data sources whose trajectories it scores; `*` for all that no part names; all when
    empty."""


class MathReward(_Part):
    r"""1 if math-verify finds the answer equal to the reference, else 0. The answer follows the reasoning (0
    if that has no end): what is in the last `<answer>` tag; in it, or in the text without one, the last
    `\boxed{}` or `\fbox{}`, else the last number after `####`, else what math-verify finds."""

    kind: Literal["math"]
    """Mathematical equality by math-verify."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match after the reasoning is the answer. No match scores 0."""


class ReasoningGymReward(_Part):
    """The scorer of the procedural source."""

    kind: Literal["reasoning_gym"]
    """The scorer of the procedural source."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match is the answer to score. The whole text when null."""


class ExactReward(_Part):
    """1 if the answer equals the reference, else 0."""

    kind: Literal["exact"]
    """Equality of texts."""
    pattern: str | None = None
    """Regular expression; group 1 of its last match is the answer. The whole text when null."""
    ignore_case: bool = False
    """Ignore case."""
    ignore: str = ""
    """Characters to ignore, such as the comma of 1,000."""


class PatternReward(_Part):
    """1 if the turn matches a regular expression, else 0; for format rewards."""

    kind: Literal["pattern"]
    """A regular expression to search for in the last turn."""
    pattern: str
    """Regular expression, searched for in what the part reads (dot matches newlines)."""
    reads: Literal["text", "answer"] = "text"
    """text: the last turn with its special tokens and reasoning, and with the `<think>` with which the chat
    template may begin it. answer: only the answer."""


class FunctionReward(_Part):
    """A user-defined Python function."""

    kind: Literal["function"]
    """A Python function, sync or async."""
    path: str
    """Dotted path, `package.module.function`, or `file.py:function` relative to the config file."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Additional keyword arguments of the function."""
    group: bool = False
    """Call the function once for the valid trajectories of a group: each argument but those of params is a
    list, and the function returns a list of numbers in the same order."""


class ChoiceReward(_Part):
    """Whether the answer's letter equals the reference's: 1 or 0, unless `scores` are given. The letter is
    sought after the reasoning, in the last `<answer>` tag if there is one: the letter in the last box, else
    the one after the last "answer is" or "answer:", else the last letter that stands alone. Several letters,
    as in "B, C", are a wrong answer; the words "a" and "I" are none."""

    kind: Literal["choice"]
    """Multiple choice."""
    letters: str = Field(default="ABCDEFGHIJ", pattern=r"^[A-Z]{2,}$")
    """Letters that are valid answers."""
    scores: tuple[float, float, float, float] = (1.0, 1.0, 0.0, 0.0)
    """Scores of the right letter in a box, elsewhere, of a wrong letter in a box, and of other answers."""


class LengthReward(_Part):
    """0 up to `start`, then linearly down to -1 at `end`, and -1 beyond."""

    kind: Literal["length"]
    """A penalty for long responses."""
    unit: Literal["tokens", "characters"] = "tokens"
    """tokens: tokens of the policy in all turns. characters: characters of the last turn, with its
    reasoning."""
    start: NonNegativeInt = 0
    """Length above which the penalty starts."""
    end: PositiveInt
    """Length at which the reward reaches -1."""

    @model_validator(mode="after")
    def _start_before_end(self) -> LengthReward:
        if self.start >= self.end:
            raise ValueError(f"start={self.start} is not below end={self.end}; lower start or raise end")
        return self


class RepetitionReward(_Part):
    """Minus the fraction of word n-grams that repeat an earlier one, regardless of case; 0 below n words."""

    kind: Literal["repetition"]
    """A penalty for repeated phrases."""
    ngram: PositiveInt = 3
    """Number of words in an n-gram."""


class CodeReward(_Part):
    """Runs the answer's Python code against the row's tests, in a process with limits on time, memory and
    files.

    Tests are one of: Python text with assertions; a list of such texts; a list of {input, output}, for
    programs that read stdin and print; {inputs, outputs} with two lists; or any of these as JSON text. With
    `fn_name`, `testtype: functional` or `type: function_call` (LiveCodeBench, DeepCoder, TACO) they are
    arguments and result of a function.
    """

    kind: Literal["code"]
    """Python code that must pass the tests."""
    tests_key: str = "tests"
    """Column that holds the tests."""
    score: Literal["all", "fraction"] = "all"
    """all: 1 if every test passes, else 0. fraction: fraction of tests that pass."""
    pattern: str = r"```(?:python|py)?[ \t]*\n(.*?)```"
    """Regular expression; group 1 of its last match is the code (dot matches newlines). No match scores 0."""
    test_timeout_s: PositiveFloat = 5.0
    """Timeout of one test in seconds, after which it counts as failed. Replaces reward.timeout_s."""
    memory_bytes: int = Field(default=2**30, ge=2**26, le=2**32)
    """Address space limit of one test's process in bytes; a test that needs more fails."""


class ModelReward(_Part):
    """Score of a sequence classifier for the conversation that ends with the response."""

    kind: Literal["model"]
    """A reward model, loaded with transformers' AutoModelForSequenceClassification."""
    path: str
    """Model folder or hub name."""
    label: NonNegativeInt | None = None
    """Index of the output that is the score; required if the classifier has more than one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Transformation of the output: none, its sigmoid, or its softmax probability over all labels."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own when null."""
    template: str | None = None
    """Chat template as Jinja text, or the path of a .jinja file; the tokenizer's own when null."""
    max_tokens: PositiveInt | None = None
    """Maximum input length in tokens; the limit of model and tokenizer when null."""
    overlong: Literal["error", "left", "right"] = "error"
    """Longer inputs: mark the trajectory invalid, or cut off the left or right end (counted in metrics)."""
    batch_tokens: PositiveInt = 16_384
    """Tokens per forward pass, including padding; a longer input is processed alone."""
    dtype: DType = "fp32"
    """Dtype of the weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto for run.device."""
    trust_remote_code: bool = False
    """Allow the model folder to run its own Python code."""


class JudgeReward(_Part):
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
            if given := [name for name in ("model", "api_key_env", "body") if getattr(self, name)]:
                raise ValueError(
                    f"url=policy uses the policy as the judge, so {given[0]} does not apply; remove it"
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


RewardPart = Annotated[
    MathReward
    | ReasoningGymReward
    | ExactReward
    | PatternReward
    | ChoiceReward
    | LengthReward
    | RepetitionReward
    | CodeReward
    | ModelReward
    | JudgeReward
    | FunctionReward,
    Field(discriminator="kind"),
]


def part_name(part: RewardPart) -> str:
    """Name of a part in metrics: its configured name, else the name of its function or its kind."""
    if isinstance(part, FunctionReward) and not part.name:
        return re.split(r"[.:]", part.path)[-1] or part.kind
    return part.name or part.kind


class OverlongConfig(Section):
    """A penalty that grows linearly over the last tokens before the length limit (DAPO, arXiv 2503.14476)."""

    buffer_tokens: PositiveInt
    """Tokens before rollout.sampling.max_new_tokens over which the penalty grows, for the longest turn."""
    penalty: PositiveFloat = 1.0
    """Penalty at the limit."""


class CodeConfig(Section):
    """Sandbox of the programs that rewards run."""

    isolation: Literal["auto", "bubblewrap", "sandlock", "process"] = "auto"
    """Sandbox: bubblewrap, sandlock, or with auto the first of them that works on this machine; if none does,
    the run is refused. process: only limits on time, memory and files; the program can read files, use the
    network and kill processes."""


class RewardConfig(Section):
    """Scoring of trajectories. The weighted sum of the parts is added to the environment's reward. For
    training, this sum is zeroed (`truncated`), penalised (`overlong`), scaled, shifted and clipped, in this
    order; evaluation and `reward/mean` use it unchanged."""

    parts: tuple[RewardPart, ...] = ()
    """Reward functions that score the final text."""
    truncated: Literal["keep", "zero"] = "keep"
    """zero: truncated trajectories get reward 0 in training."""
    overlong: OverlongConfig | None = None
    """Penalty for long responses, in training only; none when null."""
    scale: float = 1.0
    """Factor on the reward, in training only."""
    shift: float = 0.0
    """Constant added to the scaled reward, in training only."""
    clip: PositiveFloat | None = None
    """Bound on the absolute value of the reward, in training only; null for none."""
    timeout_s: PositiveFloat = 30.0
    """Timeout of one call of a part, in seconds."""
    retries: NonNegativeInt = 1
    """Retries after a failed call before the trajectory becomes invalid."""
    concurrency: PositiveInt = 16
    """Maximum concurrent calls of functions and processes."""
    code: CodeConfig = CodeConfig()
    """Sandbox of the programs that rewards run."""
