"""RLinf's embodied task: presets, simulators, robot policies, and the batches of chunks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from braid.config.env import LiberoEnv, ManiskillEnv
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid_dialects.load import Read, read_config

SEED = Path(__file__).parent / "seeds" / "rlinf-embodied-003.yaml"
LONG = ("env.train.max_episode_steps=80", "env.eval.max_episode_steps=80")
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
    assert (env.task, env.max_episode_steps) == ("PutCarrotOnPlateInScene-v1", 10)
    assert (env.reward_mode, env.gripper, env.on_gpu) == ("put_on", "open_is_one", True)
    assert (env.auto_reset, env.ignore_terminations, env.fixed_reset_states) == (False, False, True)
    assert (env.relative_reward, env.reward_scale) == (True, 5.0)
    assert (env.video.save, env.video.overlay, env.video.dir) == (
        True,
        True,
        "../results/grpo-1.5b/video/train",
    )
    assert env.video.train_every_rounds == 1
    assert (env.camera_height, env.camera_width) == (256, 256)
    assert (env.offload, env.pipeline_stages, env.num_envs) == (True, 1, 160)
    assert (found.train.backend, found.rollout.engine) == ("fsdp", "native")
    vla = found.model.vla
    assert vla is not None
    assert (vla.kind, vla.action_dim, vla.num_action_chunks, vla.unnorm_key) == (
        "openvla_oft",
        7,
        8,
        "bridge_orig",
    )
    assert (vla.greedy, vla.image_size, vla.num_images) == (True, (224, 224), 1)
    assert (vla.center_crop, vla.use_proprio) == (True, False)
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


def test_no_key_is_unsupported_and_text_keys_say_why_they_have_no_effect() -> None:
    ledger = read().ledger
    assert not [entry.path for entry in ledger if entry.disposition == "unsupported"]
    unused = {entry.path for entry in ledger if entry.disposition == "unused"}
    assert {f"algorithm.{name}_type" for name in ("reward", "entropy")} <= unused
    found = notes()
    assert found["runner.seq_length"] == "for language models only; runner.task_type is embodied"
    assert found["rollout.model.model_path"] == "the robot policy is set by actor.model.model_path"
    assert found["algorithm.auto_reset"] == "overridden by env.train.auto_reset"


def test_another_preset_is_another_simulator() -> None:
    env = config(*LIBERO).env
    assert isinstance(env, LiberoEnv)
    assert (env.suite, env.gripper, env.max_episode_steps) == ("libero_10", "open_is_one", 10)
    assert not env.fixed_reset_states, "the preset's group_size is 1, that of the algorithm 2"


@pytest.mark.parametrize(
    ("overrides", "prompts", "steps"),
    [
        # null: one optimizer batch of 160 chunks; episodes of 10 steps are one chunk of 8 each, so 160 simulators
        ([], 80, 1),
        ([*LONG], 8, 1),
        # 64 simulators * 80 // 8 chunks = 640 = 4 batches of 160
        ([*LONG, "env.train.total_num_envs=64"], 32, 4),
        (
            [*LONG, "env.train.total_num_envs=64", "algorithm.rollout_epoch=2"],
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
        *LONG,
        "env.eval.max_steps_per_rollout_epoch=160",
    )
    env = found.env
    assert isinstance(env, ManiskillEnv)
    assert (env.auto_reset, env.max_steps_per_rollout, env.num_envs) == (True, 160, 64)
    assert found.rollout.prompts_per_round == 64 * 2 // 2
    assert env.eval_episodes == 10 * 3 * 2


def test_reset_states_in_order_or_a_single_one() -> None:
    in_order = config("env.eval.use_ordered_reset_state_ids=true", "env.eval.total_num_envs=20").env
    assert isinstance(in_order, ManiskillEnv)
    assert in_order.eval_reset_seeds == 20
    one = config(
        "env.train.specific_reset_id=3", "env.eval.specific_reset_id=3", "env.eval.total_num_envs=2"
    ).env
    assert isinstance(one, ManiskillEnv)
    assert (one.reset_seeds, one.eval_reset_seeds) == ((3,), (3, 3))
    with pytest.raises(ConfigError, match=r"env\.reset_seeds"):
        config("env.train.use_ordered_reset_state_ids=true")
    with pytest.raises(ConfigError, match=r"total_num_envs"):
        config("env.eval.use_ordered_reset_state_ids=true")


def test_a_factor_on_rewards_is_the_presets_or_the_algorithms(tmp_path: Path) -> None:
    assert "env.train.reward_coef" in notes("algorithm.reward_coef=2.0")["algorithm.reward_coef"]
    shutil.copytree(SEED.parent, tmp_path, dirs_exist_ok=True)
    for preset in (tmp_path / "env").glob("*.yaml"):
        preset.write_text(preset.read_text().replace("reward_coef: 5.0\n", ""))
    found = read_config(tmp_path / SEED.name, ["algorithm.reward_coef=2.0"]).loaded.config.env
    assert isinstance(found, ManiskillEnv)
    assert found.reward_scale == 2.0


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
        (["env.train.env_type=robotwin"], "is not supported: use one of maniskill, libero, metaworld"),
        (
            ["actor.model.model_type=gr00t"],
            "is not supported: use one of openvla, openvla_oft, openpi, mlp_policy, cnn_policy with runner.task_type=embodied",
        ),
        (
            ["env.eval.ignore_terminations=true"],
            "evaluation has the settings of training, env.train.ignore_terminations=False; make them agree",
        ),
        (["env.train.group_size=8"], "set it to algorithm.group_size=2, or to 1"),
        (["actor.model.image_size=[224]"], "is not a list of 2, each an integer >= 1"),
    ],
)
def test_settings_that_differ_from_training_or_are_missing_are_refused(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read(*overrides)


def test_keys_of_maniskill_s_scene() -> None:
    env = config(
        "env.train.init_params.sim_backend=cpu",
        "env.train.init_params.obs_mode=rgb",
        "env.train.init_params.control_mode=pd_joint_delta_pos",
        "env.train.init_params.sim_config.sim_freq=100",
        "env.train.init_params.sensor_configs.shader_pack=minimal",
        "env.train.reward_mode=only_success",
        "actor.model.policy_setup=panda-ee-dpos",
    ).env
    assert isinstance(env, ManiskillEnv)
    assert (env.on_gpu, env.obs_mode, env.control_mode) == (False, "rgb", "pd_joint_delta_pos")
    assert env.kwargs == {"sim_config": {"sim_freq": 100}, "sensor_configs": {"shader_pack": "minimal"}}
    assert (env.reward_mode, env.gripper, env.pipeline_stages) == ("success", "signed", 2)


def test_openpi_s_keys_are_those_of_pi0() -> None:
    of = "actor.model.openpi."
    overrides = [
        "actor.model.model_type=openpi",
        "actor.model.num_action_chunks=5",
        f"{of}config_name=pi0_libero",
        f"{of}num_steps=3",
        f"{of}noise_method=flow_noise",
        f"{of}joint_logprob=true",
        f"{of}train_expert_only=true",
        f"{of}detach_critic_input=true",
        f"{of}use_dsrl=false",
        f"{of}value_after_vlm=true",
        f"{of}value_vlm_mode=mean_token",
    ]
    vla = config(*overrides).model.vla
    assert vla is not None
    assert (vla.kind, vla.denoise_steps, vla.noise, vla.train_expert_only) == ("pi0", 3, "flow_noise", True)
    for override, words in (
        (f"{of}config_name=pi05_libero", "pi0.5 is not supported"),
        (f"{of}joint_logprob=false", "set it to true for noise_method=flow_noise"),
        (f"{of}noise_method=reinflow", "use flow_sde or flow_noise"),
        (f"{of}value_vlm_mode=last_token", "use mean_token"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            read(*overrides, override)


def test_small_policies_are_built_from_sizes() -> None:
    found = config(
        "actor.model.model_type=mlp_policy",
        "actor.model.is_lora=false",
        "env.train.init_params.obs_mode=state",
    ).model
    assert (found.path, found.vla) == (None, None)
    assert found.mlp is not None
    assert (found.mlp.hidden_sizes, found.mlp.num_action_chunks) == ((256, 256, 256), 8)
    assert found.mlp.initial_std == 0.6065  # exp(-0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.replay_buffer.cache_size=200", "SAC and other replay methods are not supported"),
        ("actor.model.add_q_head=true", "SAC and other replay methods are not supported"),
        ("actor.model.embodiment_tag=libero_sim", "GR00T is not supported"),
        ("env.train.use_spacemouse=true", "real robots are not supported"),
        ("env.train.task_config.task_name=adjust_bottle", "for a simulator that is not supported"),
        ("runner.ckpt_path=/path/to/ckpt.pt", "use a Hugging Face folder"),
    ],
)
def test_what_is_out_of_scope_is_unsupported_with_a_sentence(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        read(override)


def test_syncing_and_the_rollout_s_own_model_change_nothing() -> None:
    found = {
        entry.path: entry.disposition
        for entry in read(
            "weight_syncer.type=patch",
            "weight_syncer.patch.init_sync.enabled=true",
            "rollout.model.action_dim=7",
            "env.train.is_eval=false",
        ).ledger
    }
    assert found["weight_syncer.type"] == found["weight_syncer.patch.init_sync.enabled"] == "no effect"
    assert found["rollout.model.action_dim"] == "no effect"
    assert found["env.train.is_eval"] == "implied"
    assert read("rollout.generation_backend=huggingface").loaded.config.rollout.engine == "native"
