"""Environments of GEM's protocol whose observations are put into templates, as in ROLL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from braid.envs.agents.base import Opening, Step
from braid.functions import load_function
from braid.types import Action, Message, Prompt

from . import refused

_FIELDS = frozenset(
    [
        "env_instruction",
        "opening",
        "observation",
        "current_observation",
        "suffix",
        "turn_idx",
        "current_step",
        "step_count",
        "actions_left",
        "max_response_length",
        "history",
        "history_length",
    ]
)

_PICTURE = "\0picture\0"
"""In the text of a message: the place of the picture of a board."""


class Templated:
    """`id` is frozen_lake, sokoban (see grids), one of GEM, or package.module.Class with GEM's reset and
    step; `env_kwargs` are its arguments. See base.AgentEnv.

    `template` makes the user message of a turn of {observation} (in the first turn the rules), {suffix} (the
    state, as text or a picture, which is appended to the observation if the template has no place for it),
    {env_instruction} (the rules), {opening} (the rules in the first turn, later nothing), {turn_idx},
    {current_step}, {step_count}, {actions_left} (of `max_turns`), {max_response_length} (`max_tokens`) and
    {history}. With `history_length` the policy reads only this message in each turn, so that each
    turn is a separate training row; {history} then has the last `history_length` - 1 turns, and
    {current_observation} the state.
    """

    def __init__(
        self,
        id: str,
        *,
        template: str = "{observation}\n{suffix}",
        system: str | None = None,
        max_turns: int = 10,
        max_tokens: int | None = None,
        history_length: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._fields = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise refused(f"template: {error}") from None
        if unknown := sorted(self._fields - _FIELDS):
            raise refused(
                f"the template's {', '.join(f'{{{name}}}' for name in unknown)} is unknown; known: "
                f"{', '.join(sorted(_FIELDS))}"
            )
        self._template, self._system = template, system
        self._max_turns, self._max_tokens, self._history_length = max_turns, max_tokens, history_length
        self._env = _made(id, dict(env_kwargs or {}))
        self._history: list[str] = []
        self._num_turns = 0

    def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        self._rules, info = self._env.reset(seed=seed % 2**32)
        return Opening(self._messages(self._rules, info, is_fresh=True))

    def step(self, action: Action) -> Step:
        thought = f"<think>{action.reasoning}</think>" if action.reasoning else ""
        answer = thought + action.text
        observation, reward, is_done, is_truncated, info = self._env.step(answer)
        self._num_turns += 1
        self._history.append(
            f"(step: {self._num_turns}, observation: {self._seen}, action: {action.text.strip()})"
        )
        is_truncated = not is_done and (is_truncated or self._num_turns >= self._max_turns)
        forgets = self._history_length is not None
        return Step(
            self._messages(observation, info, is_fresh=forgets),
            float(reward),
            bool(is_done),
            bool(is_truncated),
            metrics={name: float(value) for name, value in info.get("metrics", {}).items()},
            forgets=forgets,
        )

    def close(self) -> None:
        """Nothing to free."""

    def _messages(self, observation: str, info: dict[str, Any], *, is_fresh: bool) -> list[Message]:
        image = info.get("image")
        if image is not None and self._history_length is not None:
            raise refused("render_mode=rgb_array: histories have no pictures; remove history_length")
        suffix = str(info.get("suffix", "")).strip() if image is None else _PICTURE
        self._seen = suffix if observation == self._rules else f"{observation} {suffix}".strip()
        if suffix and not self._fields & {"suffix", "current_observation"}:
            observation = f"{observation}\n{suffix}"
        num_kept = (self._history_length or 1) - 1
        kept = self._history[-num_kept:] if num_kept else []
        text = self._template.format(
            env_instruction=self._rules,
            opening="" if self._num_turns else self._rules,
            observation=observation,
            current_observation=self._seen,
            suffix=suffix,
            turn_idx=self._num_turns + 1,
            current_step=self._num_turns + 1,
            step_count=self._num_turns,
            actions_left=self._max_turns - self._num_turns,
            max_response_length=self._max_tokens,
            history=", ".join(kept),
            history_length=len(kept),
        )
        content: str | list[Any] = text
        if image is not None:
            before, _, after = text.partition(_PICTURE)
            first, last = ([{"type": "text", "text": words}] if words else [] for words in (before, after))
            content = [*first, {"type": "image", "image": image}, *last]
        user: Message = {"role": "user", "content": content}
        return [{"role": "system", "content": self._system}, user] if self._system and is_fresh else [user]


def _made(id: str, kwargs: dict[str, Any]) -> Any:
    if id in ("frozen_lake", "sokoban"):
        from . import grids

        make = {"frozen_lake": grids.FrozenLake, "sokoban": grids.Sokoban}[id]
    elif ":" not in id and "." in id:
        make = load_function(id, base_dir=Path(), key="env.kwargs.id", allows_class=True)
    else:
        from .gem_env import made

        return made(id, kwargs)
    try:
        return make(**kwargs)
    except TypeError as error:
        raise refused(f"{id}: {error}") from None
