"""Derived values of a plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.recipes import Correction
from braid.config.load import load_config
from braid.config.schema import RunConfig
from braid.errors import ConfigError
from braid.plan import Plan, derive, longest_row, resolve

BASE = [
    "model.build={}",
    "run.max_rounds=10",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "data.eval=[{kind: procedural, generator: chain_sum, size: 10}]",
    "reward.parts=[{kind: exact}]",
]


def config(*overrides: str) -> RunConfig:
    return load_config(None, [*BASE, *overrides]).config


def plan(*overrides: str) -> Plan:
    return resolve(config(*overrides))


def test_counts_of_a_round_and_its_steps() -> None:
    planned = plan(
        "rollout.prompts_per_round=12",
        "rollout.group_size=4",
        "train.steps_per_pass=3",
        "train.passes_per_round=2",
    )
    assert planned.trajectories_per_round == 48  # 12 x 4
    assert planned.steps_per_round == 6  # 3 x 2
    assert planned.rows_per_step == 16  # 12 / 3 prompts x 4
    assert planned.num_rounds == 10
    assert planned.num_steps == 60


def test_rows_per_step_are_those_of_the_largest_mini_batch() -> None:
    assert plan("rollout.prompts_per_round=10", "train.steps_per_pass=3").rows_per_step == 4 * 8


def test_token_bounds_of_a_single_turn() -> None:
    planned = plan(
        "data.max_prompt_tokens=100", "rollout.sampling.max_new_tokens=20", "rollout.prompts_per_round=4"
    )
    assert (planned.max_output_tokens, planned.max_trajectory_tokens) == (20, 120)
    assert planned.max_tokens_per_round == 32 * 120
    assert planned.eval_max_trajectory_tokens == 120
    longer = plan("data.max_prompt_tokens=100", "eval.sampling.max_new_tokens=50")
    assert longer.eval_max_trajectory_tokens == 150


def test_the_longest_row_is_that_of_training_and_evaluation() -> None:
    settings = ("data.max_prompt_tokens=100", "rollout.sampling.max_new_tokens=20")
    assert longest_row(config(*settings)) == 120
    assert longest_row(config(*settings, "eval.sampling.max_new_tokens=50")) == 150


def test_supervised_rows_are_bounded_by_the_models_positions_alone() -> None:
    supervised = "sft={data: [{kind: procedural, generator: chain_sum, response_function: a.b}]}"
    assert longest_row(config(supervised, "model.build.max_positions=4000")) == 4000
    assert longest_row(config(supervised, "model.build=null", "model.path=some/hub-name")) is None


@pytest.mark.parametrize("section", ["sft={max_tokens: 3000}", "prefer={max_tokens: 3000}"])
def test_rows_of_examples_and_pairs_are_bounded_by_their_limit_too(section: str) -> None:
    assert longest_row(config(section, "model.build.max_positions=4000")) == 3000
    assert longest_row(config(section, "model.build=null", "model.path=some/hub-name")) == 3000


def test_token_bounds_of_a_conversation_are_its_context() -> None:
    planned = plan(
        "env={kind: tools, max_turns: 3, max_context_tokens: 500}",
        "data.max_prompt_tokens=100",
        "rollout.sampling.max_new_tokens=50",
    )
    assert (planned.max_output_tokens, planned.max_trajectory_tokens) == (150, 500)


def test_a_simulator_has_no_token_counts() -> None:
    planned = resolve(load_config(None, SIMULATOR).config)
    assert planned.max_trajectory_tokens is None
    assert planned.memory == ()
    assert planned.trajectories_per_round == 32 * 8


SIMULATOR = [
    "model.mlp={}",
    "env={kind: gymnasium, id: CartPole-v1}",
    "algorithm.recipe=ppo",
    "run.max_rounds=3",
]


def test_rounds_follow_from_epochs_and_prompts() -> None:
    unlimited = config("run.max_rounds=null", "run.max_epochs=2", "rollout.prompts_per_round=30")
    assert resolve(unlimited).num_rounds == 7  # ceil(2 x 100 / 30), sizes of procedural sources being known
    assert resolve(unlimited, 50).num_rounds == 4  # ceil(2 x 50 / 30)


def test_the_smaller_of_rounds_and_epochs_applies() -> None:
    assert plan("run.max_epochs=1", "rollout.prompts_per_round=50").num_rounds == 2
    assert plan("run.max_epochs=100").num_rounds == 10


def test_rounds_of_unread_files_are_not_known_yet() -> None:
    files = config("run.max_rounds=null", "run.max_epochs=1", "data.train=[{kind: file, path: x.jsonl}]")
    planned = resolve(files)
    assert (planned.planned_rounds, planned.planned_steps) == (None, None)
    with pytest.raises(AssertionError, match="num_prompts"):
        _ = planned.num_rounds
    assert resolve(files, 64).num_rounds == 2


def test_a_source_with_a_limit_counts_up_to_it() -> None:
    limited = "data.train=[{kind: procedural, generator: a, size: 100, limit: 40}, {kind: procedural, generator: b, size: 5}]"
    assert plan(limited).num_prompts == 45


def test_the_config_changes_parts_of_a_recipe() -> None:
    recipe = plan("algorithm.policy_loss.clip_high=0.3", "algorithm.kl_clamp=off").recipe
    assert recipe.policy_loss == PpoClip(clip_high=0.3)
    assert recipe.kl_clamp is None


def test_critic_and_reference_follow_from_the_recipe() -> None:
    assert not plan().needs_critic
    assert not plan().needs_reference
    both = plan("algorithm.recipe=ppo", "algorithm.kl_coef=0.1")
    assert both.needs_critic
    assert both.needs_reference


def test_the_policy_takes_no_steps_while_the_critic_warms_up() -> None:
    planned = plan("algorithm.recipe=ppo", "critic.warmup_rounds=4", "train.passes_per_round=2")
    assert planned.num_steps == planned.num_schedule_steps == (10 - 4) * 2
    assert planned.num_critic_steps == 10 * 2


def test_warm_up_of_a_value_head_is_part_of_the_policys_schedule() -> None:
    """Its optimizer counts these steps too, so that rates fall to their end in the last round, not before."""
    shared = config(
        "algorithm.recipe=ppo",
        "critic={network: shared, warmup_rounds: 4, train: {passes_per_round: 3}}",
        "train.passes_per_round=2",
    )
    planned = derive(shared, None, "train")
    assert planned.num_steps == (10 - 4) * 2
    assert planned.num_schedule_steps == (10 - 4) * 2 + 4 * 3


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ([], "current"),
        (["train.passes_per_round=2"], "recompute"),
        (["train.steps_per_pass=2"], "recompute"),
        (["algorithm.old_logprobs=behavior"], "behavior"),
        (["algorithm.kl_coef=0.1"], "current"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward"], "recompute"),
        (["algorithm.recipe=decoupled_ppo"], "recompute"),
        (["algorithm.recipe=decoupled_ppo", "algorithm.corrections=[]"], "current"),
        (["algorithm.recipe=clip_cov"], "recompute"),
        (["algorithm.policy_loss=kl_cov"], "recompute"),
        (["algorithm.policy_loss=kl_cov", "algorithm.old_logprobs=behavior"], "behavior"),
        (["algorithm.recipe=gspo"], "current"),
        (["rollout.engine.dtype=bf16"], "recompute"),
    ],
)
def test_old_logprobs_are_recomputed_where_the_round_needs_them(overrides: list[str], mode: str) -> None:
    assert plan(*overrides).old_logprobs == mode


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "is_corrected"),
    [
        (["rollout.engine.dtype=fp32"], 0, False),
        (["rollout.engine.dtype=bf16"], 0, True),
        (["rollout.engine.dtype=bf16", "algorithm.corrections=[]"], 0, False),
        (["rollout.engine.dtype=bf16", "algorithm.old_logprobs=behavior"], 0, False),
        (["rollout.engine.dtype=bf16", "train.autocast=bf16"], 0, False),
        (["rollout.engine.dtype=bf16", "model.dtype=bf16"], 0, False),
        (["rollout.engine.dtype=bf16", "train.autocast=fp16"], 0, False),
        (["rollout.engine.dtype=bf16", "rollout.engine=vllm"], 0, False),
        (["rollout.engine.dtype=bf16"], 1, False),  # train.autocast is bf16 there
        (["rollout.engine.dtype=bf16", "train.autocast=none"], 1, True),
    ],
)
def test_sampling_in_a_lower_precision_than_that_of_training_is_corrected(
    overrides: list[str], num_gpus: int, is_corrected: bool
) -> None:
    recipe = derive(config(*overrides), None, "train", num_gpus).recipe
    assert recipe.corrections == (
        (Correction(level="token", mode="truncate", low=0.0, high=2.0),) if is_corrected else ()
    )


def test_the_aggregation_constant_is_the_longest_response() -> None:
    constant = ["algorithm.aggregation=token_sum_constant", "rollout.sampling.max_new_tokens=77"]
    assert plan(*constant).aggregation_constant == 77.0
    assert plan(*constant, "algorithm.aggregation_constant=5").aggregation_constant == 5.0
    assert plan().aggregation_constant is None


def test_memory_counts_weights_gradients_and_two_moments() -> None:
    policy = plan().memory[0]
    assert policy.weights_bytes == 4 * policy.parameters
    assert policy.gradients_bytes == 4 * policy.parameters
    assert policy.optimizer_bytes == 8 * policy.parameters
    assert policy.total_bytes == 16 * policy.parameters


@pytest.mark.parametrize(
    ("backend", "bytes_per_parameter"),
    [("single", 2 + 4 + 12), ("deepspeed", 2 + 4 + 12), ("fsdp2", 4 + 4 + 8), ("fsdp", 4 + 4 + 8)],
)
def test_memory_counts_the_float32_masters_of_half_precision_weights(
    backend: str, bytes_per_parameter: int
) -> None:
    (policy,) = plan("model.dtype=bf16", f"train.backend={backend}").memory
    assert policy.total_bytes == bytes_per_parameter * policy.parameters


def test_frozen_weights_below_adapters_have_no_masters_but_in_flat_shards() -> None:
    def held(backend: str) -> tuple[int, int]:
        keys = (
            "model.dtype=bf16",
            f"train.backend={backend}",
            "model.lora={rank: 2}",
            "algorithm.kl_coef=0.1",
        )
        policy, reference = plan(*keys).memory
        frozen = policy.parameters - reference.parameters
        return frozen, policy.total_bytes - reference.parameters * (2 + 4 + 12 if backend == "single" else 16)

    for backend, width in (("single", 2), ("fsdp2", 2), ("fsdp", 4)):
        frozen, others = held(backend)
        assert others == width * frozen, backend


def test_memory_has_a_row_for_each_role() -> None:
    overrides = ["algorithm.recipe=ppo", "algorithm.kl_coef=0.1", "rollout.engine.dtype=bf16"]
    policy, critic, reference, copy = plan(*overrides).memory
    assert [policy.role, critic.role, reference.role, copy.role] == [
        "policy",
        "critic",
        "reference",
        "engine's copy",
    ]
    assert (
        critic.parameters == policy.parameters + 256 + 1
    )  # a tied head is the embedding; the value head is new
    assert reference.total_bytes == 4 * policy.parameters
    assert copy.total_bytes == 2 * policy.parameters


def test_compiled_steps_have_a_packed_copy_of_the_weights_in_the_plan() -> None:
    def packed(num_gpus: int, *overrides: str) -> list[int]:
        planned = resolve(config("rollout.prompts_per_round=1000000", *overrides), num_gpus=num_gpus)
        return [part.total_bytes for part in planned.memory if part.role == "engine's packed weights"]

    (policy, *_) = plan().memory
    assert packed(0) == [4 * policy.parameters]
    assert (
        packed(1) == packed(0, "rollout.engine.compile=never") == packed(0, "rollout.engine.dtype=bf16") == []
    )
    assert packed(0, "model.lora={}") == packed(0)


def test_the_cache_counts_keys_and_values_of_all_layers() -> None:
    planned = plan("rollout.engine.kv_budget_tokens=4000", "rollout.engine.dtype=bf16")
    assert planned.kv_bytes_per_token == 2 * 4 * 2 * 64 * 2  # K and V, 4 layers, 2 heads of 64, 2 bytes
    assert planned.kv_budget_bytes == 4000 * 2048
    assert planned.max_concurrent == 4000 // (1024 + 256)


def test_the_native_engine_computes_as_training_does() -> None:
    def of_engine(num_gpus: int, *overrides: str) -> tuple[int | None, bool]:
        planned = resolve(config(*overrides), num_gpus=num_gpus)
        return planned.kv_bytes_per_token, any(part.role == "engine's copy" for part in planned.memory)

    half = 2 * 4 * 2 * 64 * 2
    assert of_engine(0) == (2 * half, False)
    assert of_engine(1) == (half, True)
    assert of_engine(1, "run.device=cpu") == (2 * half, False)
    assert of_engine(1, "train.autocast=none") == (2 * half, False)
    assert of_engine(0, "train.autocast=bf16", "rollout.prompts_per_round=1") == (half, True)
    assert of_engine(1, "model.dtype=bf16") == (half, False)
    half_fsdp = ("train.backend=fsdp2", "train.backend.param_dtype=bf16")
    assert of_engine(0, *half_fsdp, "rollout.prompts_per_round=1") == (half, True)


def test_the_cache_of_a_gpu_has_no_fixed_size() -> None:
    on_gpu, on_cpu = (resolve(config("rollout.engine.max_running=24"), num_gpus=num) for num in (1, 0))
    assert (on_gpu.kv_budget_bytes, on_gpu.max_concurrent) == (None, 24)
    assert on_cpu.kv_budget_bytes == 131_072 * 4096


def test_a_plan_is_plain_data() -> None:
    data = json.loads(json.dumps(plan("algorithm.recipe=ppo").to_json()))
    assert data["trajectories_per_round"] == 256
    assert data["recipe"]["advantage"]["kind"] == "gae"
    assert data["total_bytes"] == sum(role.total_bytes for role in plan("algorithm.recipe=ppo").memory)


def test_problems_carry_the_origin_of_their_key(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("train:\n  steps_per_pass: 99\n")
    loaded = load_config(path, BASE)
    with pytest.raises(ConfigError, match=r"\[c\.yaml:2\]$"):
        resolve(loaded.config, origin_of=loaded.origin)


def test_planning_imports_no_torch() -> None:
    code = "import sys, braid.plan, braid.config.load; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_of_adapters_and_their_reference() -> None:
    plain = {role.role: role for role in plan("algorithm.kl_coef=0.1").memory}
    adapted = {role.role: role for role in plan("algorithm.kl_coef=0.1", "model.lora={rank: 2}").memory}
    adapters = adapted["reference"].parameters
    assert 0 < adapters < plain["policy"].parameters / 10
    assert adapted["policy"].parameters == plain["policy"].parameters + adapters
    assert adapted["policy"].gradients_bytes == 4 * adapters
    assert adapted["policy"].optimizer_bytes == 8 * adapters


def test_plain_gradient_descent_holds_no_moments() -> None:
    policy, *_ = plan("train.optimizer.kind=sgd").memory
    assert policy.optimizer_bytes == 0
    assert policy.gradients_bytes == policy.weights_bytes > 0
