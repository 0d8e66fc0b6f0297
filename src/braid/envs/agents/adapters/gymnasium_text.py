"""Gymnasium environments as text: FrozenLake, Blackjack, CliffWalking, Taxi, and others with Discrete or Text
spaces."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
from gymnasium import spaces

from braid.envs.agents.base import Opening, Step
from braid.types import Action, Prompt

from . import refused


@dataclass(frozen=True, slots=True)
class _Game:
    """The words for actions, in order; the rules, and a state, as the policy reads them. They are short, for
    small models. `env` is unwrapped."""

    actions: tuple[str, ...]
    rules: Callable[[Any], str]
    state: Callable[[Any, Any], str]


def _lake_rules(env: Any) -> str:
    is_sure = all(len(outcomes) == 1 for outcomes in env.P[0].values())
    grid = "\n".join(b"".join(row).decode() for row in env.desc)
    return f"Walk from S to G, not into H.{'' if is_sure else ' You may slip.'}\n{grid}"


def _taxi_rules(env: Any) -> str:
    grid = "\n".join(b"".join(row).decode() for row in env.desc)
    return f"Take the passenger to the destination. Walls are |.\n{grid}"


def _taxi_state(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.decode(int(state))
    place = "in taxi" if passenger == 4 else f"at {'RGYB'[passenger]}"
    return f"taxi row {row}, col {column}; passenger {place}, to {'RGYB'[destination]}"


def _cell(columns: int, state: Any) -> str:
    return "row {}, col {}".format(*divmod(int(state), columns))


def _cliff_rules(env: Any) -> str:
    return (
        "Walk from row 3, col 0 to row 3, col 11 of a grid of 4 by 12. Row 3 between them is a cliff: "
        f"-100, and back to the start. A move costs 1.{' You may slip.' if env.is_slippery else ''}"
    )


_LAKE = _Game(("left", "down", "right", "up"), _lake_rules, lambda env, at: _cell(env.ncol, at))
_GAMES = {
    "FrozenLake": _LAKE,
    "FrozenLake8x8": _LAKE,
    "Blackjack": _Game(
        ("stick", "hit"),
        lambda _: "Blackjack: come close to 21, not over.",
        lambda _, hand: f"you {hand[0]}, dealer {hand[1]}{', usable ace' if hand[2] else ''}",
    ),
    "CliffWalking": _Game(("up", "right", "down", "left"), _cliff_rules, lambda _, at: _cell(12, at)),
    "Taxi": _Game(("south", "north", "east", "west", "pickup", "dropoff"), _taxi_rules, _taxi_state),
}
_GAMES["CliffWalkingSlippery"] = _GAMES["CliffWalking"]


class GymnasiumText:
    """The policy reads the state and answers with an action's word. See base.AgentEnv.

    The action is the last word in an answer that is one, in any case; with `pattern`, the last match of the
    regular expression, or of its first group. Any other answer costs a move, gets `invalid_reward`, and is
    answered with the actions. The episode is truncated after `max_moves` moves. `observation` ansi shows the
    environment's own rendering, with [X] for highlighted and (X) for coloured cells. Further arguments are
    those of gymnasium.make.
    """

    def __init__(
        self,
        id: str,
        *,
        max_moves: int | None = None,
        observation: Literal["text", "ansi"] = "text",
        pattern: str | None = None,
        invalid_reward: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self._max_moves, self._is_ansi, self._invalid_reward = (
            max_moves,
            observation == "ansi",
            invalid_reward,
        )
        self._env = _made(id, kwargs | ({"render_mode": "ansi"} if self._is_ansi else {}))
        self._game = _GAMES.get(id.partition("-v")[0]) or _plain_game(id, self._env)
        self._choices = f"Choose: {', '.join(self._game.actions)}.\n" if self._game.actions else ""
        words = "|".join(map(re.escape, self._game.actions))
        default = rf"\b(?:{words})\b" if words else r"\S.*"
        try:
            self._pattern = re.compile(pattern or default, re.IGNORECASE | re.DOTALL)
        except re.error as error:
            raise refused(f"pattern {pattern!r} is not a regular expression: {error}") from None
        self._moves = self._num_invalid = 0

    async def start(self, task: Prompt, seed: int) -> Opening:  # noqa: ARG002
        observation, _ = self._env.reset(seed=seed)
        rules = self._game.rules(self._env.unwrapped)
        if self._max_moves:
            rules += f"\nAt most {self._max_moves} moves."
        return Opening([{"role": "user", "content": f"{rules}\n{self._choices}{self._state(observation)}"}])

    async def step(self, action: Action) -> Step:
        self._moves += 1
        chosen, note, reward, is_done, is_truncated = (
            self._action(action.text),
            "",
            self._invalid_reward,
            False,
            False,
        )
        if chosen is None:
            self._num_invalid += 1
            note = self._choices or "Invalid answer.\n"
        else:
            self._seen, reward, is_done, is_truncated, _ = self._env.step(chosen)
        if is_done or is_truncated or self._moves == self._max_moves:
            metrics = {"moves": float(self._moves), "invalid_moves": float(self._num_invalid)}
            return Step(reward=float(reward), is_done=is_done, is_truncated=not is_done, metrics=metrics)
        return Step([{"role": "user", "content": f"{note}{self._state(self._seen)}"}], float(reward))

    async def close(self) -> None:
        self._env.close()

    def _state(self, observation: Any) -> str:
        self._seen = observation
        if not self._is_ansi:
            return self._game.state(self._env.unwrapped, observation)
        return _without_colours(str(self._env.render())).rstrip()

    def _action(self, text: str) -> Any:
        """The action that the answer names, None if it names none."""
        matches = [match[1] if self._pattern.groups else match[0] for match in self._pattern.finditer(text)]
        word = (matches[-1] or "").strip() if matches else ""
        space, words = self._env.action_space, self._game.actions
        if isinstance(space, spaces.Discrete):
            return int(space.start) + words.index(word.lower()) if word.lower() in words else None
        return word if space.contains(word) else None


def _made(env_id: str, kwargs: dict[str, Any]) -> gymnasium.Env:
    try:
        return gymnasium.make(env_id, disable_env_checker=True, **kwargs)
    except gymnasium.error.Error as error:
        raise refused(f"Gymnasium cannot make {env_id!r}: {error}") from error
    except (TypeError, ValueError, KeyError) as error:
        raise refused(f"{env_id} does not accept {kwargs}: {error}") from error


def _plain_game(env_id: str, env: gymnasium.Env) -> _Game:
    """A game that braid knows no words for: actions are numbers or text."""
    actions, observations = env.action_space, env.observation_space
    parts = list(observations) if isinstance(observations, spaces.Tuple) else [observations]
    if not all(isinstance(part, spaces.Discrete | spaces.MultiDiscrete | spaces.Text) for part in parts):
        raise refused(
            f"unsupported observation space of {env_id}: {observations}; supported are Discrete and Text"
        )
    if isinstance(actions, spaces.Discrete):
        names = tuple(str(int(actions.start) + number) for number in range(int(actions.n)))
    elif isinstance(actions, spaces.Text):
        names = ()
    else:
        raise refused(f"unsupported action space of {env_id}: {actions}; supported are Discrete and Text")
    return _Game(names, lambda _: env_id, lambda _, observation: str(observation))


def _without_colours(text: str) -> str:
    """Colours may be all that shows where the agent is."""
    text = re.sub(r"\x1b\[4[0-9](?:;1)?m(.*?)\x1b\[0m", r"[\1]", text, flags=re.DOTALL)
    text = re.sub(r"\x1b\[3[0-9](?:;1)?m(.*?)\x1b\[0m", r"(\1)", text, flags=re.DOTALL)
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
