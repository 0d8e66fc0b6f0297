"""Games of TextArena in which the policy has every seat, or plays against earlier weights."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.needs import needs
from tests.trainer.conftest import TINY_MODEL, LoadTiny, load_tiny
from tests.trainer.test_runs import lines

from braid.envs.agents.base import EpisodeOver, Outcome, ToolSchema
from braid.envs.agents.build import AgentEnvs
from braid.errors import ConfigError, EnvError
from braid.report.samples import read_samples
from braid.trainer import commands
from braid.types import Action, Message, Prompt

pytestmark = [pytest.mark.slow, needs("textarena")]
__all__ = ["load_tiny"]
TASK = Prompt("test:0", "test", (), ())
Policy = Callable[[str], str]


class Player:
    """Plays by a function of what it reads."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.heard = policy, list[str]()

    async def reply(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Action:
        (message,) = messages
        self.heard.append(message["content"])
        return Action(self._policy(message["content"]))

    def reward(self, value: float) -> None:
        raise AssertionError("rewards are those of the outcome")


class Players(dict[str, Any]):
    max_turns: int | None = None

    def open(self, agent: str) -> Player:
        raise AssertionError(agent)


def first_free(observation: str) -> str:
    return observation.splitlines()[-1].split("'")[1]


Make = Callable[..., AgentEnvs]


@pytest.fixture
def make(nothing_is_left: None) -> Iterator[Make]:
    made: list[AgentEnvs] = []

    def games(id: str = "TicTacToe-v0", **kwargs: Any) -> AgentEnvs:
        made.append(AgentEnvs("textarena_self_play", {"id": id, **kwargs}, Path(), num_processes=2))
        return made[-1]

    yield games
    for each in made:
        asyncio.run(each.close())


async def play(envs: AgentEnvs, seed: int, *policies: Policy) -> tuple[Outcome, dict[str, list[str]]]:
    """The outcome, and what each agent has heard."""
    env = envs()
    players = Players(zip(env.agents, map(Player, policies), strict=True))
    try:
        await env.ready(TASK)
        outcome = await env.run(TASK, seed, players)
    finally:
        await env.close()
    return outcome, {agent: player.heard for agent, player in players.items()}


def played(envs: AgentEnvs, *policies: Policy, seed: int = 3) -> tuple[Outcome, dict[str, list[str]]]:
    return asyncio.run(play(envs, seed, *policies))


def test_each_seat_reads_its_own_side_and_only_what_is_new(make: Make) -> None:
    outcome, heard = played(make(), first_free, first_free)
    assert outcome.rewards == {"seat0": 1.0, "seat1": -1.0}
    assert (outcome.metrics["moves/seat0"], outcome.metrics["moves/seat1"]) == (4.0, 3.0)
    assert outcome.metrics["invalid_move/seat0"] == outcome.metrics["invalid_move/seat1"] == 0.0
    for number in (0, 1):
        first, *later = heard[f"seat{number}"]
        assert f"You are Player {number} in Tic Tac Toe" in first
        assert not any("You are Player" in text for text in later)
    assert heard["seat0"][1].startswith("[Player 0] [0]")
    assert "[Player 1] [1]" in heard["seat0"][1]


def test_the_player_that_moves_twice_where_it_may_not_loses(make: Make) -> None:
    outcome, heard = played(make(), first_free, lambda _: "[12]")
    assert outcome.rewards == {"seat0": 1.0, "seat1": -1.0}
    assert outcome.metrics["invalid_move/seat1"] == 1.0
    assert "invalid move" in heard["seat1"][1]


def test_games_side_by_side_are_those_of_their_seeds(make: Make) -> None:
    envs = make("KuhnPoker-v0", max_rounds=3)

    def check(observation: str) -> str:
        return "[check]" if "'[check]'" in observation.splitlines()[-1] else "[call]"

    async def beside() -> list[Any]:
        return await asyncio.gather(*(play(envs, (3, 17)[i % 2], check, check) for i in range(6)))

    alone = played(envs, check, check)
    episodes = asyncio.run(beside())
    assert episodes[::2] == [alone] * 3
    assert episodes[1::2] == [episodes[1]] * 3
    assert episodes[1] != alone


def test_earlier_weights_have_the_other_seat_which_the_seed_draws(make: Make) -> None:
    envs = make(earlier_opponents=True)
    assert (envs().agents, envs().opponents) == (("player", "opponent1"), ("opponent1",))
    seats = Counter()
    for seed in range(8):
        outcome, heard = played(envs, first_free, first_free, seed=seed)
        assert (outcome, heard) == played(envs, first_free, first_free, seed=seed)
        seat = int("You are Player 1" in heard["player"][0])
        assert outcome.rewards == {"player": 1.0 - 2 * seat, "opponent1": 2 * seat - 1.0}
        seats[seat] += 1
    assert set(seats) == {0, 1}
    _, heard = played(make(earlier_opponents=True, seat=1), first_free, first_free, seed=0)
    assert "You are Player 1" in heard["player"][0]


def test_a_player_out_of_tokens_ends_the_game_without_a_winner(make: Make) -> None:
    def out_of_tokens(_: str) -> str:
        raise EpisodeOver

    outcome, _ = played(make(), first_free, out_of_tokens)
    assert outcome == Outcome(rewards={"seat0": 0.0, "seat1": 0.0})


def test_a_game_that_is_late_is_a_failure(make: Make) -> None:
    none = (
        1e-300  # added to a clock it changes nothing, so the deadline has passed before the game can answer
    )
    with pytest.raises(EnvError, match=r"the game took longer than env.kwargs.timeout_s=1e-300"):
        played(make(timeout_s=none), first_free, first_free)


def test_unknown_games_and_seats_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="TextArena has no environment 'TicTac-v0', did you mean"):
        make("TicTac-v0")
    with pytest.raises(ConfigError, match="seat=2: a seat is below num_players=2"):
        make(earlier_opponents=True, seat=2)()
    with pytest.raises(ConfigError, match="seat=0: a seat is for earlier_opponents=true only"):
        make(seat=0)()


ACTIONS = ("[check]", "[bet]", "[call]", "[fold]")


def sentences() -> list[str]:
    """The lines of a game of Kuhn poker, which are then one token each, but for the cards."""
    said = [text for seed in range(4) for seat in _heard(seed).values() for text in seat]
    parts = {part for text in said for line in text.splitlines() for part in re.split(r"'[JQK]'", line)}
    return sorted(part.strip() for part in parts if len(part) > 20)


def _heard(seed: int) -> dict[str, list[str]]:
    import textarena

    game = textarena.make("KuhnPoker-v0")
    game.reset(num_players=2, seed=seed)
    heard: dict[str, list[str]] = {"0": [], "1": []}
    for action in ("[check]", "[bet]", "[call]"):
        player, observation = game.get_observation()
        heard[str(player)].append(observation)
        if game.step(action)[0]:
            break
    return heard


@pytest.mark.parametrize("earlier", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_policy_trains_on_the_seats_that_it_plays(
    load_tiny: LoadTiny, earlier: bool, nothing_is_left: None
) -> None:
    """A move is one token. Untrained, most are none, and the second of these loses the game. Who has had no
    turn by then has no row, and the sum of rewards is that of the loser. Against an opponent that loses
    before the first turn of the player there is nothing to learn: such episodes are invalid."""
    kwargs = {"id": "KuhnPoker-v0", "earlier_opponents": earlier, "seat": 0 if earlier else None}
    game = {"kind": "agent", "name": "textarena_self_play", "kwargs": kwargs, "max_turns": 4, "tasks": 64}
    env = {
        **game,
        "max_context_tokens": 600,
        "cut_turns": "continue",
        "opponents": {"every_rounds": 2} if earlier else None,
    }
    build = {**TINY_MODEL, "characters": "JQKPlayer01[]' ", "words": [*ACTIONS, *sentences()]}
    run = commands.train(
        load_tiny(
            f"env={json.dumps(env)}",
            f"model.build={json.dumps(build)}",
            "data={}",
            "reward={}",
            "rollout={prompts_per_round: 4, group_size: 8, max_invalid_fraction: 1.0, sampling: "
            "{max_new_tokens: 1}}",
            "run.max_rounds=4",
            "eval={at_end: false}",
            "report={samples_every_rounds: 4}",
        )
    ).run_dir
    assert all(line["policy/grad_norm"] > 0 for line in lines(run)[1:])
    (path,) = (run / "samples").glob("round_000004.jsonl")
    agents = {
        (segment.agent, segment.is_trained, segment.turns[0].policy_version)
        for sample in read_samples(path)
        for segment in sample.trajectory.segments
    }
    if earlier:
        assert agents == {("player", True, 3), ("opponent1", False, 2)}
    else:
        assert agents == {("seat0", True, 3), ("seat1", True, 3)}
        assert all(line["reward/mean"] <= 0 for line in lines(run)[1:])
        assert all(line["status/invalid"] == 0 for line in lines(run)[1:])
