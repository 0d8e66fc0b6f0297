"""RLinf's embodied examples as whole files, one of each kind, composed from presets.

Keys and values are those of RLinf's examples (`examples/embodiment/config`, 2026); the order and the comments
are not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from braid.config.source import parse_path, place
from braid_dialects.load import Read, read_config

Flat = dict[str, Any]
"""Path -> value."""

_VIDEO: Flat = {
    "video_cfg.info_on_video": True,
    "video_cfg.video_base_dir": "${runner.logger.log_path}/video/train",
}
_SUITE: Flat = _VIDEO | {
    "total_num_envs": None, "auto_reset": False, "ignore_terminations": False, "is_eval": False, "seed": 0, "group_size": 1,
    "use_rel_reward": True, "use_ordered_reset_state_ids": False, "video_cfg.save_video": True,
}  # fmt: skip
_SCENE: Flat = _VIDEO | {
    "env_type": "maniskill", "total_num_envs": None, "auto_reset": False, "ignore_terminations": False, "seed": 0, "group_size": 1,
    "enable_offload": False, "video_cfg.save_video": False, "init_params.num_envs": None, "init_params.control_mode": "None",
    "init_params.sim_backend": "gpu", "init_params.render_mode": "all",
    "init_params.max_episode_steps": "${env.train.max_episode_steps}",
}  # fmt: skip
_CARROT: Flat = _SCENE | {
    "use_rel_reward": True, "use_fixed_reset_state_ids": True, "init_params.id": "PutOnPlateInScene25Main-v3",
    "init_params.obs_mode": "rgb+segmentation", "init_params.sim_config.sim_freq": 500, "init_params.sim_config.control_freq": 5,
    "init_params.obj_set": "train",
}  # fmt: skip
PRESETS: dict[str, Flat] = {
    "env/libero_10": _SUITE | {
        "env_type": "libero", "task_suite_name": "libero_10", "max_episode_steps": 512, "max_steps_per_rollout_epoch": 512,
        "use_fixed_reset_state_ids": True, "reward_coef": 5.0, "reset_gripper_open": True, "use_step_penalty": False,
        "init_params.camera_heights": 256, "init_params.camera_widths": 256,
    },
    "env/metaworld_50": _SUITE | {
        "env_type": "metaworld", "task_suite_name": "metaworld_50", "max_episode_steps": 100,
        "max_steps_per_rollout_epoch": 100, "use_fixed_reset_state_ids": False, "reward_coef": 1.0,
        "init_params.camera_heights": 480, "init_params.camera_widths": 480,
    },
    "env/maniskill_put_on_plate_in_scene_25_main": _CARROT | {
        "max_episode_steps": 80, "max_steps_per_rollout_epoch": 80, "init_params.sensor_configs.shader_pack": "minimal",
        "init_params.use_multiple_plates": False,
    },
    "env/maniskill_ood_template": _CARROT | {
        "total_num_envs": 16, "auto_reset": True, "ignore_terminations": True, "policy_setup": "widowx_bridge",
        "video_cfg.save_video": True, "init_params.max_episode_steps": 80, "init_params.sensor_configs.shader_pack": "default",
    },
    "env/maniskill_pick_cube": _SCENE | {
        "wrap_obs_mode": "simple", "use_full_state": False, "use_rel_reward": False, "reward_mode": "raw",
        "use_fixed_reset_state_ids": False, "max_episode_steps": 50, "max_steps_per_rollout_epoch": 50,
        "init_params.id": "PickCube-v1", "init_params.obs_mode": "state", "init_params.sim_config.sim_freq": 100,
        "init_params.sim_config.control_freq": 20, "init_params.sensor_configs.shader_pack": "default",
    },
    "model/pi0": {
        "model_type": "openpi", "model_path": "/path/to/model/openpi", "precision": None, "num_action_chunks": 10,
        "action_dim": 7, "is_lora": False, "lora_rank": 32, "use_proprio": True, "num_steps": 4, "add_value_head": False,
        "openpi.config_name": "pi0_libero", "openpi.num_images_in_input": 2, "openpi.noise_level": 0.5,
        "openpi.action_chunk": "${actor.model.num_action_chunks}", "openpi.num_steps": "${actor.model.num_steps}",
        "openpi.train_expert_only": True, "openpi.action_env_dim": "${actor.model.action_dim}",
        "openpi.noise_method": "flow_sde", "openpi.add_value_head": "${actor.model.add_value_head}",
        "openpi.detach_critic_input": False, "openpi.use_dsrl": False, "openpi.dsrl_state_dim": 8,
        "openpi.dsrl_action_noise_dim": 32, "openpi.dsrl_num_q_heads": 10, "openpi.dsrl_agg_q": "mean",
        "openpi.dsrl_image_latent_dim": 64, "openpi.dsrl_state_latent_dim": 64, "openpi.dsrl_hidden_dims": [128, 128, 128],
    },
    "model/openvla_oft": {
        "model_type": "openvla_oft", "implement_version": "rlinf", "model_path": "/path/to/model/oft", "precision": "bf16",
        "value_type": "action_level", "action_dim": 7, "num_action_chunks": 8, "use_proprio": False, "use_film": False,
        "proprio_dim": 8, "unnorm_key": "libero_10_no_noops", "center_crop": True, "max_prompt_length": 50, "vocab_size": 32000,
        "hidden_size": 4096, "add_value_head": False, "image_size": [224, 224], "is_lora": False, "lora_rank": 32,
        "lora_path": None, "num_images_in_input": 1, "attn_implementation": "flash_attention_2",
        "force_musa_eager_sdpa": True, "low_cpu_mem_usage": True, "trust_remote_code": True, "policy_setup": "widowx_bridge",
    },
    "model/mlp_policy": {
        "model_type": "mlp_policy", "model_path": "", "policy_setup": "panda-qpos", "obs_dim": 42, "action_dim": 8,
        "num_action_chunks": 1, "hidden_dim": 256, "precision": "32", "add_value_head": True, "is_lora": False, "lora_rank": 32,
    },
    "hybrid_engines/fsdp": {
        "strategy": "fsdp", "sharding_strategy": "full_shard", "hybrid_shard_size": -1, "gradient_checkpointing": False,
        "cpu_offload": False, "offload_pin_memory": False, "reshard_after_forward": True, "enable_gradient_accumulation": True,
        "forward_prefetch": False, "limit_all_gathers": False, "backward_prefetch": None, "use_orig_params": False,
        "use_liger_kernel": False, "mixed_precision.param_dtype": None, "mixed_precision.reduce_dtype": None,
        "mixed_precision.buffer_dtype": None, "amp_autocast.enabled": False, "amp_autocast.precision": "bf16",
        "grad_scaler.enabled": False,
    },
    "weight_syncer/patch_syncer": {
        "type": "patch", "patch.snapshot_device": "cpu", "patch.delta_encoding": True, "patch.compression": "none",
        "patch.init_sync.enabled": True, "patch.init_sync.prefixes": None, "patch.init_sync.bucket_size": 134217728,
    },
}  # fmt: skip

COMMON: Flat = {
    "hydra.run.dir": ".", "hydra.output_subdir": None, "hydra.searchpath": ["file://${oc.env:EMBODIED_PATH}/config/"],
    "cluster.num_nodes": 1, "cluster.component_placement": {"actor,env,rollout": "all"},
    "runner.task_type": "embodied", "runner.logger.log_path": "../results", "runner.logger.project_name": "rlinf",
    "runner.logger.experiment_name": "test", "runner.logger.logger_backends": ["tensorboard"], "runner.max_epochs": 1000,
    "runner.max_steps": -1, "runner.only_eval": False, "runner.val_check_interval": -1, "runner.save_interval": 40,
    "runner.resume_dir": None, "runner.ckpt_path": None,
    "algorithm.normalize_advantages": True, "algorithm.kl_penalty": "kl", "algorithm.kl_beta": 0.0, "algorithm.entropy_bonus": 0,
    "algorithm.loss_agg_func": "token-mean", "algorithm.clip_ratio_low": 0.2, "algorithm.clip_ratio_high": 0.2,
    "algorithm.clip_ratio_c": 3.0, "algorithm.value_clip": 0.2, "algorithm.huber_delta": 10.0, "algorithm.gamma": 0.99,
    "algorithm.gae_lambda": 0.95, "algorithm.group_size": 1,
    "env.group_name": "EnvGroup", "env.train.rollout_epoch": 1, "env.eval.rollout_epoch": 1, "env.eval.auto_reset": True,
    "env.eval.ignore_terminations": True, "env.eval.group_size": 1, "env.eval.video_cfg.save_video": True,
    "env.eval.video_cfg.video_base_dir": "${runner.logger.log_path}/video/eval",
    "rollout.group_name": "RolloutGroup", "rollout.generation_backend": "huggingface", "rollout.pipeline_stage_num": 1,
    "rollout.model.model_path": "${actor.model.model_path}", "rollout.model.precision": "${actor.model.precision}",
    "actor.group_name": "ActorGroup", "actor.training_backend": "fsdp", "actor.optim.adam_beta1": 0.9,
    "actor.optim.adam_eps": 1e-8, "actor.optim.weight_decay": 0.01,
    **{f"actor.fsdp_config.mixed_precision.{kind}_dtype": "${actor.model.precision}" for kind in ("param", "reduce", "buffer")},
    "reward.use_reward_model": False, "critic.use_critic_model": False,
}  # fmt: skip
_PPO: Flat = {
    "algorithm.adv_type": "gae",
    "algorithm.loss_type": "actor_critic",
    "actor.model.add_value_head": True,
}
_GRPO: Flat = {
    "algorithm.adv_type": "grpo", "algorithm.loss_type": "actor", "algorithm.group_size": 8,
    "env.train.group_size": "${algorithm.group_size}", "algorithm.filter_rewards": True,
}  # fmt: skip
_LIBERO: Flat = {
    "defaults": ["libero_10", "libero_10"], "env.train.total_num_envs": 64, "env.eval.total_num_envs": 500,
    "env.eval.is_eval": True, "env.eval.use_ordered_reset_state_ids": True,
}  # fmt: skip
_PI0: Flat = {
    "model": "pi0", "algorithm.reward_type": "chunk_level", "algorithm.logprob_type": "chunk_level",
    "algorithm.entropy_type": "token_level", "algorithm.reward_coef": 1.0, "algorithm.filter_rewards": False,
    "algorithm.rewards_lower_bound": 0.1, "algorithm.rewards_upper_bound": 0.9,
    "env.train.reward_coef": "${algorithm.reward_coef}", "env.train.rollout_epoch": 8,
    "rollout.recompute_logprobs": False, "rollout.enable_offload": False, "rollout.enable_torch_compile": False,
    "actor.micro_batch_size": 128, "actor.global_batch_size": 2048, "actor.seed": 42, "actor.enable_offload": False,
    "actor.optim.lr": 5e-6, "actor.optim.value_lr": 1e-4, "actor.optim.adam_beta2": 0.95, "actor.optim.clip_grad": 2.0,
    "actor.fsdp_config.sharding_strategy": "no_shard",
}  # fmt: skip
_PI0_LIBERO: Flat = _LIBERO | _PI0 | {
    **{f"env.{use}.{name}": 480 for use in ("train", "eval") for name in ("max_episode_steps", "max_steps_per_rollout_epoch")},
    "rollout.unnorm_key": "libero_10",
}  # fmt: skip
_PI0_PPO: Flat = _PPO | {
    "algorithm.update_epoch": 4, "actor.model.openpi.detach_critic_input": True, "actor.optim.critic_warmup_steps": 0
}  # fmt: skip
_OFT: Flat = {
    "model": "openvla_oft", "algorithm.reward_type": "action_level", "algorithm.logprob_type": "token_level",
    "algorithm.entropy_type": "token_level", "algorithm.clip_ratio_high": 0.28, "rollout.enable_offload": True,
    "rollout.sampling_params.do_sample": True, "rollout.sampling_params.top_p": 1.0,
    "rollout.sampling_params.repetition_penalty": 1.0, "rollout.sampling_params.max_new_tokens": None,
    "actor.seed": 1234, "actor.enable_offload": True, "actor.optim.value_lr": 3e-3, "actor.optim.adam_beta2": 0.999,
    "actor.fsdp_config.gradient_checkpointing": True,
}  # fmt: skip
_SMALL: Flat = {"env.train.auto_reset": True, "env.train.use_fixed_reset_state_ids": False}
FILES: dict[str, Flat] = {
    "libero_10_ppo_openpi": _PI0_LIBERO | _PI0_PPO,
    "libero_10_grpo_openpi": _PI0_LIBERO | _GRPO | {"algorithm.update_epoch": 2},
    "metaworld_50_ppo_openpi": _PI0 | _PI0_PPO | {
        "defaults": ["metaworld_50", "metaworld_50"], "env.train.total_num_envs": 64, "env.eval.total_num_envs": 500,
        "env.eval.max_episode_steps": 100, "env.eval.max_steps_per_rollout_epoch": 100,
        "env.eval.use_fixed_reset_state_ids": True, "actor.model.num_action_chunks": 5, "actor.model.action_dim": 4,
        "actor.model.num_steps": 5, "actor.model.openpi.config_name": "pi0_metaworld",
        "actor.model.openpi.num_images_in_input": 1, "actor.optim.lr": 1e-5, "actor.optim.clip_grad": 1.0,
    },
    "libero_10_grpo_openvlaoft": _LIBERO | _OFT | _GRPO | {
        "algorithm.reward_coef": 5.0, "algorithm.rewards_lower_bound": 0.5, "algorithm.rewards_upper_bound": 4.5,
        "env.train.rollout_epoch": 16, "env.train.reset_gripper_open": False, "env.eval.reset_gripper_open": False,
        "rollout.sampling_params.temperature_train": 1.6, "rollout.sampling_params.temperature_eval": 1.6,
        "rollout.sampling_params.top_k": -1, "actor.model.max_prompt_length": 128, "actor.micro_batch_size": 32,
        "actor.global_batch_size": 16384, "actor.optim.lr": 2e-5, "actor.optim.clip_grad": 1.0,
    },
    "maniskill_ppo_openvlaoft": _OFT | _PPO | _SMALL | {
        "defaults": ["maniskill_put_on_plate_in_scene_25_main", "maniskill_ood_template"],
        "cluster.component_placement": {"actor": "0-7", "env": "0-3", "rollout": "4-7"}, "algorithm.bootstrap_type": "always",
        "env.train.total_num_envs": 128, "env.train.max_episode_steps": 80, "env.train.max_steps_per_rollout_epoch": 160,
        "env.eval.total_num_envs": 16, "env.eval.max_episode_steps": 80, "env.eval.max_steps_per_rollout_epoch": 80,
        "rollout.sampling_params.temperature_train": 1.0, "rollout.sampling_params.temperature_eval": 0.6,
        "rollout.sampling_params.top_k": 0, "actor.model.unnorm_key": "bridge_orig", "actor.model.is_lora": True,
        "actor.model.lora_path": "/path/to/lora_004000", "actor.model.max_prompt_length": 30, "actor.micro_batch_size": 40,
        "actor.global_batch_size": 640, "actor.optim.lr": 1e-4, "actor.optim.clip_grad": 10.0,
        "actor.optim.critic_warmup_steps": 0,
    },
    "maniskill_ppo_mlp": _PPO | _SMALL | {
        "defaults": ["maniskill_pick_cube", "maniskill_pick_cube"], "model": "mlp_policy",
        "cluster.component_placement": {"env,rollout,actor": 0}, "runner.val_check_interval": 50, "runner.save_interval": -1,
        **{f"algorithm.{quantity}_type": "action_level" for quantity in ("reward", "logprob", "entropy")},
        "algorithm.bootstrap_type": "always", "algorithm.update_epoch": 8, "algorithm.value_clip": 1.0,
        "algorithm.gamma": 0.8, "algorithm.gae_lambda": 0.9, "env.train.total_num_envs": 1024, "env.eval.total_num_envs": 32,
        "env.eval.use_fixed_reset_state_ids": True, "rollout.enable_offload": False, "rollout.enable_torch_compile": True,
        "rollout.enable_cuda_graph": True, "rollout.sampling_params.do_sample": True,
        "rollout.sampling_params.temperature_train": 1.0, "rollout.sampling_params.temperature_eval": 0.6,
        "rollout.sampling_params.top_k": 0, "rollout.sampling_params.top_p": 1.0,
        "rollout.sampling_params.repetition_penalty": 1.0, "rollout.sampling_params.max_new_tokens": 7,
        "actor.micro_batch_size": 6400, "actor.global_batch_size": 6400, "actor.seed": 1234, "actor.enable_offload": False,
        "actor.optim.lr": 3e-4, "actor.optim.value_lr": 3e-4, "actor.optim.adam_beta2": 0.999, "actor.optim.clip_grad": 0.5,
        "actor.fsdp_config.sharding_strategy": "no_shard",
    },
}  # fmt: skip

FILES["maniskill_sac_mlp"] = {
    **{path: value for path, value in FILES["maniskill_ppo_mlp"].items() if not path.startswith("actor.optim.")},
    "algorithm.adv_type": "embodied_sac", "algorithm.loss_type": "embodied_sac", "algorithm.bootstrap_type": "standard",
    "algorithm.update_epoch": 32, "algorithm.gamma": 0.8, "algorithm.tau": 0.01, "algorithm.target_update_freq": 1,
    "algorithm.agg_q": "min", "algorithm.actor_agg_q": "mean", "algorithm.critic_subsample_size": -1,
    "algorithm.critic_actor_ratio": 4, "algorithm.backup_entropy": False, "algorithm.train_actor_steps": 2,
    "algorithm.replay_buffer.enable_cache": True, "algorithm.replay_buffer.cache_size": 200,
    "algorithm.replay_buffer.min_buffer_size": 2, "algorithm.replay_buffer.sample_window_size": 200,
    "algorithm.replay_buffer.auto_save": False,
    "algorithm.entropy_tuning.alpha_type": "softplus", "algorithm.entropy_tuning.initial_alpha": 0.01,
    "algorithm.entropy_tuning.target_entropy": -4, "algorithm.entropy_tuning.optim.lr": 3e-4,
    "algorithm.entropy_tuning.optim.lr_scheduler": "torch_constant", "algorithm.entropy_tuning.optim.clip_grad": 10.0,
    "env.train.total_num_envs": 32, "actor.micro_batch_size": 256, "actor.global_batch_size": 256,
    "actor.model.add_q_head": True, "actor.model.add_value_head": False, "actor.optim.lr": 3e-4, "actor.optim.clip_grad": 10.0,
    "actor.critic_optim.lr": 1e-4, "actor.critic_optim.lr_scheduler": "torch_constant", "actor.critic_optim.clip_grad": 1.0,
}  # fmt: skip


def nested(flat: Flat) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        assert place(tree, parse_path(path), value) is None, path
    return tree


class Examples:
    """Reads the files, from a folder with the presets where Hydra looks for them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, flat in PRESETS.items():
            path = folder / "config" / f"{name}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(yaml.safe_dump(nested(flat)), "utf-8")

    def read(self, name: str, *overrides: str, flat: Flat | None = None, **chosen: Any) -> Read:
        flat = dict(COMMON | FILES[name] if flat is None else flat)
        train, evaluation = flat.pop("defaults")
        presets = (
            f"env/{train}@env.train",
            f"env/{evaluation}@env.eval",
            f"model/{flat.pop('model')}@actor.model",
        )
        others = ("hybrid_engines/fsdp@actor.fsdp_config", "weight_syncer/patch_syncer@weight_syncer")
        defaults = [*presets, *others, {"override hydra/job_logging": "stdout"}]
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({"defaults": defaults} | nested(flat), sort_keys=False), "utf-8")
        return read_config(path, overrides, **chosen)


EVALUATION: Flat = {
    "cluster.num_nodes": 1, "cluster.component_placement": {"env,rollout": "0"},
    "runner.task_type": "embodied_eval", "runner.max_epochs": 1, "runner.logger.log_path": "../results",
    "env.eval.rollout_epoch": 1, "env.eval.env_type": "libero", "env.eval.task_suite_name": "libero_goal",
    "env.eval.total_num_envs": 20, "env.eval.auto_reset": True, "env.eval.ignore_terminations": True, "env.eval.is_eval": True,
    "env.eval.max_episode_steps": 320, "env.eval.max_steps_per_rollout_epoch": 640, "env.eval.use_rel_reward": True,
    "rollout.group_name": "RolloutGroup",
    **{f"rollout.model.{key}": value for key, value in PRESETS["model/pi0"].items() if "${" not in str(value)},
    "rollout.model.num_action_chunks": 5, "rollout.model.num_steps": 7, "rollout.model.openpi.num_steps": "${..num_steps}",
    "rollout.model.model_path": "/path/to/model/goal",
}  # fmt: skip
"""An evaluation as RLinf has them since 2026: without `actor`, `algorithm` and `env.train`."""
