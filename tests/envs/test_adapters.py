"""Environments of other libraries: same seed, same episode; their traps."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.leftovers import LIMIT_S
from tests.needs import needs

from braid.envs.agents.base import Opening, Step
from braid.envs.agents.build import ADAPTERS, AgentEnvs
from braid.errors import ConfigError, EnvError
from braid.generators import reasoning_gym
from braid.types import Action, Prompt

pytestmark = pytest.mark.slow

FIELDS = {"reward_spec": {"ground_truth": "7"}, "extra_info": {"max_turns": 3}}
TASK = Prompt("test:0", "test", (1,), ({"role": "user", "content": "3+4="},), FIELDS)
LAKE = {"id": "FrozenLake-v1", "is_slippery": False}
EPISODES: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {
    "guess": ({"highest": 100}, ["50", "20", "many", "70"]),
    "gymnasium": ({"id": "FrozenLake-v1"}, ["right", "down", "up", "right"]),
    "skyrl_gym": ({"id": "gsm8k_multi_turn"}, ["#### 5", "seven", "#### 7"]),
    "gem": ({"id": "game:Sokoban-v0-easy"}, [r"\\boxed{up}", r"\\boxed{left}", r"\\boxed{down}"]),
    "reasoning_gym": ({"generator": "basic_arithmetic"}, ["1", "<answer>2</answer>", "3"]),
    "textarena": ({"id": "KuhnPoker-v0", "opponent": "random"}, ["[bet]", "[check]", "[call]", "[check]"]),
    "textworld": ({"has_commands": True}, ["look", "go east", "dance\nnow"]),
}
"""Arguments, and what the policy says."""
PACKAGES = {"gymnasium": "gymnasium", "guess": "braid", "textworld": "jericho"}
INSTALLED = [
    pytest.param(
        name, marks=[needs(PACKAGES.get(name, name)), *([pytest.mark.slow] if name == "textworld" else [])]
    )
    for name in EPISODES
]


@pytest.fixture
def maker(nothing_is_left: None, tmp_path: Path) -> Iterator[Callable[..., AgentEnvs]]:
    """Makers of environments, closed after the test."""
    made: list[AgentEnvs] = []

    def make(name: str, num_processes: int = 1, run_in: Any = "auto", **kwargs: Any) -> AgentEnvs:
        if name == "textworld":
            kwargs.setdefault("folder", str(tmp_path))
        made.append(AgentEnvs(name, kwargs, Path(), run_in, num_processes))
        return made[-1]

    yield make
    for each in made:
        asyncio.run(each.close())


async def play(
    make: AgentEnvs, says: Sequence[str], seed: int = 3, task: Prompt = TASK
) -> list[Opening | Step]:
    """The episode, until it ends or the policy has said everything."""
    env = make()
    try:
        episode: list[Opening | Step] = [await env.start(task, seed)]
        for text in says:
            episode.append(step := await env.step(Action(text)))
            if step.is_done or step.is_truncated:
                break
    finally:
        await env.close()
    return episode


def played(make: AgentEnvs, *says: str, seed: int = 3, task: Prompt = TASK) -> list[Any]:
    return asyncio.run(play(make, says, seed, task))


def said(step: Opening | Step) -> str:
    return step.messages[0]["content"]


def test_every_adapter_is_tested() -> None:
    elsewhere = {"openenv", "templated", "team", "textarena_self_play"}
    assert {*EPISODES, *elsewhere} == set(ADAPTERS), "the last three: test_NAME.py"


@pytest.mark.parametrize("name", INSTALLED)
def test_a_seed_decides_the_episode_whatever_runs_beside_it(
    name: str, maker: Callable[..., AgentEnvs]
) -> None:
    kwargs, says = EPISODES[name]
    make = maker(name, 2, **kwargs)

    async def beside() -> list[list[Opening | Step]]:
        return await asyncio.gather(*(play(make, says, (3, 17)[number % 2]) for number in range(9)))

    alone = played(make, *says)
    episodes = asyncio.run(beside())
    assert episodes[::2] == [alone] * 5
    assert episodes[1::2] == [episodes[1]] * 4
    assert (episodes[1] == alone) == (name == "skyrl_gym"), "its task has no seed"
    assert all(
        message["role"] == "user" and message["content"] for reply in alone for message in reply.messages
    )


@pytest.mark.parametrize("name", INSTALLED)
def test_an_unknown_game_is_refused(name: str, maker: Callable[..., AgentEnvs]) -> None:
    argument = {"reasoning_gym": "generator", "textworld": "game", "guess": "id"}.get(name, "id")
    with pytest.raises(ConfigError, match=r"nowhere|unexpected"):
        played(maker(name, **{argument: "nowhere"}))


# Gymnasium


def test_the_lake_is_read_as_text(maker: Callable[..., AgentEnvs]) -> None:
    opening, *steps = played(
        maker("gymnasium", **LAKE, max_moves=9), "I go RIGHT", "Hm?", "not left but down"
    )
    assert said(opening) == (
        "Walk from S to G, not into H.\nSFFF\nFHFH\nFFFH\nHFFG\nAt most 9 moves.\nChoose: left, down, right, up.\nrow 0, col 0"
    )
    assert [said(step) for step in steps[:2]] == [
        "row 0, col 1",
        "Choose: left, down, right, up.\nrow 0, col 1",
    ]
    assert steps[2] == Step(is_done=True, metrics={"moves": 3.0, "invalid_moves": 1.0})


def test_the_shortest_way_over_the_ice_has_six_moves(maker: Callable[..., AgentEnvs]) -> None:
    *_, last = played(maker("gymnasium", **LAKE), *["down", "down", "right", "right", "down", "right"])
    assert (last.reward, last.is_done, last.metrics["moves"]) == (1.0, True, 6.0)


def test_the_best_policy_on_slippery_ice_reaches_the_exact_optimum(maker: Callable[..., AgentEnvs]) -> None:
    moves, num = 15, 600
    kwargs = {"id": "FrozenLake-v1", "success_rate": 0.8, "max_moves": moves}
    model: Any = gymnasium.make("FrozenLake-v1", success_rate=0.8).unwrapped
    values, best = np.zeros(16), []
    for _ in range(moves):
        action_values = np.array(
            [
                [
                    sum(p * (reward + (not done) * values[to]) for p, to, reward, done in model.P[state][a])
                    for a in range(4)
                ]
                for state in range(16)
            ]
        )
        best.insert(0, action_values.argmax(1))
        values = action_values.max(1)
    assert values[0] == pytest.approx(0.75, abs=5e-4)

    async def reward(seed: int) -> float:
        env = make()
        reply: Opening | Step = await env.start(TASK, seed)
        for of_state in best:
            row, column = (int(word.strip(",")) for word in said(reply).splitlines()[-1].split()[1::2])
            word = ("left", "down", "right", "up")[of_state[4 * row + column]]
            if (reply := await env.step(Action(word))).is_done or reply.is_truncated:
                break
        await env.close()
        return reply.reward

    async def rewards() -> list[float]:
        return [await reward(seed) for seed in range(num)]

    make = maker("gymnasium", **kwargs)
    four_sigma = 4 * (0.75 * 0.25 / num) ** 0.5
    assert np.mean(asyncio.run(rewards())) == pytest.approx(values[0], abs=four_sigma)


def test_a_bad_answer_costs_a_move_and_its_penalty(maker: Callable[..., AgentEnvs]) -> None:
    _, first, last = played(maker("gymnasium", **LAKE, max_moves=2, invalid_reward=-0.5), "north", "leftish")
    assert (first.reward, first.is_done, first.is_truncated) == (-0.5, False, False)
    assert (last.reward, last.is_done, last.is_truncated) == (-0.5, False, True)
    assert last.metrics == {"moves": 2.0, "invalid_moves": 2.0}


def test_a_pattern_finds_the_action(maker: Callable[..., AgentEnvs]) -> None:
    make = maker("gymnasium", **LAKE, pattern=r"<answer>(.*?)</answer>")
    _, *steps = played(
        make, "down", "<answer>left</answer>, no: <answer> Right </answer>", "<answer>jump</answer>"
    )
    assert [said(step).splitlines()[-1] for step in steps] == ["row 0, col 0", "row 0, col 1", "row 0, col 1"]
    assert steps[2].messages[0]["content"].startswith("Choose:")
    with pytest.raises(ConfigError, match="not a regular expression"):
        played(maker("gymnasium", **LAKE, pattern="("))


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [("FrozenLake-v1", "[S]FFF"), ("Taxi-v4", "|[ ]: :"), ("CliffWalking-v1", "x  C  C")],
)
def test_a_rendering_shows_places_without_colour_codes(
    env_id: str, expected: str, maker: Callable[..., AgentEnvs]
) -> None:
    text = said(played(maker("gymnasium", id=env_id, observation="ansi"))[0])
    assert expected in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("env_id", "says", "expected"),
    [
        ("Blackjack-v1", "hit", "you 17, dealer 10"),
        ("CliffWalking-v1", "up", "row 2, col 0"),
        ("Taxi-v4", "north", "taxi row 0, col 2; passenger at R, to Y"),
    ],
)
def test_other_games_have_words(
    env_id: str, says: str, expected: str, maker: Callable[..., AgentEnvs]
) -> None:
    opening, step = played(maker("gymnasium", id=env_id), says)
    assert says in said(opening)
    assert said(step) == expected


class _Echo(gymnasium.Env):
    """Text in, text out."""

    observation_space = action_space = gymnasium.spaces.Text(5, charset="abc")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return "a", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return action[::-1], 1.0, False, False, {}


def test_spaces_of_text_are_passed_on(maker: Callable[..., AgentEnvs]) -> None:
    gymnasium.register("Echo-v0", _Echo)
    try:
        _, good, bad = played(maker("gymnasium", id="Echo-v0"), " abc ", "xyz")
    finally:
        del gymnasium.registry["Echo-v0"]
    assert (said(good), good.reward) == ("cba", 1.0)
    assert (said(bad), bad.reward) == ("Invalid answer.\ncba", 0.0)


def test_spaces_that_are_no_text_are_refused(maker: Callable[..., AgentEnvs]) -> None:
    with pytest.raises(ConfigError, match="unsupported observation space"):
        played(maker("gymnasium", id="CartPole-v1"))
    with pytest.raises(ConfigError, match="does not accept"):
        played(maker("gymnasium", id="FrozenLake-v1", slippery=True))
    with (
        pytest.warns(DeprecationWarning, match="upgrading to version"),
        pytest.raises(ConfigError, match="use `Taxi-v4` instead"),
    ):
        played(maker("gymnasium", id="Taxi-v3"))


# Guess


def test_binary_search_wins_as_often_as_can_be(maker: Callable[..., AgentEnvs]) -> None:
    async def wins(highest: int, tries: int, seed: int) -> float:
        env, low, high = maker("guess", highest=highest, tries=tries)(), 1, highest
        await env.start(TASK, seed)
        while True:
            middle = (low + high) // 2
            step = await env.step(Action(f"is it {middle}?"))
            if step.is_done:
                return step.reward
            low, high = (middle + 1, high) if said(step) == "higher" else (low, middle - 1)

    assert all(asyncio.run(wins(15, 4, seed)) == 1.0 for seed in range(60))
    # Seven of the fifteen numbers are found in three tries.
    four_sigma = 4 * (7 / 15 * 8 / 15 / 200) ** 0.5
    assert np.mean([asyncio.run(wins(15, 3, seed)) for seed in range(200)]) == pytest.approx(
        7 / 15, abs=four_sigma
    )


# skyrl-gym


@needs("skyrl_gym")
def test_the_task_of_skyrl_gym_is_in_the_fields(maker: Callable[..., AgentEnvs]) -> None:
    opening, wrong, right = played(maker("skyrl_gym", id="gsm8k_multi_turn"), "#### 5", "#### 7")
    assert opening.messages == [dict(TASK.messages[0])]
    assert wrong.reward == pytest.approx(0.2 / 3)
    assert (right.reward, right.is_done, right.metrics) == (1.0, True, {"steps": 2.0})
    assert played(maker("skyrl_gym", id="gsm8k_multi_turn", max_turns=1), "#### 5")[-1].is_done
    with pytest.raises(
        EnvError, match=r"reward_spec field is required; the task's fields and env.kwargs are \[\]"
    ):
        played(maker("skyrl_gym", id="gsm8k"), task=Prompt("test:1", "test", (1,), ()))


@needs("skyrl_gym")
def test_the_settings_of_skyrl_gym_have_attributes(maker: Callable[..., AgentEnvs]) -> None:
    config = {"search_url": "http://127.0.0.1:1", "topk": 1, "timeout": 1, "log_requests": False}
    make = maker("skyrl_gym", id="search", env_config=config, reward_spec={"ground_truth": {"target": "7"}})
    assert played(make, "<answer>7</answer>")[-1] == Step([], reward=1.0, is_done=True)


@needs("skyrl_gym")
def test_aime_of_skyrl_gym_has_its_answer_in_another_field(maker: Callable[..., AgentEnvs]) -> None:
    for answer, reward in (("Answer: 7", 1.0), ("Answer: 8", -1.0)):
        make = maker("skyrl_gym", id="aime", reward_model={"ground_truth": "7"})
        assert played(make, answer)[-1] == Step([], reward=reward, is_done=True)
    with pytest.raises(EnvError, match=r"reward_model field is required; .* \['extra_info', 'reward_spec'\]"):
        played(maker("skyrl_gym", id="aime"))


# GEM


@needs("gem")
def test_the_board_of_gem_is_in_its_suffix(maker: Callable[..., AgentEnvs]) -> None:
    opening, step = played(maker("gem", run_in="inline", id="game:Sokoban-v0-easy"), r"\boxed{up}")
    assert all("# # #" in said(reply) and "Enter your move" in said(reply) for reply in (opening, step))


@needs("gem")
def test_a_wrong_format_ends_an_episode_of_gem(maker: Callable[..., AgentEnvs]) -> None:
    _, last = played(maker("gem", run_in="inline", id="game:GuessTheNumber-v0-easy"), "five")
    assert (last.reward, last.is_done, last.is_truncated) == (-0.1, True, False)


@needs("gem")
def test_an_end_and_a_limit_of_gem_at_once_are_an_end(maker: Callable[..., AgentEnvs]) -> None:
    _, last = played(maker("gem", run_in="inline", id="rg:leg_counting"), r"\boxed{1}")
    assert (last.is_done, last.is_truncated) == (True, False)


@pytest.mark.parametrize(
    ("name", "game"),
    [
        pytest.param("gem", "game:Wordle-v0-easy", marks=needs("gem")),
        pytest.param("textarena", "Wordle-v0", marks=needs("textarena")),
    ],
)
def test_missing_word_lists_are_an_error_that_says_so(
    name: str, game: str, maker: Callable[..., AgentEnvs], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NLTK_DATA", "/nowhere")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    with pytest.raises(EnvError, match=f"{game} needs data of nltk that is not installed"):
        played(maker(name, id=game))


# reasoning-gym


def test_the_last_attempt_is_scored(maker: Callable[..., AgentEnvs]) -> None:
    make = maker("reasoning_gym", run_in="inline", generator="chain_sum", attempts=2, feedback="no")
    task = said(played(make)[0]).split(": ")[1].removesuffix(" =")
    answer = str(eval(task))
    _, wrong, right = played(make, "0", f"so <answer>{answer}</answer>")
    assert (said(wrong), wrong.reward, wrong.is_done) == ("no", 0.0, False)
    assert (right.reward, right.is_done, right.metrics) == (1.0, True, {"attempts": 2.0})
    assert played(make, "0", "0")[-1] == Step(is_done=True, metrics={"attempts": 2.0})


def test_the_task_of_procedural_data_is_used(maker: Callable[..., AgentEnvs]) -> None:
    create_dataset = reasoning_gym().create_dataset

    entry = create_dataset("chain_sum", size=1, seed=5)[0]
    fields = {
        **entry,
        "reasoning_gym": {"generator": "chain_sum", "params": {}, "answer": entry["answer"]},
        "answer": None,
    }
    task = Prompt("test:0", "test", (1,), (), fields)
    opening, last = played(maker("reasoning_gym", run_in="inline"), entry["answer"], task=task)
    assert not opening.messages
    assert last.reward == 1.0
    with pytest.raises(ConfigError, match="test:0 is not procedural"):
        played(maker("reasoning_gym", run_in="inline"))


# TextArena


@needs("textarena")
def test_the_policy_of_textarena_reads_only_what_is_new(maker: Callable[..., AgentEnvs]) -> None:
    make = maker("textarena", run_in="inline", id="TicTacToe-v0", opponent="random", seat=1)
    opening, step = played(make, "[4]")
    assert "You are Player 1 in Tic Tac Toe" in said(opening)
    assert "[Player 0]" in said(opening)
    assert said(step).startswith("[Player 1] [4]")
    assert "You are Player 1 in" not in said(step)


@needs("textarena")
def test_the_second_invalid_move_loses(maker: Callable[..., AgentEnvs]) -> None:
    _, first, second = played(
        maker("textarena", run_in="inline", id="TicTacToe-v0", opponent="random"), "[12]", "[12]"
    )
    assert "invalid move" in said(first)
    assert (first.reward, second.reward, second.is_done) == (0.0, -1.0, True)
    assert second.metrics["invalid_move"] == 1.0


def first_free(observation: str) -> str:
    """An opponent that takes the first free cell."""
    return observation.splitlines()[-1].split("'")[1]


@needs("textarena")
def test_an_opponent_can_be_a_function(maker: Callable[..., AgentEnvs]) -> None:
    make = maker(
        "textarena", run_in="inline", id="TicTacToe-v0", opponent="tests.envs.test_adapters.first_free"
    )
    _, *steps = played(make, "[4]", "[3]", "[5]")
    assert steps[-1] == Step(reward=1.0, is_done=True, metrics={"invalid_move": 0.0, "moves": 3.0})


@needs("textarena")
def test_a_game_for_one_has_no_opponent(maker: Callable[..., AgentEnvs]) -> None:
    _, *steps = played(
        maker("textarena", run_in="inline", id="GuessTheNumber-v0"),
        *(f"[{number}]" for number in range(1, 21)),
    )
    assert steps[-1].is_done
    assert 0 < steps[-1].reward <= 1


# TextWorld


@needs("jericho")
def test_a_game_of_textworld_is_won(
    maker: Callable[..., AgentEnvs],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    make = maker("textworld", has_commands=True)
    opening, *_ = played(make, seed=5)
    assert "Commands: " in said(opening)
    assert "$$$" not in said(opening), "without the banner"
    (game,) = tmp_path.glob("*.z8")
    assert played(make, "go east", "close box", seed=5)[-1] == Step(
        reward=1.0, is_done=True, metrics={"moves": 2.0, "won": 1.0}
    )
    task = Prompt("test:0", "test", (1,), (), {"game": str(game)})
    assert played(make, seed=1, task=task) == [opening]
    assert played(maker("textworld", max_moves=1), "dance", seed=5)[-1].is_truncated
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == [], "nothing else is left"
    assert not list(home.iterdir()), "the compiler writes to ~/Inform"
    with pytest.raises(EnvError, match="no game file nowhere"):
        played(make, task=Prompt("test:0", "test", (1,), (), {"game": "nowhere"}))


# OpenEnv


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The URL of a server for two sessions."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.envs.openenv_server", "2"],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout is not None
    yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    process.terminate()
    process.wait(LIMIT_S)
    process.stdout.close()


@needs("openenv")
def test_a_session_of_openenv_is_an_episode(server: str, maker: Callable[..., AgentEnvs]) -> None:
    make = maker("openenv", url=server, action_key="guess", observation_key="text", reset={"highest": 3})

    async def two() -> list[list[Opening | Step]]:
        return await asyncio.gather(*(play(make, ["1", "2", "3"], seed) for seed in (3, 3)))

    first, second = asyncio.run(two())
    others = [played(make, "1", "2", "3", seed=seed) for seed in range(8)]
    assert first == second
    assert others[3] == first
    assert {len(other) for other in others} == {2, 3, 4}, "the seed reaches the server"
    assert said(first[0]) == "1 to 3"
    assert (first[-1].reward, first[-1].is_done) == (1.0, True)


@needs("openenv")
def test_only_invalid_actions_are_mistakes_of_the_policy(
    server: str, maker: Callable[..., AgentEnvs]
) -> None:
    make = maker("openenv", url=server)
    opening, *steps = played(make, "five", "[5]", '{"gues": 5}', '{"guess": 0}')
    assert said(opening) == '{"text": "1 to 9"}'
    assert [said(step).partition(":")[0] for step in steps[:3]] == [
        "Not JSON",
        "Answer with a JSON object.",
        "Invalid action",
    ]
    assert "gues" in said(steps[2])
    assert said(steps[3]) == '{"text": "higher"}'
    with pytest.raises(EnvError, match="failed at step: the environment broke"):
        played(make, '{"guess": 99}')


@needs("openenv")
def test_a_server_that_is_full_or_away_is_a_failure(server: str, maker: Callable[..., AgentEnvs]) -> None:
    async def three() -> None:
        make = maker("openenv", url=server)
        envs = [make() for _ in range(3)]
        try:
            for env in envs[:2]:
                await env.start(TASK, 3)
            with pytest.raises(EnvError, match=r"at capacity|max_concurrent_envs"):
                await envs[2].start(TASK, 3)
        finally:
            for env in envs:
                await env.close()

    asyncio.run(three())
    with pytest.raises(EnvError, match=r"cannot connect to ws://127.0.0.1:1/ws"):
        played(maker("openenv", url="http://127.0.0.1:1"))
