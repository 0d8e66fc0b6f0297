"""Runs of vision-language-action policies: supervised and reinforcement learning, export."""

from __future__ import annotations

import gc
import inspect
import itertools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces
from safetensors.torch import load_file
from tests.models.vla_checkpoints import STATISTICS, tiny_openvla, tiny_pi0, tiny_tokenizer
from tests.needs import need_images_of_metaworld, needs
from tests.resume.test_kill_and_resume import weight_hashes

from braid.config.load import load_config
from braid.config.paths import with_absolute_paths
from braid.data.lerobot import Demonstration, read_demonstrations, write_demonstrations
from braid.envs.simulators.adapters.metaworld import MetaWorld
from braid.errors import ConfigError, DataError, ModelError
from braid.models.vla.openvla import load_openvla
from braid.plan import resolve
from braid.report.video import read_video
from braid.trainer import commands
from braid.trainer.demonstrations import demonstration_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.slow

_IMPORTS = "from typing import Any\nimport gymnasium\nimport numpy as np\nfrom gymnasium import spaces\n"


class Toy(gymnasium.Env[dict[str, Any], Any]):
    """The reward is minus the distance of the action from (0.3, 2, 0.5)."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (24, 24, 3), np.uint8),
            "instruction": spaces.Text(20),
            "state": spaces.Box(-1, 1, (2,), np.float32),
        }
    )
    action_space = spaces.Box(-5, 5, (3,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observed(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict]:
        self._steps += 1
        reward = -float(np.abs(action - np.array([0.3, 2.0, 0.5])).mean())
        return self._observed(), reward, self._steps == 5, False, {"success": reward > -0.2}

    def _observed(self) -> dict[str, Any]:
        image = self.np_random.integers(0, 256, (24, 24, 3), np.uint8)
        return {
            "image": image,
            "state": np.array([0.1, self._steps / 5], np.float32),
            "instruction": "push red cube",
        }


OFT = {"kind": "openvla_oft", "form": "rlinf", "num_action_chunks": 2}
OPENVLA = {"kind": "openvla", "num_action_chunks": 1, "use_proprio": True}
PI0 = {"kind": "pi0", "num_action_chunks": 2, "denoise_steps": 2, "noise": "flow_noise"}
ADAPTERS = {"rank": 2, "targets": ["proj", "qkv", "fc1", "fc2", "fc3", "q_proj", "down_proj", "lm_head"]}
"""Of the output head and the convolution of the patches (`proj`) too."""


def write_config(
    folder: Path, vla: dict[str, Any], lora: dict[str, Any] | None = None, **sections: Any
) -> Path:
    if vla["kind"] == "pi0":
        tiny_pi0(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        (folder / "model" / "dataset_statistics.json").write_text(json.dumps(STATISTICS))
    else:
        tiny_openvla(folder / "model", proprio_size=2 if vla.get("use_proprio") else None)
    (folder / "toy.py").write_text(_IMPORTS + inspect.getsource(Toy))  # workers cannot import this module
    vla = {"action_dim": 3, "unnorm_key": "toy", "max_prompt_tokens": 20, **vla}
    config = {
        "run": {"name": "vla", "max_rounds": 2, "device": "cpu", "output_dir": "runs"},
        "model": {"path": "model", "vla": vla, "lora": lora},
        "env": {"kind": "gymnasium", "id": "toy.py:Toy", "num_envs": 4, "processes": 0, "eval_episodes": 4},
        "rollout": {"prompts_per_round": 2, "group_size": 4},
        "algorithm": {"recipe": "grpo", "kl_coef": 0.0},
        "train": {"optimizer": {"lr": 1.0e-3}},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
        **sections,
    }
    (folder / "vla.yaml").write_text(yaml.safe_dump(config))
    return folder / "vla.yaml"


def metrics(outcome: commands.Outcome) -> list[dict[str, Any]]:
    lines = (outcome.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("vla", "recipe"), [(OFT, "grpo"), (OFT | {"greedy": True}, "ppo"), (OPENVLA, "grpo"), (PI0, "ppo")]
)
def test_training_steps(tmp_path: Path, vla: dict[str, Any], recipe: str) -> None:
    """The policy before the first step is the one that acted: all ratios are 1."""
    algorithm = {"recipe": recipe, "kl_coef": 0.0}
    if vla["kind"] == "pi0":
        algorithm["logprob_level"] = "chunk"
    train = {"optimizer": {"lr": 1.0e-3}, "gradient_checkpointing": recipe == "ppo"}
    outcome = commands.train(load_config(write_config(tmp_path, vla, algorithm=algorithm, train=train)))
    lines = metrics(outcome)
    assert len([line for line in lines if "policy/loss" in line or "policy/ratio_mean" in line]) >= 2
    first = next(line for line in lines if "policy/ratio_mean" in line)
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["env/steps"] == 2 * 4 * 5, "whatever a decision's positions are"


_LEVELS = [("chunk", *levels) for levels in itertools.product(("token", "action", "chunk"), repeat=2)]
_LEVELS += [("action", "token", "token"), ("action", "token", "chunk"), ("action", "action", "token")]


@pytest.mark.parametrize(("reward", "logprob", "entropy"), _LEVELS)
def test_ppo_and_grpo_train_at_every_level(tmp_path: Path, reward: str, logprob: str, entropy: str) -> None:
    """Two mini-batches a round: the second step's ratios are not 1, its clipped loss is finite, and the
    policy's entropy is that of the level: 2 x 3 tokens, 2 actions or a chunk of nearly uniform bins."""
    levels = {
        "logprob_level": logprob,
        "entropy_level": entropy,
        "entropy_coef": 0.01,
        "reward_level": reward,
    }
    ppo = {"recipe": "ppo", "kl_coef": 0.0, **levels}
    recipes = (
        [(ppo, "own"), (ppo, "shared")]
        if reward == "action"
        else [(ppo, "own"), ({**ppo, "recipe": "grpo"}, "own")]
    )
    numbers = {"token": 1, "action": 3, "chunk": 6}
    for algorithm, network in recipes:
        if algorithm["recipe"] == "grpo":
            algorithm = {key: value for key, value in algorithm.items() if key != "reward_level"}
        critic = {"network": network} if algorithm["recipe"] == "ppo" else {}
        config = write_config(tmp_path, OFT, algorithm=algorithm, critic=critic)
        outcome = commands.train(
            load_config(config, ["train.steps_per_pass=2", "run.max_rounds=1", "run.if_exists=new"])
        )
        (line,) = [line for line in metrics(outcome) if "policy/ratio_mean" in line]
        assert np.isfinite(line["policy/loss"])
        assert line["policy/entropy"] == pytest.approx(numbers[entropy] * np.log(128), rel=0.05)


@pytest.mark.parametrize(
    ("vla", "equal", "other"),
    [
        (OFT, ["", "eval.sampling.temperature=2.0"], "eval.sampling.temperature=1.0"),
        (OPENVLA, ["eval.sampling.temperature=1.0e-4", "eval.sampling.greedy=true", "model.vla.greedy=true"], ""),
        (OPENVLA, ["", "model.vla.greedy=false eval.sampling={greedy: true, temperature: 2.0}"], "model.vla.greedy=true"),
        (PI0, ["", "eval.sampling.greedy=true", "eval.sampling.temperature=2.0"], "model.vla.greedy=false"),
    ],
    ids=["temperature of training", "of almost 0", "never greedy", "pi0 without noise"],
)  # fmt: skip
def test_evaluation_has_its_own_sampling(
    tmp_path: Path, vla: dict[str, Any], equal: list[str], other: str
) -> None:
    """Settings with equal results, and one with another."""
    rollout = {"prompts_per_round": 1, "group_size": 2, "sampling": {"temperature": 2.0}}
    path, returns = write_config(tmp_path, vla, rollout=rollout), []
    for overrides in (*equal, other):
        loaded = load_config(path, overrides.split(" ", 1) if overrides else [])
        returns.append(metrics(commands.evaluate(loaded))[-1]["eval/all/mean@1"])
    assert len({*returns[:-1]}) == 1
    assert returns[-1] != returns[0]


@pytest.mark.parametrize("vla", [OFT, PI0], ids=["openvla_oft", "pi0"])
def test_a_policy_with_a_value_head_is_its_own_critic(tmp_path: Path, vla: dict[str, Any]) -> None:
    """With adapters too, whose checkpoints have the head, and whose exports don't."""
    config = write_config(
        tmp_path,
        vla,
        lora={"rank": 2},
        algorithm={"recipe": "ppo", "kl_coef": 0.0, "logprob_level": "chunk"},
        critic={"network": "shared", "warmup_rounds": 1},
    )
    falling = "train.optimizer.schedule={decay: linear}"
    outcome = commands.train(load_config(config, ["run.max_rounds=3", "checkpoint.every_rounds=1", falling]))
    first, second, last = [line for line in metrics(outcome) if "critic/value_mean" in line]
    assert 0 < last["policy/lr"] < second["policy/lr"] < first["critic/lr"], (
        "it falls to 0 after the last round"
    )
    assert first["critic/value_mean"] == 0
    assert second["critic/value_mean"] != 0, "the round before was one of the value loss alone"
    assert "policy/ratio_mean" not in first
    assert "policy/ratio_mean" in second
    middle = outcome.run_dir / "checkpoints" / "step_1"
    options = [
        "run.max_rounds=3",
        falling,
        "run.name=again",
        f"run.resume={middle}",
        "run.allow_changes=true",
    ]
    again = commands.train(load_config(config, [*options, "checkpoint.every_rounds=1"]))
    hashes = weight_hashes(outcome.run_dir)
    assert [name for name in hashes if name.endswith("value_head.weight")]
    assert weight_hashes(again.run_dir) == hashes
    commands.export(outcome.run_dir, output=tmp_path / "out")
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if "value" in name]


def test_training_episodes_are_filmed_every_so_many_rounds(tmp_path: Path) -> None:
    """An episode has a frame before its five steps and one after each; two of 24 x 24 pixels, enlarged
    eightfold, side by side above their text."""
    path = write_config(tmp_path, OFT)
    video = "env.video={train_every_rounds: 2, num_episodes: 2}"
    outcome = commands.train(load_config(path, ["run.max_rounds=3", video]))
    (film,) = (outcome.run_dir / "video").iterdir()
    assert film.name == "train_000002.mp4"
    assert read_video(film, 99).shape == (6, 8 * 24 + 30, 2 * 8 * 24, 3)


def write_toy_demonstrations(folder: Path) -> None:
    """One episode of the best action."""
    env = Toy()
    observation, _ = env.reset(seed=0)
    frames = [observation] + [env.step(np.zeros(3))[0] for _ in range(4)]
    observations = {name: np.stack([frame[name] for frame in frames]) for name in ("image", "state")}
    actions = np.tile(np.array([0.3, 2.0, 0.5], np.float32), (5, 1))
    write_demonstrations(folder, [Demonstration(observations, actions, "push red cube")])


@pytest.mark.parametrize("noise", [pytest.param("flow_sde", marks=pytest.mark.nightly), "flow_noise"])
def test_imitation_by_flow_matching(tmp_path: Path, noise: str) -> None:
    """The reward of a random policy is about -5."""
    write_toy_demonstrations(tmp_path / "data")
    sft = {"demonstrations": "data", "steps": 100, "rows_per_step": 16, "optimizer": {"lr": 3.0e-3}}
    vla = PI0 | {"noise": noise, "train_expert_only": False}
    sections = {"algorithm": {"recipe": "grpo", "kl_coef": 0.0, "logprob_level": "chunk"}}
    path = write_config(tmp_path, vla, sft=sft, eval={"before": True}, **sections)
    outcome = commands.sft(load_config(path))
    evals = json.loads((outcome.run_dir / "summary.json").read_text())["eval"]
    first, last = (evals[at]["all"]["mean@1"] for at in ("first", "last"))
    assert last > first / 3


def test_imitation_then_export(tmp_path: Path) -> None:
    """Imitating one action makes it the likeliest; the exported folder has the trained weights."""
    write_toy_demonstrations(tmp_path / "data")
    sft = {"demonstrations": "data", "steps": 60, "rows_per_step": 5, "optimizer": {"lr": 3.0e-3}}
    path = write_config(tmp_path, OFT, sft=sft, eval={"before": True, "sampling": {"greedy": True}})
    outcome = commands.sft(load_config(path))
    evals = json.loads((outcome.run_dir / "summary.json").read_text())["eval"]
    assert evals["last"]["all"]["mean@1"] > -0.3 > evals["first"]["all"]["mean@1"]
    commands.export(outcome.run_dir, output=tmp_path / "out")
    exported = load_openvla(str(tmp_path / "out"), dtype=torch.float32, device=torch.device("cpu"))
    before = load_file(tmp_path / "model" / "model.safetensors")
    changed = [n for n, tensor in exported.state_dict().items() if not torch.equal(tensor, before[n])]
    assert "language_model.lm_head.weight" in changed
    assert not [name for name in changed if "attn_pool" in name]


@needs("metaworld")
def test_experts_of_metaworld_succeed_and_are_imitated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their actions, repeated in the environment of the policy, meet the observations of the folder, and end
    in success."""
    options = {"task": "reach-v3", "cameras": {"image": "corner4"}, "image_size": 24}
    need_images_of_metaworld()
    env = MetaWorld(**options)
    script = runpy.run_path(str(EXAMPLES / "metaworld_demonstrations.py"))
    arguments = ["--tasks", "reach-v3", "--episodes", "2", "--image-size", "24"]
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "data"), *arguments])
    script["main"]()
    episodes = list(read_demonstrations(tmp_path / "data", "key"))
    assert [episode.instruction for episode in episodes] == ["reach", "reach"]
    for seed, episode in enumerate(episodes):
        observation, is_success = env.reset(seed=seed)[0], False
        for frame, action in enumerate(episode.actions):
            assert not is_success, "an episode ends at its first success"
            for name in ("image", "state"):
                np.testing.assert_array_equal(episode.observations[name][frame], observation[name])
            observation, *_, info = env.step(action)
            is_success = info["success"]
        assert is_success
    env.close()

    path = write_config(
        tmp_path,
        OFT | {"action_dim": 4, "unnorm_key": "metaworld"},
        env={"kind": "metaworld", **options, "max_episode_steps": 4, "processes": 0, "eval_episodes": 1},
        sft={"demonstrations": "data", "steps": 1, "rows_per_step": 4},
    )
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["norm_stats"] = {"metaworld": {"action": {"q01": [-1.0] * 4, "q99": [1.0] * 4}}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    rows = demonstration_rows(with_absolute_paths(load_config(path)).config)
    assert len(rows) == sum(len(episode.actions) for episode in episodes)
    assert rows[0].inputs["bins"].size == 2 * 4, "two actions of four numbers"
    (loss,) = [line["sft/loss"] for line in metrics(commands.sft(load_config(path))) if "sft/loss" in line]
    assert np.isfinite(loss)


def test_the_critic_begins_with_the_adapters_that_imitation_trained(tmp_path: Path) -> None:
    """A learning rate of almost 0 leaves both as they were after it."""
    write_toy_demonstrations(tmp_path / "data")
    sft = {"demonstrations": "data", "steps": 5, "rows_per_step": 5, "optimizer": {"lr": 3.0e-3}}
    algorithm = {"recipe": "ppo", "kl_coef": 0.0}
    train = {"optimizer": {"lr": 1.0e-30}}
    path = write_config(tmp_path, OFT, {"rank": 2}, sft=sft, algorithm=algorithm, train=train)
    hashes = weight_hashes(commands.train(load_config(path, ["run.max_rounds=1"])).run_dir)
    ours, critics = (
        {n.rpartition("/")[2]: value for n, value in hashes.items() if f"/{role}/weights/base_model" in n}
        for role in ("policy", "critic")
    )
    assert "base_model.model.projector.fc3.lora_B.weight" in ours
    assert ours == critics


def test_demonstrations_of_other_images_are_refused(tmp_path: Path) -> None:
    frames = {"front": np.zeros((5, 24, 24, 3), np.uint8), "state": np.zeros((5, 2), np.float32)}
    demonstration = Demonstration(frames, np.zeros((5, 3), np.float32), "push red cube")
    write_demonstrations(tmp_path / "data", [demonstration])
    path = write_config(tmp_path, OFT, sft={"demonstrations": "data", "steps": 1, "rows_per_step": 1})
    with pytest.raises(
        DataError, match="has the images front, but the policy reads image of the environment"
    ):
        commands.sft(load_config(path))


@pytest.mark.parametrize("lora", [{"rank": 2}, ADAPTERS], ids=["all linear", "head and convolution"])
def test_adapters_are_trained_alone_and_merged_on_export(tmp_path: Path, lora: dict[str, Any]) -> None:
    config = write_config(tmp_path, OFT, lora=lora)
    outcome = commands.train(load_config(config))
    commands.export(outcome.run_dir, output=tmp_path / "out")
    exported = load_openvla(
        str(tmp_path / "out"), dtype=torch.float32, device=torch.device("cpu")
    ).state_dict()
    before = load_file(tmp_path / "model" / "model.safetensors")
    assert exported.keys() == before.keys()
    changed = {name for name, tensor in exported.items() if not torch.equal(tensor, before[name])}
    assert "projector.fc1.weight" in changed
    for name in ("language_model.lm_head.weight", "vision_backbone.featurizer.patch_embed.proj.weight"):
        assert (name in changed) is (lora == ADAPTERS)
    assert not [name for name in changed if name.endswith(("bias", "norm.weight"))]


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("model.vla.action_dim=7", "", "3 action dimensions, not 7"),
        ("model.vla.form=null", "", "model.vla.form is not set"),
        ("sft={demonstrations: nowhere, steps: 1}", "", "not a LeRobot data set"),
        ("env={kind: single_turn}", "model.vla", "text environment"),
        ("sft={data: []}", "sft.demonstrations", "LeRobot folder"),
        ("sft={demonstrations: nowhere}", "sft.steps", "demonstrations have no epochs"),
        ("train.backend=megatron", "train.backend", "megatron trains language models only"),
        ("algorithm.kl_coef=0.1", "algorithm.kl_coef", "no reference model"),
    ],
)
def test_unusable_settings_are_refused(tmp_path: Path, override: str, key: str, words: str) -> None:
    loaded = load_config(write_config(tmp_path, OFT), [override])
    if key:
        with pytest.raises(ConfigError) as caught:
            resolve(loaded.config)
        messages = {problem.key: problem.message for problem in caught.value.problems}
        assert words in messages[key]
    else:
        with pytest.raises(Exception, match=words):
            commands.train(loaded)


def test_an_instruction_that_is_too_long_ends_the_run_with_one_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_config(write_config(tmp_path, OFT | {"max_prompt_tokens": 4}))
    with pytest.raises(ModelError, match=r"'push red cube' has 16 tokens.*model\.vla\.max_prompt_tokens=4"):
        commands.train(loaded)
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"], (
        "the exceptions of other groups"
    )


@pytest.mark.parametrize(
    "vla",
    [pytest.param(OFT, id="oft"), pytest.param(OPENVLA, id="openvla")],
)
@pytest.mark.nightly
def test_reinforcement_learning_finds_the_best_action(tmp_path: Path, vla: dict[str, Any]) -> None:
    """Random tokens are 1.0 off on average; the best action's are 0."""
    config = write_config(
        tmp_path,
        vla,
        run={"name": "vla", "max_rounds": 40, "device": "cpu", "output_dir": "runs"},
        rollout={"prompts_per_round": 4, "group_size": 8},
        train={"optimizer": {"lr": 3.0e-3}},
        eval={"before": True},
    )
    outcome = commands.train(load_config(config))
    evals = json.loads((outcome.run_dir / "summary.json").read_text())["eval"]
    first, last = (evals[at]["all"]["mean@1"] for at in ("first", "last"))
    assert first < -2.5
    assert last > first / 2
