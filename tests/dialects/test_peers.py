"""Keys that the systems' own example files have and their documentation does not, with the values that stand
there.

The tables were written from files of RLinf (examples/reasoning/config/math, tests/e2e_tests/reasoning), of
ROLL (RLVR examples) and of SkyRL (base configs of skyrl-train 0.1 to 0.4, GSM8K and DAPO scripts). Each is
laid over the documentation's file of its system. ROLL's RLVR examples, which combine five domains with every
strategy, are composed below, one of each kind.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.cli.main import main
from braid.config.source import parse_path, place
from braid.trainer.inputs import check_sources, prompt_sampler, read_inputs
from braid_dialects.load import read_config

from .conftest import Reader, Seed, laid_over

APPLIED, IMPLIED, NOTHING, MISSING = "applied", "implied", "no effect", "unsupported"

RLINF: dict[str, tuple[Any, str]] = {
    "defaults": ([{"override hydra/job_logging": "stdout"}], NOTHING),
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
    "actor.lr_sched.start_weight_decay": (None, NOTHING),
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
        APPLIED,
    ),
    "rewards.ifeval.reward_type": ("soft", NOTHING),
    "rewards.ifeval.tag_included": (["ifeval"], APPLIED),
    "rewards.llm_judge.worker_cls": (
        "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
        APPLIED,
    ),
    "rewards.llm_judge.judge_model_type": ("inference", APPLIED),
    "rewards.llm_judge.tag_included": (["RLVR"], APPLIED),
    "rewards.llm_judge.model_args": ({"model_name_or_path": "judge", "dtype": "bf16"}, APPLIED),
    "rewards.llm_judge.strategy_args": ({"strategy_name": "hf_infer", "strategy_config": None}, APPLIED),
    "rewards.llm_judge.device_mapping": ("list(range(4,8))", APPLIED),
    "rewards.code_sandbox.worker_cls": (
        "roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker",
        APPLIED,
    ),
    "rewards.code_sandbox.use_local": (True, NOTHING),
    "rewards.code_sandbox.tag_included": (["KodCode"], APPLIED),
}

SKYRL: dict[str, tuple[Any, str]] = {
    "defaults": (["_self_"], NOTHING),
    "trainer.target_modules": (None, NOTHING),
    "trainer.exclude_modules": (None, NOTHING),
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
    "generator.enable_http_endpoint": (False, NOTHING),
    "generator.http_endpoint_port": (8000, NOTHING),
    "generator.fully_sharded_loras": (False, NOTHING),
    "generator.enable_ray_prometheus_stats": (False, NOTHING),
    "generator.engine_init_kwargs": ({}, IMPLIED),
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


def with_table(reader: Reader, name: str) -> Path:
    """The documentation's file with the table's keys in it."""
    seed, table = FILES[name]
    tree = seed.tree()
    for key, (value, _) in table.items():
        assert place(tree, parse_path(key), value) is None, key
    return reader.write(f"peer-{name}", tree)


@pytest.mark.parametrize("name", FILES)
def test_a_key_of_an_example_file_becomes_what_its_table_says(reader: Reader, name: str) -> None:
    seed, table = FILES[name]
    read = read_config(with_table(reader, name), dialect=seed.dialect, allowed=["*"])
    dispositions = {entry.path: entry.disposition for entry in read.ledger}
    assert {key: dispositions.get(key) for key in table} == {
        key: expected for key, (_, expected) in table.items()
    }


def test_an_override_may_be_a_mapping_without_spaces_as_in_hydra(reader: Reader) -> None:
    read = reader.read(
        FILES["skyrl"][0], ["+generator.chat_template_kwargs={reasoning_effort:low,url:http://a:1}"]
    )
    assert read.loaded.config.data.chat_template_kwargs == {"reasoning_effort": "low", "url": "http://a:1"}


@pytest.mark.parametrize("name", FILES)
def test_explain_ends_well(reader: Reader, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        str(with_table(reader, name)),
        "--dialect",
        FILES[name][0].dialect,
        "--allow-unsupported",
        "rewards",
    ]
    assert main(["explain", *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "plan: ok"


# ROLL's RLVR examples

_RULES = "roll.pipeline.rlvr.rewards"
_ONE = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
}
_SHARES = {"math_rule": 0.4, "code_sandbox": 0.3, "llm_judge": 0.1, "crossthinkqa": 0.1, "ifeval": 0.1}


def _reward(worker: str, *tags: str, **more: Any) -> dict[str, Any]:
    model = {"model_args": {"model_name_or_path": "${reward_pretrain}"}, "data_args": {"template": "qwen2_5"}}
    return {"worker_cls": f"{_RULES}.{worker}", "tag_included": [*tags], "world_size": 8, **model, **more}


FIVE_DOMAINS: dict[str, Any] = {
    "hydra": {"run": {"dir": "."}, "output_subdir": None},
    "exp_name": "five-domains",
    "logging_dir": "./output/logs",
    "system_envs": {"USE_MODELSCOPE": "1"},
    "checkpoint_config": {"type": "file_system", "output_dir": "./models/${exp_name}"},
    "track_with": "tensorboard",
    "tracker_kwargs": {"log_dir": "./tensorboard"},
    "rollout_batch_size": 64,
    "prompt_length": 2048,
    "response_length": 4096,
    "num_return_sequences_in_group": 8,
    "ppo_epochs": 1,
    "adv_estimator": "reinforce",
    "value_clip": 0.5,
    "reward_clip": 10,
    "advantage_clip": 2.0,
    "dual_clip_loss": True,
    "norm_mean_type": "None",  # as the files of 2025 write it
    "norm_std_type": None,
    "max_len_mask": True,
    "difficulty_mask": True,
    "difficulty_low_threshold": 0.1,
    "difficulty_high_threshold": 0.95,
    "error_max_len_clip": False,
    "difficulty_loss_weight": False,
    "length_loss_weight": False,
    "add_token_level_kl": False,
    "whiten_advantages": True,
    "pretrain": "Qwen/Qwen2.5-7B",
    "reward_pretrain": "Qwen/Qwen2.5-7B",
    "validation": {
        "data_args": {"template": "qwen2_5", "file_name": ["benchmarks.jsonl"]},
        "generating_args": {
            "max_new_tokens": "${response_length}",
            "top_p": 0.6,
            "top_k": 50,
            "num_beams": 1,
        },
    },
    "actor_train": {
        "model_args": {"disable_gradient_checkpointing": False, "dtype": "bf16", "model_type": None},
        "training_args": {
            "learning_rate": 1.0e-6,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 32,
            "warmup_steps": 20,
            "num_train_epochs": 50,
        },
        "data_args": {
            "template": "qwen2_5",
            "file_name": [f"{name}.jsonl" for name in _SHARES],
            "domain_interleave_probs": _SHARES,
            "dataset_dir": "data",
            "messages": "messages",
            "interleave_probs": "1.0",
        },
        "strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {**_ONE, "use_distributed_optimizer": True, "recompute_granularity": "full"},
        },
        "device_mapping": "list(range(0,16))",
        "infer_batch_size": 4,
    },
    "actor_infer": {
        "model_args": {"disable_gradient_checkpointing": True, "dtype": "bf16"},
        "generating_args": {
            "max_new_tokens": "${response_length}",
            "top_p": 0.99,
            "top_k": 100,
            "temperature": 0.99,
        },
        "data_args": {"template": "qwen2_5"},
        "strategy_args": {
            "strategy_name": "vllm",
            "strategy_config": {"gpu_memory_utilization": 0.8, "block_size": 16, "max_model_len": 8000},
        },
        "device_mapping": "list(range(0,12))",
    },
    "reference": {
        "model_args": {"dtype": "bf16", "model_type": None},
        "data_args": {"template": "qwen2_5"},
        "strategy_args": {"strategy_name": "megatron_infer", "strategy_config": _ONE},
        "device_mapping": "list(range(0,16))",
        "infer_batch_size": 8,
    },
    "rewards": {
        "crossthinkqa": _reward(
            "crossthinkqa_rule_reward_worker.CrossThinkQARuleRewardWorker",
            "crossthinkqa",
            reward_type="soft",
            response_length_penalty_coef=0.0,
        ),
        "ifeval": _reward("ifeval_rule_reward_worker.GeneralRuleRewardWorker", "ifeval", reward_type="soft"),
        "math_rule": _reward("math_rule_reward_worker.MathRuleRewardWorker", "deepmath_103k", "aime"),
        "code_sandbox": _reward(
            "code_sandbox_reward_worker.CodeSandboxRewardWorker", "KodCode", use_local=True
        ),
        "llm_judge": _reward(
            "llm_judge_reward_worker.LLMJudgeRewardWorker",
            "RLVR",
            judge_prompt="Qwen2.5-7B-Instruct-RLVR-prompt",
            judge_model_type="inference",
            strategy_args={"strategy_name": "hf_infer", "strategy_config": None},
            device_mapping="list(range(12,16))",
        ),
    },
}
_OTHER_THAN_MATH = {name: None for name in FIVE_DOMAINS["rewards"] if name != "math_rule"}
MATH_ALONE: dict[str, Any] = {
    "actor_train": {"data_args": {"domain_interleave_probs": {"math_rule": 1.0} | dict.fromkeys(_SHARES)}},
    "rewards": _OTHER_THAN_MATH,
}
"""null removes a key."""
_FSDP = {"fsdp_size": 4, "param_dtype": "bf16", "reduce_dtype": "float32", "offload_policy": False}
_MOE = {"moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True}
KINDS: dict[str, tuple[list[dict[str, Any]], Collection[str]]] = {
    "megatron": ([], ()),
    "fsdp2": (
        [
            {
                "lora_target": "o_proj,q_proj",
                "actor_train": {
                    "model_args": {"ulysses_size": 2, "lora_target": "${lora_target}", "lora_rank": 32},
                    "strategy_args": {"strategy_name": "fsdp2_train", "strategy_config": _FSDP},
                },
                "reference": {
                    "model_args": {"ulysses_size": 2},
                    "strategy_args": {"strategy_name": "fsdp2_infer", "strategy_config": _FSDP},
                },
            }
        ],
        (),
    ),
    "experts": (
        [
            {
                "actor_train": {
                    "strategy_args": {
                        "strategy_config": {
                            "pipeline_model_parallel_size": 2,
                            "virtual_pipeline_model_parallel_size": 8,
                            "expert_model_parallel_size": 4,
                            "context_parallel_size": 4,
                            "sequence_parallel": True,
                            "moe_layer_recompute": True,
                            **_MOE,
                        }
                    },
                    "device_mapping": "list(range(0,32))",
                },
                "actor_infer": {
                    "num_gpus_per_worker": 4,
                    "strategy_args": {
                        "strategy_config": {
                            "tensor_parallel_size": 2,
                            "sleep_level": 2,
                            "load_format": "dummy",
                            "cuda_graph_sizes": [1, 2, 4],
                        }
                    },
                },
                "reference": {
                    "strategy_args": {"strategy_config": {"expert_model_parallel_size": 4, **_MOE}}
                },
            }
        ],
        (),
    ),
    "sglang": (
        [
            {
                "actor_infer": {
                    "num_gpus_per_worker": 2,
                    "strategy_args": {
                        "strategy_name": "sglang",
                        "strategy_config": {
                            "mem_fraction_static": 0.7,
                            "load_format": "dummy",
                            **dict.fromkeys(("gpu_memory_utilization", "block_size", "max_model_len")),
                        },
                    },
                }
            }
        ],
        (),
    ),
    "packing": (
        [
            {
                role: {
                    "use_sequence_packing": True,
                    "sequence_packing_args": {
                        "algorithm": "load_balance",
                        "max_packed_sequence_length_train": 8192,
                        "max_packed_sequence_length_forward": 8192,
                        "min_num_micro_batches_train": 1,
                        "min_num_micro_batches_forward": 1,
                    },
                }
                for role in ("actor_train", "reference")
            }
        ],
        (),
    ),
    "off-policy": (
        [
            MATH_ALONE,
            {
                "pg_variant": "topr",
                "exp_name": "math-${pg_variant}",
                "norm_mean_type": "batch",
                "norm_std_type": "batch",
                "actor_train": {
                    "worker_cls": "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker",
                    "pg_variant": "${pg_variant}",
                },
            },
        ],
        (),
    ),
    "critic": (
        [
            MATH_ALONE,
            {
                "adv_estimator": "gae",
                "use_kl_loss": True,
                "kl_loss_coef": 0.001,
                "critic": {
                    "model_args": {"model_type": "trl"},
                    "training_args": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 32},
                    "strategy_args": {
                        "strategy_name": "fsdp2_train",
                        "strategy_config": {
                            **_FSDP,
                            "wrap_policy": {"transformer_layer_cls_to_wrap": ["Qwen2DecoderLayer"]},
                        },
                    },
                    "device_mapping": "list(range(0,16))",
                },
            },
        ],
        (),
    ),
    "filtered": (
        [
            MATH_ALONE,
            {
                "rewards": {
                    "math_rule": {
                        "query_filter_config": {
                            "type": "mean_filter",
                            "filter_args": {"threshold_up": 0.9, "threshold_down": 0.1},
                        }
                    }
                }
            },
        ],
        (),
    ),
    "images": (
        [
            MATH_ALONE,
            {
                "actor_train": {
                    "model_args": {"freeze_module_prefix": "vision_model"},
                    "data_args": {"messages": "prompt", "image_max_pixels": 1048576},
                },
                "rewards": {
                    "cv_detection": _reward("detection_reward_worker.DetectionRewardWorker", "coco"),
                },
            },
        ],
        (),
    ),
}
"""Kind of example -> changes to the file of five domains, and the keys that stay unsupported."""


def _without_nulls(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in tree.items() if changes.get(key, key) is not None}
    return {
        key: _without_nulls(value, changes[key]) if isinstance(changes.get(key), dict) else value
        for key, value in kept.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_an_rlvr_example_of_roll_is_accepted(tmp_path: Path, kind: str) -> None:
    tree, (layers, unsupported) = FIVE_DOMAINS, KINDS[kind]
    for changes in layers:
        tree = _without_nulls(laid_over(tree, changes), changes)
    (tmp_path / "roll.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    read = read_config(tmp_path / "roll.yaml", dialect="roll", allowed=["*"])
    assert {entry.path for entry in read.ledger if entry.disposition == MISSING} == set(unsupported)


def test_the_rows_of_roll_s_five_domains_stay_where_they_are(tmp_path: Path) -> None:
    """Each domain has its share, and rows with another tag belong to math_rule."""
    tags = ["deepmath_103k", "KodCode", "RLVR", "crossthinkqa", "ifeval"]
    for name, tag in zip(_SHARES, tags, strict=True):
        row = {"messages": json.dumps([{"role": "user", "content": "a"}]), "ground_truth": "B", "tag": tag}
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 4)
    (tmp_path / "benchmarks.jsonl").write_text(json.dumps(row | {"tag": "MATH-500"}) + "\n")
    (tmp_path / "roll.yaml").write_text(yaml.safe_dump(FIVE_DOMAINS, sort_keys=False))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    built = [
        "braid.model.path=null",
        "braid.model.build={characters: ab}",
        f'braid.model.chat_template="{template}"',
    ]
    loaded = read_config(
        tmp_path / "roll.yaml", built, dialect="roll", backend="single", engine="native"
    ).loaded
    inputs = read_inputs(loaded, "train")
    assert inputs is not None
    check_sources(loaded, inputs)
    prompts = inputs.train.prompts
    drawn = Counter(prompts[i].source for i in prompt_sampler(loaded.config, len(prompts), prompts).take(90))
    assert drawn == {"deepmath_103k": 36, "KodCode": 27, "RLVR": 9, "crossthinkqa": 9, "ifeval": 9}
