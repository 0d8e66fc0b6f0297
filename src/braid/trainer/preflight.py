"""Checks a config once its data has been read and before anything is built: prompts without the references
that rewards need, rewards that cannot be called, missing models and packages. `braid show --check` runs only
this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from braid.cluster.environment import environment
from braid.config.load import Loaded
from braid.config.paths import with_absolute_paths
from braid.config.schema import RunConfig
from braid.data import checked
from braid.data.prompts import Prompts
from braid.errors import ConfigError, Problem, RewardError
from braid.models.chat import ChatFormat
from braid.plan import Plan
from braid.report.names import reserved_names
from braid.report.streams import reward_prints_in
from braid.rewards.base import Later, Part, Score, Services, references_of
from braid.rewards.kinds import RewardPart
from braid.rewards.parts import GroupPart, build_part
from braid.rewards.scorer import as_score
from braid.types import Prompt, Segment, Trajectory, Turn

from .conversations import chat_format
from .inputs import TextInputs, check_sources, planned, read_inputs
from .runnable import run_problems

_MAX_EXAMPLES = 4
"""Most prompts on which a reward function is tried until it returns a score."""


def check(loaded: Loaded, plan: Plan) -> tuple[Plan, Trajectory | None]:
    """Check everything of a planned run that can be checked without building it. Returns the plan, with the
    number of its prompts, and an example of what its rewards read, a prompt answered with its reference; None
    without rewards of a text. Raises ConfigError, DataError and ModelError."""
    loaded = with_absolute_paths(loaded)
    with environment(loaded.config.cluster.variables):
        inputs = read_inputs(loaded, plan.verb)
        plan = planned(loaded, plan, inputs)
        check_inputs(loaded, plan, inputs)
        if inputs is None or plan.verb == "sft" or not loaded.config.reward.parts:
            return plan, None
        prompts = inputs.train.prompts + inputs.eval.prompts
        chat = chat_format(loaded.config, inputs.tokenizer, inputs.end_token_ids, inputs.vision)
        return plan, _example(prompts[0], chat) if prompts else None


def check_inputs(loaded: Loaded, plan: Plan, inputs: TextInputs | None) -> None:
    """Raise ConfigError with all problems of packages, devices, models and rewards."""
    config = loaded.config
    problems = run_problems(config, plan) + _own_problems(config, plan)
    if inputs is not None and plan.verb != "sft":
        config.text_env.check(loaded.base_dir)
        if plan.verb == "train":
            check_sources(loaded, inputs)
        prompts = inputs.train.prompts + inputs.eval.prompts
        chat = chat_format(config, inputs.tokenizer, inputs.end_token_ids, inputs.vision)
        named = {source for part in config.reward.parts for source in part.sources}
        for i, part in enumerate(config.reward.parts):
            covered = prompts.chosen(prompts.are_covered(part.sources, named))
            if covered:
                with reward_prints_in(None):
                    problems += _part_problems(loaded, i, covered, chat)
    if problems:
        raise ConfigError([loaded.placed(problem) for problem in problems])


def _own_problems(config: RunConfig, plan: Plan) -> list[Problem]:
    """Problems of losses and an advantage of the user's own, which are tried once."""
    if plan.verb == "prefer" and config.prefer is not None and config.prefer.loss.is_own:
        from braid.algorithms.trial import problem_of

        kind = config.prefer.loss
        why = problem_of(kind, reserved_names("prefer"))
        return [Problem(kind.config_key, f"{kind.kind!r}: {why}")] if why else []
    loss, advantage = plan.recipe.policy_loss, plan.recipe.advantage
    if plan.verb != "train" or not (loss.is_own or advantage.is_own):
        return []
    from braid.algorithms.trial import problem_of, problem_of_advantage

    tried = (
        (loss, problem_of(loss, reserved_names("policy")) if loss.is_own else ""),
        (advantage, problem_of_advantage(advantage) if advantage.is_own else ""),
    )
    return [Problem(kind.config_key, f"{kind.kind!r}: {why}") for kind, why in tried if why]


async def _no_model(*_: object, **__: object) -> str:
    raise AssertionError("judges are not called before a run")


def _no_image(_: object) -> tuple[int, int]:
    raise AssertionError("no answer is scored before a run")


def _part_problems(loaded: Loaded, number: int, prompts: Prompts, chat: ChatFormat) -> Iterator[Problem]:
    config, base_dir, key = loaded.config, loaded.base_dir, f"reward.parts[{number}]"
    part = config.reward.parts[number]
    image_size = None if config.model.vision is None else _no_image
    services = Services({}, _no_model, image_size, {number: _no_model})
    if part.has_model:
        return
    try:
        built = build_part(config.reward, number, base_dir=base_dir, seed=config.run.seed, services=services)
    except ConfigError as error:
        yield from error.problems
        return
    assert isinstance(built, Part | GroupPart)
    try:
        problems = list(_unscorable(part, key, prompts, base_dir))
        yield from problems
        if part.is_tried and not problems:
            score = built.score if isinstance(built, Part) else partial(_alone, built)
            yield from _failed_call(score, f"{key}.path", prompts, chat)
    finally:
        built.close()


def _unscorable(part: RewardPart, key: str, prompts: Prompts, base_dir: Path) -> Iterator[Problem]:
    """Prompts that lack the columns that the part reads, as one problem. Data that have passed are not read
    again."""
    known = (
        ""
        if part.reads_files
        else checked.key_of(len(prompts), prompts.fingerprint, key, part.model_dump_json())
    )
    read = part.reader(key, base_dir)
    if read is None or checked.recall(known) is not None:
        return
    first, num_failed = "", 0
    for prompt in prompts.untokenized(messages=part.reads_messages):
        try:
            read(prompt)
        except RewardError as error:
            first = first or f"{prompt.uid}: {error}"
            num_failed += 1
    if num_failed:
        yield Problem(
            key, f"{part.kind} cannot score {num_failed:,} of {len(prompts):,} prompts; first: {first}"
        )
        return
    if problems := [Problem(*problem) for problem in part.prompt_problems(key, prompts[0])]:
        yield from problems
        return
    checked.keep(known, {})


def _failed_call(
    score: Score,
    key: str,
    prompts: Prompts,
    chat: ChatFormat,
) -> Iterator[Problem]:
    """Call the function on an example, a prompt answered with its reference. If it raises, other prompts are
    tried, since a function may reject some; a service that is unreachable or slow is left to the run."""
    examples = prompts[:: max(1, len(prompts) // _MAX_EXAMPLES)][:_MAX_EXAMPLES]
    first = ""
    with ThreadPoolExecutor(1) as pool:  # a separate event loop, since this thread may already run one
        for prompt in examples:
            trajectory = _example(prompt, chat)
            try:
                as_score(pool.submit(asyncio.run, _call(score(trajectory))).result())
                return
            except RewardError as error:
                cause = error.__cause__
                if isinstance(cause, ConnectionError | TimeoutError) or "reward.timeout_s" in str(error):
                    return
                first = first or f"called on {prompt.uid} with the answer {trajectory.answer_text!r}: {error}"
    tried = "" if len(examples) == 1 else f"; {len(examples) - 1} other prompts failed too"
    yield Problem(key, f"{first}{tried}; it must return a number (an exception makes the trajectory invalid)")


def _alone(function: GroupPart, trajectory: Trajectory) -> Later:
    """The score of a group of one."""

    async def later() -> object:
        return (await function.scores([trajectory]))[0]

    return later


async def _call(later: float | Later) -> object:
    return await later() if callable(later) else later


def _example(prompt: Prompt, chat: ChatFormat) -> Trajectory:
    """A single-turn trajectory whose answer is the reference, or empty if there is none."""
    try:
        answer = references_of(prompt)[0]
    except RewardError:
        answer = ""
    action = chat.example_turn(answer, prompt.token_ids)
    ids: list[int] = chat.tokenizer(action.raw_text, add_special_tokens=False, verbose=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    turn = Turn(list(prompt.token_ids), ids, [0.0] * len(ids), "stop", 0)
    trajectory = Trajectory(prompt, 0, segments=[Segment([turn])], text=action.raw_text)
    trajectory.set_last_turn(action)
    return trajectory
