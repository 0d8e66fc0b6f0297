"""Builds reward parts from their config; defines those that need processes, threads or a generator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import regex

from braid.config.reward import (
    ChoiceReward,
    CodeReward,
    ExactReward,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathReward,
    ModelReward,
    PatternReward,
    ReasoningGymReward,
    RepetitionReward,
    RewardPart,
)
from braid.errors import ConfigError, Problem, RewardError, suggest
from braid.functions import load_function
from braid.types import Trajectory

from .base import Later, Part, Services, column_of, references_of, task_of
from .classifier import ModelPart
from .isolation import START_LIMIT_S, Isolation, find_isolation
from .processes import ScoringProcesses
from .programs import read_tests
from .rules import ChoicePart, ExactPart, Extraction, LengthPart, PatternPart, RepetitionPart
from .threads import LoopThread, ReplaceableThreads

OFFERED = ("text", "answer", "prompt", "fields", "trajectory")
"""Parameters that a reward function may declare, besides its own."""
TEXT_COMPARING = frozenset({"chain_sum", "products"})
"""reasoning-gym generators whose own scorer only compares short texts (verified in its source)."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings shared by all parts of a run."""

    timeout_s: float
    concurrency: int
    base_dir: Path
    seed: int
    services: Services
    isolation: str = "auto"


def build_part(part: RewardPart, number: int, setting: Setting) -> Part | ModelPart:
    """Build the part configured at reward.parts[number]. Raises ConfigError for invalid patterns, functions,
    templates, keys and URLs, and for a part that needs a model which the run lacks."""
    key, timeout_s = f"reward.parts[{number}]", setting.timeout_s
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
        case ChoiceReward() | LengthReward() | RepetitionReward():
            return _build_rule(part)
        case CodeReward():
            extract = Extraction(part.pattern, timeout_s, key=f"{key}.pattern", flags=regex.DOTALL)
            return CodePart(extract, part, find_isolation(setting.isolation), key=key)
        case ModelReward():
            if number not in setting.services.classifiers:
                raise _without_service(key, "a reward model")
            return ModelPart(setting.services.classifiers[number])
        case JudgeReward():
            return _build_judge(part, key, setting)
        case FunctionReward():
            function = load_function(part.path, base_dir=setting.base_dir, key=f"{key}.path")
            names = offered_names(function, part.params, path=part.path, key=key)
            return FunctionPart(function, names, part.params, timeout_s, max_stuck=setting.concurrency)


def _build_rule(part: ChoiceReward | LengthReward | RepetitionReward) -> Part:
    match part:
        case ChoiceReward():
            return ChoicePart(part.letters, part.scores)
        case LengthReward():
            return LengthPart(part.start, part.end, counts_tokens=part.unit == "tokens")
        case RepetitionReward():
            return RepetitionPart(part.ngram)


def _build_judge(part: JudgeReward, key: str, setting: Setting) -> Part:
    from .judge import HttpChat, JudgePart, PolicyChat  # needs httpx2

    if part.url != "policy":
        chat = HttpChat(part, key=key)
    elif setting.services.generate is not None:
        chat = PolicyChat(part, setting.services.generate)
    else:
        raise _without_service(f"{key}.url", "a text policy")
    return JudgePart(
        part, chat, timeout_s=setting.timeout_s, seed=setting.seed, base_dir=setting.base_dir, key=key
    )


def _without_service(key: str, what: str) -> ConfigError:
    return ConfigError([Problem(key, f"needs {what}, which was not given to this scorer", "config")])


class MathPart:
    """1 if math-verify finds the answer equal to a reference. Always runs in a process that can be killed."""

    def __init__(self, timeout_s: float) -> None:
        self._processes = ScoringProcesses("math")
        self._timeout_s = timeout_s

    def __call__(self, trajectory: Trajectory) -> Later:
        arguments = (trajectory.answer_text, references_of(trajectory))
        return partial(self._processes.run, arguments, self._timeout_s)

    def close(self) -> None:
        self._processes.close()


class CodePart:
    """Runs the code in the response against the row's tests; see programs.py. A response without code scores
    0."""

    def __init__(self, extract: Extraction, config: CodeReward, isolation: Isolation, *, key: str) -> None:
        self._extract = extract
        self._isolation = isolation
        self._config = config
        self._key = key
        self._processes = ScoringProcesses("code")

    def __call__(self, trajectory: Trajectory) -> float | Later:
        config = self._config
        try:
            tests = read_tests(column_of(trajectory, config.tests_key, key=f"{self._key}.tests_key"))
        except ValueError as error:
            raise RewardError(f"column {config.tests_key!r}: {error}") from error
        code = self._extract(trajectory.answer_text)
        if code is None:
            return 0.0
        each_s, needs_all = config.test_timeout_s, config.score == "all"
        arguments = (code, tests, self._isolation, each_s, config.memory_bytes, needs_all)
        limit_s = len(tests) * (each_s + START_LIMIT_S)
        limit = (
            f"{limit_s:g} s: {each_s:g} s ({self._key}.test_timeout_s) and {START_LIMIT_S:g} s to start, for each of "
            f"{len(tests)} tests"
        )
        return partial(self._processes.run, arguments, limit_s, limit)

    def close(self) -> None:
        self._processes.close()


class ReasoningGymPart:
    """The generator's own score. Scorers that only compare texts run inline; the others, some of which `eval`
    the answer, in a process that can be killed."""

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
    """A user's function. Synchronous ones run in threads, async ones on a separate event loop; see
    threads.py."""

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
            "prompt": task_of(trajectory),
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
    """The names among OFFERED to call the function with. Raises ConfigError if it cannot be called with these
    and `params`."""
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
                Problem(f"{key}.params", f"{name!r} is provided by braid; use another name", "config")
            )
        elif name not in named and not takes_all:
            problem = f"{path!r} has no parameter {name!r}{suggest(name, named)}"
            problems.append(Problem(f"{key}.params", problem, "config"))
    known = {*OFFERED, *params}
    for name, parameter in named.items():
        if name not in known and parameter.default is parameter.empty:
            problem = (
                f"{path!r} needs {name!r}{suggest(name, OFFERED)}; braid provides {', '.join(OFFERED)}; set other "
                f"parameters in {key}.params"
            )
            problems.append(Problem(f"{key}.path", problem, "config"))
    if problems:
        raise ConfigError(problems)
    return frozenset(OFFERED) if takes_all else frozenset(named) & frozenset(OFFERED)
