"""SkyRL files: native values, and errors."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from braid.algorithms.advantages.gae import Gae
from braid.algorithms.advantages.grpo import Grpo
from braid.algorithms.advantages.reinforce import Reinforce
from braid.algorithms.advantages.rloo import Rloo
from braid.algorithms.policy_losses.cispo import Cispo
from braid.algorithms.policy_losses.clip_cov import ClipCov
from braid.algorithms.policy_losses.dppo import Dppo
from braid.algorithms.policy_losses.importance_sampling import ImportanceSampling
from braid.algorithms.policy_losses.kl_cov import KlCov
from braid.algorithms.policy_losses.masked_is import MaskedIs
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.policy_losses.sapo import Sapo
from braid.cli.explain import shown
from braid.errors import ConfigError
from braid.training.backends.deepspeed.kind import DeepSpeed
from braid.training.backends.megatron.kind import Megatron
from braid_dialects.load import Read, read_config
from braid_dialects.skyrl import SKYRL

from .samples import samples

SEED = Path(__file__).parent / "seeds/skyrl-004.yaml"
SINGLE = {"backend": "single", "engine": "native"}
GAE = ("trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=m")


@pytest.fixture(autouse=True)
def _no_tracker_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", "/home/x")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with only SkyRL's defaults."""
    path = tmp_path / "skyrl.yaml"
    path.write_text("trainer: {epochs: 1}\ngenerator: {max_turns: 1}\n")
    return path


def read(path: Path, *overrides: str, **options: Any) -> Read:
    return read_config(path, overrides, dialect="skyrl@0.0", **options)


def native(result: Read, path: str) -> Any:
    """The native value at a dotted path."""
    value: Any = result.loaded.config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def row(result: Read, path: str) -> Any:
    (entry,) = [entry for entry in result.ledger if entry.path == path]
    return entry


def problems(path: Path, *overrides: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(path, *overrides, **options)
    return [f"{problem.key}: {problem.message}" for problem in caught.value.problems]


# --- the page's file
# -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seed() -> Read:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_API_KEY", raising=False)
        patch.setenv("HOME", "/home/x")
        return read(SEED)


def test_a_file_without_keys_means_the_pages_defaults(file: Path, seed: Read) -> None:
    bare, full = read(file).loaded.config, seed.loaded.config
    assert bare.train == full.train
    assert bare.algorithm == full.algorithm
    assert bare.eval == full.eval
    assert bare.reference == full.reference
    assert bare.rollout == full.rollout
    assert bare.cluster == full.cluster
    assert bare.report == full.report


def test_in_one_process_devices_and_engines_have_no_effect(file: Path) -> None:
    result = read(SEED, **SINGLE)
    config = result.loaded.config
    assert (config.train.backend.kind, config.rollout.engine.kind, config.cluster.placement) == (
        "single",
        "native",
        {},
    )
    assert config.reference.train is None
    assert config.rollout.engine.max_running == 1024
    for path in (
        "trainer.placement.policy_num_gpus_per_node",
        "trainer.policy.fsdp_config.cpu_offload",
        "generator.inference_engine_tensor_parallel_size",
        "generator.weight_sync_backend",
        "trainer.strategy",
    ):
        assert row(result, path).disposition == "no effect", path
        assert row(result, path).note


# --- batch arithmetic
# ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "mini", "num", "gpus", "steps"),
    [(1024, 256, 5, 4, 4), (8, 8, 2, 4, 1), (64, 16, 4, 2, 4), (4, 2, 2, 1, 2)],
)
def test_mini_batches_are_counted_in_prompts(
    file: Path, batch: int, mini: int, num: int, gpus: int, steps: int
) -> None:
    """SkyRL: a rank steps after mini * num // ranks samples, so train_batch_size / mini times a batch."""
    result = read(
        file,
        f"trainer.train_batch_size={batch}",
        f"trainer.policy_mini_batch_size={mini}",
        f"trainer.critic_mini_batch_size={mini}",
        f"generator.n_samples_per_prompt={num}",
        *(f"trainer.placement.{role}_num_gpus_per_node={gpus}" for role in ("policy", "ref")),
        f"generator.inference_engine_tensor_parallel_size={gpus}",
    )
    assert result.loaded.config.train.steps_per_pass == steps
    assert result.loaded.config.rollout.prompts_per_round * num == batch * num


def test_the_critic_has_its_own_mini_batches(file: Path) -> None:
    critic = read(file, *GAE, "trainer.critic_mini_batch_size=64").loaded.config.critic
    assert critic.train is not None
    assert critic.train.steps_per_pass == 16
    assert critic.train.optimizer.lr == 5e-6


def test_token_budgets_replace_sample_counts(file: Path) -> None:
    train = read(file, "trainer.max_tokens_per_microbatch=4096").loaded.config.train
    assert (train.micro_batch_tokens, train.micro_batch_rows, train.infer_batch_tokens) == (4096, None, 4096)


# --- algorithms
# ----------------------------------------------------------------------------------------------------

_A = "trainer.algorithm"


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (GAE, {"recipe": "ppo", "advantage": Gae(gamma=1.0, gae_lambda=1.0), "value_clip": 0.2}),
        ((f"{_A}.advantage_estimator=rloo",), {"recipe": "grpo", "advantage": Rloo()}),
        ((f"{_A}.advantage_estimator=reinforce++",), {"advantage": Reinforce(gamma=1.0), "whiten_advantages": True}),
        ((f"{_A}.policy_loss_type=rollout_is",), {"policy_loss": MaskedIs(clip_low=0.2), "old_logprobs": "behavior"}),
        (
            (f"{_A}.policy_loss_type=rollout_is", f"+{_A}.off_policy_correction.tis_ratio_type=token"),
            {"policy_loss": MaskedIs(clip_low=0.2, ratio_to="behavior"), "old_logprobs": "recompute"},
        ),
        ((f"{_A}.policy_loss_type=importance_sampling",), {"policy_loss": ImportanceSampling()}),
        (("generator.n_samples_per_prompt=1",), {"advantage": Reinforce()}),
        ((f"{_A}.advantage_batch_normalize=true",), {"whiten_advantages": True}),
        ((f"{_A}.grpo_norm_by_std=false",), {"advantage": Grpo(normalize_by_std=False)}),
        ((f"{_A}.use_kl_loss=false",), {"kl_coef": 0.0}),
        ((f"{_A}.use_kl_loss=false", f"{_A}.use_kl_in_reward=true"), {"kl_in": "reward", "kl_coef": 0.001}),
        ((f"{_A}.use_kl_estimator_k3=false",), {"kl_estimator": "k1", "kl_clamp": "off"}),
        ((f"{_A}.use_kl_estimator_k3=false", f"{_A}.use_abs_kl=true"), {"kl_estimator": "abs"}),
        ((f"{_A}.use_abs_kl=true",), {"kl_estimator": "k3"}),
        ((f"{_A}.kl_estimator_type=k2",), {"kl_estimator": "k2"}),
        ((f"{_A}.ppo_loss_type=dual_clip",), {"policy_loss": PpoClip(dual_clip=3.0)}),
        ((f"{_A}.policy_loss_type=dual_clip", f"{_A}.clip_ratio_c=5"), {"policy_loss.dual_clip": 5.0}),
        ((f"{_A}.policy_loss_type=gspo",), {"policy_loss": PpoClip(ratio_level="sequence", clip_low=0.2)}),
        ((f"{_A}.policy_loss_type=cispo",), {"policy_loss": Cispo(clip_low=1.0, clip_high=4.0)}),
        ((f"{_A}.policy_loss_type=sapo",), {"policy_loss": Sapo(tau_positive=1.0, tau_negative=1.05)}),
        ((f"{_A}.policy_loss_type=clip_cov",), {"policy_loss": ClipCov(cov_fraction=0.0002, cov_low=1.0, cov_high=5.0)}),
        ((f"{_A}.policy_loss_type=kl_cov",), {"policy_loss": KlCov(cov_fraction=0.2, cov_coef=1.0)}),
        ((f"{_A}.policy_loss_type=dppo",), {"policy_loss": Dppo(divergence="tv"), "old_logprobs": "behavior"}),
        ((f"{_A}.loss_reduction=token_mean",), {"aggregation": "token_mean"}),
        (
            (f"{_A}.loss_reduction=seq_mean_token_sum_norm", f"{_A}.max_seq_len=2048"),
            {"aggregation": "token_sum_constant", "aggregation_constant": 2048.0},
        ),
        ((f"{_A}.use_entropy_loss=true",), {"entropy_coef": 0.01}),
        (("generator.apply_overlong_filtering=true",), {"mask_truncated": True}),
    ],
)  # fmt: skip
def test_algorithms_become(file: Path, overrides: tuple[str, ...], values: dict[str, Any]) -> None:
    algorithm = read(file, *overrides).loaded.config.algorithm
    assert {name: attrgetter(name)(algorithm) for name in values} == values


@pytest.mark.parametrize(
    ("overrides", "corrections"),
    [
        (("tis_ratio_type=token",), [("token", "truncate", 0.0, 2.0, "kept")]),
        (
            ("tis_ratio_type=sequence", "sequence_tis_ratio_clip_high=3"),
            [("sequence", "truncate", 0.0, 3.0, "kept")],
        ),
        (
            ("tis_ratio_type=token", "sequence_mask_metric=geometric"),
            [("token", "truncate", 0.0, 2.0, "kept"), ("geometric", "mask", 0.99, 1.01, "kept")],
        ),
        (("sequence_mask_metric=product",), [("sequence", "mask", 0.5, 2.0, "kept")]),
        (("token_mask_is_threshold_high=4",), [("token", "mask", 0.0, 4.0, "all")]),
        (("outlier_token_is_threshold_low=0.01",), [("token", "mask_sequence", 0.01, "off", "all")]),
        (
            (
                "sequence_mask_metric=geometric",
                "token_mask_is_threshold_low=0.5",
                "outlier_token_is_threshold_high=9",
            ),
            [
                ("token", "mask_sequence", 0.0, 9.0, "all"),
                ("token", "mask", 0.5, "off", "all"),
                ("geometric", "mask", 0.99, 1.01, "kept"),
            ],
        ),
    ],
)
def test_off_policy_corrections_become(
    file: Path, overrides: tuple[str, ...], corrections: list[tuple[Any, ...]]
) -> None:
    result = read(file, *(f"{_A}.off_policy_correction.{override}" for override in overrides))
    made = result.loaded.config.algorithm.corrections
    assert made is not None
    assert [(c.level, c.mode, c.low, c.high, c.tokens) for c in made] == corrections
    assert result.loaded.config.algorithm.old_logprobs == "recompute"


def test_the_older_spelling_of_truncated_importance_sampling_works(file: Path) -> None:
    made = read(file, f"{_A}.use_tis=true", f"{_A}.tis_imp_ratio_cap=1.5").loaded.config.algorithm.corrections
    assert made is not None
    assert [(c.level, c.mode, c.high) for c in made] == [("token", "truncate", 1.5)]


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        (("dynamic_sampling.type=filter",), {"min_std": 0.0, "then": "resample", "max_batches": 30}),
        (("dynamic_sampling.type=replace",), {"then": "replace", "min_kept_fraction": 0.3}),
        (("zero_variance_filter=true",), {"min_std": 1e-6, "then": "mask"}),
    ],
)
def test_dynamic_sampling_is_a_filter(file: Path, overrides: tuple[str, ...], values: dict[str, Any]) -> None:
    chosen = read(file, *(f"{_A}.{override}" for override in overrides)).loaded.config.rollout.filter
    assert {name: getattr(chosen, name) for name in values} == values


def test_values_not_rewards_are_normalised(file: Path) -> None:
    result = read(file, *GAE)
    assert result.loaded.config.critic.normalize_values
    assert result.loaded.config.critic.head_name == "value_head"
    assert not read(file, *GAE, f"{_A}.normalize_reward=false").loaded.config.critic.normalize_values


# --- environment, sampling, places
# ---------------------------------------------------------------------------------


def test_gsm8k_answers_are_the_number_after_the_marks(seed: Read) -> None:
    (part,) = seed.loaded.config.reward.parts
    assert part.kind == "exact"
    assert part.ignore == ",$"


def test_another_environment_is_refused_with_the_supported_ones(file: Path) -> None:
    (problem,) = problems(file, "environment.env_class=mine")
    assert problem.startswith(
        "environment.env_class: 'mine' is not supported: use gsm8k, aime, gsm8k_multi_turn, "
    )
    assert "the module that registers it (module:name), or its class (package.module.Class)" in problem
    result = read(
        file,
        "environment.env_class=mine",
        "braid.reward.parts=[{kind: function, path: rewards.py:score}]",
        allowed=["environment.env_class"],
    )
    assert result.loaded.config.reward.parts[0].kind == "function"


def test_tools_read_turns_and_lengths(file: Path) -> None:
    env = read(
        file, "braid.env={kind: tools}", "generator.max_turns=3", "generator.max_input_length=2000"
    ).loaded.config.env
    assert env.kind == "tools"
    assert (env.max_turns, env.max_context_tokens) == (3, 3024)


def test_a_temperature_of_zero_is_greedy(file: Path) -> None:
    result = read(file, "generator.eval_sampling_params.temperature=0.0")
    assert result.loaded.config.eval.sampling is not None
    assert result.loaded.config.eval.sampling.greedy


def test_without_evaluation_its_data_is_not_read(file: Path) -> None:
    result = read(file, "trainer.eval_interval=-1", "data.val_data=[x.parquet]")
    assert result.loaded.config.data.eval == ()
    assert not result.loaded.config.eval.before
    assert row(result, "data.val_data").disposition == "no effect"


def test_remote_servers_replace_engines(file: Path) -> None:
    result = read(
        file,
        "trainer.placement.colocate_all=false",
        "generator.run_engines_locally=false",
        "generator.num_inference_engines=2",
        "generator.remote_inference_engine_urls=[10.0.0.1:8001, 'https://b']",
        "generator.override_existing_update_group=disable",
    )
    config = result.loaded.config
    assert config.rollout.engine.servers == ("http://10.0.0.1:8001", "https://b")
    assert config.rollout.weight_sync.existing_group == "refuse"
    assert config.cluster.placement == {"policy,reference": "0-3"}


def test_devices_apart_are_numbered_one_after_the_other(file: Path) -> None:
    result = read(
        file,
        *GAE,
        "trainer.placement.colocate_all=false",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.placement.ref_num_gpus_per_node=2",
        "generator.num_inference_engines=2",
    )
    assert result.loaded.config.cluster.placement == {
        "policy": "0-3",
        "reference": "4-5",
        "critic": "6-9",
        "rollout": "10-17",
    }
    cluster = result.loaded.config.cluster
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, 18)
    nodes = [f"trainer.placement.{role}_num_nodes=2" for role in ("policy", "ref")]
    several = read(file, "trainer.placement.colocate_all=false", *nodes)
    cluster = several.loaded.config.cluster
    assert (cluster.num_nodes, cluster.devices_per_node) == (3, 4)


@pytest.mark.parametrize(
    ("logger", "wandb", "swanlab", "tensorboard"),
    [("console", False, False, False), ("tensorboard", False, False, True), ("swanlab", False, True, False)],
)
def test_loggers(file: Path, logger: str, *, wandb: bool, swanlab: bool, tensorboard: bool) -> None:
    report = read(file, f"trainer.logger={logger}").loaded.config.report
    assert (report.wandb is not None, report.swanlab is not None, report.tensorboard) == (
        wandb,
        swanlab,
        tensorboard,
    )


def test_wandb_is_online_where_a_key_is_set(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    result = read(file, "trainer.logger=wandb")
    assert result.loaded.config.report.wandb is not None
    assert result.loaded.config.report.wandb.mode == "online"
    assert "secret" not in str(result)


def test_names_that_are_not_valid_folder_names_are_kept_for_the_tracker(file: Path) -> None:
    result = read(file, "trainer.run_name=my run/1")
    assert result.loaded.config.run.name == "my-run-1"
    assert result.loaded.config.report.wandb is not None
    assert result.loaded.config.report.wandb.name == "my run/1"


def test_adapters(file: Path) -> None:
    assert read(file).loaded.config.model.lora is None
    lora = read(
        file, "trainer.policy.model.lora.rank=8", "trainer.target_modules=[q_proj]"
    ).loaded.config.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (8, 16.0, ("q_proj",))


def test_routing_replay_is_that_of_megatron(file: Path) -> None:
    keys = ("trainer.policy.megatron_config.moe_enable_routing_replay=true",
            "generator.inference_engine.enable_return_routed_experts=true")  # fmt: skip
    chosen = {
        name: read(file, *keys, f"trainer.strategy={name}").loaded.config for name in ("megatron", "fsdp2")
    }
    assert {name: config.train.router_replay for name, config in chosen.items()} == {
        "megatron": "rollout",
        "fsdp2": "none",
    }


def test_each_backend_reads_its_own_section(file: Path) -> None:
    sizes = ("trainer.policy.deepspeed_config.zero_optimization.zero_hpz_partition_size=2",
             "trainer.policy.megatron_config.tensor_model_parallel_size=2")  # fmt: skip
    configs = {
        name: read(file, *sizes, f"trainer.strategy={name}").loaded.config
        for name in ("deepspeed", "megatron", "fsdp2")
    }
    chosen = {name: config.train.backend for name, config in configs.items()}
    assert chosen["fsdp2"].kind == "fsdp2"
    assert isinstance(chosen["deepspeed"], DeepSpeed)
    assert chosen["deepspeed"].hpz_partition_size == 2
    assert isinstance(chosen["megatron"], Megatron)
    assert (chosen["megatron"].tensor_parallel, chosen["megatron"].sequence_parallel) == (2, True)


# --- other spellings
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alias", "name"), SKYRL.aliases.items())
def test_later_names_mean_the_same(file: Path, alias: str, name: str) -> None:
    rule = SKYRL.rules[name]
    other = next(v for v in samples(rule) if v not in (rule.default, None))
    options = {"allowed": ["*"]}
    old, new = (
        _relaxed(file, f"{key}={shown(other) if not isinstance(other, list) else other}", **options)
        for key in (name, alias)
    )
    assert old == new


def _relaxed(file: Path, *overrides: str, **options: Any) -> Any:
    """The config, or the problems without the spelling of the key."""
    try:
        return read(file, *overrides, **options).loaded.config
    except ConfigError as error:
        return [problem.message for problem in error.problems]


def test_two_spellings_that_differ_are_refused(file: Path) -> None:
    (message,) = problems(file, f"{_A}.ppo_loss_type=regular", f"{_A}.policy_loss_type=dual_clip")
    assert message.endswith(f"is an alias of {_A}.ppo_loss_type, which is 'regular'; remove one")


def test_warmup_of_one_model_or_of_both(file: Path) -> None:
    both = read(file, *GAE, "trainer.num_warmup_steps=7").loaded.config
    assert both.critic.train is not None
    assert (
        both.train.optimizer.schedule.warmup_steps == both.critic.train.optimizer.schedule.warmup_steps == 7
    )
    one = read(file, *GAE, "trainer.policy.optimizer_config.num_warmup_steps=7").loaded.config
    assert one.critic.train is not None
    assert (one.train.optimizer.schedule.warmup_steps, one.critic.train.optimizer.schedule.warmup_steps) == (
        7,
        0,
    )


# --- what is refused
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("trainer.policy_mini_batch_size=0",), "trainer.policy_mini_batch_size: 0 is not an integer >= 1"),
        (("trainer.micro_train_batch_size_per_gpu=0",), "trainer.micro_train_batch_size_per_gpu: 0 is not an integer >= 1"),
        (("trainer.train_batch_size=128",), "trainer.policy_mini_batch_size: 256 is above trainer.train_batch_size=128; lower it"),
        (
            ("trainer.train_batch_size=1000", "trainer.policy_mini_batch_size=300"),
            "trainer.policy_mini_batch_size: trainer.train_batch_size=1000 is not divisible by 300; set it "
            "to 250 or 500",
        ),
        (
            ("trainer.policy_mini_batch_size=1", "generator.n_samples_per_prompt=2"),
            "trainer.policy_mini_batch_size: the mini-batch of one rank is empty: policy_mini_batch_size * "
            "n_samples_per_prompt // ranks = 1*2//4 = 0; raise it to at least 2",
        ),
        (
            ("trainer.micro_train_batch_size_per_gpu=3",),
            ("trainer.micro_train_batch_size_per_gpu: the mini-batch of one rank of the policy is not "
"divisible by 3: policy_mini_batch_size * n_samples_per_prompt // ranks = 256*5//4 = 320; "
"set it to 2 or 4"),
        ),
        (
            (*GAE, "trainer.critic_mini_batch_size=2048"),
            "trainer.critic_mini_batch_size: 2048 is above trainer.train_batch_size=1024; lower it",
        ),
        (
            ("generator.max_input_length=600",),
            "generator.max_input_length: for a single turn it must equal trainer.max_prompt_length=512, "
            "not 600",
        ),
        (
            ("generator.max_turns=2", "generator.max_input_length=100"),
            "generator.max_input_length: 100 is below trainer.max_prompt_length=512; raise it",
        ),
        (
            ("generator.run_engines_locally=false", "generator.num_inference_engines=2"),
            "generator.num_inference_engines: 2 differs from the number of "
            "generator.remote_inference_engine_urls, 1",
        ),
        (
            ("generator.async_engine=false", "generator.batched=false"),
            "generator.batched: async_engine=false can only generate in batches; set batched=true",
        ),
        (
            (f"{_A}.advantage_estimator=gae",),
            "trainer.critic.model.path: advantage_estimator=gae needs a critic; set its path, for example "
            "to the policy's",
        ),
        (
            (f"{_A}.use_kl_in_reward=true",),
            f"{_A}.use_kl_in_reward: use_kl_in_reward and use_kl_loss are mutually exclusive; set one of "
            "them to false",
        ),
        (
            ("trainer.strategy=fsdp", "trainer.policy.fsdp_config.cpu_offload=true"),
            ("trainer.policy.fsdp_config.cpu_offload: FSDP1 cannot offload a trained model; set it to "
"false, or use trainer.strategy=fsdp2"),
        ),
        (
            ("trainer.strategy=deepspeed", "trainer.policy.optimizer_config.offload_after_step=false"),
            ("trainer.policy.optimizer_config.offload_after_step: DeepSpeed always offloads the optimizer "
"after a step; set it to true, or use another trainer.strategy"),
        ),
        (
            ("trainer.policy.deepspeed_config.zero_optimization.stage=2",),
            "trainer.policy.deepspeed_config.zero_optimization.stage: 2 is not one of 3",
        ),
        (
            ("trainer.max_ckpts_to_keep=0",),
            "trainer.max_ckpts_to_keep: 0 would keep no checkpoint; set it to -1 to keep all, or to the "
            "number of checkpoints to keep",
        ),
        (
            ("trainer.resume_mode=from_path",),
            "trainer.resume_path: resume_mode=from_path needs the folder of a checkpoint; set it, or use "
            "latest",
        ),
        (
            ("trainer.resume_mode=from_path", "trainer.resume_path=a/b"),
            "trainer.resume_path: a/b is not a checkpoint: the folder's name must be step_N (or "
            "global_step_N)",
        ),
        (
            ("trainer.placement.policy_num_gpus_per_node=8",),
            ("generator.num_inference_engines: with colocate_all the engines use the policy's 8 GPUs, but "
"num_inference_engines times their parallel sizes is 4; make them equal, or set "
"trainer.placement.colocate_all=false"),
        ),
        (
            ("trainer.placement.ref_num_gpus_per_node=2",),
            "trainer.placement.ref_num_gpus_per_node: with colocate_all the ref uses the policy's 4 GPUs, "
            "not 2; make them equal, or set trainer.placement.colocate_all=false",
        ),
        (
            ("trainer.placement.colocate_all=false", "trainer.placement.ref_num_gpus_per_node=2"),
            (
                "trainer.placement.ref_num_gpus_per_node: with colocate_policy_ref the ref uses the "
                "policy's 4 GPUs, not 2; make them equal, or set "
                "trainer.placement.colocate_policy_ref=false"),
        ),
        (
            ("trainer.policy.sequence_parallel_size=2", "trainer.use_sample_packing=false"),
            "trainer.policy.sequence_parallel_size: sequence parallelism needs "
            "trainer.use_sample_packing=true",
        ),
        (
            ("trainer.policy.sequence_parallel_size=3",),
            ("trainer.placement.policy_num_gpus_per_node: the policy's 4 GPUs are not a multiple of the 3 "
"GPUs per model replica; change one of them"),
        ),
        (
            (f"{_A}.use_tis=true",),
            f"{_A}.tis_imp_ratio_cap: use_tis needs a cap above 0; set it, or use "
            "off_policy_correction.tis_ratio_type",
        ),
        (
            (f"{_A}.off_policy_correction.{name}" for name in ("sequence_mask_metric=geometric", "geo_mask_high=0.5")),
            f"{_A}.off_policy_correction.geo_mask_low: 0.99 is above geo_mask_high=0.5; lower it",
        ),
        (
            (f"{_A}.policy_loss_type=kl_cov", f"{_A}.off_policy_correction.tis_ratio_type=token"),
            f"{_A}.policy_loss_type: kl_cov does not apply off_policy_correction; disable the correction",
        ),
        (
            ("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=1"),
            ("trainer.train_batch_size: a batch has 2 samples, fewer than the 4 needed by the models' "
"data-parallel ranks; raise it"),
        ),
    ],
)  # fmt: skip
def test_rules_between_keys(file: Path, overrides: tuple[str, ...], expected: str) -> None:
    assert expected in problems(file, *overrides)


def test_fully_asynchronous_training_is_the_pipelined_loop(file: Path) -> None:
    off = read(file, "trainer.fully_async.max_staleness_steps=2")
    assert native(off, "pipeline") is None
    at = "trainer.fully_async"
    result = read(
        file, f"{at}.enabled=true", f"{at}.max_staleness_steps=2", f"{at}.num_parallel_generation_workers=9"
    )
    expected = {"max_lag": 2, "groups_in_flight": 9, "on_new_weights": "interrupt", "over_lag": "keep"}
    assert native(result, "pipeline").model_dump() == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.strategy=ddp", "trainer.strategy: 'ddp' is not one of fsdp, fsdp2, deepspeed, megatron"),
        (f"{_A}.advantage_estimator=rlo", f"{_A}.advantage_estimator: 'rlo' is not one of grpo, gae, rloo, reinforce++, maxrl"),
        ("trainer.resume_mode=newest", "trainer.resume_mode: 'newest' is not one of null, none, latest, from_path"),
        ("trainer.logger=mlflow", ("trainer.logger: 'mlflow' is not supported: use tensorboard, wandb or "
"swanlab, or read metrics.jsonl; to ignore it: --allow-unsupported "
"trainer.logger")),
        ("trainer.polcy_mini_batch_size=4",
            "trainer.polcy_mini_batch_size: unknown key of SkyRL, did you mean "
            "'trainer.policy_mini_batch_size'?"),
        (f"{_A}.temperature=0.5",
            f"{_A}.temperature: log-probs always use the sampling temperature; set it to "
            "sampling_params.temperature, or to null"),
    ],
)  # fmt: skip
def test_values_and_keys_that_are_refused(file: Path, override: str, expected: str) -> None:
    assert problems(file, override) == [expected]


_KWARGS = "generator.engine_init_kwargs"


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        ([f"+{_KWARGS}.max_model_len=600"], "rollout.max_sequence_tokens", 600),
        ([f"+{_KWARGS}.max_num_seqs=7"], "rollout.engine.max_running", 7),
        ([f"+{_KWARGS}.enforce_eager=true"], "rollout.engine.cuda_graphs", False),
        ([f"+{_KWARGS}.disable_log_stats=true"], "rollout.engine.log_stats", False),
        ([f"+{_KWARGS}.chat_template=own.jinja"], "model.chat_template", "own.jinja"),
        ([f"+{_KWARGS}.compilation_config.level=3"], "rollout.engine.cuda_graphs", True),
    ],
)
def test_arguments_of_vllm_are_settings_of_the_engine(
    file: Path, overrides: list[str], key: str, expected: object
) -> None:
    config = read(file, *overrides).loaded.config
    assert attrgetter(key)(config) == expected


def test_an_argument_of_vllm_without_a_setting_is_refused_by_name(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine_init_kwargs\.kv_transfer_config: .*does not pass"):
        read(file, f"+{_KWARGS}.kv_transfer_config={{kv_role: both}}")
