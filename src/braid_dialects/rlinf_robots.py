"""RLinf's keys of robot policies below `actor.model`, and those of robots, methods and models that braid does
not have."""

from __future__ import annotations

from . import rlinf_facts as facts
from .conditions import needs, overridden, unless
from .conversions import opposite
from .rlinf_facts import ROBOTS_ONLY, SMALL_POLICIES, VALUES, VLA, of_simulator
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, unsupported
from .values import Takes, list_of


def _chunks(value: int, source: Source) -> Became:
    kind = "mlp" if source["actor.model.model_type"] in SMALL_POLICIES else "vla"
    return Became({f"model.{kind}.num_action_chunks": value})


def _controller(policy_setup: str, _: Source) -> str:
    return next(mode for robot, mode in _CONTROLLERS.items() if robot in policy_setup)


def _gripper(policy_setup: str, _: Source) -> str:
    return "signed" if "panda" in policy_setup else "open_is_one"


def _is_joint(value: bool, source: Source) -> Became:
    if value == (source["actor.model.openpi.noise_method"] == "flow_noise"):
        return implied("flow_noise has the log-prob of the whole chain, flow_sde that of one step")
    return unsupported("set it to true for noise_method=flow_noise, and to false for flow_sde")


def _value_type(value: str, source: Source) -> Became:
    if value == (source["algorithm.reward_type"] or "chunk_level"):
        return implied("there is a value for each reward: algorithm.reward_type")
    return unsupported("there is a value for each reward; make it agree with algorithm.reward_type")


def base(source: Source) -> dict[str, object]:
    """Native values of robots that no single key determines."""
    native: dict[str, object] = {}
    model, simulator = source["actor.model.model_type"], facts.simulator(source)
    if simulator == "libero" and model in facts.OPENVLA:
        native["env.gripper"] = "open_is_one"
    if simulator == "metaworld":
        native |= {"env.reward_mode": "success", "env.terminate_on_success": True}
        if model != "mlp_policy":
            native |= {"env.cameras": {"image": "corner4"}, "env.shadows": True}
    if model not in (None, "openpi", *facts.OPENVLA):
        native["eval.sampling.greedy"] = True
    if facts.has_critic(source) and model in (*facts.OPENVLA, "cnn_policy", "openpi"):
        native["critic.network"] = "shared"  # a value head on the policy's features
    return native


_CONTROLLERS = {
    "panda-qpos": "pd_joint_delta_pos",
    "panda-ee-dpos": "pd_ee_delta_pos",
    "panda-ee-target-dpos": "pd_ee_target_delta_pose",
    "google_robot_static": "arm_pd_ee_delta_pose_align_interpolate_by_planner_gripper_pd_joint_target_delta_pos_"
    "interpolate_by_planner",
    "widowx": "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos",
    "panda": "pd_ee_body_target_delta_pose_real_root_frame",
}
"""Part of a policy_setup -> ManiSkill's controller."""
_SETUP = Takes(
    f"a string with one of {', '.join(_CONTROLLERS)}",
    lambda v: any(robot in str(v) for robot in _CONTROLLERS),
)
_PI0 = needs("actor.model.model_type", "openpi")
_CNN = needs("actor.model.model_type", "cnn_policy")
_REPLAY = (
    "replay buffers are for SAC (adv_type=embodied_sac with model_type=mlp_policy); here use adv_type=gae with "
    "loss_type=actor_critic"
)
_REAL = "real robots are not supported; use a simulator"
_OTHER = "for a simulator that is not supported; use env_type maniskill, libero or metaworld"
_GR00T = "GR00T is not supported; use openvla_oft or openpi"

# One rule per line.
# fmt: off
_MODEL = section("actor.model", "model.vla", ROBOTS_ONLY)(
    to("num_action_chunks", "", "count", _chunks, note="actions of one answer"),
    always("{obs_dim,state_dim}", "the environment's observations determine it", "count"),
    to("hidden_dim", "model.mlp.hidden_sizes", "count", _CNN, lambda v, _: [v]),
    to("action_dim", ".action_dim", "count", VLA),
    to("max_prompt_length", ".max_prompt_tokens", "count", VLA),
    to("use_proprio", ".use_proprio", "bool", VLA),
    to("unnorm_key", ".unnorm_key", "text?", VLA),
    to("value_type", "", "chunk_level|action_level", VLA, _value_type),
    to("val_micro_batch_size", ".eval_batch_rows", "count", VLA, note="not read by RLinf"),
    to("center_crop", ".center_crop", "bool", VLA),
    to("do_sample", ".greedy", "bool", VLA,
       unless(lambda s: facts.eval_temperature(s) is not None, "overridden by sampling_params.temperature_eval"),
       opposite, note="in evaluation; training always samples"),
    to("add_qkv_bias", ".qkv_bias", "bool", VLA, note="checked against the folder"),
    to("vocab_size", ".vocab_size", "count", VLA, note="action tokens are counted backwards from it"),
    to("hidden_size", ".hidden_size", "count", VLA, note="input of the value head"),
    to("policy_setup", {"env.control_mode": _controller, "env.gripper": _gripper}, _SETUP, of_simulator("maniskill"),
       note="the gripper's number in [0, 1] opens it above 0.5; policies of panda robots have it in [-1, 1]"),
    to("image_size", ".image_size", list_of("count", length=2), VLA, note="height and width"),
    to("num_images_in_input", ".num_images", "count", VLA),
    always("add_value_head", "there is a value head whenever values are learned", "bool"),
    to("implement_version", ".form", "rlinf|official", needs(".model_type", "openvla_oft"), default="rlinf"),
    missing("use_film", "use a policy without FiLM", default=False),
    ignored("proprio_dim", "the folder determines it"),
    ignored("sharding_strategy", "RLinf reads actor.fsdp_config.sharding_strategy"),
    ignored("force_musa_eager_sdpa", "for devices of Moore Threads"),
    to("num_steps", ".denoise_steps", "count", _PI0))

_OPENPI = section("actor.model.openpi", "model.vla", ROBOTS_ONLY, _PI0)(
    to("config_name", "", "text",
       lambda v, _: unsupported("pi0.5 is not supported; use a checkpoint of pi0") if v.startswith("pi05")
       else implied("the folder's config.json and statistics describe the checkpoint")),
    to("num_images_in_input", ".num_images", "count"),
    to("action_chunk", ".num_action_chunks", "count"),
    to("action_env_dim", ".action_dim", "count"),
    to("num_steps", ".denoise_steps", "count"),
    to("train_expert_only", ".train_expert_only", "bool", default=False),
    to("noise_method", ".noise", "flow_sde|flow_noise|flow_cps|reinflow",
       lambda v, _: v if v in ("flow_sde", "flow_noise") else unsupported("use flow_sde or flow_noise"),
       default="flow_sde"),
    to("noise_level", ".noise_level", "non-negative",
       lambda v, _: v or unsupported("without noise there are no log-probs; use a positive number")),
    to("joint_logprob", "", "bool", _is_joint),
    always("add_value_head", "there is a value head whenever values are learned", "bool"),
    to("detach_critic_input", "critic.network", "bool?", VALUES, lambda v, _: "shared_detached" if v else "shared"),
    ignored("{action_horizon,model_action_dim,paligemma_variant,action_expert_variant,max_token_len,task}",
            "the folder determines it"),
    ignored("value_after_vlm", "the critic reads the expert's state at the robot's state in any case", "bool"),
    to("value_vlm_mode", "", "mean_token|last_token|first_token",
       lambda v, _: implied("see value_after_vlm") if v == "mean_token" else unsupported("use mean_token")),
    missing("{noise_params,noise_anneal,chunk_critic_input,safe_get_logprob,ignore_last}", "remove it", default=False),
    missing("use_dsrl", _REPLAY, default=False),
    ignored("dsrl_{state_dim,action_noise_dim,num_q_heads,agg_q,image_latent_dim,state_latent_dim,hidden_dims}",
            "for use_dsrl only"))

_OUT = rows(
    missing("actor.model.{add_q_head,num_q_heads,q_head_type,vh_mode,q_network_separate_processing,denoising_steps}",
            _REPLAY, default=False),
    missing("actor.model.{embodiment_tag,obs_converter_type} actor.model.rl_head_config.*", _GR00T),
    missing(
        "algorithm.{replay_buffer,demo_buffer,entropy_tuning}.* algorithm.entropy_tuning.optim.* "
        "actor.critic_optim.* "
        "algorithm.{tau,agg_q,actor_agg_q,target_update_freq,target_update_type,critic_actor_ratio,backup_entropy,"
        "critic_subsample_size,enable_drq,train_actor_steps}", _REPLAY),
    missing("algorithm.dagger.*", "use braid sft on demonstrations"),
    missing(
        "env.{train,eval}.{use_spacemouse,keyboard_reward_wrapper,no_gripper,main_image_key} "
        "env.{train,eval}.override_cfg.*",
            _REAL, default=False),
    missing(
        "env.{train,eval}.{assets_path,seeds_path,center_crop,use_custom_reward,use_full_state,robot_name,base_config_name,"
        "use_eval_utils_cfg,policy_wrapper,num_env_subprocess,skip_intermediate_obs_in_chunk} "
        "env.{train,eval}.task_config.* "
        "env.{train,eval}.task_config.{domain_randomization,camera,data_type}.* "
        "env.{train,eval}.omni_config.* "
        "env.{train,eval}.omni_config.{env,render,camera,macro,task,scene}.* "
        "env.{train,eval}.omni_config.task.{termination_config,reward_config}.*", _OTHER, default=False),
    missing("env.{train,eval}.data_collection.*", "use the scripted expert of examples/tabletop.py, or braid.data.lerobot"))

RULES = rows(
    _MODEL,
    _OPENPI,
    _OUT,
    ignored(
        "weight_syncer.{type,nccl_max_ctas} weight_syncer.{patch,bucket}.* "
        "weight_syncer.patch.init_sync.*",
            "weights are synced as the placement allows (braid.rollout.weight_sync)"),
    missing("runner.ckpt_path", "use a Hugging Face folder as actor.model.model_path"),
    ignored("rollout.model.* rollout.model.openpi.*",
            "training samples with actor.model; in an evaluation (runner.only_eval) the policy is built "
            "from rollout.model"),
    missing("rollout.expert_model.*", "use braid sft on demonstrations"),
    to("rollout.unnorm_key", "model.vla.unnorm_key", "text?", ROBOTS_ONLY, overridden("actor.model.unnorm_key"),
       needs("actor.model.model_type", *facts.OPENVLA), note="where actor.model.unnorm_key is absent"),
    always("rollout.validate_weight_first_sync", "the engine reads the trainer's weights", "bool"),
)
# fmt: on
