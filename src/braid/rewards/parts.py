"""The kinds of reward parts: what each config section becomes.

A part is called with a valid trajectory and returns its score, or where that may take long, a function to await for it.
Whatever goes wrong leaves as RewardError. Weights, retries and sums are scorer.py's.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import regex

from braid.config.reward import (
    ExactReward,
    FunctionReward,
    MathReward,
    PatternReward,
    ReasoningGymReward,
    RewardPart,
)
from braid.errors import ConfigError, Problem, RewardError, suggest
from braid.functions import load_function
from braid.types import Trajectory

from .processes import ScoringProcesses
from .threads import LoopThread, ReplaceableThreads

OFFERED = ("text", "answer", "prompt", "fields", "trajectory")
"""What a reward function may declare as parameters, beside its own."""
TEXT_COMPARING = frozenset({"chain_sum", "products"})
"""reasoning-gym generators whose own scorer does no more than compare short texts (read, not guessed)."""


Later = Callable[[], Awaitable[object]]
"""What to await for a score."""


class Part(Protocol):
    """One kind of score."""

    def __call__(self, trajectory: Trajectory) -> float | Later: ...

    def close(self) -> None:
        """Give up threads and processes."""
        ...


def build_part(part: RewardPart, *, timeout_s: float, concurrency: int, base_dir: Path, key: str) -> Part:
    """The part that a config section describes. Raises ConfigError for patterns and functions that cannot be used."""
    match part:
        case MathReward():
            return MathPart(timeout_s)
        case ReasoningGymReward():
            extract = Extraction(part.pattern, timeout_s, key=f"{key}.pattern")
            return ReasoningGymPart(extract, timeout_s)
        case ExactReward():
            extract = Extraction(part.pattern, timeout_s, key=f"{key}.pattern")
            return ExactPart(extract, ignore_case=part.ignore_case, ignore=part.ignore)
        case PatternReward():
            return PatternPart(part.pattern, timeout_s, key=f"{key}.pattern")
        case FunctionReward():
            function = load_function(part.path, base_dir=base_dir, key=f"{key}.path")
            names = offered_names(function, part.params, path=part.path, key=key)
            return FunctionPart(function, names, part.params, timeout_s, max_stuck=concurrency)


class Extraction:
    """Finds the answer in a text: the first group of the pattern's last match, or the whole text without a pattern.

    Patterns run in the `regex` package, whose matches can be given a time limit.
    """

    def __init__(self, pattern: str | None, timeout_s: float, *, key: str) -> None:
        self._pattern = None if pattern is None else compile_pattern(pattern, key=key)
        self._timeout_s = timeout_s
        if self._pattern is not None and not self._pattern.groups:
            raise ConfigError(
                [Problem(key, f"{pattern!r} has no group; put the answer into one: (...)", "config")]
            )

    def __call__(self, text: str) -> str | None:
        """The answer without surrounding blanks; None when the pattern matches nowhere."""
        if self._pattern is None:
            return text.strip()
        answer = None
        try:
            for match in self._pattern.finditer(text, timeout=self._timeout_s):
                answer = match[1]
        except TimeoutError as error:
            raise _too_slow(self._timeout_s) from error
        return None if answer is None else answer.strip()


def compile_pattern(pattern: str, *, key: str, flags: int = 0) -> regex.Pattern[str]:
    """Compile what the config key `key` holds. Raises ConfigError when it is no regular expression."""
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise ConfigError(
            [Problem(key, f"{pattern!r} is no regular expression: {error}", "config")]
        ) from error


def _too_slow(timeout_s: float) -> RewardError:
    return RewardError(f"the pattern found no end within reward.timeout_s={timeout_s:g}; simplify it")


def _references(trajectory: Trajectory) -> list[str]:
    """The reference answers, any of which is right."""
    answer = trajectory.prompt.fields.get("answer")
    if answer is None or answer == []:
        raise RewardError(
            "the prompt has no reference answer; set answer_key of its source to the column that has it"
        )
    return [str(item) for item in (answer if isinstance(answer, list) else [answer])]


class ExactPart:
    """1 if the answer equals a reference, blanks around them aside and without the characters of `ignore`."""

    def __init__(self, extract: Extraction, *, ignore_case: bool, ignore: str) -> None:
        self._extract = extract
        self._ignore_case = ignore_case
        self._left_out = str.maketrans("", "", ignore)

    def __call__(self, trajectory: Trajectory) -> float:
        answer, references = self._extract(trajectory.answer_text), _references(trajectory)
        return float(answer is not None and self._plain(answer) in map(self._plain, references))

    def _plain(self, text: str) -> str:
        text = text.translate(self._left_out).strip()
        return text.casefold() if self._ignore_case else text

    def close(self) -> None: ...


class PatternPart:
    """1 if the text matches somewhere."""

    def __init__(self, pattern: str, timeout_s: float, *, key: str) -> None:
        self._pattern = compile_pattern(pattern, key=key, flags=regex.DOTALL)
        self._timeout_s = timeout_s

    def __call__(self, trajectory: Trajectory) -> float:
        try:
            return float(self._pattern.search(trajectory.answer_text, timeout=self._timeout_s) is not None)
        except TimeoutError as error:
            raise _too_slow(self._timeout_s) from error

    def close(self) -> None: ...


class MathPart:
    """1 if math-verify finds the answer equal to a reference. Always in a process that can be killed."""

    def __init__(self, timeout_s: float) -> None:
        self._processes = ScoringProcesses("math")
        self._timeout_s = timeout_s

    def __call__(self, trajectory: Trajectory) -> Later:
        arguments = (trajectory.answer_text, _references(trajectory))
        return partial(self._processes.run, arguments, self._timeout_s)

    def close(self) -> None:
        self._processes.close()


class ReasoningGymPart:
    """The generator's own score. Scorers that only compare texts run here and now; the others, some of which
    `eval` the answer, in a process that can be killed."""

    def __init__(self, extract: Extraction, timeout_s: float) -> None:
        self._extract = extract
        self._timeout_s = timeout_s
        self._processes = ScoringProcesses("reasoning_gym")
        self._here: dict[tuple[str, str], Callable[[str | None, Any], float] | None] = {}

    def __call__(self, trajectory: Trajectory) -> float | Later:
        entry, answer = trajectory.prompt.fields, self._extract(trajectory.answer_text)
        if "reasoning_gym" not in entry:
            raise RewardError(
                f"source {trajectory.prompt.source!r} is not procedural, so it has no scorer of reasoning-gym; use another "
                "kind of reward for it"
            )
        generator, params = entry["reasoning_gym"]["generator"], entry["reasoning_gym"]["params"]
        key = (generator, repr(params))
        if key not in self._here:
            self._here[key] = _text_comparing_scorer(generator, params)
        score = self._here[key]
        if score is None:
            return partial(self._processes.run, (generator, params, answer, entry), self._timeout_s)
        return float(score(answer, entry))

    def close(self) -> None:
        self._processes.close()


def _text_comparing_scorer(
    generator: str, params: Mapping[str, Any]
) -> Callable[[str | None, Any], float] | None:
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS, create_dataset

    inherits = DATASETS[generator][0].score_answer is ProceduralDataset.score_answer
    if not inherits and generator not in TEXT_COMPARING:
        return None
    return create_dataset(generator, size=1, seed=0, **params).score_answer


class FunctionPart:
    """A user's function: plain ones run in threads, async ones on a loop of their own. See threads.py."""

    def __init__(
        self,
        function: Callable[..., Any],
        names: frozenset[str],
        params: Mapping[str, Any],
        timeout_s: float,
        *,
        max_stuck: int,
    ) -> None:
        self._function = function
        self._names = names
        self._params = params
        self._timeout_s = timeout_s
        is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        )
        self._runner = LoopThread() if is_async else ReplaceableThreads(max_stuck=max_stuck)

    def __call__(self, trajectory: Trajectory) -> Later:
        offered = {
            "text": trajectory.answer_text,
            "answer": trajectory.prompt.fields.get("answer"),
            "prompt": trajectory.prompt.messages[-1]["content"] if trajectory.prompt.messages else "",
            "fields": trajectory.prompt.fields,
            "trajectory": trajectory,
        }
        chosen = {name: value for name, value in offered.items() if name in self._names}
        return partial(self._runner.run, partial(self._function, **chosen, **self._params), self._timeout_s)

    def close(self) -> None:
        self._runner.close()


def offered_names(
    function: Callable[..., Any], params: Mapping[str, Any], *, path: str, key: str
) -> frozenset[str]:
    """Which of OFFERED the function is called with. Raises ConfigError when it cannot be called with them and
    `params`."""
    try:
        declared = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            [Problem(f"{key}.path", f"{path!r} has no signature: {error}", "config")]
        ) from error
    kinds = {p.kind for p in declared.values()}
    named = {n: p for n, p in declared.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    problems = []
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        problems.append(
            Problem(f"{key}.path", f"{path!r} has positional-only parameters; remove the '/'", "config")
        )
    for name in params:
        if name in OFFERED:
            problems.append(
                Problem(f"{key}.params", f"{name!r} is filled in by braid; use another name", "config")
            )
        elif name not in named and not takes_all:
            problem = f"{path!r} has no parameter {name!r}{suggest(name, named)}"
            problems.append(Problem(f"{key}.params", problem, "config"))
    known = {*OFFERED, *params}
    for name, parameter in named.items():
        if name not in known and parameter.default is parameter.empty:
            problem = (
                f"{path!r} needs {name!r}{suggest(name, OFFERED)}; a reward function may declare {', '.join(OFFERED)}, "
                f"and gets what else it needs from {key}.params"
            )
            problems.append(Problem(f"{key}.path", problem, "config"))
    if problems:
        raise ConfigError(problems)
    return frozenset(OFFERED) if takes_all else frozenset(named) & frozenset(OFFERED)
