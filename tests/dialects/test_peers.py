"""Keys that the systems' own example files have and their documentation does not, with the values that stand there.

The tables were written from files of RLinf (examples/reasoning/config/math, tests/e2e_tests/reasoning), of ROLL (RLVR examples) and of SkyRL
(base configs of skyrl-train 0.1 to 0.4, GSM8K and DAPO scripts). Each is laid over the documentation's file of its system.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braid.cli.main import main
from braid.config.source import parse_path, place
from braid.dialects.load import read_config

from .conftest import Reader, Seed

APPLIED, IMPLIED, NOTHING, MISSING = "applied", "implied", "no effect", "unsupported"

RLINF: dict[str, tuple[Any, str]] = {
    "defaults": ([{"override hydra/job_logging": "stdout"}], IMPLIED),
    "cluster.auto_scheduler": (False, NOTHING),
    "cluster.assign_policy": ("greedy", NOTHING),
    "runner.experiment_name": ("1.5b-8node-shared-16*512-28672", APPLIED),
    "algorithm.clip_ratio_low": (None, NOTHING),
    "algorithm.clip_ratio_high": (None, NOTHING),
    "rollout.model.precision": ("bf16", APPLIED),
    "rollout.vllm.max_num_batched_tokens": (None, NOTHING),
    "rollout.vllm.enable_flash_infer_sampler": (True, NOTHING),
    "rollout.vllm.torch_profiler_dir": (None, NOTHING),
    "rollout.return_logprobs": ("${not:${algorithm.recompute_logprobs}}", IMPLIED),
    "algorithm.recompute_logprobs": (True, APPLIED),
    "inference.model.precision": ("fp16", NOTHING),
    "inference.model.model_type": ("qwen2.5", NOTHING),
    "inference.tokenizer.use_fast": (True, NOTHING),
    "inference.fsdp_config.strategy": ("fsdp", NOTHING),
    "inference.fsdp_config.mixed_precision.param_dtype": (None, NOTHING),
    "inference.fsdp_config.amp_autocast.enabled": (False, NOTHING),
    "actor.model.moe_grouped_gemm": ("te", APPLIED),
    "actor.model.moe_router_topk": (2, NOTHING),
    "actor.model.moe_aux_loss_coeff": (0.0, NOTHING),
    "actor.optim.loss_scale": (65536, APPLIED),
    "actor.lr_sched.start_weight_decay": (None, IMPLIED),
    "actor.megatron.use_profiler": (False, NOTHING),
    "actor.megatron.profiler.activities": (["cpu", "cuda"], NOTHING),
    "actor.megatron.ckpt.te_ln_add_extra_state": ("tensor_pickle_none", NOTHING),
    "actor.fsdp_config.hybrid_shard_size": (-1, NOTHING),
    "actor.fsdp_config.amp_grad_scaler.enabled": (True, NOTHING),
    "reward.tokenizer.tokenizer_model": ("${actor.tokenizer.tokenizer_model}", NOTHING),
    "reward.tokenizer.padding_side": ("right", NOTHING),
    "reward.reward_weights.qa_accuracy": (1.0, NOTHING),
    "reward.len_reward_penalty": (0.1, NOTHING),
    "critic.optim.lr": (1e-5, NOTHING),
}

RLINF_FSDP: dict[str, tuple[Any, str]] = {
    "actor.training_backend": ("fsdp", APPLIED),
    "actor.fsdp_config.strategy": ("fsdp", APPLIED),
    "actor.fsdp_config.sharding_strategy": ("full_shard", APPLIED),
    "actor.fsdp_config.mixed_precision.param_dtype": ("fp16", APPLIED),
    "actor.fsdp_config.mixed_precision.reduce_dtype": ("fp16", APPLIED),
    "actor.fsdp_config.mixed_precision.buffer_dtype": (None, NOTHING),
    "actor.fsdp_config.amp_autocast.enabled": (True, APPLIED),
    "actor.fsdp_config.amp_autocast.precision": ("fp16", APPLIED),
    "actor.fsdp_config.grad_scaler.enabled": (False, APPLIED),
    "actor.model.precision": ("fp32", APPLIED),
    "algorithm.loss_type": ("gspo", APPLIED),
}
"""fp16 with autocast over FSDP's own mixed precision, as RLinf ships it."""

ROLL: dict[str, tuple[Any, str]] = {
    "defaults": (["_self_"], NOTHING),
    "checkpoint_config.use_hard_links": (True, NOTHING),
    "actor_train.data_args.domain_interleave_probs": (
        {"math_rule": 0.6, "code_sandbox": 0.3, "ifeval": 0.1},
        APPLIED,
    ),
    "actor_train.strategy_args.strategy_config.bf16": (True, NOTHING),
    "reference.strategy_args.strategy_config.bf16": (True, NOTHING),
    "actor_infer.strategy_args.strategy_config.optimization_level": (1, NOTHING),
    "actor_infer.strategy_args.strategy_config.disable_mm_preprocessor_cache": (True, NOTHING),
    "rewards.math_rule.worker_cls": (
        "roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker",
        APPLIED,
    ),
    "rewards.math_rule.tag_included": (["deepmath_103k", "aime"], APPLIED),
    "rewards.ifeval.worker_cls": (
        "roll.pipeline.rlvr.rewards.ifeval_rule_reward_worker.GeneralRuleRewardWorker",
        MISSING,
    ),
    "rewards.ifeval.reward_type": ("soft", MISSING),
    "rewards.ifeval.tag_included": (["ifeval"], NOTHING),
    "rewards.llm_judge.worker_cls": (
        "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
        NOTHING,
    ),
    "rewards.llm_judge.judge_model_type": ("inference", MISSING),
    "rewards.llm_judge.tag_included": (["RLVR"], NOTHING),
    "rewards.code_sandbox.worker_cls": (
        "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker",
        APPLIED,
    ),
    "rewards.code_sandbox.use_local": (True, NOTHING),
    "rewards.code_sandbox.tag_included": (["KodCode"], APPLIED),
}

SKYRL: dict[str, tuple[Any, str]] = {
    "defaults": (["_self_"], IMPLIED),
    "trainer.target_modules": (None, NOTHING),
    "trainer.exclude_modules": (None, IMPLIED),
    "trainer.policy.model.lora.rank": (0, NOTHING),
    "trainer.policy.model.lora.target_modules": ("all-linear", NOTHING),
    "trainer.policy.model_config_kwargs": ({}, NOTHING),
    "deepspeed_config.train.gradient_clipping": (1.0, NOTHING),
    "deepspeed_config.train.torch_autocast": ({"enabled": True, "dtype": "bfloat16"}, NOTHING),
    "deepspeed_config.train.zero_optimization.offload_optimizer.pin_memory": (True, NOTHING),
    "trainer.policy.megatron_config.torch_profiler_config.enable": (False, NOTHING),
    "trainer.policy.megatron_config.lora_config.lora_type": ("lora", NOTHING),
    "trainer.policy.megatron_config.optimizer_config_kwargs.optimizer_cpu_offload": (False, NOTHING),
    "trainer.policy.megatron_config.transformer_config_kwargs.recompute_modules": (["core_attn"], NOTHING),
    "trainer.ref.megatron_config.model_config_kwargs": ({}, NOTHING),
    "trainer.rope_scaling": (None, NOTHING),
    "trainer.rope_theta": (None, NOTHING),
    "trainer.algorithm.overlong_buffer.len": (4096, APPLIED),
    "trainer.algorithm.overlong_buffer.penalty_factor": (0.5, APPLIED),
    "trainer.fully_async.max_staleness_steps": (4, NOTHING),
    "generator.model_name": ("${trainer.policy.model.path}", NOTHING),
    "generator.served_model_name": (None, NOTHING),
    "generator.external_proxy_url": (None, NOTHING),
    "generator.external_server_urls": (None, NOTHING),
    "generator.enable_http_endpoint": (False, IMPLIED),
    "generator.http_endpoint_port": (8000, NOTHING),
    "generator.fully_sharded_loras": (False, NOTHING),
    "generator.enable_ray_prometheus_stats": (False, NOTHING),
    "generator.engine_init_kwargs": ({}, NOTHING),
    "generator.chat_template_kwargs": ({"reasoning_effort": "low"}, APPLIED),
    "generator.rope_scaling": ("${trainer.rope_scaling}", NOTHING),
    "generator.rope_theta": ("${trainer.rope_theta}", NOTHING),
}

FILES = {
    "rlinf": (Seed("rlinf-math-003", "rlinf", ("rlinf-math-003.yaml",)), RLINF),
    "rlinf-fsdp": (Seed("rlinf-math-003", "rlinf", ("rlinf-math-003.yaml",)), RLINF_FSDP),
    "roll": (Seed("roll-rlvr-002", "roll", ("roll-rlvr-002.yaml",)), ROLL),
    "skyrl": (Seed("skyrl-004", "skyrl", ("skyrl-004.yaml",)), SKYRL),
}


def laid_over(reader: Reader, name: str) -> Path:
    """The documentation's file with the table's keys in it."""
    seed, table = FILES[name]
    tree = seed.tree()
    for key, (value, _) in table.items():
        assert place(tree, parse_path(key), value) is None, key
    return reader.write(f"peer-{name}", tree)


@pytest.mark.parametrize("name", FILES)
def test_a_key_of_an_example_file_becomes_what_its_table_says(reader: Reader, name: str) -> None:
    seed, table = FILES[name]
    read = read_config(laid_over(reader, name), dialect=seed.dialect, allowed=["*"])
    found = {entry.path: entry.disposition for entry in read.ledger}
    assert {key: found.get(key) for key in table} == {key: expected for key, (_, expected) in table.items()}


def test_an_override_may_be_a_mapping_without_spaces_as_in_hydra(reader: Reader) -> None:
    read = reader.read(
        FILES["skyrl"][0], ["+generator.chat_template_kwargs={reasoning_effort:low,url:http://a:1}"]
    )
    assert read.loaded.config.data.chat_template_kwargs == {"reasoning_effort": "low", "url": "http://a:1"}


@pytest.mark.parametrize("name", FILES)
def test_explain_ends_well(reader: Reader, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(laid_over(reader, name)), "--dialect", FILES[name][0].dialect]) == 0
    assert "keys" in capsys.readouterr().out
