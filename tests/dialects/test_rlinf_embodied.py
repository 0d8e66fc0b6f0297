"""RLinf's embodied task: presets, simulators, robot policies, and the batches of chunks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from braid.algorithms.advantages.gae import Gae
from braid.config.schema import RunConfig
from braid.envs.kinds import LiberoEnv, ManiskillEnv, MetaworldEnv
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


def test_no_key_is_unsupported_and_text_keys_say_why_they_have_no_effect() -> None:
    ledger = read().ledger
    assert not [entry.path for entry in ledger if entry.disposition == "unsupported"]
    unused = {entry.path for entry in ledger if entry.disposition == "unused"}
    assert {f"algorithm.{name}_type" for name in ("reward", "entropy")} <= unused
    note_of = notes()
    assert note_of["runner.seq_length"] == "for language models only; runner.task_type is embodied"
    assert note_of["rollout.model.model_path"] == "the robot policy is set by actor.model.model_path"
    assert note_of["algorithm.auto_reset"] == "overridden by env.train.auto_reset"


def test_another_preset_is_another_simulator() -> None:
    env = config(*LIBERO).env
    assert isinstance(env, LiberoEnv)
    assert (env.suite, env.gripper, env.max_episode_steps) == ("libero_10", "open_is_one", 10)
    assert not env.fixed_reset_states, "the preset's group_size is 1, that of the algorithm 2"


@pytest.mark.parametrize(
    ("overrides", "prompts", "steps"),
    [
        # null: one optimizer batch of 160 chunks; episodes of 10 steps are one chunk of 8 each, so 160
        # simulators
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
    run_config = config(*overrides)
    assert (run_config.rollout.prompts_per_round, run_config.train.steps_per_pass) == (prompts, steps)


def test_several_episodes_of_each_simulator_in_a_round() -> None:
    run_config = config(
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
    env = run_config.env
    assert isinstance(env, ManiskillEnv)
    assert (env.auto_reset, env.max_steps_per_rollout, env.num_envs) == (True, 160, 64)
    assert run_config.rollout.prompts_per_round == 64 * 2 // 2
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
    env = read_config(tmp_path / SEED.name, ["algorithm.reward_coef=2.0"]).loaded.config.env
    assert isinstance(env, ManiskillEnv)
    assert env.reward_scale == 2.0


def test_gae_adds_a_value_head() -> None:
    algorithm = config(
        "algorithm.adv_type=gae", "algorithm.loss_type=actor_critic", "algorithm.gamma=0.8"
    ).algorithm
    assert algorithm.advantage == Gae(gamma=0.8)
    values = ("algorithm.adv_type=gae", "algorithm.loss_type=actor_critic")
    assert config(*values, "algorithm.bootstrap_type=always").algorithm.advantage.bootstrap == "always"
    assert config("algorithm.bootstrap_type=always").algorithm.advantage.kind == "grpo"
    assert config("algorithm.adv_type=ppo").algorithm.advantage.kind == "gae"
    assert (
        config("algorithm.adv_type=gae", "algorithm.loss_type=actor").algorithm.advantage.kind == "reinforce"
    )


def test_groups_with_mean_rewards_out_of_bounds_are_dropped() -> None:
    reward_filter = config(
        "algorithm.filter_rewards=true",
        "algorithm.rewards_lower_bound=0.1",
        "algorithm.rewards_upper_bound=4.9",
    ).rollout.filter
    assert (reward_filter.min_mean, reward_filter.max_mean) == (0.1, 4.9)
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
        (
            ["env.train.env_type=robotwin"],
            "is not supported: there is no simulator robotwin; use one of maniskill, libero, metaworld",
        ),
        (
            ["actor.model.model_type=gr00t"],
            "is not supported: use one of openvla, openvla_oft, openpi, mlp_policy, cnn_policy with "
            "runner.task_type=embodied",
        ),
        (
            ["env.eval.max_episode_steps=20"],
            "evaluation has the settings of training, env.train.max_episode_steps=10; make them agree",
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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "env.eval.ignore_terminations=true",
            "env.train.ignore_terminations=False: env/success_once is the same",
        ),
        ("env.eval.reward_coef=1.0", "env.train.reward_coef=5.0: returns are measured alike"),
        ("env.eval.use_rel_reward=false", "env.train.use_rel_reward=True: returns are measured alike"),
    ],
)
def test_evaluations_that_differ_without_an_effect_on_success_say_how(override: str, words: str) -> None:
    key = override.partition("=")[0]
    entry = {entry.path: entry for entry in read(override).ledger}[key]
    assert entry.disposition == "no effect"
    assert words in entry.note


@pytest.mark.parametrize(
    ("model", "overrides", "temperature"),
    [
        ("openvla_oft", ["rollout.sampling_params.temperature_eval=0.6"], 0.6),
        ("openvla_oft", ["rollout.sampling_params.temperature_eval=-1"], None),
        ("openvla_oft", ["algorithm.sampling_params.temperature_eval=0"], None),
        ("openvla_oft", [], None),
        ("openpi", ["rollout.sampling_params.temperature_eval=0.6"], None),
        ("openpi", [], None),
        ("cnn_policy", ["actor.model.is_lora=false"], None),
    ],
)
def test_evaluations_have_a_temperature_of_their_own_or_the_likeliest_actions(
    model: str, overrides: list[str], temperature: float | None
) -> None:
    """pi0 and small policies always have the likeliest; the file's actor.model.do_sample=false counts
    otherwise."""
    sampling = config(f"actor.model.model_type={model}", *overrides).eval_sampling
    assert sampling.greedy == (temperature is None)
    assert temperature in (None, sampling.temperature)


def test_sampling_params_of_the_rollout_come_before_those_of_the_algorithm() -> None:
    overrides = ("rollout.sampling_params.temperature_train=1.6", "rollout.sampling_params.do_sample=true")
    assert config(*overrides).rollout.sampling.temperature == 1.6
    note_of = notes(*overrides)
    assert note_of["algorithm.sampling_params.temperature"] == "sampling_params are those of rollout"
    assert notes("rollout.sampling_params.max_new_tokens=null")["rollout.sampling_params.max_new_tokens"] == (
        "null: what the actions need, or runner.seq_length leaves"
    )


@pytest.mark.parametrize(
    ("override", "disposition"),
    [
        ("rollout.sampling_params.top_k=50", "unsupported"),
        ("rollout.sampling_params.top_k=-1", "implied"),
        ("rollout.sampling_params.top_p=0.9", "no effect"),
        ("rollout.sampling_params.repetition_penalty=1.2", "no effect"),
        ("rollout.sampling_params.add_BOS=false", "no effect"),
        ("rollout.enable_torch_compile=false", "no effect"),
        ("actor.model.use_film=false", "no effect"),
        ("actor.model.use_film=true", "unsupported"),
        ("actor.model.proprio_dim=8", "no effect"),
        ("actor.model.sharding_strategy=no_shard", "no effect"),
        ("actor.fsdp_config.transformer_layer_cls_to_wrap=[GemmaMLP]", "no effect"),
        ("runner.eval_policy_path=null", "no effect"),
        ("runner.eval_policy_path=a.pt", "unsupported"),
        ("env.train.use_step_penalty=false", "no effect"),
        ("env.train.init_params.camera_pos=[1.0, 0.0, 2.0]", "no effect"),
        ("env.train.init_params.task_description=Stack", "no effect"),
        ("env.eval.policy_setup=widowx_bridge", "no effect"),
        ("env.obs_compression.enable=false", "no effect"),
        ("actor.optim.num_cycles=0.5", "no effect"),
        ("actor.optim.lr_warmup_steps=-1", "no effect"),
        ("actor.optim.critic_warmup_steps=10", "no effect"),  # without a critic
    ],
)
def test_keys_that_change_nothing_are_accepted_and_others_are_not(override: str, disposition: str) -> None:
    entries = {entry.path: entry for entry in read_config(SEED, [override], allowed=["*"]).ledger}
    entry = entries[override.partition("=")[0]]
    assert (entry.disposition, bool(entry.note)) == (disposition, True)


def test_training_at_temperature_0_is_refused_unless_nothing_is_trained() -> None:
    override = "rollout.sampling_params.temperature_train=0.0"
    with pytest.raises(ConfigError, match="training samples actions; use a number above 0"):
        read(override)
    assert notes(override, "runner.only_eval=true")["rollout.sampling_params.temperature_train"] == (
        "nothing is trained"
    )


def test_counts_of_steps_and_decisions_become_those_of_braid() -> None:
    """640 chunks of a round are 4 optimizer steps, times 2 passes."""
    run_config = config(
        "algorithm.adv_type=gae",
        "algorithm.loss_type=actor_critic",
        "env.train.total_num_envs=64",
        "algorithm.update_epoch=2",
        "actor.optim.critic_warmup_steps=17",
        "actor.optim.lr_scheduler=cosine",
        "actor.optim.lr_warmup_steps=3",
        "actor.optim.total_training_steps=100",
        *LONG,
    )
    assert (run_config.train.steps_per_pass, run_config.train.passes_per_round) == (4, 2)
    assert run_config.critic.warmup_rounds == 3
    schedule = run_config.train.optimizer.schedule
    assert (schedule.warmup_steps, schedule.decay_steps) == (24, 800), "RLinf counts rounds"
    assert run_config.train.micro_batch_tokens == 8 * 8 * 7, "micro-batches are counted in log-probs"
    for level, positions in (("action_level", 8), ("chunk_level", 1)):
        assert config(f"algorithm.logprob_type={level}").train.micro_batch_tokens == 8 * positions
    longer = config(*LONG, "env.train.total_num_envs=64", "env.train.max_steps_per_rollout_epoch=160")
    assert longer.train.steps_per_pass == 8


def test_pytorch_s_own_schedules() -> None:
    overrides = (
        "actor.optim.min_lr=1e-5",
        "actor.optim.lr_warmup_steps=3",
        "actor.optim.lr_scheduler=torch_cosine",
    )
    schedule = config(*overrides).train.optimizer.schedule
    assert (schedule.decay, schedule.warmup_steps) == ("cosine", 0)
    assert schedule.min_ratio == pytest.approx(1e-6 / 1e-4)
    assert "neither a warm-up" in notes(*overrides)["actor.optim.min_lr"]
    assert config("actor.optim.lr_scheduler=torch_constant").train.optimizer.schedule.decay == "constant"


def test_libero_s_own_keys() -> None:
    def env(*overrides: str) -> LiberoEnv:
        libero = config(*LIBERO, *overrides).env
        assert isinstance(libero, LiberoEnv)
        return libero

    penalised = [
        f"env.{use}.{key}"
        for use in ("train", "eval")
        for key in ("use_step_penalty=true", "reset_gripper_open=false")
    ]
    assert (env(*penalised).step_penalty, env(*penalised).open_gripper) == (1.0, False)
    in_order = "env.train.use_ordered_reset_state_ids=true"
    assert env(in_order, "env.train.group_size=2").reset_seeds == 500
    assert notes(*LIBERO, in_order)["env.train.use_ordered_reset_state_ids"] == (
        "each episode begins in a random state of its own"
    )
    of_eval = "env.eval.is_eval=true"
    assert env(of_eval, "env.eval.total_num_envs=500").eval_reset_seeds == 500
    assert env(of_eval, "env.eval.total_num_envs=12").eval_reset_seeds == (*range(0, 500, 50), 1, 51), (
        "tasks in turns"
    )
    assert env(of_eval).eval_reset_seeds is None


def test_a_task_of_metaworld_or_a_set() -> None:
    metaworld = [*LIBERO, *(f"env.{use}.env_type=metaworld" for use in ("train", "eval"))]
    for key, task in (("task_name=reach-v3", "reach-v3"), ("task_suite_name=metaworld_45_ind", "ML45-train")):
        env = config(*metaworld, *(f"env.{use}.{key}" for use in ("train", "eval"))).env
        assert isinstance(env, MetaworldEnv)
        assert env.task == task
    both = [f"env.{use}.task_suite_name=metaworld_50" for use in ("train", "eval")]
    named = [f"env.{use}.task_name=reach-v3" for use in ("train", "eval")]
    assert notes(*metaworld, *both, *named)["env.train.task_suite_name"] == "overridden by task_name"


def test_a_policy_needs_a_folder_unless_it_is_built() -> None:
    with pytest.raises(ConfigError, match="set it to the policy's folder"):
        read("actor.model.model_path=''")
    small = ("actor.model.model_type=mlp_policy", "actor.model.is_lora=false", "rollout.model.model_path=''")
    assert config("actor.model.model_path=''", *small).model.path is None


def test_precisions_of_fsdp_have_the_names_of_the_model_s() -> None:
    backend = config("actor.fsdp_config.mixed_precision.param_dtype=32").train.backend
    assert backend.parameter_dtype() == "fp32"


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
    assert (env.on_gpu, env.obs_mode) == (False, "rgb")
    assert env.control_mode == "pd_ee_delta_pos", "the policy's, whatever init_params says"
    assert env.kwargs == {"sim_config": {"sim_freq": 100}, "sensor_configs": {"shader_pack": "minimal"}}
    assert (env.reward_mode, env.gripper, env.pipeline_stages) == ("success", "signed", 2)


def test_openpi_s_keys_are_those_of_pi0() -> None:
    prefix = "actor.model.openpi."
    overrides = [
        "actor.model.model_type=openpi",
        "actor.model.num_action_chunks=5",
        f"{prefix}config_name=pi0_libero",
        f"{prefix}num_steps=3",
        f"{prefix}noise_method=flow_noise",
        f"{prefix}joint_logprob=true",
        f"{prefix}train_expert_only=true",
        f"{prefix}detach_critic_input=true",
        f"{prefix}use_dsrl=false",
        f"{prefix}value_after_vlm=true",
        f"{prefix}value_vlm_mode=mean_token",
    ]
    vla = config(*overrides).model.vla
    assert vla is not None
    assert (vla.kind, vla.denoise_steps, vla.noise, vla.train_expert_only) == ("pi0", 3, "flow_noise", True)
    for override, words in (
        (f"{prefix}config_name=pi05_libero", "pi0.5 is not supported"),
        (f"{prefix}joint_logprob=false", "set it to true for noise_method=flow_noise"),
        (f"{prefix}noise_method=reinflow", "use flow_sde or flow_noise"),
        (f"{prefix}value_vlm_mode=last_token", "use mean_token"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            read(*overrides, override)


def test_small_policies_are_built_from_sizes() -> None:
    model = config(
        "actor.model.model_type=mlp_policy",
        "actor.model.is_lora=false",
        "env.train.init_params.obs_mode=state",
    ).model
    assert (model.path, model.vla) == (None, None)
    assert model.mlp is not None
    assert (model.mlp.hidden_sizes, model.mlp.num_action_chunks) == ((256, 256, 256), 8)
    assert model.mlp.initial_std == 0.6065  # exp(-0.5)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.replay_buffer.cache_size=200", "replay buffers are for SAC"),
        ("actor.model.add_q_head=true", "replay buffers are for SAC"),
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
    dispositions = {
        entry.path: entry.disposition
        for entry in read(
            "weight_syncer.type=patch",
            "weight_syncer.patch.init_sync.enabled=true",
            "rollout.model.action_dim=7",
            "env.train.is_eval=false",
        ).ledger
    }
    assert (
        dispositions["weight_syncer.type"]
        == dispositions["weight_syncer.patch.init_sync.enabled"]
        == "no effect"
    )
    assert dispositions["rollout.model.action_dim"] == "no effect"
    assert dispositions["env.train.is_eval"] == "implied"
    assert read("rollout.generation_backend=huggingface").loaded.config.rollout.engine.kind == "native"


@pytest.mark.parametrize(
    ("keys", "offload"),
    [
        (
            ["env.train.enable_offload=true", "env.eval.enable_offload=false", "env.enable_offload=false"],
            True,
        ),
        (["env.eval.enable_offload=true", "env.enable_offload=false"], True),
        (["env.enable_offload=true"], True),
    ],
)
def test_the_offload_of_training_decides(keys: list[str], offload: bool) -> None:
    """RLinf reads those of env.train and env.eval; its pages show env.enable_offload."""
    foreign = [key for key in keys if not key.startswith("env.enable_offload")]
    loaded = config(*foreign, *(key for key in keys if key.startswith("env.enable_offload")))
    assert loaded.env.offload is offload  # pyright: ignore[reportAttributeAccessIssue]
