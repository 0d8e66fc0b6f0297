"""Reward parts that need processes or threads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import regex

from braid.config.reward import RewardConfig
from braid.errors import ConfigError, Problem, RewardError, suggest
from braid.generators import reasoning_gym
from braid.isolation.sandbox import MAX_WAIT, START_LIMIT_S, Isolation, find_isolation
from braid.reasoning import without_reasoning
from braid.rewards.kinds import CodeReward, FunctionReward
from braid.types import Prompt, Trajectory
from braid.users import shown

from .base import Later, Making, Part, Services, column_of, references_of, task_of
from .classifier import ModelPart
from .isolated import score_by_generator
from .processes import ScoringProcesses
from .programs import read_tests
from .rules import Extract
from .threads import CallThreads, LoopThread

OFFERED = ("text", "response", "reasoning", "prefill", "answer", "prompt", "fields", "trajectory")
"""Parameters that a reward function may declare, besides columns of its rows and its own."""
TEXT_COMPARING = frozenset({"chain_sum", "products"})
"""reasoning-gym generators whose own scorer only compares short texts (verified in its source)."""


def build_part(
    config: RewardConfig, number: int, *, base_dir: Path, seed: int, services: Services
) -> Part | ModelPart | GroupPart:
    """Build the part configured at reward.parts[number]. Raises ConfigError as RewardPart.build."""
    return config.parts[number].build(Making(config, number, base_dir, seed, services))


def math_part(extract: Extract | None, timeout_s: float) -> Part:
    """Equality by math-verify of the reference with what `extract` finds in the answer, or with the answer
    that math-verify finds."""
    processes = ScoringProcesses("math")
    return Part(partial(_math, processes, extract, timeout_s), processes.close)


def reasoning_gym_part(extract: Extract, timeout_s: float) -> Part:
    """The generator's own score of what `extract` finds."""
    processes = ScoringProcesses("reasoning_gym")
    return Part(partial(_reasoning_gym, processes, extract, timeout_s), processes.close)


def code_part(config: CodeReward, making: Making) -> Part:
    """The result of the code in the answer on the row's tests."""
    extract = making.pattern(config.pattern, flags=regex.DOTALL)
    processes, isolation = ScoringProcesses("code"), find_isolation(making.config.code.isolation)
    return Part(partial(_code, processes, extract, config, isolation, making.key), processes.close)


def function_part(config: FunctionReward, making: Making) -> Part | GroupPart:
    """What a function of the user's returns."""
    key = making.key
    function = config.load(key, making.base_dir)
    arguments = arguments_of(function, config.params, path=config.path, key=key)
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    runner = LoopThread() if is_async else CallThreads(max_stuck=making.config.concurrency)
    call = partial(function, **config.params)

    def later(arguments: Mapping[str, Any]) -> Later:
        return partial(runner.run, partial(call, **arguments), making.timeout_s)

    if config.group:
        return GroupPart(later, arguments, runner.close)
    return Part(lambda trajectory: later(arguments.of(trajectory)), runner.close)


def _math(
    processes: ScoringProcesses, extract: Extract | None, timeout_s: float, trajectory: Trajectory
) -> float | Later:
    """1 if math-verify finds the answer equal to a reference; 0 while the reasoning lasts, or without a
    match."""
    references = references_of(trajectory.prompt)
    text = without_reasoning(trajectory.answer_text, is_parsed=bool(trajectory.reasoning_text))
    answer = extract(text) if extract is not None else text
    if not answer:
        return 0.0
    return partial(processes.run, (answer, references, extract is not None), timeout_s)


def _code(
    processes: ScoringProcesses,
    extract: Extract,
    config: CodeReward,
    isolation: Isolation,
    key: str,
    trajectory: Trajectory,
) -> float | Later:
    """Result of the code in the response on the row's tests; see programs.py. 0 without code."""
    try:
        column = column_of(trajectory.prompt, config.tests_key, key=f"{key}.tests_key")
        tests = read_tests(column, trajectory.prompt.fields.get("metadata"))
    except ValueError as error:
        raise RewardError(f"column {config.tests_key!r}: {error}") from error
    code = extract(trajectory.answer_text)
    if code is None:
        return 0.0
    each_s, needs_all = config.test_timeout_s, config.score == "all"
    limit_s = len(tests) * MAX_WAIT * (each_s + START_LIMIT_S)
    limit = (
        f"{limit_s:g} s: {MAX_WAIT} times {each_s:g} s ({key}.test_timeout_s) and {START_LIMIT_S:g} s to "
        f"start, for each of {len(tests)} tests"
    )
    arguments = (code, tests, isolation, each_s, config.memory_bytes, needs_all)
    return partial(processes.run, arguments, limit_s, limit)


def _reasoning_gym(
    processes: ScoringProcesses, extract: Extract, timeout_s: float, trajectory: Trajectory
) -> float | Later:
    """The generator's own score. Scorers that only compare texts run inline; the others, some of which `eval`
    the answer, in a process that can be killed."""
    fields, answer = trajectory.prompt.fields, extract(trajectory.answer_text)
    if "reasoning_gym" not in fields:
        raise RewardError(
            f"source {trajectory.prompt.source!r} is not procedural, so it has no scorer of reasoning-gym; "
            "use another kind of reward for it"
        )
    generator, params, expected = (
        fields["reasoning_gym"][name] for name in ("generator", "params", "answer")
    )
    entry = {**fields, "answer": expected}  # also where answer_key is another or null
    if _compares_text(generator):
        return score_by_generator(generator, params, answer, entry)
    return partial(processes.run, (generator, params, answer, entry), timeout_s)


@cache
def _compares_text(generator: str) -> bool:
    datasets = reasoning_gym().DATASETS
    from reasoning_gym.dataset import ProceduralDataset

    inherits = datasets[generator][0].score_answer is ProceduralDataset.score_answer
    return inherits or generator in TEXT_COMPARING


@dataclass(frozen=True, slots=True)
class Arguments:
    """The names that a function is called with: those of OFFERED and of columns. `declared` is None for
    `**kwargs`, which take them all; `required` have no default; `params` have values in the config."""

    path: str
    declared: frozenset[str] | None
    required: frozenset[str]
    params: frozenset[str]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that a row must have."""
        return self.required - {*OFFERED, *self.params}

    def check(self, prompt: Prompt) -> None:
        """Raise RewardError if the prompt's row lacks one of these columns."""
        for name in sorted(self.columns - prompt.fields.keys()):
            near = suggest(name, [*OFFERED, *prompt.fields])
            raise RewardError(
                f"{self.path!r} needs {name!r}{near}; braid provides {', '.join(OFFERED)} and the row's "
                f"columns {', '.join(map(repr, prompt.fields)) or '(none)'}; set other parameters in params",
                is_final=True,
            )

    def of(self, trajectory: Trajectory) -> dict[str, Any]:
        """The arguments of a call. Raises RewardError."""
        self.check(trajectory.prompt)
        offered = dict(trajectory.prompt.fields) | {
            "text": trajectory.sampled_text,
            "response": trajectory.answer_text,
            "reasoning": trajectory.reasoning_text,
            "prefill": trajectory.prefill,
            "answer": trajectory.prompt.fields.get("answer"),
            "prompt": task_of(trajectory),
            "fields": trajectory.prompt.fields,
            "trajectory": trajectory,
        }
        return {
            name: value
            for name, value in offered.items()
            if name not in self.params and (self.declared is None or name in self.declared)
        }


class GroupPart:
    """A function that scores the valid trajectories of a group in one call: each argument is a list, and so
    is the result."""

    def __init__(
        self, call: Callable[[Mapping[str, Any]], Later], arguments: Arguments, close: Callable[[], None]
    ) -> None:
        self._call, self._arguments, self.close = call, arguments, close

    async def scores(self, trajectories: Sequence[Trajectory]) -> list[object]:
        """What the function returns for each. Raises RewardError if it fails, or returns anything but a list
        of this length."""
        arguments = [self._arguments.of(trajectory) for trajectory in trajectories]
        result: Any = await self._call({name: [one[name] for one in arguments] for name in arguments[0]})()
        try:
            values = None if isinstance(result, str | bytes | Mapping) else list(result)
        except Exception:
            values = None
        if values is None or len(values) != len(trajectories):
            raise RewardError(
                f"returned {shown(result)}; with group=true a function returns a list with a number for "
                f"each of the {len(trajectories)} trajectories that it is given"
            )
        return values


def arguments_of(
    function: Callable[..., Any], params: Mapping[str, Any], *, path: str, key: str
) -> Arguments:
    """What to call the function with. Raises ConfigError if it cannot be called with that and `params`."""
    try:
        declared = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ConfigError(
            [Problem(f"{key}.path", f"{path!r} has no signature: {error}", "config")]
        ) from error
    kinds = {p.kind for p in declared.values()}
    named = {n: p for n, p in declared.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    problems: list[tuple[str, str]] = []
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        problems.append(("path", f"{path!r} has positional-only parameters; remove the '/'"))
    for name in params:
        if name in OFFERED:
            problems.append(("params", f"{name!r} is provided by braid; use another name"))
        elif name not in named and not takes_all:
            problems.append(("params", f"{path!r} has no parameter {name!r}{suggest(name, named)}"))
    if problems:
        raise ConfigError([Problem(f"{key}.{option}", problem, "config") for option, problem in problems])
    required = frozenset(name for name, p in named.items() if p.default is p.empty)
    return Arguments(path, None if takes_all else frozenset(named), required, frozenset(params))
