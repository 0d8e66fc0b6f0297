"""RLinf's embodied task: presets, simulators, robot policies, and the batches of chunks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from braid.config.rollout import LiberoEnv, ManiskillEnv
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid_dialects.load import Read, read_config

SEED = Path(__file__).parent / "seeds" / "rlinf-embodied-003.yaml"
LIBERO = ("env@env.train=libero_10", "env@env.eval=libero_10")


def read(*overrides: str) -> Read:
    return read_config(SEED, overrides)


def config(*overrides: str) -> RunConfig:
    return read(*overrides).loaded.config


def notes(*overrides: str) -> dict[str, str]:
    return {entry.path: entry.note for entry in read(*overrides).ledger}


def test_the_pages_embodied_file_is_a_robot_in_maniskill() -> None:
    found = config()
    env = found.env
    assert isinstance(env, ManiskillEnv)
    assert (env.task, env.max_episode_steps, env.group_size, env.seed) == (
        "PutCarrotOnPlateInScene-v1",
        10,
        2,
        0,
    )
    assert (env.auto_reset, env.ignore_terminations, env.fixed_reset_states) == (False, False, True)
    assert (env.relative_reward, env.reward_scale) == (True, 5.0)
    assert (env.video.save, env.video.overlay, env.video.dir) == (
        True,
        True,
        "../results/grpo-1.5b/video/train",
    )
    assert (env.camera_height, env.camera_width) == (256, 256)
    assert (env.offload, env.pipeline_stages, env.num_envs) == (True, 2, 160)
    assert env.eval is not None
    assert env.eval.max_episode_steps == 10
    assert (found.train.backend, found.rollout.engine) == ("fsdp", "native")
    vla = found.model.vla
    assert vla is not None
    assert (vla.kind, vla.action_dim, vla.num_action_chunks, vla.unnorm_key) == (
        "openvla_oft",
        7,
        8,
        "bridge_orig",
    )
    assert (vla.value_level, vla.greedy, vla.image_size, vla.num_images) == ("chunk", True, (224, 224), 1)
    assert (vla.center_crop, vla.use_proprio, vla.policy_setup) == (True, False, "widowx_bridge")
    assert (vla.vocab_size, vla.extra_vocab_size, vla.hidden_size, vla.max_prompt_tokens) == (
        32000,
        421,
        4096,
        30,
    )
    assert (found.model.path, found.model.attention) == ("/path/to/huggingface_model", "flash_attention_2")
    lora = found.model.lora
    assert lora is not None
    assert (lora.rank, lora.path, lora.alpha) == (32, "/storage/models/oft-sft/lora_004000", None)
    optimizer = found.train.optimizer
    assert (optimizer.lr, optimizer.value_lr, optimizer.betas) == (1e-4, 3e-3, (0.9, 0.999))
    assert found.train.max_grad_norm == 10.0
    assert (found.train.offload.weights, found.train.offload.optimizer) == (True, True)
    algorithm = found.algorithm
    assert (algorithm.reward_level, algorithm.logprob_level, algorithm.entropy_level) == (
        "chunk",
        "token",
        "token",
    )
    assert algorithm.advantage == "grpo"
    assert (found.rollout.sampling.min_new_tokens, found.rollout.max_sequence_tokens) == (1, 1024)
    assert (found.run.max_rounds, found.run.max_epochs) == (5, None)
    assert found.reward.parts == ()


def test_keys_of_the_simulator_are_unsupported_and_text_keys_say_why_they_have_no_effect() -> None:
    ledger = read().ledger
    for entry in ledger:
        is_of_env = bool(entry.native) and all(key.startswith("env.") for key in entry.native)
        assert (entry.disposition == "unsupported") == is_of_env, entry.path
    unused = {entry.path for entry in ledger if entry.disposition == "unused"}
    assert {f"algorithm.{name}_type" for name in ("reward", "entropy")} <= unused
    found = notes()
    assert found["runner.seq_length"] == "for language models only; runner.task_type is embodied"
    assert found["rollout.model.model_path"] == "the robot policy is set by actor.model.model_path"
    assert found["algorithm.auto_reset"] == "overridden by env.train.auto_reset"


def test_another_preset_is_another_simulator() -> None:
    env = config(*LIBERO).env
    assert isinstance(env, LiberoEnv)
    assert (env.suite, env.group_size, env.max_episode_steps) == ("libero_10", 1, 10)


@pytest.mark.parametrize(
    ("overrides", "prompts", "steps"),
    [
        # null: one optimizer batch of 160 chunks; episodes of 10 steps are one chunk of 8 each, so 160 simulators
        ([], 80, 1),
        (["env.train.max_episode_steps=80"], 8, 1),
        # 64 simulators * 80 // 8 chunks = 640 = 4 batches of 160
        (["env.train.max_episode_steps=80", "env.train.total_num_envs=64"], 32, 4),
        (
            ["env.train.max_episode_steps=80", "env.train.total_num_envs=64", "algorithm.rollout_epoch=2"],
            64,
            8,
        ),
        (["env.train.total_num_envs=64", "actor.global_batch_size=64", "algorithm.group_size=8"], 8, 1),
    ],
)
def test_a_round_has_the_episodes_of_all_simulators_and_a_step_global_batch_size_chunks(
    overrides: list[str], prompts: int, steps: int
) -> None:
    found = config(*overrides)
    assert (found.rollout.prompts_per_round, found.train.steps_per_pass) == (prompts, steps)


def test_several_episodes_of_each_simulator_in_a_round() -> None:
    found = config(
        "env.train.auto_reset=true",
        "env.train.total_num_envs=64",
        "env.train.rollout_epoch=2",
        "env.train.max_steps_per_rollout_epoch=160",
        "env.eval.auto_reset=true",
        "env.eval.total_num_envs=10",
        "env.eval.rollout_epoch=3",
        "env.eval.max_episode_steps=80",
        "env.eval.max_steps_per_rollout_epoch=160",
    )
    env = found.env
    assert isinstance(env, ManiskillEnv)
    assert (env.auto_reset, env.max_steps_per_rollout, env.num_envs) == (True, 160, 64)
    assert found.rollout.prompts_per_round == 64 * 2 // 2
    assert env.eval_episodes == 10 * 3 * 2


def test_gae_adds_a_value_head() -> None:
    found = config(
        "algorithm.adv_type=gae", "algorithm.loss_type=actor_critic", "algorithm.gamma=0.8"
    ).algorithm
    assert (found.advantage, found.gamma) == ("gae", 0.8)
    values = ("algorithm.adv_type=gae", "algorithm.loss_type=actor_critic")
    assert config(*values, "algorithm.bootstrap_type=always").algorithm.bootstrap == "always"
    assert config("algorithm.bootstrap_type=always").algorithm.bootstrap is None
    assert config("algorithm.adv_type=ppo").algorithm.advantage == "gae"
    assert config("algorithm.adv_type=gae", "algorithm.loss_type=actor").algorithm.advantage == "reinforce"


def test_groups_with_mean_rewards_out_of_bounds_are_dropped() -> None:
    found = config(
        "algorithm.filter_rewards=true",
        "algorithm.rewards_lower_bound=0.1",
        "algorithm.rewards_upper_bound=4.9",
    ).rollout.filter
    assert (found.min_mean, found.max_mean) == (0.1, 4.9)
    assert (
        notes("algorithm.rewards_lower_bound=0.1")["algorithm.rewards_lower_bound"]
        == "algorithm.filter_rewards is not set"
    )


def test_old_log_probs_are_the_rollouts_by_default(tmp_path: Path) -> None:
    text = SEED.read_text().replace("  recompute_logprobs: True\n", "")
    path = tmp_path / "env.yaml"
    path.write_text(text)
    preset = tmp_path / "env" / "manikill_put_carrot_on_plate_in_scene.yaml"
    preset.parent.mkdir()
    preset.write_text((SEED.parent / "env" / preset.name).read_text())
    assert read_config(path).loaded.config.algorithm.old_logprobs == "behavior"
    assert config().algorithm.old_logprobs == "recompute"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["env@env.eval=libero_10"],
            "evaluation must use the simulator and task of training, env.train.env_type=maniskill",
        ),
        (
            ["env.eval.task_name=Other-v1"],
            "evaluation must use the simulator and task of training, env.train.task_name=PutCarrot",
        ),
        (["env.train.env_type=robotwin"], "is not supported: use maniskill or libero"),
        (
            ["actor.model.model_type=openpi"],
            "is not supported: use one of openvla, openvla_oft with runner.task_type=embodied",
        ),
        (["actor.model.image_size=[224]"], "is not a list of 2, each an integer >= 1"),
    ],
)
def test_settings_that_differ_from_training_or_are_missing_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(*overrides)
