"""ROLL's dialect: native values of the documentation's file, batch arithmetic, constraints, defaults and
aliases."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from braid.algorithms.advantages.grpo import Grpo
from braid.algorithms.advantages.reinforce import Reinforce
from braid.algorithms.policy_losses import PolicyLoss
from braid.algorithms.policy_losses.cispo import Cispo
from braid.algorithms.policy_losses.kimi import Kimi
from braid.algorithms.policy_losses.policy_gradient import PolicyGradient
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.policy_losses.topr import Topr
from braid.config.load import Loaded
from braid.config.model import BuildSpec
from braid.errors import ConfigError
from braid.models.build import build_model
from braid.models.tokenizer import character_tokenizer
from braid.plan import resolve
from braid.plan.placement import format_numbers
from braid.plan.placement import parse_devices as parse_native
from braid.rewards.kinds import ChoiceReward, IfevalReward, JudgeReward, RepetitionReward
from braid.trainer import commands
from braid_dialects.devices import MAX_DEVICES, parse_devices
from braid_dialects.load import Read, read_config

from .conftest import IN_ONE_PROCESS, SEEDS, laid_over

SEED = SEEDS / "roll-rlvr-002.yaml"
SMALL: dict[str, Any] = {
    "rollout_batch_size": 8,
    "num_return_sequences_in_group": 4,
    "prompt_length": 64,
    "response_length": 32,
    "pretrain": "model",
    "actor_train": {
        "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "data_args": {"file_name": "rows.jsonl", "prompt": "prompt"},
        "device_mapping": "[0, 1]",
    },
    "actor_infer": {"device_mapping": "[0, 1]"},
}
"""8 prompts * 4 samples = 32 rows; 4 rows * 2 micro-batches * 2 ranks = 16 rows a step: 2 steps a pass."""


def read(tmp_path: Path, changes: dict[str, Any] | None = None, *overrides: str, **chosen: Any) -> Read:
    path = tmp_path / "roll.yaml"
    path.write_text(yaml.safe_dump(laid_over(SMALL, changes or {}), sort_keys=False), "utf-8")
    return read_config(path, overrides, dialect="roll", **chosen)


def native(loaded: Loaded, path: str) -> Any:
    value: Any = loaded.config
    for name in path.split("."):
        value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value


def problems(tmp_path: Path, changes: dict[str, Any], **chosen: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, changes, **chosen)
    return str(caught.value)


def test_in_one_process_keys_of_devices_engines_and_megatron_have_no_effect() -> None:
    result = read_config(SEED, dialect="roll", **IN_ONE_PROCESS)
    config = result.loaded.config
    assert (config.train.backend.kind, config.rollout.engine.kind, config.cluster.placement) == (
        "single",
        "native",
        {},
    )
    assert config.train.gradient_checkpointing
    why = {entry.path: entry for entry in result.ledger}
    placed = why["actor_infer.device_mapping"]
    assert (placed.disposition, placed.note) == (
        "no effect",
        "the run has a single process (--backend single)",
    )
    expert = why["actor_train.strategy_args.strategy_config.expert_model_parallel_size"]
    assert (expert.disposition, expert.note) == ("no effect", "for megatron only; the backend is single")


def test_the_page_s_file_takes_one_optimizer_step_a_round_with_a_horizon_of_500() -> None:
    # 64 * 8 = 512 samples; 16 devices, TP = PP = CP = 1: 1 * 32 * 16 = 512 rows a step.
    plan = resolve(read_config(SEED, dialect="roll", **IN_ONE_PROCESS).loaded.config)
    assert (plan.steps_per_round, plan.rows_per_step, plan.planned_steps) == (1, 512, 500)


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        # dp = 16 / (2 * 2) = 4: 1 * 32 * 4 = 128 rows a step of 512
        (["{config}.tensor_model_parallel_size=2", "{config}.pipeline_model_parallel_size=2"], 4),
        (["{config}.context_parallel_size=4"], 4),
        (["{config}.expert_model_parallel_size=8"], 1),  # experts are not divided by
        (["actor_train.training_args.gradient_accumulation_steps=4"], 8),
        (["actor_train.training_args.per_device_train_batch_size=2", "rollout_batch_size=128"], 1),
        (
            [
                "actor_train.strategy_args.strategy_name=fsdp2_train",
                "actor_train.model_args.ulysses_size=2",
                "actor_train.device_mapping=range(8)",
            ],
            4,  # dp = 8 / 2 = 4: 128 rows
        ),
        (["ppo_epochs=3"], 1),
    ],
)
def test_steps_of_a_pass_follow_from_devices_and_accumulation(overrides: list[str], steps: int) -> None:
    config = "actor_train.strategy_args.strategy_config"
    texts = [text.replace("{config}", config) for text in overrides]
    none: dict[str, Any] = {}
    for chosen in (none, IN_ONE_PROCESS):  # the file's own device counts, whatever runs it
        loaded = read_config(SEED, texts, dialect="roll", **chosen).loaded
        assert loaded.config.train.steps_per_pass == steps


def test_a_batch_that_does_not_fit_names_the_values_that_do(tmp_path: Path) -> None:
    changes = {"actor_train": {"training_args": {"gradient_accumulation_steps": 3}}}
    assert (
        "actor_train.training_args.gradient_accumulation_steps: the 32 samples of a round are not a "
        "multiple of the global batch: per_device_train_batch_size=4 * gradient_accumulation_steps=3 * "
        "dp=2 = 24; values that fit: 1, 2, 4"
    ) in problems(tmp_path, changes)


def test_mini_batches_are_whole_prompts(tmp_path: Path) -> None:
    training = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    text = problems(tmp_path, {"actor_train": {"training_args": training}})
    assert (
        "mini-batches consist of whole prompts with their 4 samples, which do not divide the global" in text
    )
    assert "= 2; values that fit: 2, 4, 8, 16" in text


def test_a_batch_without_valid_values_is_reported(tmp_path: Path) -> None:
    training = {"per_device_train_batch_size": 7}
    text = problems(tmp_path, {"actor_train": {"training_args": training}})
    assert "no value fits, because 14 rows (per_device_train_batch_size * dp) do not divide 32" in text


RULES: list[tuple[dict[str, Any], str]] = [
    ({"response_length": None}, "response_length: set response_length, or sequence_length"),
    ({"sequence_length": 64}, "sequence_length: 64 leaves no room for a response with prompt_length=64"),
    (
        {"val_prompt_length": 64, "validation": {"data_args": {"file_name": "aime.jsonl"}}},
        "val_prompt_length: set both val_prompt_length and val_sequence_length, or neither",
    ),
    (
        {
            "val_prompt_length": 64,
            "val_sequence_length": 32,
            "validation": {"data_args": {"file_name": "aime.jsonl"}},
        },
        "val_sequence_length=32 leaves no room for a response with val_prompt_length=64",
    ),
    (
        {"actor_train": {"data_args": {"messages": "messages"}}},
        "actor_train.data_args.messages: conflicts with data_args.prompt",
    ),
    (
        {"actor_train": {"data_args": {"prompt": None}}},
        "actor_train.data_args.file_name: set its column: data_args.prompt",
    ),
    (
        {"actor_train": {"device_mapping": "range(3)", "model_args": {"ulysses_size": 2}}},
        "actor_train.device_mapping: 3 devices are not a multiple of the 2 devices per model replica",
    ),
    (
        {"critic": {"model_args": {"ulysses_size": 2}}},
        "critic.model_args.ulysses_size: 1 devices are not a multiple of the 2 devices per model replica",
    ),
    (
        {
            "actor_train": {
                "device_mapping": "range(8)",
                "model_args": {"ulysses_size": 4},
                "strategy_args": {"strategy_config": {"fsdp_size": 2}},
            }
        },
        "strategy_config.fsdp_size: 2 is below ulysses_size=4",
    ),
    (
        {"actor_infer": {"num_gpus_per_worker": 4}},
        "actor_infer.device_mapping: 2 devices are not a multiple of the 4 devices per engine",
    ),
    (
        {
            "rollout_batch_size": 3,
            "num_return_sequences_in_group": 8,
            "actor_train": {
                "strategy_args": {"strategy_name": "megatron_train"},
                "training_args": {"gradient_accumulation_steps": 1},
            },
        },
        "rollout_batch_size: 3 prompts cannot be divided among dp=2 ranks; set it to a multiple of 2",
    ),
    (
        {
            "actor_train": {
                "strategy_args": {
                    "strategy_name": "megatron_train",
                    "strategy_config": {"moe_shared_expert_overlap": True},
                }
            }
        },
        "moe_shared_expert_overlap: needs moe_token_dispatcher_type=alltoall, not allgather",
    ),
    (
        {
            "actor_train": {
                "training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
                "strategy_args": {
                    "strategy_name": "megatron_train",
                    "strategy_config": {
                        "pipeline_model_parallel_size": 2,
                        "virtual_pipeline_model_parallel_size": 2,
                    },
                },
            }
        },
        "virtual_pipeline_model_parallel_size: needs actor_train.training_args.gradient_accumulation_steps "
        "to be a multiple of pipeline_model_parallel_size=2",
    ),
    (
        {"profiler_timeline": False, "use_kl_loss": True, "kl_loss_coef": 0.1, "add_token_level_kl": True},
        "add_token_level_kl: conflicts with use_kl_loss: braid has only one KL term",
    ),
    (
        {"enable_old_logprobs_recompute": True, "force_disable_old_logprobs_recompute": True},
        "force_disable_old_logprobs_recompute: contradicts",
    ),
    (
        {"actor_infer": {"strategy_args": {"strategy_name": "sglang"}}},
        "strategy_config.mem_fraction_static: required for sglang",
    ),
    ({"rewards": {"mine": {"tag_included": ["a"]}}}, "rewards.mine.worker_cls: set it to the reward worker"),
    (
        {"rewards": {"math_rule": {"world_size": 1}, "multiple_choice_boxed": {"tag_included": ["b"]}}},
        "rewards.math_rule.tag_included: with several domains, each must list the tags",
    ),
    (
        {
            "rewards": {
                "math_rule": {
                    "tag_included": ["a"],
                    "query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_down": 0.1}},
                },
                "multiple_choice_boxed": {"tag_included": ["b"]},
            }
        },
        "the domains have different filters",
    ),
    (
        {
            "difficulty_mask": True,
            "difficulty_low_threshold": 0.2,
            "rewards": {
                "math_rule": {
                    "query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_down": 0.1}}
                }
            },
        },
        "difficulty_mask: masks groups (mean reward <= 0.2, or >= 1) that the query filter keeps",
    ),
    (
        {"rewards": {"crossthinkqa": {"world_size": 1}}},
        "rewards.crossthinkqa.reward_type: set it to one of loose, soft, strict",
    ),
    (
        {"rewards": {"crossthinkqa": {"reward_type": "hard"}}},
        "rewards.crossthinkqa.reward_type: 'hard' is not one of loose, soft, strict",
    ),
]


@pytest.mark.parametrize(("changes", "text"), RULES, ids=[text.partition(":")[0] for _, text in RULES])
def test_inconsistent_keys_are_reported(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    assert text in problems(tmp_path, changes)


def test_a_timeline_is_unsupported_with_an_alternative(tmp_path: Path) -> None:
    text = problems(tmp_path, {"profiler_timeline": True})
    assert "profiler_timeline: true is not supported: use profiler_memory" in text
    assert "--allow-unsupported profiler_timeline" in text


# Devices


@pytest.mark.parametrize(
    ("mapping", "placement"),
    [
        ("list(range(0,16))", "0-15"),
        ("  list( range( 0 , 4 ) ) ", "0-3"),
        ("range(8)", "0-7"),
        ("range(0, 8, 2)", "0,2,4,6"),
        ("[0,1,2,5]", "0-2,5"),
        ("[3, ]", "3"),
        ("list(range(0,4)) + list(range(8,12)) + [15]", "0-3,8-11,15"),
        ("(list((range(2))))", "0-1"),
        ([4, 5, 6], "4-6"),
        ("range(3, -1, -1)", "0-3"),
    ],
)
def test_a_device_mapping_is_read(mapping: str | list[int], placement: str) -> None:
    assert format_numbers(parse_devices(mapping)) == placement


@pytest.mark.parametrize(
    "mapping",
    [
        "__import__('os').system('true')",
        "list(range(0,8)) if True else []",
        "[i for i in range(8)]",
        "list(range(0,2**3))",
        "range(1, 2, 0)",
        "range()",
        "range(1,2,3,4)",
        "list(range(0,8)",
        "list(range(0,8)))",
        "list(range(0;8))",
        "0-7",
        "range(0, 99999999)",
        "[0, 0]",
        "[-1]",
        "[]",
        "range(0)",
        "[1.5]",
        "[1, 2",
        "1",
        "(" * 300 + "range(2)" + ")" * 300,
        "[" + "0," * 2000 + "]",
        "range(2) range(3)",
        "range(2) +",
        "lambda: 0",
        "\u0664",
    ],
)
def test_anything_else_is_refused_with_the_value_and_the_grammar(mapping: str) -> None:
    with pytest.raises(ValueError, match="write list\\(range\\(0,8\\)\\)") as caught:
        parse_devices(mapping)
    assert repr(mapping[:20])[1:-1] in str(caught.value).replace("\\\\", "\\")


@given(st.lists(st.integers(0, MAX_DEVICES), min_size=1, max_size=40, unique=True))
def test_a_placement_names_the_devices_of_its_mapping(devices: list[int]) -> None:
    read_back = parse_native(format_numbers(parse_devices(str(devices))))
    assert read_back is not None
    assert read_back.numbers == tuple(sorted(devices))


def test_roles_on_the_same_devices_offload(tmp_path: Path) -> None:
    shared = read(tmp_path).loaded.config
    assert shared.train.offload.weights
    apart = read(tmp_path, {"actor_infer": {"device_mapping": "[2, 3]"}}).loaded.config
    assert not apart.train.offload.weights
    assert apart.cluster.placement == {"policy": "0-1", "rollout": "2-3"}


@pytest.mark.parametrize(
    ("changes", "tensor_parallel", "replicas"),
    [
        ({}, 1, 2),
        ({"num_gpus_per_worker": 2}, 2, 1),
        ({"strategy_args": {"strategy_config": {"tensor_parallel_size": 2}}}, 2, 1),
        (
            {
                "num_gpus_per_worker": 2,
                "strategy_args": {"strategy_config": {"tensor_parallel_size": 1}},
            },
            1,
            2,
        ),
        (
            {
                "device_mapping": "range(8)",
                "strategy_args": {"strategy_config": {"pipeline_parallel_size": 2}},
            },
            1,
            4,
        ),
    ],
)
def test_engines_are_as_many_as_their_devices_allow(
    tmp_path: Path, changes: dict[str, Any], tensor_parallel: int, replicas: int
) -> None:
    vllm: Any = read(tmp_path, {"actor_infer": changes}).loaded.config.rollout.engine
    assert (vllm.tensor_parallel, vllm.replicas) == (tensor_parallel, replicas)


# Algorithms


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"adv_estimator": "grpo"}, {"advantage": Grpo(normalize_by_std=True), "reward_mean": None}),
        (
            {"adv_estimator": "grpo", "gamma": 0.9},
            {"advantage": Reinforce(gamma=0.9), "reward_mean": "group", "reward_std": "group"},
        ),
        (
            {"adv_estimator": "reinforce", "norm_mean_type": "group", "norm_std_type": "batch"},
            {"advantage.kind": "reinforce", "reward_mean": "group", "reward_std": "batch"},
        ),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.01},
            {"kl_coef": 0.01, "kl_in": "loss", "kl_estimator": "k3", "kl_clamp": 10.0},
        ),
        (
            {"add_token_level_kl": True, "kl_penalty": "mse", "target_kl": 0.1, "kl_horizon": 100},
            {
                "kl_coef": 0.2,
                "kl_in": "reward",
                "kl_estimator": "k2",
                "kl_clamp": "off",
                "kl_target": 0.1,
                "kl_horizon": 100.0,
            },
        ),
        (
            {"add_token_level_kl": True, "kl_penalty": "full"},
            {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "full", "kl_clamp": "off"},
        ),
        ({"init_kl_coef": 0.5}, {"kl_coef": 0.0}),  # no reference is loaded for nothing
        (
            {"dual_clip_loss": True, "pg_clip": 0.3},
            {"policy_loss": PpoClip(dual_clip=1.6, clip_low=0.3, clip_high=0.3)},
        ),
        (
            {"use_pg_clip_range": True, "pg_clip_low": 0.1, "pg_clip_high": 0.28},
            {"policy_loss.clip_low": 0.1, "policy_loss.clip_high": 0.28},
        ),
        ({"pg_clip_high": 0.28}, {"policy_loss.clip_high": 0.2}),  # not without use_pg_clip_range
        ({"importance_sampling": "seq"}, {"policy_loss.ratio_level": "sequence"}),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, {"aggregation": "token_sum_constant"}),
        ({"value_clip": 0.5}, {"value_clip": 0.5}),
        ({"rl_loss_coef": 0.5, "entropy_loss_coef": 0.01}, {"policy_loss_coef": 0.5, "entropy_coef": 0.01}),
        ({"max_len_mask": True}, {"mask_truncated": True}),
        ({"enable_old_logprobs_recompute": True}, {"old_logprobs": "recompute"}),
        ({"force_disable_old_logprobs_recompute": True}, {"old_logprobs": "current"}),
        (
            {"adv_estimator": "grpo", "reward_clip": 2.0},
            {
                "reward_clip": 2.0,
                "reward_mean": "group",
                "advantage.kind": "reinforce",
                "advantage_clip": "off",
            },
        ),
        ({"adv_estimator": "grpo", "advantage_clip": 1.0}, {"advantage_clip": 1.0, "advantage.kind": "grpo"}),
        ({"reward_clip": 2.0}, {"reward_clip": 2.0, "token_reward_clip": None}),
        ({"reward_clip": 2.0, "add_token_level_kl": True}, {"reward_clip": 2.0, "token_reward_clip": 2.0}),
        ({"error_max_len_clip": True, "error_max_len_threshold": 512}, {"mask_long_failures": 512}),
        ({"error_max_len_clip": False, "error_max_len_threshold": 512}, {"mask_long_failures": "off"}),
    ],
)
def test_settings_of_the_algorithm_become_native_parts(
    tmp_path: Path, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    algorithm = read(tmp_path, changes).loaded.config.algorithm
    assert {name: attrgetter(name)(algorithm) for name in expected} == expected


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        ("vanilla", PolicyGradient()),
        ("ppo", PpoClip()),
        ("tis", Cispo(clip_low=1.0, clip_high=0.0)),
        ("cispo", Cispo(clip_low=0.1, clip_high=0.1)),
        ("topr", Topr()),
        ("kimi15", Kimi()),
    ],
)
def test_variants_of_the_policy_gradient_worker_are_policy_losses(
    tmp_path: Path, variant: str, expected: PolicyLoss
) -> None:
    worker = {"worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker", "pg_variant": variant}
    plan = resolve(read(tmp_path, {"actor_train": worker}, **IN_ONE_PROCESS).loaded.config)
    assert plan.recipe.policy_loss == expected


def test_a_variant_without_its_worker_has_no_effect(tmp_path: Path) -> None:
    result = read(tmp_path, {"actor_train": {"pg_variant": "cispo"}})
    row = next(entry for entry in result.ledger if entry.path == "actor_train.pg_variant")
    assert row.disposition == "no effect"
    loss = result.loaded.config.algorithm.policy_loss
    assert isinstance(loss, PpoClip)
    assert "kind" not in loss.model_fields_set


def test_corrections_of_the_sampler_come_weights_first(tmp_path: Path) -> None:
    correction = {
        "is_weight": {"enabled": True, "weight_type": "segment", "upper_bound": 1.5},
        "filters": [{"enabled": True, "agg_type": "geometric", "ratio_low": 0.5}, {"enabled": False}],
    }
    algorithm = read(tmp_path, {"train_infer_correction": correction}).loaded.config.algorithm
    assert algorithm.corrections is not None
    made = [(c.level, c.mode, c.low, c.high) for c in algorithm.corrections]
    assert made == [("turn_geometric", "truncate", 0.0, 1.5), ("geometric", "mask", 0.5, 1.2)]
    assert algorithm.old_logprobs == "recompute"


def test_a_lower_precision_of_the_engine_is_corrected_only_if_the_file_says_so(tmp_path: Path) -> None:
    def corrections(dtype: str | None, *overrides: str) -> object:
        models = {
            "actor_infer": {"model_args": {"dtype": dtype}},
            "actor_train": {"model_args": {"dtype": "fp32"}},
        }
        return read(tmp_path, models, *overrides, **IN_ONE_PROCESS).loaded.config.algorithm.corrections

    assert corrections("bf16") == ()
    assert corrections(None) is corrections("fp32") is None
    assert corrections("bf16", "braid.rollout.engine.dtype=bf16") is None, "braid's key, braid's default"
    assert corrections("bf16", "async_generation_ratio=1") is None, "a pipeline's correction"
    assert corrections("bf16", "train_infer_correction.is_weight.enabled=true")


def test_a_filter_masks_by_ratio_by_difference_or_by_both(tmp_path: Path) -> None:
    both = {"enabled": True, "agg_type": "sequence", "diff_enabled": True, "diff_low": -0.5}
    difference = {"enabled": True, "diff_enabled": True, "ratio_enabled": False}
    algorithm = read(
        tmp_path, {"train_infer_correction": {"filters": [both, difference]}}
    ).loaded.config.algorithm
    made = [(c.level, c.mode, c.measure, c.low, c.high, c.tokens) for c in algorithm.corrections or ()]
    assert made == [
        ("sequence", "mask", "ratio", 0.8, 1.2, "all"),
        ("sequence", "mask", "difference", -0.5, 0.2, "all"),
        ("token", "mask", "difference", -0.2, 0.2, "all"),
    ]


@pytest.mark.parametrize(
    ("query_filter", "expected"),
    [
        ({"type": "std_filter", "filter_args": {"std_threshold": 0.0}}, (0.0, None, None, "resample")),
        (
            {"type": "mean_filter", "filter_args": {"threshold_down": 0.1, "threshold_up": 0.9}},
            (None, 0.1, 0.9, "resample"),
        ),
        ({"type": "no_filter"}, (None, None, None, "mask")),
    ],
)
def test_a_query_filter_draws_until_the_round_is_full(
    tmp_path: Path, query_filter: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    chosen = read(
        tmp_path, {"rewards": {"math_rule": {"query_filter_config": query_filter}}}
    ).loaded.config.rollout.filter
    assert (chosen.min_std, chosen.min_mean, chosen.max_mean, chosen.then) == expected


def test_a_difficulty_mask_masks_groups(tmp_path: Path) -> None:
    changes = {
        "difficulty_mask": True,
        "difficulty_low_threshold": 0.1,
        "difficulty_high_threshold": 0.95,
    }
    chosen = read(tmp_path, changes).loaded.config.rollout.filter
    assert (chosen.min_mean, chosen.max_mean, chosen.then) == (0.1, 0.95, "mask")


def test_a_difficulty_mask_changes_nothing_below_a_stricter_query_filter(tmp_path: Path) -> None:
    filtered = {"type": "mean_filter", "filter_args": {"threshold_down": 0.1, "threshold_up": 0.9}}
    changes = {
        "difficulty_mask": True,
        "difficulty_low_threshold": 0.1,
        "difficulty_high_threshold": 0.95,
        "rewards": {"math_rule": {"query_filter_config": filtered}},
    }
    result = read(tmp_path, changes)
    chosen = result.loaded.config.rollout.filter
    assert (chosen.min_mean, chosen.max_mean, chosen.then) == (0.1, 0.9, "resample")
    dispositions = {entry.path: entry.disposition for entry in result.ledger}
    assert (dispositions["difficulty_mask"], dispositions["difficulty_low_threshold"]) == (
        "implied",
        "no effect",
    )


# Rewards, data, evaluation


def test_domains_are_parts_that_score_their_tags(tmp_path: Path) -> None:
    rules = "roll.pipeline.rlvr.rewards"
    rewards = {
        "math_rule": {
            "tag_included": ["deepmath", "aime"],
            "worker_cls": f"{rules}.math_rule_reward_worker.MathRuleRewardWorker",
        },
        "choice": {
            "world_size": 2,
            "worker_cls": f"{rules}.multiple_choice_boxed_rule_reward_worker.MultipleChoiceBoxedRuleRewardWorker",
            "tag_included": ["mmlu"],
        },
    }
    config = read(tmp_path, {"rewards": rewards}).loaded.config
    parts = [(part.kind, part.name, part.sources) for part in config.reward.parts]
    assert parts == [("math", "math_rule", ("deepmath", "aime", "*")), ("choice", "choice", ("mmlu",))]
    assert config.data.train[0].source_key == "tag"


@pytest.mark.parametrize(
    ("reward_type", "scores"),
    [("loose", (1, 1, -1, -1)), ("soft", (1, 0.5, -0.5, -1)), ("strict", (1, -1, -1, -1))],
)
def test_crossthinkqa_is_a_choice_with_a_penalty_for_repetition(
    tmp_path: Path, reward_type: str, scores: tuple[float, ...]
) -> None:
    rewards = {
        "crossthinkqa": {"reward_type": reward_type, "tag_included": ["qa"]},
        "math_rule": {"tag_included": ["aime"]},
    }
    choice, repetition, math = read(tmp_path, {"rewards": rewards}).loaded.config.reward.parts
    assert isinstance(choice, ChoiceReward)
    assert isinstance(repetition, RepetitionReward)
    assert (choice.name, choice.scores, choice.sources) == ("crossthinkqa", scores, ("qa",))
    assert (repetition.weight, repetition.ngram, repetition.sources) == (0.5, 3, ("qa",))
    assert (math.name, math.sources) == ("math_rule", ("aime", "*"))


def test_ifeval_is_an_instruction_and_a_penalty_for_repetition(tmp_path: Path) -> None:
    rewards = {
        "ifeval": {"tag_included": ["ifeval"], "reward_type": "soft"},
        "math_rule": {"tag_included": ["aime"]},
    }
    instruction, repetition, _ = read(tmp_path, {"rewards": rewards}).loaded.config.reward.parts
    assert isinstance(instruction, IfevalReward)
    assert isinstance(repetition, RepetitionReward)
    assert (instruction.name, instruction.sources) == ("ifeval", ("ifeval",))
    assert (repetition.weight, repetition.ngram, repetition.sources) == (0.5, 3, ("ifeval",))


def test_rows_of_domains_without_a_reward_or_a_share_are_dropped(tmp_path: Path) -> None:
    rewards = {
        "video": {
            "worker_cls": "roll.pipeline.rlvr.rewards.video.VideoRewardWorker",
            "tag_included": ["video"],
        },
        "multiple_choice_boxed": {"tag_included": ["mmlu"]},
        "math_rule": {"tag_included": ["aime"]},
    }
    shares = {"actor_train": {"data_args": {"domain_interleave_probs": {"math_rule": 0.6, "video": 0.4}}}}
    result = read(tmp_path, {"rewards": rewards, **shares}, allowed=["rewards.video"])
    mix = {entry.sources: entry.share for entry in result.loaded.config.data.mix}
    assert mix == {("aime", "*"): 0.6, ("video",): 0.0, ("mmlu",): 0.0}
    assert [part.name for part in result.loaded.config.reward.parts] == ["multiple_choice_boxed", "math_rule"]


def test_a_judge_is_called_at_its_server(tmp_path: Path) -> None:
    judge = {
        "judge_model_type": "api",
        "judge_api_url": "http://localhost:8000/v1",
        "judge_model_name": "judge",
    }
    part = read(tmp_path, {"rewards": {"llm_judge": judge}}).loaded.config.reward.parts[0]
    assert isinstance(part, JudgeReward)
    assert (part.url, part.model) == ("http://localhost:8000/v1", "judge")
    del judge["judge_api_url"]
    assert "rewards.llm_judge.judge_api_url: required for a judge" in problems(
        tmp_path, {"rewards": {"llm_judge": judge}}
    )


_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
}
JUDGE = {
    "worker_cls": "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "judge_model_type": "inference",
    "judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
    "model_args": {"model_name_or_path": "judge", "attn_implementation": "fa2", "dtype": "fp32"},
    "generating_args": {"max_new_tokens": 100, "top_p": 0.8, "top_k": 50, "num_beams": 1, "temperature": 0.8},
    "data_args": {"template": "qwen2_5"},
    "strategy_args": {
        "strategy_name": "vllm",
        "strategy_config": {"gpu_memory_utilization": 0.4, "max_model_len": 4096, "load_format": "auto"},
    },
    "device_mapping": "list(range(6,8))",
}


def test_a_judge_of_inference_is_a_model_that_the_run_loads(tmp_path: Path) -> None:
    loaded = read(tmp_path, {"rewards": {"llm_judge": JUDGE}}).loaded
    part = loaded.config.reward.parts[0]
    assert isinstance(part, JudgeReward)
    assert (part.path, part.dtype, part.url) == ("judge", "fp32", None)
    assert (part.max_tokens, part.temperature, part.top_p, part.top_k) == (100, 0.8, 0.8, 50)
    engine = part.engine.model_dump()
    assert (engine["kind"], engine["memory_fraction"], engine["max_model_tokens"]) == ("vllm", 0.4, 4096)
    assert loaded.config.cluster.placement["reward"] == "6-7"
    greedy = JUDGE | {"generating_args": {"temperature": 0}, "strategy_args": {"strategy_name": "hf_infer"}}
    part = read(tmp_path, {"rewards": {"llm_judge": greedy}}).loaded.config.reward.parts[0]
    assert isinstance(part, JudgeReward)
    assert (part.engine.kind, part.temperature, part.top_p, part.max_tokens) == ("native", 0, 1, 1024)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_args": {}}, r"model_args\.model_name_or_path: required for a judge"),
        (
            {"model_args": {"model_name_or_path": "j", "lora_rank": 8}},
            "remove lora_rank; a judge's model_args",
        ),
        ({"generating_args": {"num_beams": 4}}, "set num_beams to 1"),
        ({"data_args": {"template": "base"}}, "template=base is not the tokenizer's own"),
        (
            {"strategy_args": {"strategy_name": "megatron_infer"}},
            "strategy_name=megatron_infer is not one of",
        ),
        (
            {"strategy_args": {"strategy_name": "vllm", "strategy_config": {"swap_space": 4}}},
            "remove swap_space of strategy_config",
        ),
        ({"judge_model_type": "cluster"}, "set judge_model_type: inference in the domain"),
    ],
)
def test_what_a_judge_of_inference_cannot_have_is_named(
    tmp_path: Path, change: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        read(tmp_path, {"rewards": {"llm_judge": JUDGE | change}})


def test_a_file_with_a_judge_of_inference_trains_two_rounds(tmp_path: Path) -> None:
    words = ["yes", "no"]
    tokenizer = character_tokenizer(" .", words=words)
    spec = BuildSpec.model_validate({**_SIZES, "characters": " .", "words": words})
    build_model(spec, tokenizer, dtype=torch.float32, seed=0).save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    row = {"messages": json.dumps([{"role": "user", "content": "a"}]), "ground_truth": "b", "tag": "RLVR"}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    rows = {"file_name": "rows.jsonl", "messages": "messages", "prompt": None}
    changes = {
        "rollout_batch_size": 4, "prompt_length": 8, "response_length": 4, "num_return_sequences_in_group": 2,
        "max_steps": 2, "rewards": {"llm_judge": JUDGE | {"tag_included": ["RLVR"]}},
        "actor_train": {"data_args": rows, "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8}, "device_mapping": "[0]"},
    }  # fmt: skip
    overrides = [
        "braid.model.path=null", f"braid.model.build={json.dumps({**_SIZES, 'characters': 'ab'})}",
        "braid.model.chat_template='{{ messages[-1].content }}'", f"braid.run.output_dir={tmp_path}",
        "braid.report.console=none",
    ]  # fmt: skip
    loaded = read(tmp_path, changes, *overrides, backend="single", engine="native").loaded
    run = commands.train(loaded).run_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    scores = [line["reward/part/llm_judge"] for line in lines if "reward/part/llm_judge" in line]
    assert len(scores) == 2
    assert all(0 <= score <= 1 for score in scores)


def test_a_domain_without_a_native_part_suggests_an_alternative(tmp_path: Path) -> None:
    text = problems(tmp_path, {"rewards": {"video": {"worker_cls": "roll.x.VideoRewardWorker"}}})
    assert "rewards.video.worker_cls" in text
    assert "use a function" in text


def test_evaluation_has_its_own_sampling_and_length(tmp_path: Path) -> None:
    changes = {
        "val_prompt_length": 64,
        "val_sequence_length": 164,
        "eval_steps": 5,
        "validation": {
            "data_args": {"file_name": "aime.jsonl"},
            "generating_args": {"temperature": 0, "num_return_sequences": 4},
        },
    }
    config = read(tmp_path, changes).loaded.config
    assert config.eval.sampling is not None
    assert (config.eval.sampling.greedy, config.eval.sampling.max_new_tokens) == (True, 100)
    assert (config.eval.every_rounds, config.eval.samples_per_prompt) == (5, 4)
    assert config.data.eval[0].prompt_key == "prompt"


def test_evaluation_without_its_own_sampling_uses_that_of_training(tmp_path: Path) -> None:
    config = read(tmp_path, {"validation": {"data_args": {"file_name": "aime.jsonl"}}}).loaded.config
    assert config.eval.sampling is None
    assert config.eval.every_rounds == 10


def test_the_chatml_template_is_written_out(tmp_path: Path) -> None:
    import jinja2

    config = read(tmp_path, {"actor_train": {"data_args": {"template": "chatml"}}}).loaded.config
    assert config.model.chat_template is not None
    messages = [{"role": "user", "content": "1+1"}]
    text = jinja2.Template(config.model.chat_template).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"


# Roles


def test_a_critic_with_its_own_settings_has_its_own_steps(tmp_path: Path) -> None:
    critic = {
        "device_mapping": "[0, 1]",
        "training_args": {
            "learning_rate": 1e-5,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
        },
    }
    config = read(tmp_path, {"critic": critic, "reward_pretrain": "critic"}).loaded.config
    assert config.critic.train is not None
    assert (config.train.steps_per_pass, config.critic.train.steps_per_pass) == (2, 4)
    assert (config.critic.path, config.critic.train.optimizer.lr) == ("critic", 1e-5)
    without = read(tmp_path, {"critic": critic, "adv_estimator": "grpo"})
    assert without.loaded.config.critic.train is None
    row = next(entry for entry in without.ledger if entry.path == "critic.training_args.learning_rate")
    assert row.note == "adv_estimator=grpo uses no critic"


def test_a_reference_is_used_only_if_a_kl_term_needs_it(tmp_path: Path) -> None:
    reference = {
        "infer_batch_size": 4,
        "device_mapping": "[0]",
        "strategy_args": {"strategy_name": "hf_infer"},
    }
    assert read(tmp_path, {"reference": reference}).loaded.config.reference.train is None
    config = read(tmp_path, {"reference": reference, "use_kl_loss": True, "kl_loss_coef": 0.1}).loaded.config
    assert config.reference.train is not None
    assert (config.reference.train.backend.kind, config.reference.train.infer_batch_rows) == ("single", 4)


def test_adapters_are_trained_where_a_target_is_named(tmp_path: Path) -> None:
    config = read(
        tmp_path, {"actor_train": {"model_args": {"lora_target": "q_proj,v_proj", "lora_rank": 16}}}
    ).loaded.config
    assert config.model.lora is not None
    assert (config.model.lora.targets, config.model.lora.rank, config.model.lora.alpha) == (
        ("q_proj", "v_proj"),
        16,
        32.0,
    )
    assert read(tmp_path, {"actor_train": {"model_args": {"lora_rank": 16}}}).loaded.config.model.lora is None


def test_token_limits_replace_row_limits_of_micro_batches(tmp_path: Path) -> None:
    changes = {"use_dynamic_batching_in_train": True, "max_tokens_per_microbatch_in_train": 4096}
    train = read(tmp_path, {"actor_train": changes}).loaded.config.train
    assert (train.micro_batch_tokens, train.micro_batch_rows) == (4096, None)
    train = read(tmp_path).loaded.config.train
    assert (train.micro_batch_tokens, train.micro_batch_rows) == (4 * (64 + 32), 4)


def test_the_longest_response_is_the_smallest_of_its_limits(tmp_path: Path) -> None:
    def longest(changes: dict[str, Any]) -> int:
        return read(tmp_path, changes).loaded.config.rollout.sampling.max_new_tokens

    assert longest({}) == 32
    assert longest({"sequence_length": 100}) == 36
    assert longest({"actor_infer": {"generating_args": {"max_new_tokens": 16}}}) == 16
    assert longest({"actor_infer": {"generating_args": {"max_new_tokens": 500}}}) == 32


# Names and values


def test_other_spellings_of_a_key_work(tmp_path: Path) -> None:
    result = read(tmp_path, {"global_template": "native", "router_args": {"max_running_requests": 64}})
    assert result.loaded.config.rollout.engine.max_running == 64
    row = next(entry for entry in result.ledger if entry.path == "global_template")
    assert row.note.startswith("alias of actor_train.data_args.template")


@pytest.mark.parametrize(("mode", "replay"), [("disable", "none"), ("R2", "old"), ("R3", "rollout")])
def test_router_replay_and_the_load_balancing_loss_are_the_policy_s(
    tmp_path: Path, mode: str, replay: str
) -> None:
    policy = {"router_replay": {"mode": mode}, "model_args": {"moe_aux_loss_coef": 0.01}}
    train = read(tmp_path, {"actor_train": policy}).loaded.config.train
    assert (train.router_replay, train.router_aux_coef) == (replay, 0.01)


def test_a_wrong_value_is_refused_with_the_allowed_ones(tmp_path: Path) -> None:
    text = problems(
        tmp_path,
        {
            "adv_estimator": "ppo",
            "rollout_batch_size": "many",
            "actor_train": {"strategy_args": {"strategy_name": "zero3"}},
        },
    )
    assert "adv_estimator: 'ppo' is not one of gae, reinforce, grpo, gigpo" in text
    assert "rollout_batch_size: 'many' is not an integer >= 1" in text
    assert "strategy_name: 'zero3' is not one of megatron_train, fsdp2_train" in text


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path) -> None:
    text = problems(tmp_path, {"actor_train": {"infer_batchsize": 4}, "rollout_batchsize": 1})
    assert (
        "actor_train.infer_batchsize: unknown key of ROLL, did you mean 'actor_train.infer_batch_size'?"
        in text
    )
    assert "rollout_batchsize: unknown key of ROLL, did you mean 'rollout_batch_size'?" in text
    text = problems(tmp_path, {"variants": {"actor_infer_sglang": {"strategy_name": "sglang"}}})
    assert "did you mean 'actor_infer.strategy_args.strategy_name'?" in text


def test_keys_of_other_pipelines_are_known_and_not_supported(tmp_path: Path) -> None:
    text = problems(tmp_path, {"student_pretrain": "small"})
    assert "student_pretrain" in text
    assert "distillation on a file, which has the sections student and teacher" in text


def test_the_asynchronous_generation_ratio_bounds_the_lag(tmp_path: Path) -> None:
    assert native(read(tmp_path, {"async_generation_ratio": 0}).loaded, "pipeline") is None
    pipeline = native(read(tmp_path, {"async_generation_ratio": 1.5}).loaded, "pipeline")
    assert (pipeline.max_lag, pipeline.over_lag, pipeline.on_new_weights) == (2, "drop", "interrupt")


def test_a_file_without_a_model_is_refused_when_a_run_starts(tmp_path: Path) -> None:
    from braid.errors import ModelError
    from braid.models.loading import load_tokenizer

    config = read(tmp_path, {"pretrain": "model"}).loaded.config
    assert config.model.path == "model"
    unnamed = read_config(SEED, dialect="roll").loaded.config
    with pytest.raises(ModelError, match="set pretrain"):
        load_tokenizer(unnamed.model)
