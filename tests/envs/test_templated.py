"""Board games, and environments put into templates."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np
import pytest

from braid.envs.agents.adapters.grids import CELL, FrozenLake, Sokoban
from braid.envs.agents.adapters.templated import Templated
from braid.envs.agents.base import Opening, Step
from braid.envs.agents.build import AgentEnvs, MixedEnvs
from braid.envs.kinds import AgentEnvConfig, MixedEnvConfig
from braid.errors import ConfigError
from braid.images import opened
from braid.types import Action, Prompt

TASK = Prompt("a:0", "a", (), ())


def says(word: str) -> Action:
    return Action(f"<answer> {word} </answer>")


def text_of(step: Step | Opening) -> str:
    return step.messages[-1]["content"]


def path(board: str) -> list[str]:
    """A shortest path on a lake."""
    rows = board.split("\n")
    moves = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
    queue: deque[tuple[tuple[int, int], list[str]]] = deque([((0, 0), [])])
    visited = {(0, 0)}
    while queue:
        (row, column), taken = queue.popleft()
        if rows[row][column] == "G":
            return taken
        for name, (down, right) in moves.items():
            at = (row + down, column + right)
            if (
                at not in visited
                and 0 <= at[0] < len(rows)
                and 0 <= at[1] < len(rows)
                and rows[at[0]][at[1]] != "O"
            ):
                visited.add(at)
                queue.append((at, [*taken, name]))
    raise AssertionError("no path")


@pytest.mark.parametrize("seed", range(5))
def test_a_lake_is_that_of_its_seed_and_can_be_crossed(seed: int) -> None:
    lake, other = FrozenLake(is_slippery=False), FrozenLake(is_slippery=False)
    board = lake.reset(seed)[1]["suffix"]
    assert board == other.reset(seed)[1]["suffix"] != other.reset(seed + 100)[1]["suffix"]
    *moves, last = path(board)
    for move in moves:
        assert lake.step(f"<answer>{move}</answer>")[1:4] == (0.0, False, False)
    _, reward, is_done, is_truncated, info = lake.step(f"<answer>{last.upper()}</answer>")
    assert (reward, is_done, is_truncated) == (1.0, True, False)
    assert info["metrics"]["success"] == 1
    assert info["suffix"][-1] == "√"


@pytest.mark.parametrize("answer", ["", "Right", "<answer>North</answer>"])
def test_an_answer_without_an_action_costs_the_penalty(answer: str) -> None:
    lake = FrozenLake(format_penalty=-0.25)
    board = lake.reset(1)[1]["suffix"]
    text, reward, is_done, _, info = lake.step(answer)
    assert (reward, is_done, info["suffix"]) == (-0.25, False, board)
    assert "not a valid action" in text


def solution(game: Sokoban) -> list[str]:
    """A shortest solution, by the game's own moves from states that are put back."""

    def state() -> Any:
        return game._player, frozenset(game._boxes)

    start = state()
    queue: deque[tuple[Any, list[int]]] = deque([(start, [])])
    visited = {start}
    while queue:
        (player, boxes), taken = queue.popleft()
        for move in (1, 2, 3, 4):
            game._player, game._boxes = player, set(boxes)
            game._move(move)
            if game._is_won():
                game._player, game._boxes = start[0], set(start[1])
                return [game.actions[i] for i in (*taken, move)]
            if state() not in visited:
                visited.add(state())
                queue.append((state(), [*taken, move]))
    raise AssertionError("no solution")


@pytest.mark.parametrize(("seed", "boxes"), [(0, 1), (1, 1), (2, 2)])
def test_a_sokoban_room_is_that_of_its_seed_and_can_be_solved(seed: int, boxes: int) -> None:
    game = Sokoban(dim_room=[6, 6], num_boxes=boxes, max_steps=100)
    board = game.reset(seed)[1]["suffix"]
    assert board == Sokoban(dim_room=[6, 6], num_boxes=boxes).reset(seed)[1]["suffix"]
    assert (board.count("X"), board.count("P") + board.count("S")) == (boxes, 1)
    steps = [game.step(f"<answer>{move}</answer>") for move in solution(game)]
    *others, last = steps
    assert all(step[2:4] == (False, False) for step in others)
    assert last[2:4] == (True, False)
    assert sum(step[1] for step in steps) == pytest.approx(boxes + 10 - 0.1 * len(steps))
    assert "X" not in last[4]["suffix"]


def test_sokoban_ends_after_its_steps_and_has_symbols_of_ones_own() -> None:
    lookup = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
    game = Sokoban(dim_room=[6, 6], num_boxes=1, max_steps=2, format_penalty=-0.15, grid_lookup=lookup)
    assert set(game.reset(3)[1]["suffix"]) <= set("W.GCBA@\n")
    assert game.step("?")[1:4] == (pytest.approx(-0.25), False, False)
    assert game.step("?")[1:4] == (pytest.approx(-0.25), False, True)


def test_a_conversation_is_made_of_the_template() -> None:
    env = Templated(
        "frozen_lake", template="{turn_idx}/{actions_left}/{max_response_length}\n{observation}", system="Play.",
        max_turns=2, max_tokens=9, env_kwargs={"is_slippery": False},
    )  # fmt: skip
    opening = env.start(TASK, 0)
    assert [message["role"] for message in opening.messages] == ["system", "user"]
    first = text_of(opening)
    assert first.startswith("1/2/9\nYou walk over a frozen lake")
    assert first.split("\n")[-4][0] == "P", "the board is appended where the template has no place for it"
    second = env.step(says("left"))
    assert text_of(second).startswith("2/1/9\nTurn 1: you moved left, without effect.")
    assert [message["role"] for message in second.messages] == ["user"]
    assert not (second.is_truncated)
    assert not (second.forgets)
    assert env.step(says("left")).is_truncated


DRAWN = {"is_slippery": False, "render_mode": "rgb_array", "env_instruction": "Walk."}


def test_a_board_is_drawn_where_the_template_has_the_state() -> None:
    env = Templated(
        "frozen_lake",
        template="{opening}Turn {turn_idx}:{suffix}{actions_left} left",
        max_turns=2,
        env_kwargs=DRAWN,
    )
    (first,) = env.start(TASK, 0).messages
    rules, board, after = first["content"]
    assert rules["text"].startswith("Walk.\nColours: blue: player, white: empty, black: hole")
    assert rules["text"].endswith("UpTurn 1:"), "the rules are in the first turn"
    assert after == {"type": "text", "text": "2 left"}
    pixels = np.asarray(opened(board["image"]))
    assert pixels.shape == (4 * CELL, 4 * CELL, 3)
    assert pixels[0, 0].tolist() == [50, 80, 220], "the player starts in the corner"
    assert pixels[-1, -1].tolist() == [40, 180, 60], "the goal is in the other"
    (second,) = env.step(says("left")).messages
    before, same, _ = second["content"]
    assert before["text"] == "Turn 2:"
    assert same == board, "a wall stops the player"
    sokoban = Sokoban(dim_room=[6, 7], num_boxes=1, render_mode="rgb_array").reset(3)[1]["image"]
    assert sokoban.shape == (6 * CELL, 7 * CELL, 3)
    assert {tuple(pixel) for pixel in sokoban[::CELL, ::CELL].reshape(-1, 3)} >= {(0, 0, 0), (50, 80, 220)}


def test_the_picture_is_appended_to_a_template_without_a_place_and_histories_have_none() -> None:
    _, board = Templated("frozen_lake", env_kwargs=DRAWN).start(TASK, 0).messages[0]["content"]
    assert board["type"] == "image"
    with pytest.raises(ConfigError, match="remove history_length"):
        Templated("frozen_lake", history_length=2, env_kwargs=DRAWN).start(TASK, 0)


def test_with_a_history_each_turn_reads_only_its_message() -> None:
    env = Templated(
        "frozen_lake", template="{env_instruction}|{history}|{history_length}|{current_step}|{current_observation}",
        system="Play.", history_length=2, env_kwargs={"is_slippery": False, "env_instruction": "Rules"},
    )  # fmt: skip
    env.start(TASK, 0)
    env.step(says("left"))
    step = env.step(says("up"))
    assert step.forgets
    assert [message["role"] for message in step.messages] == ["system", "user"]
    _, history, length, current, observation = text_of(step).split("|")
    assert history.startswith("(step: 2, observation: Turn 1: you moved left")
    assert history.endswith("action: <answer> up </answer>)")
    assert (length, current) == ("1", "3")
    assert observation.startswith("Turn 2: you moved up")


def test_reasoning_is_part_of_what_the_action_is_found_in() -> None:
    env = Templated(
        "frozen_lake", env_kwargs={"action_pattern": r"<think>(.*?)</think>\s*<answer>(.*?)</answer>"}
    )
    env.start(TASK, 0)
    assert env.step(Action("<answer>Left</answer>", reasoning="hm")).metrics["valid"] == 1
    assert env.step(says("Left")).metrics["valid"] == 0


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"template": "{stat}"}, "{stat} is unknown"),
        ({"env_kwargs": {"size": 3, "colour": 1}}, "colour"),
        ({"env_kwargs": {"action_pattern": "<answer>"}}, "no group"),
        ({"env_kwargs": {"render_mode": "human"}}, "set it to text or rgb_array"),
    ],
)
def test_mistakes_in_arguments_are_named(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Templated("frozen_lake", **kwargs)


def test_the_kind_of_a_mixture_follows_from_the_source_or_a_column(tmp_path: Any) -> None:
    def envs(highest: int) -> AgentEnvs:
        return AgentEnvs("guess", {"highest": highest}, tmp_path)

    async def play() -> list[str]:
        texts = []
        for key, task in ((None, Prompt("b", "b", (), ())), ("env", Prompt("a", "a", (), (), {"env": "b"}))):
            config = AgentEnvConfig(kind="agent", mix={"b": MixedEnvConfig(name="guess")}, mix_key=key)
            mixed = MixedEnvs({"a": (envs(3), None), "b": (envs(7), 1)}, config.kind_of_task)
            env = mixed()
            opening = await env.start(task, 0)
            step = await env.step(Action("nothing"))
            assert step.is_truncated, "after one turn"
            await env.close()
            await mixed.close()
            texts.append(text_of(opening))
        return texts

    assert asyncio.run(play()) == ["Guess a number from 1 to 7 in 4 tries."] * 2
