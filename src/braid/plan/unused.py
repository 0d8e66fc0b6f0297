"""Keys that have no effect in a run, each with the reason.

Each rule yields (reason, keys). Keys are patterns separated by spaces: `{a,b}` stands for alternatives, and
`section.*` for all keys of a section. Where several rules name a key, the first gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from braid.algorithms.recipes import POLICY_LOSS_KEYS
from braid.config.backends import MegatronConfig
from braid.config.report import SftConfig
from braid.config.reward import CodeReward, JudgeReward
from braid.config.roles import train_config
from braid.config.rollout import GymnasiumEnv, SamplingConfig, SingleTurnEnv, ToolEnv
from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of
from braid.config.train import TrainConfig

from .parallel import served_engine
from .plan import Plan
from .sizes import engine_dtype

_Unused = Iterator[tuple[str, str]]
"""(reason, keys)."""


def unused_keys(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Unused key or section -> the reason, whether or not it is set. `key[]` stands for all items of a
    list."""
    reasons: dict[str, str] = {}
    for rule in _RULES:
        for why, patterns in rule(config, plan):
            for key in (key for pattern in patterns.split() for key in _keys(pattern)):
                reasons.setdefault(key, why)
    return reasons


def why_unused(reasons: Mapping[str, str], key: str) -> str:
    """The reason that `unused_keys` gives for a key or a section that contains it; empty if there is none."""
    parts = re.sub(r"\[\d+\]", "[]", key).split(".")
    above = (".".join(parts[: i + 1]) for i in range(len(parts)))
    return next((reasons[name] for name in above if name in reasons), "")


def set_keys(section: Any, key: str, at: str = "") -> Iterator[str]:
    """The keys that `key` stands for whose values differ from their defaults."""
    name, _, rest = key.partition(".")
    is_list, name = name.endswith("[]"), name.removesuffix("[]")
    field = type(section).model_fields.get(name)
    value = None if field is None else getattr(section, name)
    if not rest:
        if field is not None and value != field.get_default(call_default_factory=True):
            yield f"{at}{name}"
    elif is_list:
        for i, item in enumerate(value or ()):
            yield from set_keys(item, rest, f"{at}{name}[{i}].")
    elif value is not None:
        yield from set_keys(value, rest, f"{at}{name}.")


_ALL = tuple(path for path, field in fields_of(RunConfig) if not sections_of(field))


@cache
def _keys(pattern: str) -> tuple[str, ...]:
    """The keys that a pattern stands for."""
    if found := re.search(r"\{([^{}]*)\}", pattern):
        before, after = pattern[: found.start()], pattern[found.end() :]
        return tuple(key for option in found[1].split(",") for key in _keys(before + option + after))
    if pattern.endswith(".*"):
        return tuple(path for path in _ALL if path.startswith(pattern[:-1]))
    return (pattern,)


_WHILE: tuple[tuple[str, Any, str], ...] = (
    ("algorithm.entropy_coef", 0, "algorithm.entropy_level"),
    ("algorithm.kl_coef", 0, "algorithm.{kl_estimator,kl_in,kl_clamp,kl_target,kl_horizon}"),
    ("algorithm.kl_coef", 0, "reference.{path,train,update_every_epochs}"),
    ("checkpoint.export_every_rounds", 0, "checkpoint.export_dir"),
    ("data.shuffle", False, "data.seed"),
    ("data.use_chat_template", "never", "model.chat_template data.chat_template_kwargs"),
    ("report.tensorboard", False, "report.tensorboard_queue"),
    ("rollout.check_weights", False, "rollout.check_weights_dir"),
    ("rollout.sglang.cuda_graphs", False, "rollout.sglang.cuda_graph_max_batch"),
    ("rollout.sglang.torch_compile", False, "rollout.sglang.torch_compile_max_batch"),
    ("rollout.vllm.cuda_graphs", False, "rollout.vllm.cuda_graph_max_batch"),
    ("run.resume", "none", "run.allow_changes"),
)
"""(key, value, keys): no effect while `key` has this value, which for `algorithm` is the recipe's."""

_UNLESS: tuple[tuple[str, str, str], ...] = (
    ("algorithm.aggregation", "token_sum_constant", "algorithm.aggregation_constant"),
    ("rollout.engine", "native", "rollout.native.*"),
    ("rollout.engine", "sglang", "rollout.sglang.*"),
    ("rollout.engine", "vllm", "rollout.vllm.*"),
    ("rollout.filter.then", "replace", "rollout.filter.min_kept_fraction"),
    ("rollout.filter.then", "resample", "rollout.filter.max_batches"),
    ("train.backend", "megatron", "inference.{tensor_parallel,pipeline_parallel,sequence_parallel}"),
)
"""(key, value, keys): no effect unless `key` has this value."""


def _by_one_key(config: RunConfig, plan: Plan) -> _Unused:
    for key, value, keys in _UNLESS:
        if _value(config, plan, key) != value:
            yield f"{key} is not {value}", keys
    for key, value, keys in _WHILE:
        if _value(config, plan, key) == value:
            yield f"{key} is {str(value).lower()}", keys
    if plan.recipe.kl_target is None:
        yield "algorithm.kl_target is off", "algorithm.kl_horizon"


def _value(config: RunConfig, plan: Plan, path: str) -> Any:
    section, _, name = path.rpartition(".")
    return getattr(plan.recipe if section == "algorithm" else attrgetter(section)(config), name)


def _always(_: RunConfig, __: Plan) -> _Unused:
    yield "only sft.data has target responses", "data.{train,eval}[].response_{key,function}"
    yield "supervised examples are not scored", "sft.data[].{answer_key,source_key}"
    yield "the policy has no value head", "sft.optimizer.value_lr"
    yield "a critic computes no log-probs", "critic.train.{compile,logprob_chunk_bytes}"
    yield "train.record_memory records all roles", "{critic,reference}.train.record_memory"
    yield (
        "only vision-language-action policies have action chunks, and this version does not support them",
        "algorithm.reward_level",
    )


def _roles(config: RunConfig, plan: Plan) -> _Unused:
    if not plan.needs_critic:
        yield (
            "the advantage uses no critic",
            "critic.{path,train,warmup_rounds,normalize_values,head_name} "
            "algorithm.{gae_lambda,value_clip,huber_delta,value_loss_coef}",
        )
    if plan.needs_reference:
        yield (
            "the reference model is not trained",
            "reference.train.{optimizer,steps_per_pass,passes_per_round,shuffle,max_grad_norm,max_skipped_steps,"
            "gradient_checkpointing,grad_scaler,micro_batch_rows,offload.gradients,offload.optimizer}",
        )
    if not plan.needs_critic or config.critic.train is not None:
        yield (
            "the policy has no value head and the critic, if any, has its own settings",
            "train.optimizer.value_lr",
        )
    if config.critic.path is None:
        yield (
            "without critic.path the critic's layers are a copy of the policy's",
            "critic.train.liger_kernels",
        )
    if config.reference.path is None:
        yield (
            "without reference.path the reference is a copy of the policy",
            "reference.train.liger_kernels",
        )
        if config.model.lora is not None and plan.layout.mode == "in_process":
            yield (
                "the reference is the policy's model with the initial adapters",
                "reference.train.{compile,logprob_chunk_bytes}",
            )
    if config.reference.train is not None and config.reference.train.infer_batch_tokens is not None:
        yield "reference.train.infer_batch_tokens is used instead", "reference.train.micro_batch_tokens"
    if plan.layout.role("inference") is None:
        yield (
            "inference has no separate devices: the policy's workers compute log-probs",
            "inference.*",
        )
    if train_config(config, "inference").megatron.tensor_parallel == 1:
        yield "inference has no tensor parallelism", "inference.sequence_parallel"


def _losses(config: RunConfig, plan: Plan) -> _Unused:
    recipe = plan.recipe
    others = sorted(frozenset().union(*POLICY_LOSS_KEYS.values()) - POLICY_LOSS_KEYS[recipe.policy_loss])
    yield f"algorithm.policy_loss={recipe.policy_loss} does not use it", f"algorithm.{{{','.join(others)}}}"
    if plan.old_logprobs == "behavior":
        yield "with algorithm.old_logprobs=behavior there is nothing to correct", "algorithm.corrections"
    if plan.old_logprobs == "interpolated" and not config.max_lag:
        yield (
            "rounds are sampled with the weights that they start from, so interpolated log-probs are the engine's",
            "algorithm.corrections",
        )
    if plan.old_logprobs == "current":
        yield "with algorithm.old_logprobs=current all ratios are 1", "algorithm.early_stop_ratio"
    if not is_of_text(config):
        yield (
            "only a turn of text has several tokens; a simulator's policy has one log-prob per env step",
            "algorithm.{logprob_level,entropy_level}",
        )
    if recipe.logprob_level != "token":
        yield (
            "algorithm.logprob_level is not token, so every turn counts once",
            "algorithm.turn_weighting",
        )
    if all(of.level == "token" for of in config.algorithm.corrections or ()):
        yield "token-level weights depend on a single token", "algorithm.corrections[].tokens"


def _advantages(_: RunConfig, plan: Plan) -> _Unused:
    recipe = plan.recipe
    advantage = recipe.advantage
    if advantage not in ("gae", "reinforce", "gigpo"):
        yield "only gae, reinforce and gigpo use discounting", "algorithm.gamma"
    if advantage not in ("grpo", "gigpo"):
        yield (
            "only grpo and gigpo divide advantages by the group's standard deviation",
            "algorithm.normalize_by_std",
        )
    if advantage not in ("grpo", "gae"):
        yield "only grpo and gae can work on turns", "algorithm.advantage_level"
    if advantage != "gigpo":
        yield "only gigpo combines episode and turn advantages", "algorithm.{episode_weight,turn_weight}"
    if (
        recipe.whiten_rewards
    ):  # then it matters at which position a constant is subtracted, and how large it is
        return
    if advantage in ("rloo", "remax", "raft") or (
        advantage == "grpo" and recipe.advantage_level == "trajectory"
    ):
        yield (
            "advantages are differences within a group, so a constant subtracted from its rewards cancels",
            "algorithm.reward_mean",
        )
    has_penalty = recipe.kl_coef > 0 and recipe.kl_in == "reward"
    if advantage == "raft" and not has_penalty:
        yield (
            "the best of a group gets advantage 1, so the scale of rewards does not matter",
            "algorithm.reward_std",
        )


def _prompts(config: RunConfig, plan: Plan) -> _Unused:
    if not has_tokens(config):
        text = ",".join(name for name in SamplingConfig.model_fields if name != "greedy")
        yield (
            "a simulator has no text",
            f"{{rollout,eval}}.sampling.{{{text}}} rollout.{{native,env_timeout_s,max_sequence_tokens,print_outputs,check_weights}} "
            "reward.overlong checkpoint.export_every_rounds critic.path model.{tokenizer,chat_template} "
            "data.{mix,max_prompt_tokens,overlong,use_chat_template,chat_template_kwargs}",
        )
    if is_of_text(config) and not config.data.eval:
        yield (
            "there are no data.eval sources",
            "eval.{every_rounds,samples_per_prompt,pass_at,sampling,batch_prompts,shuffle} report.eval_samples",
        )
        if plan.recipe.supervised_coef == 0:
            yield (
                "there are no data.eval sources, and algorithm.supervised_coef is 0",
                "eval.success_reward",
            )
    if config.model.path is None and config.model.tokenizer is None:
        yield "neither the model nor the tokenizer comes from a folder", "model.trust_remote_code"
    if config.model.build is not None and not (config.model.tokenizer or config.model.chat_template):
        yield "the character tokenizer has no chat template", "data.chat_template_kwargs"


def _rewards_and_reports(config: RunConfig, _: Plan) -> _Unused:
    parts, report = config.reward.parts, config.report
    if not parts:
        yield "there are no reward parts", "reward.{timeout_s,retries,concurrency}"
    if all(isinstance(part, JudgeReward) for part in parts):
        yield "judges have their own retries", "reward.retries"
    if not any(isinstance(part, CodeReward) for part in parts):
        yield "no reward part runs programs", "reward.code"
    if config.checkpoint.every_rounds > 0:
        yield "checkpoint.every_rounds is set", "checkpoint.every_s"
    if not (report.tensorboard or report.wandb or report.swanlab):
        yield "TensorBoard and trackers are off", "report.dir"


def _rollouts(config: RunConfig, plan: Plan) -> _Unused:
    rollout = config.rollout
    if (rollout.request_batch or 0) >= rollout.prompts_per_round:
        yield "a round does not have more prompts than that", "rollout.request_batch"
    if _bound_is_wide(config):
        yield (
            "the limits of prompt and answer do not add up to more than that",
            "rollout.max_sequence_tokens",
        )
    if rollout.sampling.greedy:
        yield (
            "rollout.sampling.greedy always takes the most likely token",
            "rollout.sampling.{top_p,top_k,min_p}",
        )
    if rollout.group_size == 1:
        yield (
            "rollout.group_size is 1, so a group's rewards have no standard deviation",
            "rollout.filter.min_std",
        )
    if isinstance(config.env, GymnasiumEnv) and config.env.num_envs > plan.trajectories_per_round:
        yield "a round has fewer trajectories than that", "env.num_envs"


def _bound_is_wide(config: RunConfig) -> bool:
    bound, samplings = config.rollout.max_sequence_tokens, (config.rollout.sampling, config.eval.sampling)
    if bound is None:
        return False
    if isinstance(config.env, ToolEnv):
        return bound >= config.env.max_context_tokens
    longest = max(sampling.max_new_tokens for sampling in samplings if sampling is not None)
    return bound >= config.data.max_prompt_tokens + longest


def _engines(config: RunConfig, plan: Plan) -> _Unused:
    name, served, is_in_process = (
        config.rollout.engine,
        served_engine(config),
        plan.layout.mode == "in_process",
    )
    samples_in = engine_dtype(config, has_gpus=plan.layout.has_gpus)
    if served is not None and served.servers:
        own = ",".join(set(type(served).model_fields) - {"servers", "max_model_tokens"})
        yield (
            f"external servers have their own options (rollout.{name}.servers)",
            f"rollout.{name}.{{{own}}}",
        )
    if name == "sglang":
        yield "SGLang always detokenizes, to find stop strings", "rollout.sglang.detokenize"
        yield "SGLang reads weights from files", "rollout.weight_sync.{transport,existing_group}"
    if config.rollout.vllm.tensor_parallel * config.rollout.vllm.pipeline_parallel == 1:
        yield "each engine has a single device", "rollout.vllm.executor"
    if name != "native" or not is_in_process:
        yield (
            "weights sent to other processes are always verified by fingerprints on arrival",
            "rollout.{check_weights,check_weights_dir}",
        )
    else:
        yield "the native engine reads the trainer's weights in place", "rollout.weight_sync.*"
    is_copy = name != "native" or not is_in_process or samples_in != config.model.dtype
    if (config.model.mlp is not None or not is_copy) and not plan.needs_critic and not plan.needs_reference:
        yield "the engine samples with the trainer's own weights", "train.offload.weights"


def _pipeline(config: RunConfig, plan: Plan) -> _Unused:
    pipeline = config.pipeline
    if plan.verb != "train":
        yield "only braid train has a pipeline", "pipeline.*"
    if pipeline is None or pipeline.on_new_weights == "finish":
        yield "running turns finish before engines get new weights", "rollout.native.recompute_cache"
    if pipeline is not None and pipeline.max_lag == 0:
        yield (
            "with pipeline.max_lag=0 nothing runs when engines get new weights",
            "pipeline.{on_new_weights,over_lag} rollout.native.recompute_cache",
        )


def _cluster(config: RunConfig, plan: Plan) -> _Unused:
    if plan.layout.mode == "in_process":
        yield (
            "everything runs in one process",
            "cluster.{group_names,address,start_timeout_s,call_timeout_s} "
            "{train,critic.train,reference.train}.balance_ranks",
        )
        if not config.cluster.placement:
            yield (
                "everything runs in one process, on the first device",
                "cluster.{num_nodes,devices_per_node}",
            )
    if config.run.device == "cpu":
        yield (
            "with run.device=cpu everything is in host memory",
            "{train,critic.train,reference.train}.offload.{weights,optimizer}",
        )
        yield (
            "there are no CUDA graphs with run.device=cpu",
            "rollout.{native,vllm,sglang}.cuda_graphs rollout.{vllm,sglang}.cuda_graph_max_batch",
        )


def _model(config: RunConfig, _: Plan) -> _Unused:
    if config.model.lora is not None and config.model.lora.path is not None:
        yield "the adapters in model.lora.path determine it", "model.lora.{rank,alpha,targets}"
    if config.model.path is None:
        yield "a model built from sizes has no files", "model.low_memory_load"
    if config.model.mlp is not None:
        yield (
            "an MLP is not a transformer",
            "model.{architecture,attention,dtype,eos_token_id,lora,pad_token_id} {train,critic.train,reference.train}."
            "{compile,gradient_checkpointing,liger_kernels,logprob_chunk_bytes}",
        )


def _training(config: RunConfig, plan: Plan) -> _Unused:
    """Rules of every section of training settings, here called `@`."""
    has_critic = plan.needs_critic and config.critic.train is None
    has_reference = plan.needs_reference and config.reference.train is None
    if plan.old_logprobs != "recompute" and not has_critic and not has_reference:
        yield (
            "this run has no inference passes (log-probs or values before the update)",
            "train.{infer_batch_tokens,infer_batch_rows}",
        )
    sections = {
        "train": config.train,
        "critic.train": config.critic.train,
        "reference.train": config.reference.train,
    }
    for at, train in sections.items():
        if train is None:
            continue
        for rule in (_optimizer, _backend, _megatron):
            for why, keys in rule(config, plan, train):
                yield why.replace("@", at), keys.replace("@", at)
    if config.sft is not None:
        for why, keys in _optimizer(config, plan, config.sft):
            yield why.replace("@", "sft"), keys.replace("@", "sft")


def _optimizer(_: RunConfig, __: Plan, section: TrainConfig | SftConfig) -> _Unused:
    optimizer, schedule = section.optimizer, section.optimizer.schedule
    if optimizer.kind == "sgd":
        yield "@.optimizer.kind is sgd", "@.optimizer.{betas,eps}"
    if schedule.decay == "constant":
        yield "@.optimizer.schedule.decay is constant", "@.optimizer.schedule.{min_ratio,decay_steps}"
    if schedule.decay == "inverse_sqrt":
        yield "@.optimizer.schedule.decay is inverse_sqrt", "@.optimizer.schedule.decay_steps"
    if not (schedule.warmup_steps or schedule.warmup_fraction):
        yield "@.optimizer has no warm-up", "@.optimizer.schedule.start_ratio"


def _backend(config: RunConfig, _: Plan, train: TrainConfig) -> _Unused:
    backend, fsdp = train.backend, train.fsdp
    if backend not in ("fsdp", "fsdp2"):
        yield "@.backend is not fsdp or fsdp2", "@.fsdp.*"
    if backend != "deepspeed":
        yield "@.backend is not deepspeed", "@.deepspeed.*"
    elif train.deepspeed.cpu_offload:
        yield (
            "@.deepspeed.cpu_offload already keeps everything in host memory",
            "@.offload.{weights,gradients,optimizer}",
        )
    if backend in ("single", "fsdp", "fsdp2"):
        yield "@.backend always frees gradients after a step", "@.offload.gradients"
    if "fp16" not in (config.model.dtype, train.autocast):
        yield "fp16 is not used", "@.grad_scaler"
    if backend == "fsdp":
        yield "@.backend=fsdp does not have this option", "@.fsdp.{pin_memory,reshard_after_forward}"
    if backend == "fsdp2":
        yield (
            "@.backend=fsdp2 does not have this option",
            "@.fsdp.{forward_prefetch,backward_prefetch,limit_all_gathers,buffer_dtype}",
        )
    if not fsdp.cpu_offload:
        yield "@.fsdp.cpu_offload is false", "@.fsdp.pin_memory"
    elif backend in ("fsdp", "fsdp2"):
        yield "@.fsdp.cpu_offload already keeps everything in host memory", "@.offload.{weights,optimizer}"
    if fsdp.sharding == "grad_op":
        yield "@.fsdp.sharding=grad_op keeps weights gathered", "@.fsdp.reshard_after_forward"
    if fsdp.sharding == "none":
        yield "@.fsdp.sharding=none shards nothing", "@.fsdp.size"


def _megatron(config: RunConfig, plan: Plan, train: TrainConfig) -> _Unused:
    own = train.megatron
    if train.backend != "megatron":
        yield "@.backend is not megatron", "@.megatron.*"
        return
    if find_spec("transformer_engine") is None:
        yield (
            "the fused kernel needs Transformer Engine, which is not installed",
            "@.megatron.transformer.apply_rope_fusion",
        )
    is_other = config.critic.path is not None or config.reference.path is not None
    if plan.model_size is not None and not plan.model_size.num_experts and not is_other:
        yield (
            "the model has no experts",
            "@.megatron.{moe_grouped_gemm,moe_layer_recompute,moe_token_dispatcher}",
        )
    yield from _recomputation(own)
    if own.tensor_parallel == 1:
        yield "@.megatron.tensor_parallel is 1", "@.megatron.sequence_parallel"
    if own.pipeline_parallel == 1:
        yield "@.megatron.pipeline_parallel is 1", "@.megatron.transformer.batch_p2p_comm"
    if not own.overlap_grad_reduce:
        yield (
            "with @.megatron.overlap_grad_reduce=false all gradients form one bucket",
            "@.megatron.ddp_bucket_size",
        )
    if not own.distributed_optimizer or train.optimizer.kind == "sgd":
        yield "optimizer states are not sharded", "@.megatron.overlap_param_gather"
    if train.optimizer.kind == "sgd":
        yield "SGD has no optimizer states", "@.megatron.distributed_optimizer"
    if "fp16" not in (config.model.dtype, train.autocast):
        yield "fp16 is not used", "@.megatron.dynamic_loss_scale_window"
    yield (
        "the backend megatron uses @.megatron.dynamic_loss_scale_window",
        "@.grad_scaler.growth_interval",
    )


def _recomputation(own: MegatronConfig) -> _Unused:
    if own.recompute_granularity == "full":
        yield "recompute_granularity=full recomputes whole layers", "@.megatron.moe_layer_recompute"
    else:
        yield (
            "@.megatron.recompute_granularity is not full",
            "@.megatron.{recompute_method,recompute_num_layers}",
        )
    if own.recompute_granularity != "off":
        yield "@.megatron.recompute_granularity is used instead", "@.gradient_checkpointing"


def has_tokens(config: RunConfig) -> bool:
    """Whether trajectories have prompts and tokens; those of perceptrons do not."""
    return not isinstance(config.env, GymnasiumEnv)


def is_of_text(config: RunConfig) -> bool:
    """Whether the environment is one of messages."""
    return isinstance(config.env, SingleTurnEnv | ToolEnv)


_RULES: tuple[Callable[[RunConfig, Plan], _Unused], ...] = (
    _roles,
    _losses,
    _advantages,
    _prompts,
    _by_one_key,
    _always,
    _rewards_and_reports,
    _rollouts,
    _engines,
    _pipeline,
    _cluster,
    _model,
    _training,
)
