"""RLinf's text tasks: what the pages' files mean natively, renames, defaults, and conditions of keys."""

from __future__ import annotations

from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.algorithms.advantages.grpo import Grpo
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid.plan import resolve
from braid.training.backends.fsdp.kind import Fsdp2
from braid_dialects.load import Read, read_config
from braid_dialects.table import Entry

SEEDS = Path(__file__).parent / "seeds"
MATH_000 = SEEDS / "rlinf-math-000.yaml"
MATH_003 = SEEDS / "rlinf-math-003.yaml"
MODEL = "../../model/DeepSeek-R1-Distill-Qwen-1.5B/"


def here(*overrides: str, path: Path = MATH_003) -> Read:
    """The file in one process with braid's own engine."""
    return read_config(path, overrides, backend="single", engine="native")


def config(*overrides: str, path: Path = MATH_003) -> RunConfig:
    return read_config(path, overrides).loaded.config


def test_the_critic_has_its_own_settings_and_the_actors_for_the_rest() -> None:
    with_critic = ("algorithm.adv_type=gae", "critic.use_critic_model=true", "actor.optim.lr=1e-5")
    shared = config(*with_critic)
    assert shared.critic.train is None
    separate = config(
        *with_critic,
        "+critic.optim.lr=1e-4",
        "+critic.optim.adam_beta2=0.9",
        "+critic.lr_sched.lr_decay_style=linear",
        "+critic.tokenizer.use_fast=false",
    )
    assert separate.train == shared.train
    assert separate.critic.train is not None
    optimizer = separate.critic.train.optimizer
    assert (optimizer.lr, optimizer.betas[1], optimizer.schedule.decay) == (1e-4, 0.9, "linear")
    same = {"lr", "betas", "schedule"}
    assert optimizer.model_dump(exclude=same) == separate.train.optimizer.model_dump(exclude=same)
    assert separate.critic.train.model_dump(exclude={"optimizer"}) == separate.train.model_dump(
        exclude={"optimizer"}
    )


def test_a_setting_of_the_actor_that_does_not_suit_the_critic_is_refused() -> None:
    rates = ("actor.optim.lr=1e-4", "actor.lr_sched.min_lr=1e-5", "actor.lr_sched.lr_decay_style=cosine")
    critic = ("algorithm.adv_type=gae", "critic.use_critic_model=true", "+critic.optim.lr=1e-6")
    (problem,) = problems(*rates, *critic)
    assert problem.startswith("actor.lr_sched.min_lr: for the critic: 1e-05 is above the peak learning rate")


def row(read: Read, path: str) -> Entry:
    (entry,) = [entry for entry in read.ledger if entry.path == path]
    return entry


def problems(*overrides: str, path: Path = MATH_003, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read_config(path, overrides, **options)
    return [str(problem) for problem in error.value.problems]


def test_both_pages_files_give_the_same_run_except_for_keys_of_only_one() -> None:
    """Page 000 has the older names, one device for each node and the inference group; page 003 has FSDP's
    options."""
    older, newer = (here(path=path).loaded.config for path in (MATH_000, MATH_003))
    assert older.model_copy(update={"report": newer.report}) == newer


def test_the_agentic_blocks_lie_over_the_basic_file(tmp_path: Path) -> None:
    basic, blocks = (
        yaml.safe_load(path.read_text()) for path in (MATH_003, SEEDS / "rlinf-agentic-001.yaml")
    )
    del basic["data"]
    path = tmp_path / "agentic.yaml"
    path.write_text(yaml.safe_dump(merged(basic, blocks)))
    assert config(path=path) == config()


def merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merged(out[key], value) if both else value
    return out


def test_in_one_process_batches_are_the_same_and_cluster_keys_are_dropped() -> None:
    read = here()
    run_config = read.loaded.config
    assert (run_config.train.backend.kind, run_config.rollout.engine.kind) == ("single", "native")
    assert (run_config.cluster.placement, run_config.cluster.num_nodes) == ({}, 1)
    assert run_config.rollout.engine.max_running == 64
    plan = resolve(run_config)
    assert (plan.steps_per_round, plan.rows_per_step, plan.trajectories_per_round) == (4, 32, 128)
    assert row(read, "actor.model.tensor_model_parallel_size").disposition == "no effect"
    assert (
        row(read, "actor.model.tensor_model_parallel_size").note == "for megatron only; the backend is single"
    )
    assert row(read, "rollout.attention_backend").note == "for sglang only; the engine is native"
    assert row(read, "actor.group_name").note == "a single process has no workers (--backend single)"


@pytest.mark.parametrize(
    ("prompts", "group", "parts", "rows_per_step"),
    [(64, 2, 4, 32), (512, 16, 4, 2048), (8, 8, 1, 64), (6, 4, 3, 8)],
)
def test_a_round_is_cut_into_n_minibatches(prompts: int, group: int, parts: int, rows_per_step: int) -> None:
    """rollout_batch_size * group_size // n_minibatches rows make an optimizer step."""
    run_config = here(
        f"data.rollout_batch_size={prompts}",
        f"algorithm.group_size={group}",
        f"algorithm.n_minibatches={parts}",
    ).loaded.config
    plan = resolve(run_config)
    assert (plan.rows_per_step, plan.steps_per_round) == (rows_per_step, parts)


def test_sizes_per_device_are_multiplied_by_the_devices_of_the_file() -> None:
    overrides = [
        "cluster.num_nodes=2",
        "cluster.num_gpus_per_node=8",
        "algorithm.rollout_batch_size_per_gpu=2",
        "algorithm.val_rollout_batch_size_per_gpu=3",
        "rollout.tensor_parallel_size=2",
        "actor.model.tensor_model_parallel_size=2",
    ]
    assert here(*overrides).loaded.config.rollout.request_batch == 32
    assert here(*overrides).loaded.config.eval.batch_prompts == 48
    assert here(*overrides, "data.val_rollout_batch_size=40").loaded.config.eval.batch_prompts == 40
    assert here("algorithm.val_rollout_batch_size_per_gpu=null").loaded.config.eval.batch_prompts == 64
    assert config(*overrides).rollout.engine.replicas == 8


def test_micro_batches_are_bounded_by_rows_or_by_tokens() -> None:
    by_rows = here("algorithm.training_batch_size_per_gpu=4", "algorithm.logprob_forward_micro_batch_size=8")
    train = by_rows.loaded.config.train
    assert (train.micro_batch_rows, train.micro_batch_tokens) == (4, 8192)
    assert (train.infer_batch_rows, train.infer_batch_tokens) == (8, 16_384)
    assert row(by_rows, "runner.max_tokens_per_mbs").note == "runner.enable_dynamic_batch_size is off"
    by_tokens = here("runner.enable_dynamic_batch_size=true", "runner.max_tokens_per_mbs=4096")
    train = by_tokens.loaded.config.train
    assert (train.micro_batch_rows, train.micro_batch_tokens) == (None, 4096)
    assert (train.infer_batch_rows, train.infer_batch_tokens) == (None, None)
    assert row(by_tokens, "algorithm.training_batch_size_per_gpu").disposition == "no effect"


@pytest.mark.parametrize(
    ("scale", "bounds", "expected"),
    [
        ("5.0", [], (10.0, -5.0)),
        ("1", [], (2.0, -1.0)),
        ("2.0", ["reward.reward_min_val=0", "reward.reward_max_val=1"], (2.0, 0.0)),
        ("3.0", ["reward.reward_min_val=-0.5"], (4.5, -1.5)),
    ],
)
def test_a_right_answer_gets_reward_scale_and_a_wrong_one_its_negative(
    scale: str, bounds: list[str], expected: tuple[float, float]
) -> None:
    reward = here(f"reward.reward_scale={scale}", *bounds).loaded.config.reward
    assert (reward.scale, reward.shift) == expected


def test_a_reward_model_replaces_the_rule() -> None:
    read = here("reward.use_reward_model=true", "reward.model.model_path=some/folder")
    (part,) = read.loaded.config.reward.parts
    assert part.kind == "model"
    assert (read.loaded.config.reward.scale, read.loaded.config.reward.shift) == (5.0, 0.0)
    assert row(read, "reward.reward_type").disposition == "no effect"
    (problem,) = problems("reward.use_reward_model=true")
    assert "with true, set reward.model.model_path to the folder of the reward model" in problem


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("rollout.model_dir=m", "rollout.model.model_path=m"),
        ("rollout.model_arch=qwen3", "rollout.model.model_type=qwen3"),
        ("algorithm.sampling_params.use_greedy=true", "algorithm.sampling_params.do_sample=false"),
        ("algorithm.recompute_logprobs=false", "rollout.recompute_logprobs=false"),
        ("rollout.sglang.decode_log_interval=7", "rollout.sglang_decode_log_interval=7"),
        ("rollout.sglang.attention_backend=fa3", "rollout.attention_backend=fa3"),
        ("rollout.sglang.use_torch_compile=true", "rollout.use_torch_compile=true"),
        ("actor.checkpoint_load_path=null", "actor.model.megatron_checkpoint=null"),
        ("actor.megatron.ckpt_convertor.process_num=3", "actor.megatron.ckpt.process_num=3"),
        ("runner.task_type=reasoning", "runner.task_type=math"),
        ("data.type=reasoning", "data.type=math"),
        ("algorithm.loss_type=actor", "algorithm.loss_type=ppo"),
        ("rollout.enable_cuda_graph=false", "rollout.enforce_eager=true"),
    ],
)
def test_both_spellings_of_a_renamed_key_mean_the_same(tmp_path: Path, older: str, newer: str) -> None:
    keys = {text.partition("=")[0] for text in (older, newer)} | {
        "algorithm.sampling_params.do_sample",
        "actor.megatron.use_hf_ckpt",
    }
    tree = yaml.safe_load(MATH_003.read_text())
    for key in keys:
        at = tree
        *parents, last = key.split(".")
        for parent in parents:
            at = at.get(parent, {}) if isinstance(at, dict) else {}
        at.pop(last, None)
    path = tmp_path / "without.yaml"
    text = yaml.safe_dump(tree).replace("${rollout.model.model_path}", "m")
    path.write_text(text)
    common = [] if "model_path" in newer else ["rollout.model.model_path=m"]
    assert config(older, *common, path=path) == config(newer, *common, path=path)


def test_a_key_set_under_two_names_must_have_one_value() -> None:
    (problem,) = problems("rollout.model_dir=other")
    assert problem.startswith("rollout.model_dir: is an alias of rollout.model.model_path")
    (problem,) = problems("algorithm.sampling_params.use_greedy=true")
    assert "true here, but " in problem
    assert "algorithm.sampling_params.do_sample" in problem


def test_omitted_keys_have_rlinfs_defaults(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(
        "runner: {task_type: math, seq_length: 96, max_epochs: 1, experiment_name: small, output_dir: out}\n"
        "data: {type: math, max_prompt_length: 32, rollout_batch_size: 8, train_data_paths: [a.jsonl]}\n"
        "algorithm: {group_size: 4}\nrollout: {model: {model_path: m}}\nactor: {optim: {lr: 1.0e-3}}\n"
    )
    run_config = config(path=path)
    assert (run_config.train.backend.kind, run_config.rollout.engine.kind) == ("megatron", "sglang")
    assert run_config.algorithm.policy_loss == PpoClip(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert (run_config.algorithm.kl_coef, run_config.algorithm.aggregation) == (
        None,
        "token_mean",
    )
    assert (run_config.algorithm.whiten_advantages, run_config.algorithm.early_stop_ratio) == (True, "off")
    assert run_config.algorithm.old_logprobs == "recompute"
    assert (
        run_config.train.steps_per_pass,
        run_config.train.micro_batch_rows,
        run_config.train.micro_batch_tokens,
    ) == (
        1,
        1,
        96,
    )
    assert (run_config.train.optimizer.betas, run_config.train.optimizer.eps) == ((0.9, 0.999), 1e-8)
    assert run_config.train.optimizer.weight_decay == 0.01
    assert run_config.rollout.sampling.max_new_tokens == 64
    assert (run_config.rollout.engine.memory_fraction, run_config.rollout.engine.tensor_parallel) == (0.65, 1)
    assert (run_config.eval.every_rounds, run_config.eval.before) == (0, False)
    assert (run_config.reward.scale, run_config.reward.shift) == (2.0, -1.0)
    assert run_config.data.train[0].answer_key == "solutions"
    assert run_config.data.eval == ()
    assert run_config.run.base_dir == str(Path.cwd())


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_type=gae", "critic.use_critic_model=true"], ("ppo", "gae", "none")),
        (["algorithm.adv_type=gae"], ("ppo", "reinforce", "none")),
        (["algorithm.adv_type=gae", "algorithm.loss_type=actor_critic"], ("ppo", "gae", "none")),
        (["algorithm.adv_type=reinpp"], ("reinforce_pp", "reinforce", "none")),
        (
            ["algorithm.adv_type=reinpp", "algorithm.use_reinpp_baseline=true"],
            ("reinforce_pp", "reinforce", "group"),
        ),
        (["algorithm.adv_type=raw"], ("reinforce", "reinforce", "none")),
        (["algorithm.adv_type=grpo_dynamic", "algorithm.advantage_mode=turn"], ("grpo", "grpo", None)),
    ],
)
def test_advantages_by_their_names_there(overrides: list[str], expected: tuple[str, str, str | None]) -> None:
    algorithm = here(*overrides).loaded.config.algorithm
    assert algorithm.advantage is not None
    assert (algorithm.recipe, algorithm.advantage.kind, algorithm.reward_mean) == expected
    is_turn = "algorithm.advantage_mode=turn" in overrides
    assert (algorithm.advantage == Grpo(level="turn", normalize_by_std=True)) == is_turn


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.ratio_clip_eps=0.1"], (0.1, 0.1)),
        (["algorithm.clip_ratio_high=0.28"], (0.2, 0.28)),
        (["algorithm.clip_ratio_low=0.3", "algorithm.clip_ratio_high=0.4"], (0.3, 0.4)),
    ],
)
def test_clip_bounds(overrides: list[str], expected: tuple[float, float]) -> None:
    loss = here(*overrides).loaded.config.algorithm.policy_loss
    assert isinstance(loss, PpoClip)
    assert (loss.clip_low, loss.clip_high) == expected


def test_an_entropy_bonus_counts_when_entropy_is_calculated() -> None:
    bonus = "algorithm.entropy_bonus=0.5"
    read = here(bonus)
    assert read.loaded.config.algorithm.entropy_coef == 0.0
    assert row(read, "algorithm.entropy_bonus").note == "algorithm.calculate_entropy is false"
    assert here(bonus, "algorithm.calculate_entropy=true").loaded.config.algorithm.entropy_coef == 0.5


def test_corrections_between_engine_and_trainer() -> None:
    (fixed,) = (
        here(
            "algorithm.importance_sampling_fix=true", "algorithm.importance_sampling_clip=3"
        ).loaded.config.algorithm.corrections
        or ()
    )
    assert (fixed.level, fixed.mode, fixed.low, fixed.high) == ("token", "truncate", 0.0, 3.0)
    decoupled = here(
        "algorithm.adv_type=gae",
        "algorithm.loss_type=decoupled_actor_critic",
        "algorithm.behave_weight_threshold=4",
    ).loaded.config.algorithm
    corrections = [(c.level, c.mode, c.high) for c in decoupled.corrections or ()]
    assert corrections == [("token", "truncate", 4.0), ("token", "mask", 4.0)]


@pytest.mark.parametrize(("recomputes", "old"), [("true", "recompute"), ("false", "interpolated")])
def test_decoupled_ppo_recomputes_its_proximal_policy_or_interpolates_it(recomputes: str, old: str) -> None:
    loss = ("algorithm.adv_type=gae", "algorithm.loss_type=decoupled_actor_critic")
    read = here(*loss, f"rollout.recompute_logprobs={recomputes}")
    assert read.loaded.config.algorithm.old_logprobs == old
    assert row(read, "rollout.recompute_logprobs").disposition == "applied"


def test_decoupled_ppo_without_a_threshold_weighs_without_a_bound() -> None:
    for threshold in ([], ["algorithm.behave_weight_threshold=null"]):
        overrides = ["algorithm.adv_type=gae", "algorithm.loss_type=decoupled_actor_critic", *threshold]
        algorithm = here(*overrides).loaded.config.algorithm
        assert [(c.level, c.mode, c.high) for c in algorithm.corrections or ()] == [
            ("token", "truncate", "off")
        ]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_type=reinpp", "algorithm.normalize_advantages=false"], {"whiten_advantages": True}),
        (["algorithm.adv_type=grpo", "algorithm.normalize_advantages=false"], {"whiten_advantages": False}),
        (
            ["algorithm.adv_type=gae", "algorithm.loss_type=actor_critic", "algorithm.huber_delta=10"],
            {"huber_delta": 10.0},
        ),
        (
            ["algorithm.clip_log_ratio_min=-1", "algorithm.clip_log_ratio_max=2"],
            {"policy_loss.log_ratio_min": -1.0, "policy_loss.log_ratio_max": 2.0},
        ),
        (
            [
                "algorithm.loss_agg_func=seq-mean-token-mean",
                "algorithm.loss_scales=[group_level]",
            ],
            {"turn_weighting": "turns", "aggregation": "sequence_mean_token_sum"},
        ),
        (
            [
                "algorithm.loss_agg_func=seq-mean-token-mean",
                "algorithm.loss_scales=[group_level, agent_level]",
            ],
            {"turn_weighting": "turns", "aggregation": "agent_mean_token_mean"},
        ),
        (
            [
                "algorithm.loss_agg_func=seq-mean-token-mean",
                "algorithm.loss_scales=[group_level, agent_level, turn_level]",
            ],
            {"turn_weighting": "tokens", "aggregation": "agent_mean_token_mean"},
        ),
    ],
)
def test_parts_of_the_losses(overrides: list[str], expected: dict[str, Any]) -> None:
    algorithm = here(*overrides).loaded.config.algorithm
    assert {name: attrgetter(name)(algorithm) for name in expected} == expected


def test_unsupported_loss_scales_are_refused() -> None:
    (problem,) = problems("algorithm.loss_scales=[group_level]")  # with token-mean
    assert "algorithm.loss_agg_func=seq-mean-token-mean" in problem


@pytest.mark.parametrize(("value", "native"), [("1000000", 0), ("-1", 0), ("0", 0), ("50", 50)])
def test_a_very_large_top_k_disables_it(value: str, native: int) -> None:
    assert here(f"algorithm.sampling_params.top_k={value}").loaded.config.rollout.sampling.top_k == native


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["actor.model.precision=fp16"], ("fp32", "fp16", 5)),
        (
            ["actor.model.precision=bf16", "actor.optim.fp16=false", "actor.optim.bf16=true"],
            ("fp32", "bf16", None),
        ),
        (["actor.model.precision=fp32", "actor.training_backend=fsdp"], ("fp32", "none", None)),
        (
            ["actor.training_backend=fsdp", "actor.fsdp_config.grad_scaler.enabled=true"],
            ("fp32", "fp16", 2000),
        ),
        (
            [
                "actor.training_backend=fsdp",
                "actor.model.precision=fp32",
                "actor.fsdp_config.amp_autocast.enabled=true",
            ],
            ("fp32", "bf16", None),
        ),
    ],
)
def test_precision_is_that_of_computation_over_weights_in_fp32(
    overrides: list[str], expected: tuple[str, str, int | None]
) -> None:
    run_config = here(*overrides).loaded.config
    scaler = run_config.train.grad_scaler
    assert (run_config.model.dtype, run_config.train.autocast, scaler and scaler.growth_interval) == expected


def test_fsdp_reads_the_options_of_its_own_generation() -> None:
    base = ["actor.training_backend=fsdp", "actor.model.precision=bf16"]
    options = [
        "actor.fsdp_config.sharding_strategy=shard_grad_op",
        "actor.fsdp_config.cpu_offload=true",
        "actor.fsdp_config.backward_prefetch=pre",
        "actor.fsdp_config.fsdp_size=4",
    ]
    first = read_config(MATH_003, [*base, *options])
    fsdp: Any = first.loaded.config.train.backend
    assert first.loaded.config.train.backend.kind == "fsdp"
    assert (fsdp.sharding, fsdp.backward_prefetch, fsdp.cpu_offload, fsdp.size) == (
        "grad_op",
        "pre",
        False,
        None,
    )
    assert row(first, "actor.fsdp_config.cpu_offload").note == "for fsdp2 only; the backend is fsdp"
    assert (fsdp.param_dtype, fsdp.reduce_dtype, fsdp.buffer_dtype) == ("bf16", "bf16", "bf16")
    second = read_config(MATH_003, [*base, *options, "actor.fsdp_config.strategy=FSDP2"])
    fsdp = second.loaded.config.train.backend
    assert second.loaded.config.train.backend.kind == "fsdp2"
    assert (fsdp.cpu_offload, fsdp.size) == (True, 4)
    assert row(second, "actor.fsdp_config.backward_prefetch").note == "for fsdp only; the backend is fsdp2"
    assert row(second, "actor.megatron.use_hf_ckpt").note == "for megatron only; the backend is fsdp2"


def test_settings_that_a_chosen_backend_does_not_have_are_unused() -> None:
    options = ["sharding_strategy=shard_grad_op", "forward_prefetch=true"]
    overrides = ["actor.training_backend=fsdp", *(f"actor.fsdp_config.{option}" for option in options)]
    chosen = ["braid.train.backend=fsdp2", "braid.train.backend.pin_memory=true"]
    read = read_config(MATH_003, [*overrides, *chosen])
    backend = read.loaded.config.train.backend
    assert isinstance(backend, Fsdp2)
    assert (backend.sharding, backend.pin_memory) == ("grad_op", True)
    unused = row(read, "actor.fsdp_config.forward_prefetch")
    assert (unused.disposition, unused.note) == (
        "unused",
        "train.backend is fsdp2, which does not have forward_prefetch",
    )


def test_learning_rates_and_the_warmup() -> None:
    schedule = here(
        "actor.optim.lr=1e-4", "actor.lr_sched.min_lr=1e-5", "actor.lr_sched.lr_warmup_init=5e-5",
        "actor.lr_sched.lr_decay_style=inverse-square-root", "actor.lr_sched.lr_decay_iters=200",
    ).loaded.config.train.optimizer.schedule  # fmt: skip
    assert (schedule.decay, schedule.decay_steps) == ("inverse_sqrt", 200)
    assert (schedule.min_ratio, schedule.start_ratio) == pytest.approx((0.1, 0.5))
    read = here("actor.lr_sched.lr_warmup_iters=7")
    assert read.loaded.config.train.optimizer.schedule.warmup_steps == 7
    assert read.loaded.config.train.optimizer.schedule.warmup_fraction == 0.0
    assert (
        row(read, "actor.lr_sched.lr_warmup_fraction").note == "overridden by actor.lr_sched.lr_warmup_iters"
    )
    (problem,) = problems("actor.lr_sched.min_lr=1e-3", "actor.lr_sched.lr_decay_style=cosine")
    assert "0.001 is above the peak learning rate actor.optim.lr=2e-05; lower it" in problem


def test_loggers_under_both_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    older = config("runner.logger.logger_backends=[wandb]").report
    assert older.wandb is not None
    assert older.wandb.mode == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "a key")
    newer = config("runner.logger.logger_backends=[wandb, swanlab]").report
    assert not newer.tensorboard
    assert newer.wandb is not None
    assert (newer.wandb.project, newer.wandb.name, newer.wandb.mode) == ("rlinf", "grpo-1.5b", "online")
    assert newer.swanlab is not None
    assert (newer.swanlab.project, newer.swanlab.mode) == ("rlinf", "cloud")
    assert config("runner.logger.logger_backends=null").report.tensorboard is False
    older = config("runner.logger.wandb.enable=true", path=MATH_000).report
    assert older.wandb is not None
    assert (older.wandb.project, older.wandb.name) == ("infini-rl", "grpo-1.5b")
    assert (older.dir, older.tensorboard_queue) == ("../results/grpo-1.5b", 10)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "algorithm.loss_agg_func=mean",
            "'mean' is not one of token-mean, seq-mean-token-sum, seq-mean-token-mean",
        ),
        ("algorithm.clip_ratio_c=1.0", "1.0 is not a number > 1, or null"),
        ("actor.model.precision=int8", "'int8' is not one of fp16, 16,"),
        ("actor.optim.optimizer=muon", "'muon' is not one of adam, sgd"),
        ("rollout.gpu_memory_utilization=1.5", "1.5 is not a number > 0 and <= 1"),
        ("algorithm.group_size=two", "'two' is not an integer >= 1"),
        ("cluster.component_placement={actr: all}", "unknown component 'actr', did you mean 'actor'?"),
        ("cluster.component_placement={actor: 0-x}", "invalid placement '0-x'"),
        ("cluster.component_placement=[0]", "is not a mapping of components to devices"),
        ("algorithm.kl_penalty_type=full", "is not supported: use one of kl, k1"),
        (
            "algorithm.loss_type=actor_critic",
            "but algorithm.adv_type=grpo does not use them; set adv_type to gae",
        ),
        (
            "critic.use_critic_model=true",
            "algorithm.adv_type=grpo does not use values; set it to gae, or this to false",
        ),
        ("runner.max_steps=0", "a run needs at least one step"),
        ("algorithm.loss_tpe=ppo", "unknown key of RLinf, did you mean 'algorithm.loss_type'?"),
        (
            "sampling_params.top_k=3",
            "did you mean algorithm.sampling_params.top_k or rollout.sampling_params.top_k?",
        ),
        ("cluster.node_groups=[{label: a}]", "is not supported: number the devices"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(override: str, message: str) -> None:
    assert any(message in problem for problem in problems(override)), problems(override)


def test_an_override_below_braid_sets_a_native_key() -> None:
    run_config = here("braid.algorithm.kl_in=loss", "algorithm.kl_beta=0.1").loaded.config
    assert (run_config.algorithm.kl_in, run_config.algorithm.kl_coef) == ("loss", 0.1)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("braid.rollout.engine=vlm", "braid.rollout.engine: kind: 'vlm' is not one of"),
        ("braid.rollout.engine=[1]", "braid.rollout.engine: [1] is not one of"),
        ("braid.rollout.vllm.replicas=2", "braid.rollout.vllm: unknown key"),
        ("rollout.tensor_parallel_size=none", "rollout.tensor_parallel_size: "),
    ],
)
def test_a_problem_names_the_key_that_was_set(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_config(SEEDS / "rlinf-math-000.yaml", [override])
    (problem,) = error.value.problems
    assert str(problem).startswith(expected)
    assert problem.origin.startswith("override")


def test_a_run_without_a_limit_of_epochs_needs_one_of_steps() -> None:
    loaded = config("runner.max_epochs=-1", "runner.max_steps=5")
    assert (loaded.run.max_epochs, loaded.run.max_rounds) == (None, 5)
    with pytest.raises(ConfigError, match=r"runner\.max_epochs: .*needs runner\.max_steps above 0"):
        config("runner.max_epochs=-1", "runner.max_steps=-1")
    with pytest.raises(ConfigError, match=r"runner\.max_epochs: 0 is not an integer >= 1, or -1"):
        config("runner.max_epochs=0")


def test_a_second_model_for_planner_or_workers_is_not_ignored() -> None:
    """RLinf evaluates with two engines of different weights if rollout.use_fixed_worker is true."""
    second = ("rollout_fixed_worker.model.model_path=/other", "agentloop.fixed_role=worker")
    with pytest.raises(ConfigError, match=r"rollout\.use_fixed_worker: true is not supported"):
        config("rollout.use_fixed_worker=true", *second)
    ledger = {entry.path: entry for entry in here("rollout.use_fixed_worker=false", *second).ledger}
    assert {ledger[key.partition("=")[0]].disposition for key in second} == {"no effect"}


@pytest.mark.parametrize(
    "key",
    [
        "runner.per_worker_log=true",
        "cluster.tracer.enable=true",
        "cluster.profiling.output_dir=/there",
        "algorithm.sampling_params.stop_token_ids=[1]",
        "data.prefetch_factor=4",
        "tools.search.dummy_mode=false",
    ],
)
def test_keys_that_change_no_result_have_no_effect(key: str) -> None:
    path = key.partition("=")[0]
    (entry,) = (entry for entry in here(key).ledger if entry.path == path)
    assert (entry.disposition, entry.native) == ("no effect", {})


def test_both_names_of_the_clip_of_values_are_one_key() -> None:
    with_critic = ("algorithm.adv_type=gae", "critic.use_critic_model=true")
    assert config(*with_critic, "algorithm.value_cliprange=0.25").algorithm.value_clip == 0.25
    with pytest.raises(ConfigError, match="make them agree"):
        config(*with_critic, "algorithm.value_cliprange=0.25", "algorithm.value_clip=0.5")
