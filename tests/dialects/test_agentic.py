"""Agentic files of ROLL, SkyRL and RLinf: what their keys become, and that they train with a tiny model."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.algorithms.advantages.gigpo import Gigpo
from braid.algorithms.advantages.reinforce import Reinforce
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.cli.main import main
from braid.config.load import load_config
from braid.envs.agents.adapters.templated import Templated
from braid.errors import ConfigError
from braid.plan import resolve
from braid.report.samples import read_samples
from braid.trainer import commands
from braid.trainer.inputs import prompt_sampler, read_inputs
from braid.types import Action, Message, Prompt
from braid_dialects.load import Read, read_config

from .conftest import IN_ONE_PROCESS, SEEDS, laid_over

TEMPLATE = "Turn {turn_idx}: {observation}\n{actions_left} left, as <answer>Up</answer>\n"
MANAGER = "roll.pipeline.agentic.env_manager"
LAKE = {"env_instruction": "Walk to G.", "grid_vocab": {"P": "you"}}
PRESET: dict[str, Any] = {
    "action_pattern": "<answer>(.*?)</answer>",
    "max_tokens_per_step": 128,
    "max_actions_per_traj": 10,
    "frozen_format_penalty": -0.01,
    "env_manager_cls": f"{MANAGER}.traj_env_manager.TrajEnvManager",
    "agent_runner_cls": None,
    "custom_env": {
        name: {
            "env_type": kind,
            "max_steps": "${max_actions_per_traj}",
            "max_tokens_per_step": "${max_tokens_per_step}",
            "env_manager_cls": "${env_manager_cls}",
            "agent_runner_cls": "${agent_runner_cls}",
            "use_thread_lock": True,
            "max_env_step_concurrent": 5,
            "agent_system_template": "${agent_system_template}",
            "agent_template": "${agent_template}",
            "env_config": {
                "action_pattern": "${action_pattern}",
                "max_steps": "${max_actions_per_traj}",
                "format_penalty": "${frozen_format_penalty}",
                **config,
            },
        }
        for name, kind, config in (
            ("FrozenLake", "frozen_lake", {"is_slippery": False, **LAKE}),
            (
                "SimpleSokoban",
                "sokoban",
                {"dim_room": [6, 6], "num_boxes": 1, "grid_lookup": {0: "W", 1: "."}},
            ),
            ("WebShopEnv", "webshop", {"observation_mode": "text"}),
        )
    },
    "agent_system_template": "You play games.",
    "agent_template": TEMPLATE,
}
"""As examples/config/traj_envs.yaml."""
ROLL: dict[str, Any] = {
    "defaults": ["config/traj_envs@_here_"],
    "exp_name": "agentic",
    "render_save_dir": "./render",
    "num_gpus_per_node": 8,
    "max_steps": 100,
    "eval_steps": 10,
    "rollout_batch_size": 128,
    "val_batch_size": 96,
    "sequence_length": 8192,
    "advantage_clip": 0.2,
    "adv_estimator": "grpo",
    "init_kl_coef": 0.0,
    "whiten_advantages": True,
    "pretrain": "Qwen/Qwen2.5-0.5B-Instruct",
    "actor_train": {
        "model_args": {"dtype": "bf16"},
        "training_args": {
            "learning_rate": 1e-6,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
        },
        "data_args": {"template": "qwen2_5"},
        "strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 1},
        },
        "device_mapping": "list(range(0,8))",
        "infer_batch_size": 2,
    },
    "actor_infer": {
        "generating_args": {"max_new_tokens": 100, "top_p": 1, "top_k": 0, "temperature": 1.0},
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.8}},
        "device_mapping": "list(range(0,8))",
    },
    "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
    "train_env_manager": {
        "format_penalty": -0.15,
        "max_env_num_per_worker": 16,
        "num_env_groups": 16,
        "group_size": 8,
        "tags": ["FrozenLake"],
        "num_groups_partition": [16],
    },
    "val_env_manager": {
        "max_env_num_per_worker": 32,
        "num_env_groups": 96,
        "group_size": 1,
        "tags": ["SimpleSokoban", "FrozenLake"],
        "num_groups_partition": [32, 64],
    },
    "max_tokens_per_step": 64,
    "custom_envs": {name: f"${{custom_env.{name}}}" for name in ("FrozenLake", "SimpleSokoban")},
}
"""As the FrozenLake examples of the agentic pipeline."""


def roll(folder: Path, changes: dict[str, Any] | None = None, *overrides: str, **chosen: Any) -> Read:
    (folder / "config").mkdir(exist_ok=True)
    (folder / "config" / "traj_envs.yaml").write_text(yaml.safe_dump(PRESET, sort_keys=False))
    path = folder / "agentic.yaml"
    path.write_text(yaml.safe_dump(laid_over(ROLL, changes or {}), sort_keys=False))
    return read_config(path, overrides, dialect="roll", **chosen)


def refusal(folder: Path, changes: dict[str, Any], **chosen: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        roll(folder, changes, **chosen)
    return str(caught.value)


def test_roll_s_environments_become_a_mixture_of_tags(tmp_path: Path) -> None:
    read = roll(tmp_path)
    env = read.loaded.config.env
    assert (env.kind, env.max_turns, env.max_context_tokens, env.run_in) == ("agent", 10, 8192, "auto")
    assert (env.cut_turns, env.rewards_at, env.eval_episodes) == ("continue", "end", 96)
    shares = {tag: (kind.share, kind.eval_share) for tag, kind in env.mix.items()}
    assert shares == {"FrozenLake": (16.0, 64.0), "SimpleSokoban": (0.0, 32.0)}
    assert env.mix["SimpleSokoban"].kwargs == {
        "id": "sokoban",
        "template": TEMPLATE,
        "system": "You play games.",
        "max_turns": 10,
        "max_tokens": 64,
        "env_kwargs": {
            "action_pattern": "<answer>(.*?)</answer>", "max_steps": 10, "format_penalty": -0.01,
            "dim_room": [6, 6], "num_boxes": 1, "grid_lookup": {"0": "W", "1": "."},
        },
    }  # fmt: skip
    assert read.loaded.config.rollout.sampling.max_new_tokens == 64
    assert not [entry.path for entry in read.ledger if entry.disposition in ("unsupported", "refused")]


def test_roll_s_round_has_rollout_batch_size_trajectories(tmp_path: Path) -> None:
    config = roll(tmp_path).loaded.config
    assert resolve(config).trajectories_per_round == 128
    rollout, train = config.rollout, config.train
    assert (rollout.prompts_per_round, rollout.group_size, train.steps_per_pass) == (
        16,
        8,
        2,
    )  # 128 / (2 * 4 * 8)
    three = {"rollout_batch_size": 24, "actor_train": {"training_args": {"gradient_accumulation_steps": 1}}}
    # 24 rows are 1.5 batches of 16, and three groups do not make two steps
    assert roll(tmp_path, three).loaded.config.train.steps_per_pass == 1
    assert "do not divide rollout_batch_size=100" in refusal(tmp_path, {"rollout_batch_size": 100})


@pytest.mark.parametrize(
    ("normalization", "mean", "std"),
    [
        ({"grouping": "traj_group_id", "method": "mean_std"}, "group", "group"),
        ({"grouping": "tags", "method": "mean_std"}, "source", "source"),
        ({"grouping": "batch", "method": "mean"}, "batch", "none"),
        ({"grouping": "batch", "method": "identity"}, "none", "none"),
        ({"method": "identity", "norm_mean_type": "group", "norm_std_type": "batch"}, "group", "batch"),
    ],
)
def test_roll_s_reward_normalization_is_statistics(
    normalization: dict[str, Any], mean: str, std: str, tmp_path: Path
) -> None:
    algorithm = roll(tmp_path, {"reward_normalization": normalization}).loaded.config.algorithm
    assert algorithm.advantage is not None
    assert (algorithm.advantage.kind, algorithm.reward_mean, algorithm.reward_std) == ("reinforce", mean, std)


def test_roll_s_turn_level_estimators(tmp_path: Path) -> None:
    steps = {"env_manager_cls": f"{MANAGER}.step_env_manager.StepEnvManager", "history_length": 3}
    changes = {"adv_estimator": "gigpo", "step_reward_gamma": 0.5, "step_reward_weight": 2.0,
               "custom_envs": {"FrozenLake": PRESET["custom_env"]["FrozenLake"] | steps}}  # fmt: skip
    config = roll(tmp_path, changes).loaded.config
    algorithm = config.algorithm
    assert isinstance(algorithm.advantage, Gigpo)
    assert (algorithm.advantage.gamma, algorithm.advantage.turn_weight) == (0.5, 2.0)
    assert (algorithm.advantage.normalize_by_std, algorithm.reward_mean) == (True, "none")
    assert config.env.rewards_at == "turn"
    assert config.env.mix["FrozenLake"].kwargs["history_length"] == 3
    normalization = {"reward_normalization": {"method": "identity"}}
    steps = roll(tmp_path, {"adv_estimator": "step_reinforce", **normalization}).loaded.config.algorithm
    assert steps.advantage == Reinforce(level="turn", gamma=0.95)
    segment = roll(tmp_path, {"adv_estimator": "agentic_reinforce", "ratio_type": "segment", "gamma": 0.9})
    algorithm = segment.loaded.config.algorithm
    assert algorithm.advantage == Reinforce(level="turn", gamma=0.9)
    assert algorithm.policy_loss == PpoClip(ratio_level="turn")


def test_presets_of_gem_count_where_custom_envs_refers_to_them(tmp_path: Path) -> None:
    math = {"env_type": "math:Math12K", "tool_wrapper": {"tool_configs": [{"tool_id": "python_code"}]}}
    presets = {
        "gem_games": {"Hangman": {"env_type": "game:Hangman-v0-easy", "env_config": {"max_turns": 3}}},
        "gem_math": {"MathEnv": math},
    }
    assert "Hangman" not in roll(tmp_path, presets).loaded.config.env.mixture
    chosen = {
        "custom_envs": {"Hangman": "${gem_games.Hangman}"},
        "train_env_manager": {"tags": ["Hangman"]},
        "val_env_manager": {"tags": ["Hangman"], "num_groups_partition": [96]},
    }
    kwargs = roll(tmp_path, presets | chosen).loaded.config.env.mixture["Hangman"].kwargs
    assert (kwargs["id"], kwargs["env_kwargs"]) == ("game:Hangman-v0-easy", {"max_turns": 3})
    tools = {"custom_envs": {"FrozenLake": "${gem_math.MathEnv}"}}
    assert "use tool calls: braid.env.kind=tools" in refusal(tmp_path, presets | tools)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"custom_envs": {"FrozenLake": "${custom_env.WebShopEnv}"}}, "env_type.*'webshop'.*or an id of GEM"),
        (
            {"env_manager_cls": f"{MANAGER}.agent_native_env_manager.AgentNativeStepEnvManager"},
            r"braid\.env\.kind=program",
        ),
        ({"train_env_manager": {"tags": ["Other"]}}, "'Other' has no custom_envs.Other.env_type"),
        ({"train_env_manager": {"num_groups_partition": [15]}}, "sums to 15, but num_env_groups is 16"),
        ({"train_env_manager": {"group_size_redundancy": 1}}, "group_size_redundancy"),
        ({"reward_normalization": {"method": "asym_clip"}}, "use mean_std"),
        (
            {
                "train_env_manager": {"group_size": 1},
                "reward_normalization": {
                    "grouping": "traj_group_id",
                    "norm_mean_type": "batch",
                    "norm_std_type": "batch",
                },
            },
            "reward of a group of one to 0",
        ),
        (
            {
                "reward_normalization": {
                    "grouping": "traj_group_id",
                    "norm_mean_type": "batch",
                    "norm_std_type": "group",
                }
            },
            "mean=batch, std=group.*deviation is 0 to 0",
        ),
        (
            {"reward_normalization": {"norm_mean_type": None, "norm_std_type": "batch"}},
            "mean=none, std=batch",
        ),
        (
            {
                "adv_estimator": "gigpo",
                "reward_normalization": {"norm_mean_type": "batch", "norm_std_type": "group"},
            },
            "the group's own statistics, not mean=batch",
        ),
        ({"adv_estimator": "step_reinforce"}, "method=identity"),
        ({"adv_estimator": "gigpo", "reward_normalization": {"grouping": "tags"}}, "grouping=traj_group_id"),
        ({"exp_mode": "eval"}, "braid eval"),
    ],
)
def test_what_roll_s_pipeline_has_and_braid_lacks_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    text = refusal(tmp_path, changes)

    assert re.search(message, text), text


def test_tags_have_their_shares_of_every_round(tmp_path: Path) -> None:
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**TINY, "env": {
        "kind": "agent", "max_context_tokens": 64, "tasks": 100, "eval_episodes": 6,
        "mix": {"few": {"name": "guess"}, "many": {"name": "guess", "share": 3, "eval_share": 1}},
    }}))  # fmt: skip
    loaded = load_config(tmp_path / "model.yaml")
    inputs = read_inputs(loaded, "train")
    assert inputs is not None
    prompts = inputs.train.prompts
    assert [sum(p.source == tag for p in prompts) for tag in ("few", "many")] == [25, 75]
    assert [sum(p.source == tag for p in inputs.eval.prompts) for tag in ("few", "many")] == [3, 3]
    sampler = prompt_sampler(loaded.config, len(prompts), prompts)
    for _ in range(5):
        drawn = [prompts[i].source for i in sampler.take(8)]
        assert drawn.count("few") == 2


# --- training ---

TINY: dict[str, Any] = {
    "run": {"name": "tiny", "device": "cpu"},
    "model": {
        "build": {
            "architecture": "llama", "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2,
            "num_kv_heads": 1, "head_dim": 32,
        }
    },
    "report": {"console": "none", "tensorboard": False},
}  # fmt: skip


def warm_model(
    folder: Path,
    examples: Sequence[Mapping[str, Any]],
    template: str | None = None,
    architecture: str = "llama",
    steps: int = 60,
    words: Sequence[str] = (),
) -> Path:
    """A tiny model that has learned the answers in `examples`: of prompts, or of conversations. `words` are
    one token each."""
    (folder / "examples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in examples))
    of_prompts = {"answer_key": None, "response_key": "response"}
    keys = {"messages_key": "messages"} if "messages" in examples[0] else of_prompts
    sft = {
        "data": [{"kind": "file", "path": "examples.jsonl", **keys}],
        "steps": steps,
        "rows_per_step": 16,
        "optimizer": {"lr": 3e-3},
    }
    run = {"name": "warm", "device": "cpu", "output_dir": str(folder), "base_dir": str(folder)}
    path = folder / "warm.yaml"
    build = TINY["model"]["build"] | {"architecture": architecture, "words": list(words)}
    tiny = {**TINY, "model": {"build": build}}
    path.write_text(yaml.safe_dump({**tiny, "run": run, "sft": sft, "data": {"max_prompt_tokens": 700}}))
    model = commands.export(commands.sft(load_config(path)).run_dir, output=folder / "model")
    if template is not None:
        (model / "chat_template.jinja").write_text(template)
    return model


EVALUATED = (
    "braid.run.device=cpu",
    "braid.report.console=none",
    "braid.eval.before=true",
    "braid.eval.samples_per_prompt=16",
)


def learned(read: Read) -> tuple[float, float]:
    """The mean score before and after a run, of valid episodes alone."""
    evals = json.loads((commands.train(read.loaded).run_dir / "summary.json").read_text())["eval"]
    first, last = evals["first"]["all"], evals["last"]["all"]
    assert first["invalid"] == last["invalid"] == 0
    return first["mean@16"], last["mean@16"]


MESSAGES = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
MOVES = tuple(f"<answer>{move}</answer>" for move in ("Left", "Down", "Right", "Up"))
TEXTS = ("You play games.Turn 1: Walk to G.\nSymbols: P: you\nActions: Left, Down, Right, Up\n", "Turn ", ": Turn ",
         " left, as ", *(f": you moved {move}{end}\n" for move in ("Left", "Down", "Right", "Up")
                         for end in (".", ", without effect.")),
         *(f"{above}\n{below}\n" for above in ("P_", "PO", "_P", "OP", "__", "_O", "O_") for below in ("_G", "OG", "PG")))  # fmt: skip
"""What the lake says, and its boards."""


def random_walk(seed: int, config: dict[str, Any], max_turns: int) -> tuple[list[Message], float]:
    """An episode on a lake in which every move is as likely as the others, and its reward."""
    env = Templated(
        "frozen_lake", template=TEMPLATE, system="You play games.", max_turns=max_turns, env_kwargs=config
    )
    draw, messages = random.Random(seed), list(env.start(Prompt("a", "a", (), ()), seed).messages)
    while True:
        move = draw.choice(MOVES)
        messages.append({"role": "assistant", "content": move})
        step = env.step(Action(move))
        if step.is_done or step.is_truncated:
            return messages, step.reward
        messages += step.messages


@pytest.mark.slow
@pytest.mark.parametrize("num_rounds", [2, pytest.param(25, marks=pytest.mark.nightly)])
def test_roll_s_frozen_lake_file_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rounds: int
) -> None:
    """Sizes: a lake of 2 by 2 with two moves, and as many turns and tokens; 25 rounds of four steps, or only two
    rounds; the learning rate of a tiny model, which has learned from random walks, a third of which reach the
    goal. Its vocabulary has a token for each move, sentence and board, and a turn has one token
    (max_tokens_per_step).

    With longer turns the model may unlearn its end token and write lists of moves, of which the first counts:
    advantages that are clipped at 0.2 after whitening have a negative mean while few episodes succeed
    (policy/loss > 0 at ratio 1), so that all that is sampled gets less likely. With a token for each
    character, or a warm-up on random walks alone, it does not come to see the board in so few rounds, and
    moves right or down at random."""
    monkeypatch.chdir(tmp_path)
    lake = PRESET["custom_env"]["FrozenLake"]
    config = {"is_slippery": False, "size": 2, **LAKE}
    is_short = num_rounds == 2
    walks = [random_walk(10**6 + i, {**config, "max_steps": 2}, 2) for i in range(200 if is_short else 2000)]
    won, lost = ([messages for messages, reward in walks if (reward > 0) == wins] for wins in (True, False))
    kept = [{"messages": messages} for messages in won[:150] + lost[:300]]
    model = warm_model(tmp_path, kept, MESSAGES, words=(*MOVES, *TEXTS), steps=2 if is_short else 120)
    read = roll(
        tmp_path,
        {"custom_envs": {"FrozenLake": lake | {"env_config": lake["env_config"] | config}}},
        f"pretrain={model}",
        f"output_dir={tmp_path}/out",
        "max_actions_per_traj=2",
        "max_tokens_per_step=1",
        "sequence_length=200",
        f"max_steps={num_rounds}",
        f"eval_steps={num_rounds}",
        "val_batch_size=96",
        "val_env_manager.tags=[FrozenLake]",
        "val_env_manager.num_groups_partition=[96]",
        "actor_train.device_mapping=[0]",
        "actor_infer.device_mapping=[0]",
        "actor_train.training_args.learning_rate=2e-3",
        "actor_train.training_args.per_device_train_batch_size=32",
        "actor_train.training_args.gradient_accumulation_steps=1",
        *EVALUATED,
        **IN_ONE_PROCESS,
    )
    algorithm = read.loaded.config.algorithm
    assert (algorithm.advantage_clip, algorithm.whiten_advantages, algorithm.reward_std) == (
        0.2,
        True,
        "group",
    )
    first, last = learned(read)
    if is_short:
        return
    assert first < 0.3, "two random moves lead to the goal at most one time in eight"
    assert last > 0.7, "one that moves right or down at random stays below one half"


# --- SkyRL ---


SKYRL = SEEDS / "skyrl-004.yaml"
OWN = "tests.dialects.sums.Sums"
MULTI_TURN = (
    "generator.max_turns=3",
    "generator.use_conversation_multi_turn=true",
    "generator.batched=false",
)


def skyrl(*overrides: str, **chosen: Any) -> Read:
    return read_config(SKYRL, [*MULTI_TURN, *overrides], dialect="skyrl", **chosen)


def test_skyrl_s_environment_is_played_in_turns() -> None:
    read = skyrl(
        "environment.env_class=gsm8k_multi_turn",
        "generator.max_input_length=2048",
        "generator.step_wise_trajectories=true",
        "generator.append_eos_token_after_stop_str_in_multi_turn=true",
        "generator.zero_reward_on_non_stop=true",
        "environment.skyrl_gym.max_env_workers=16",
    )
    config = read.loaded.config
    env = config.env
    assert (env.kind, env.name, env.max_turns, env.max_context_tokens) == (
        "agent",
        "skyrl_gym",
        3,
        2048 + 1024,
    )
    assert env.kwargs == {"id": "gsm8k_multi_turn", "id_key": "env_class", "max_turns": 3}
    assert (env.thinking, config.reward.truncated, config.reward.parts) == ("as_template", "zero", ())
    assert [source.answer_key for source in config.data.train] == [None]
    dispositions = {entry.path: entry.disposition for entry in read.ledger}
    assert dispositions["generator.append_eos_token_after_stop_str_in_multi_turn"] == "implied"
    assert dispositions["generator.use_conversation_multi_turn"] == "implied"
    assert not {"unsupported", "refused"} & set(dispositions.values())


def test_skyrl_s_settings_of_an_environment_are_those_of_the_one_that_is_used() -> None:
    settings = ("environment.skyrl_gym.search.topk=3", "environment.skyrl_gym.text2sql.db_path=db")
    env = skyrl("environment.env_class=search", *settings).loaded.config.env
    assert env.kwargs["env_config"] == {"topk": 3}


@pytest.mark.parametrize("name", ["mine.envs:multiply", "mine.envs.Multiply"])
def test_skyrl_s_environment_may_be_ones_own(name: str) -> None:
    assert skyrl(f"environment.env_class={name}").loaded.config.env.kwargs["id"] == name


def test_skyrl_s_replies_may_be_text_within_the_answer() -> None:
    read = skyrl("environment.env_class=search", "generator.use_conversation_multi_turn=false")
    assert read.loaded.config.env.replies == "text"
    (entry,) = [e for e in read.ledger if e.path == "generator.use_conversation_multi_turn"]
    assert entry.disposition == "applied"


@pytest.mark.slow
@pytest.mark.parametrize("num_epochs", [2, pytest.param(60, marks=pytest.mark.nightly)])
def test_skyrl_s_file_learns_in_several_turns(
    num_epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 60 epochs; two show that it runs."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+2="}], "env_class": OWN,
         "reward_spec": {"method": "rule", "ground_truth": str(a + 2)}}
        for a in range(8)
    ]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    examples = [
        {"prompt": f"{a}+2={wrong}", "response": str(answer)}
        for a in range(8)
        for wrong in ("", *(f"{b}no\n" for b in range(10)))
        for answer in (*range(10), *[a + 1] * 5)
    ]
    read = skyrl(
        "environment.env_class=tests.dialects.sums.Sums",
        f"data.train_data=[{tmp_path}/rows.parquet]",
        f"data.val_data=[{tmp_path}/rows.parquet]",
        f"trainer.policy.model.path={warm_model(tmp_path, examples, MESSAGES, steps=200 if num_epochs > 2 else 20)}",
        f"trainer.ckpt_path={tmp_path}/out",
        "trainer.logger=console",
        f"trainer.epochs={num_epochs}",
        f"trainer.eval_interval={num_epochs}",
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=2",
        "trainer.max_prompt_length=16",
        "trainer.micro_train_batch_size_per_gpu=8",
        "trainer.micro_forward_batch_size_per_gpu=8",
        "generator.n_samples_per_prompt=16",
        "generator.max_input_length=64",
        "generator.sampling_params.max_generate_length=8",
        "trainer.policy.optimizer_config.lr=1e-3",
        *EVALUATED,
        **IN_ONE_PROCESS,
    )
    first, last = learned(read)
    if num_epochs > 2:
        assert first < 0.375 < 0.5 < last, "three guesses that ignore the problem are right in at most 3 of 8"


# --- RLinf ---


def rlinf(folder: Path, changes: dict[str, Any], *overrides: str, **chosen: Any) -> Read:
    """The page on agents lies over the basic configuration."""
    basic, page = (
        yaml.safe_load((SEEDS / name).read_text())
        for name in ("rlinf-math-003.yaml", "rlinf-agentic-001.yaml")
    )
    path = folder / "rlinf.yaml"
    path.write_text(yaml.safe_dump(laid_over(laid_over(basic, page), changes), sort_keys=False))
    return read_config(path, overrides, dialect="rlinf", **chosen)


SEARCH: dict[str, Any] = {
    "algorithm": {"loss_agg_func": "seq-mean-token-mean", "loss_scales": ["group_level", "agent_level", "turn_level"]},
    "agentloop": {
        "group_name": "AgentLoopGroup", "print_outputs": False, "toolcall_parser": "searchr1-qwen", "max_turns": 3,
        "max_tool_response_length": 500, "tool_response_truncate_side": "right", "is_dynamic_rollout_batch": True,
    },
    "tools": {"search": {"server_addr": "127.0.0.1:8000", "topk": 3}},
}  # fmt: skip


def test_rlinf_s_loop_of_turns_is_an_environment_of_tools(tmp_path: Path) -> None:
    read = rlinf(tmp_path, SEARCH, "braid.env.tools=[{index: documents.jsonl}]")
    env = read.loaded.config.env
    assert (env.kind, env.tool_format, env.max_turns, env.max_context_tokens) == ("tools", "tag", 3, 2048)
    assert env.max_result_characters == 2000
    assert [tool.index for tool in env.tools] == ["documents.jsonl"]
    assert not {"unsupported", "refused"} & {entry.disposition for entry in read.ledger}


def test_rlinf_s_search_server_is_named_with_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tools.search.server_addr.*use an index: braid.env.tools"):
        rlinf(tmp_path, SEARCH)


MAS: dict[str, Any] = {
    "algorithm": {
        "adv_type": "grpo_dynamic", "advantage_mode": "trajectory", "loss_agg_func": "seq-mean-token-mean",
        "loss_scales": ["group_level", "agent_level", "turn_level"],
    },
    "agentloop": {
        "group_name": "AgentLoopGroup", "print_outputs": False, "is_dynamic_rollout_batch": True,
        "toolcall_parser": "wideseek_r1-qwen", "workflow": "mas", "max_planner_turns": 3, "max_worker_turns": 4,
        "max_sa_turns": 50, "max_workers_per_planner": 2, "max_toolcall_per_worker": 5, "format_reward": 0.1,
        "call_search_reward": 0.05, "length_limit": 3000, "max_length_limit": 5000, "length_penalty": 0.1,
        "over_context_penalty": 0.2, "use_llm_judge": False, "llm_ip": "LLM_JUDGE_IP", "llm_port": "LLM_JUDGE_PORT",
        "llm_type": "Qwen3-30b-a3b",
    },
    "tools": {
        "online": False, "use_access_summary": True, "enable_cache": True, "cache_size": 10000,
        "cache_file": "./webpage_cache.json", "use_jina": True,
        "search": {"server_addr": "127.0.0.1:8000", "topk": 3},
    },
    "data": {"type": "wideseek_r1", "answer_key": "answer"},
}  # fmt: skip
"""A planner and workers, with all keys that such files have."""
LIMITS = ("max_planner_turns", "max_worker_turns", "max_workers_per_planner", "max_toolcall_per_worker")
SCORES = {
    f"agentloop.{name}"
    for name in (
        "format_reward", "call_search_reward", "length_limit", "max_length_limit", "length_penalty",
        "over_context_penalty", "llm_ip", "llm_port", "llm_type",
    )
}  # fmt: skip
WEB = {
    f"tools.{name}" for name in ("use_access_summary", "enable_cache", "cache_size", "cache_file", "use_jina")
}
SERVER = {"tools.search.server_addr", "tools.search.topk"}
USE_INDEX = "braid.env.kwargs.tools=[{index: documents.jsonl}]"


def unsupported_in(read: Read) -> set[str]:
    return {entry.path for entry in read.ledger if entry.disposition in ("unsupported", "refused")}


def test_rlinf_s_planner_and_workers_are_an_environment_of_braid_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read = rlinf(tmp_path, MAS, USE_INDEX, "data.type=math", allowed=sorted(SCORES))
    config = read.loaded.config
    env = config.env
    assert (env.kind, env.name, env.max_turns, env.max_context_tokens, env.tool_format) == (
        "agent",
        "team",
        4,
        2048,
        "hermes",
    )
    limits = {name: MAS["agentloop"][name] for name in LIMITS}
    assert env.kwargs == {**limits, "tools": [{"index": "documents.jsonl"}]}
    assert config.data.use_chat_template == "auto"
    assert [source.answer_key for source in config.data.train] == ["answer"]
    assert unsupported_in(read) == SCORES
    dispositions = {entry.path: entry.disposition for entry in read.ledger}
    assert (dispositions["agentloop.workflow"], dispositions["agentloop.max_sa_turns"]) == (
        "applied",
        "no effect",
    )
    with pytest.raises(ConfigError, match=r"tools.search.server_addr.*of workers: braid.env.kwargs.tools"):
        rlinf(tmp_path, MAS, "data.type=math", allowed=sorted(SCORES | WEB))
    assert unsupported_in(rlinf(tmp_path, MAS, allowed=["*"])) == SCORES | WEB | SERVER | {"data.type"}
    capsys.readouterr()
    assert main(["explain", str(tmp_path / "rlinf.yaml")]) == 2
    out = capsys.readouterr().out
    assert "workflow" in out
    assert " is not supported: " in out.splitlines()[-1]


def test_rlinf_s_planner_and_workers_may_be_an_environment_of_ones_own(tmp_path: Path) -> None:
    read = rlinf(
        tmp_path, MAS, "braid.env.name=tests.dialects.team.Team", "data.type=math", allowed=sorted(SCORES)
    )
    env = read.loaded.config.env
    assert (env.kind, env.name, env.max_turns, env.max_context_tokens) == (
        "agent",
        "tests.dialects.team.Team",
        4,
        2048,
    )
    assert env.kwargs == {name: MAS["agentloop"][name] for name in LIMITS}
    assert unsupported_in(read) == SCORES
    alone = rlinf(
        tmp_path, {"agentloop": {"toolcall_parser": "rstar2-qwen", "workflow": "sa", "max_sa_turns": 5}}
    )
    assert (alone.loaded.config.env.kind, alone.loaded.config.env.max_turns) == ("tools", 5)


def test_rlinf_s_code_judge_is_the_sandboxed_tool(tmp_path: Path) -> None:
    code = {
        "agentloop": {"toolcall_parser": "rstar2-qwen"},
        "tools": {"codejudge": {"host_addr": "localhost"}},
    }
    env = rlinf(tmp_path, code).loaded.config.env
    assert (env.tools, env.tool_format) == (("python",), "hermes")


@pytest.mark.slow
@pytest.mark.nightly
def test_rlinf_s_agentic_page_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [
        {"prompt": f"{a}+2=", "response": str(b)} for a in range(8) for b in (*range(10), a + 2, a + 2)
    ]
    rows = [{"prompt": f"{a}+2=", "solutions": [str(a + 2)]} for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = warm_model(tmp_path, examples, architecture="qwen2", steps=200)
    read = rlinf(
        tmp_path,
        {},
        f"runner.output_dir={tmp_path}/out",
        f"rollout.model.model_path={model}",
        f"actor.tokenizer.tokenizer_model={model}",
        f"data.train_data_paths=[{tmp_path}/rows.jsonl]",
        f"data.val_data_paths=[{tmp_path}/rows.jsonl]",
        "runner.max_steps=80",
        "runner.max_epochs=100",
        "runner.seq_length=32",
        "runner.val_check_interval=80",
        "runner.save_interval=80",
        "data.max_prompt_length=16",
        "data.rollout_batch_size=8",
        "algorithm.group_size=16",
        "algorithm.training_batch_size_per_gpu=32",
        "actor.optim.lr=1e-3",
        *EVALUATED,
        **IN_ONE_PROCESS,
    )
    first, last = learned(read)
    assert first < 0.3, "a guess is right one time in ten"
    assert last > 0.9


def found_by_lookup(name: str) -> str:
    """Look up what belongs to a name.

    Args:
        name: A digit.
    """
    return str((3 * int(name) + 1) % 8) if name in "01234567" else "?"


def called(tool: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


DELEGATED = tuple(called("delegate", subtask=f"{a}!") for a in range(8))
LOOKED_UP = tuple(called("found_by_lookup", name=str(a)) for a in range(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "num_rounds"),
    [
        ("tests.dialects.team.Team", 2),
        pytest.param("tests.dialects.team.Team", 30, marks=pytest.mark.nightly),
        pytest.param("team", 30, marks=pytest.mark.nightly),
    ],
)
def test_rlinf_s_planner_and_workers_learn(
    env: str, num_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_is_left: None
) -> None:
    """The planner asks a worker, who looks up a number. The model has learned to, with one in four calls and
    answers at random: four must be right. In the environment of one's own two must be, since the worker knows
    the number. In two rounds nothing is learned."""
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    is_custom, is_short = env != "team", num_rounds == 2

    def partly(right: int, texts: Sequence[str]) -> str:
        return texts[right] if draw.random() < 0.75 else draw.choice(texts)

    digits, examples = [str(b) for b in range(8)], []
    for i in range(2400):
        a, number = i % 8, draw.choice(digits)
        if i // 8 % 2:
            ask, texts = f"{a}?", [f"{b}!" for b in range(8)] if is_custom else DELEGATED
            said = [("assistant", partly(a, texts))]
        else:
            right = (3 * a + 1) % 8
            ask, said = f"{a}!", [("assistant", partly(right, digits) if is_custom else partly(a, LOOKED_UP))]
        if not is_custom:
            said += [("tool", number), ("assistant", partly(int(number), digits))]
        turns = [("user", ask), *said]
        examples.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    model = warm_model(
        tmp_path, examples, architecture="qwen2", steps=2 if is_short else 150, words=(*DELEGATED, *LOOKED_UP)
    )
    rows = [{"prompt": f"{a}?", "answer": [str((3 * a + 1) % 8)]} for a in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tools = [
        "braid.env.kwargs.tools=[tests.dialects.test_agentic.found_by_lookup]",
        "braid.env.kwargs.planner_prompt=",
        "braid.env.kwargs.worker_prompt=",
    ]
    read = rlinf(
        tmp_path,
        MAS,
        *([f"braid.env.name={env}", "agentloop.max_planner_turns=1"] if is_custom else tools),
        "agentloop.max_workers_per_planner=1",
        f"runner.output_dir={tmp_path}/out",
        f"rollout.model.model_path={model}",
        f"actor.tokenizer.tokenizer_model={model}",
        f"data.train_data_paths=[{tmp_path}/rows.jsonl]",
        f"data.val_data_paths=[{tmp_path}/rows.jsonl]",
        "data.type=math",
        f"runner.max_steps={num_rounds}",
        "runner.max_epochs=100",
        "runner.seq_length=128",
        f"runner.val_check_interval={num_rounds}",
        f"runner.save_interval={num_rounds}",
        "data.max_prompt_length=16",
        "data.rollout_batch_size=8",
        "algorithm.group_size=16",
        "algorithm.training_batch_size_per_gpu=32",
        "algorithm.sampling_params.max_new_tokens=4",
        "actor.optim.lr=1e-3",
        f"braid.report.samples_every_rounds={num_rounds}",
        *EVALUATED,
        **IN_ONE_PROCESS,
        allowed=sorted(SCORES),
    )
    first, last = learned(read)
    assert is_short or first < 0.4
    assert is_short or last > (0.5 if is_custom else 0.8)
    (path,) = tmp_path.glob(f"out/*/samples/round_{num_rounds:06}.jsonl")
    segments = [segment for sample in read_samples(path) for segment in sample.trajectory.segments]
    assert {(segment.agent, segment.is_trained) for segment in segments} == {
        ("planner", True),
        ("worker", True),
    }
