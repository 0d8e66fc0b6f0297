"""RLinf's embodied examples, whole: every key is accounted for, and they are planned for eight devices."""

from __future__ import annotations

import pytest

from braid.envs.kinds import LiberoEnv, ManiskillEnv, MetaworldEnv
from braid.errors import ConfigError
from braid.plan import resolve

from .embodied import COMMON, FILES, Examples, Flat


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_recognised_and_no_key_is_unsupported(examples: Examples, name: str) -> None:
    read = examples.read(name)
    assert read.language == "rlinf"
    assert not [entry.path for entry in read.ledger if entry.disposition in ("unsupported", "refused")]


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_planned(examples: Examples, name: str) -> None:
    plan = resolve(examples.read(name).loaded.config, num_gpus=8)
    assert plan.planned_rounds == 1000


def test_pi0_in_libero_with_values(examples: Examples) -> None:
    config = examples.read("libero_10_ppo_openpi").loaded.config
    env, vla = config.env, config.model.vla
    assert isinstance(env, LiberoEnv)
    assert (env.suite, env.max_episode_steps, env.reward_scale, env.step_penalty) == (
        "libero_10",
        480,
        1.0,
        0.0,
    )
    assert (env.gripper, env.open_gripper, env.eval_reset_seeds) == ("signed", True, 500)
    assert vla is not None
    assert (vla.kind, vla.num_action_chunks, vla.denoise_steps, vla.num_images) == ("pi0", 10, 4, 2)
    assert (config.train.steps_per_pass, config.train.passes_per_round) == (64 * 8 * 48 // 2048, 4)
    assert (config.rollout.prompts_per_round, config.critic.network) == (512, "shared_detached")
    assert config.train.micro_batch_tokens == 128, "a decision of pi0 has one log-prob"
    assert config.eval_sampling.greedy


def test_metaworld_s_rewards_are_its_successes_seen_by_rlinf_s_camera(examples: Examples) -> None:
    env = examples.read("metaworld_50_ppo_openpi").loaded.config.env
    assert isinstance(env, MetaworldEnv)
    assert (env.task, env.reward_mode, env.terminate_on_success) == ("MT50", "success", True)
    assert (env.cameras, env.shadows, env.image_size) == ({"image": "corner4"}, True, 480)


def test_openvla_oft_in_libero_by_groups(examples: Examples) -> None:
    config = examples.read("libero_10_grpo_openvlaoft").loaded.config
    env = config.env
    assert isinstance(env, LiberoEnv)
    assert (env.gripper, env.open_gripper, env.fixed_reset_states) == ("open_is_one", False, True)
    assert (config.rollout.prompts_per_round, config.rollout.group_size) == (64 * 16 // 8, 8)
    assert (config.rollout.filter.min_mean, config.rollout.filter.max_mean) == (0.5, 4.5)
    assert config.rollout.sampling.temperature == 1.6
    assert config.eval.sampling is not None
    assert (config.eval.sampling.temperature, config.eval.sampling.greedy) == (1.6, False)
    assert config.train.steps_per_pass == 64 * 16 * 64 // 16384
    assert config.train.micro_batch_tokens == 32 * 56
    assert config.model.vla is not None
    assert (config.model.vla.form, config.model.vla.max_prompt_tokens) == ("rlinf", 128)


def test_openvla_oft_in_a_scene_with_simulators_apart(examples: Examples) -> None:
    config = examples.read("maniskill_ppo_openvlaoft").loaded.config
    env = config.env
    assert isinstance(env, ManiskillEnv)
    assert (env.gripper, env.reward_mode, env.auto_reset) == ("open_is_one", "put_on", True)
    assert env.control_mode == "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
    assert env.kwargs["sensor_configs"] == {"shader_pack": "minimal"}
    assert (env.num_envs, env.max_steps_per_rollout) == (32, 160), "128 on four devices"
    assert config.train.steps_per_pass == 128 * 20 // 640
    plan = resolve(config, num_gpus=8)
    assert plan.layout.mode == "hybrid"
    assert [(role.role, len(role.workers)) for role in plan.layout.roles] == [
        ("policy", 8),
        ("rollout", 4),
        ("env", 4),
    ]


def test_a_perceptron_in_a_scene(examples: Examples) -> None:
    config = examples.read("maniskill_ppo_mlp").loaded.config
    env = config.env
    assert isinstance(env, ManiskillEnv)
    assert (env.task, env.control_mode, env.gripper, env.reward_mode) == (
        "PickCube-v1",
        "pd_joint_delta_pos",
        "signed",
        None,
    )
    assert (config.model.path, config.train.autocast, config.train.backend.param_dtype) == (
        None,
        "none",
        "fp32",
    )
    assert (config.train.steps_per_pass, config.train.micro_batch_tokens) == (1024 * 50 // 6400, 6400)
    assert config.eval.sampling is not None
    assert config.eval.sampling.greedy, "RLinf evaluates with the mean action, whatever temperature_eval is"


def test_soft_actor_critic_of_a_perceptron(examples: Examples) -> None:
    read = examples.read("maniskill_sac_mlp")
    assert not [entry.path for entry in read.ledger if entry.disposition == "unsupported"]
    config = read.loaded.config
    sac = config.sac
    assert sac is not None
    decisions = 32 * 50  # of RLinf's trajectory: 32 simulators of 50 env steps, each with a final observation
    assert (sac.capacity, sac.min_transitions, sac.min_transitions_actor) == (
        200 * 32 * 51,
        2 * decisions,
        2 * decisions,
    )
    assert (sac.updates_per_round, sac.actor_every_updates, sac.batch_size) == (32, 4, 256)
    assert (sac.target_reduce, sac.actor_reduce, sac.num_target_critics) == ("min", "mean", None)
    assert (sac.temperature.kind, sac.temperature.initial, sac.temperature.target_entropy) == (
        "softplus",
        0.01,
        -4,
    )
    assert (sac.optimizer.lr, sac.critic_optimizer.lr) == (3e-4, 1e-4)
    assert (sac.max_grad_norm, sac.critic_max_grad_norm, sac.temperature.max_grad_norm) == (10.0, 1.0, 10.0)
    assert (sac.gamma, sac.tau, sac.backup_entropy, sac.random_decisions) == (0.8, 0.01, False, 0)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor.model.q_head_type=crossq", "CrossQ is not supported"),
        ("algorithm.demo_buffer.load_path=/demonstrations", "LeRobot"),
        ("algorithm.actor_agg_q=q1", "use min or mean"),
        ("algorithm.enable_drq=true", "not augmented"),
        ("actor.critic_optim.lr_scheduler=cosine", "constant learning rate"),
        ("actor.model.model_type=openpi", "SAC of vision-language-action"),
    ],
)
def test_what_braid_lacks_of_soft_actor_critic_is_refused(
    examples: Examples, override: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        examples.read("maniskill_sac_mlp", override)


@pytest.mark.parametrize("name", ["libero_10_grpo_openvlaoft", "maniskill_ppo_mlp"])
def test_older_names_of_keys_mean_the_same(examples: Examples, name: str) -> None:
    names = {
        "rollout.sampling_params": "algorithm.sampling_params",
        "rollout.generation_backend": "rollout.backend",
        "env.train.rollout_epoch": "algorithm.rollout_epoch",
        "env.eval.rollout_epoch": "algorithm.eval_rollout_epoch",
        "runner.ckpt_path": "runner.eval_policy_path",
    }
    older: Flat = {}
    for path, value in (COMMON | FILES[name]).items():
        start = next((old for old in names if path == old or path.startswith(f"{old}.")), None)
        older[path if start is None else path.replace(start, names[start])] = value
    older["algorithm.sampling_params.use_greedy"] = not older.pop("algorithm.sampling_params.do_sample")
    older["algorithm.sampling_params.add_BOS"] = False
    read = examples.read(name, flat=older)
    assert not [entry.path for entry in read.ledger if entry.disposition == "unsupported"]
    assert read.loaded.config == examples.read(name).loaded.config


@pytest.mark.parametrize(
    ("placement", "mode", "workers", "num_envs"),
    [
        ({"actor,env,rollout": "all"}, "collocated", {"policy": 8, "rollout": 8}, None),
        ({"env": "0-1", "rollout": "2-3", "actor": "4-7"}, "disaggregated", {"policy": 4, "rollout": 2, "env": 2}, 32),
        ({"actor": "0-7", "env": "0-3", "rollout": "4-7"}, "hybrid", {"policy": 8, "rollout": 4, "env": 4}, 16),
        ({"actor": "0-7", "env,rollout": "0-3"}, "hybrid", {"policy": 8, "rollout": 4}, 16),
        ({"env": "0-0:0-3", "rollout": "1-4", "actor": "5-7"}, "disaggregated", {"policy": 3, "rollout": 4, "env": 4}, 16),
    ],
)  # fmt: skip
def test_simulators_are_placed_as_the_file_says(
    examples: Examples, placement: dict[str, str], mode: str, workers: dict[str, int], num_envs: int | None
) -> None:
    flat = COMMON | FILES["libero_10_grpo_openvlaoft"] | {"cluster.component_placement": placement}
    config = examples.read("libero_10_grpo_openvlaoft", flat=flat).loaded.config
    layout = resolve(config, num_gpus=8).layout
    assert (layout.mode, {role.role: len(role.workers) for role in layout.roles}) == (mode, workers)
    assert isinstance(config.env, LiberoEnv)
    assert num_envs in (None, config.env.num_envs), "64 in all"
