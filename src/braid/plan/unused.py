"""Keys that have no effect in a run, each with the reason.

Each rule yields (reason, keys). Keys are patterns separated by spaces: `{a,b}` stands for alternatives, and
`section.*` for all keys of a section. Where several rules name a key, the first gives the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from braid.config.env import AgentEnvConfig, ChatEnv, MetaworldEnv, SimulatorEnv, SingleTurnEnv, ToolsEnv
from braid.config.reward import CodeReward, JudgeReward
from braid.config.rollout import SamplingConfig
from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of
from braid.config.train import TrainConfig

from .plan import Plan

_Unused = Iterator[tuple[str, str]]
"""(reason, keys)."""


def unused_keys(config: RunConfig, plan: Plan) -> dict[str, str]:
    """Unused key or section -> the reason, whether or not it is set. `key[]` stands for all items of a
    list."""
    reasons: dict[str, str] = {}
    rules = (*_RULES, _evaluation) if plan.verb == "eval" else _RULES
    for rule in rules:
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
    if isinstance(section, dict):
        yield from set_keys(section[name], rest, f"{at}{name}.")
        return
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


_TRAIN = "{train,critic.train,reference.train}"
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


def _by_one_key(config: RunConfig, plan: Plan) -> _Unused:
    """Keys without effect while another has a certain value: in the same section, of the recipe, or
    elsewhere."""
    yield from config.unused_settings()
    recipe = plan.recipe
    if recipe.aggregation != "token_sum_constant":
        yield "algorithm.aggregation is not token_sum_constant", "algorithm.aggregation_constant"
    if recipe.logprob_level != "token":
        yield "algorithm.logprob_level is not token", "algorithm.turn_weighting"
    if recipe.entropy_coef == 0:
        yield "algorithm.entropy_coef is 0", "algorithm.entropy_level"
    if recipe.kl_coef == 0:
        keys = "algorithm.{kl_estimator,kl_in,kl_clamp,kl_target,kl_horizon}"
        yield "algorithm.kl_coef is 0", f"{keys} reference.{{path,train,update_every_epochs}}"
    if recipe.kl_target is None:
        yield "algorithm.kl_target is off", "algorithm.kl_horizon"
    if config.data.use_chat_template == "never":
        yield "data.use_chat_template is never", "model.chat_template data.chat_template_kwargs"
    if config.rollout.sampling.greedy:
        yield "rollout.sampling.greedy is true", "rollout.sampling.{top_p,top_k,min_p}"


def _sections(config: RunConfig) -> list[str]:
    """The sections of training settings that are set."""
    sections = [("critic.train", config.critic.train), ("reference.train", config.reference.train)]
    return ["train", *(at for at, section in sections if section is not None)]


ONLY_EVALUATES = "an evaluation trains nothing"


def _evaluation(_: RunConfig, __: Plan) -> _Unused:
    yield (
        ONLY_EVALUATES,
        "run.{max_rounds,max_epochs,max_restarts} rollout.{prompts_per_round,group_size,filter.*} "
        "algorithm.* reference.* critic.{path,train.*,warmup_rounds,normalize_values} "
        "checkpoint.{every_rounds,every_s,at_end,keep} eval.{every_rounds,before,at_end} "
        "data.train[].* data.{shuffle,seed,mix} "
        "train.{optimizer.*,steps_per_pass,passes_per_round,shuffle,max_grad_norm,micro_batch_rows,micro_batch_tokens} "
        "train.{infer_batch_rows,infer_batch_tokens,grad_scaler.*,gradient_checkpointing} sft.*",
    )


def _always(_: RunConfig, __: Plan) -> _Unused:
    yield (
        "only sft.data has target responses",
        "data.{train,eval}[].{response_key,response_function,messages_key,tools_key}",
    )
    yield "supervised examples are not scored", "sft.data[].{answer_key,source_key}"
    yield "the policy has no value head", "sft.optimizer.value_lr"
    yield "a critic computes no log-probs", "critic.train.{compile,logprob_chunk_bytes}"
    yield "train.record_memory records all roles", "{critic,reference}.train.record_memory"


def _roles(config: RunConfig, plan: Plan) -> _Unused:
    reference = config.reference
    if not plan.learns_values:
        yield (
            "the advantage uses no critic",
            "critic.{network,path,train,warmup_rounds,normalize_values,head_name} "
            "algorithm.{value_clip,huber_delta,value_loss_coef}",
        )
    elif not plan.needs_critic:
        yield "the policy computes the values", "critic.{path,train}"
    if plan.needs_reference:
        yield (
            "the reference model is not trained",
            "reference.train.{optimizer,steps_per_pass,passes_per_round,shuffle,max_grad_norm,max_skipped_steps,"
            "gradient_checkpointing,grad_scaler,micro_batch_rows,offload.gradients,offload.optimizer}",
        )
    if not plan.learns_values or (plan.needs_critic and config.critic.train is not None):
        yield "the policy has no value head, and a critic has its own settings", "train.optimizer.value_lr"
    if reference.path is None and config.model.lora is not None and plan.layout.mode == "in_process":
        keys = "reference.train.{compile,logprob_chunk_bytes}"
        yield "the reference is the policy's model with the initial adapters", keys
    if reference.train is not None and reference.train.infer_batch_tokens is not None:
        yield "reference.train.infer_batch_tokens is used instead", "reference.train.micro_batch_tokens"
    if plan.layout.role("inference") is None:
        yield "inference has no separate devices: the policy's workers compute log-probs", "inference.*"
    yield from config.train.backend.unused_inference(config.inference)


def _losses(config: RunConfig, plan: Plan) -> _Unused:
    old_logprobs = f"with algorithm.old_logprobs={plan.old_logprobs}"
    if plan.old_logprobs == "behavior":
        yield f"{old_logprobs} there is nothing to correct", "algorithm.corrections"
    if plan.old_logprobs == "interpolated" and not config.max_lag:
        yield (
            "rounds are sampled with the weights that they start from, so interpolated log-probs are the "
            "engine's",
            "algorithm.corrections",
        )
    if plan.old_logprobs == "current":
        yield f"{old_logprobs} all ratios are 1", "algorithm.early_stop_ratio"
    if config.model.num_action_chunks == 1 or not plan.learns_values or is_of_text(config):
        yield "only values of chunks of several actions depend on it", "algorithm.reward_level"
    if all(of.level == "token" for of in config.algorithm.corrections or ()):
        yield "token-level weights depend on a single token", "algorithm.corrections[].tokens"


def _statistics(_: RunConfig, plan: Plan) -> _Unused:
    recipe, advantage = plan.recipe, plan.recipe.advantage
    if recipe.whiten_rewards:  # over positions, so a constant subtracted at one of them matters
        return
    if advantage.ignores_reward_mean:
        yield (
            "advantages are differences within a group, so a constant subtracted from its rewards cancels",
            "algorithm.reward_mean",
        )
    if advantage.ignores_reward_scale and not (recipe.kl_coef > 0 and recipe.kl_in == "reward"):
        yield (
            f"{advantage.kind} only compares rewards, so their scale does not matter",
            "algorithm.reward_std",
        )


def _prompts(config: RunConfig, plan: Plan) -> _Unused:
    if not has_tokens(config):
        is_vla = config.model.vla is not None
        read = {"greedy", "temperature"} if is_vla else {"greedy"}
        text = ",".join(name for name in SamplingConfig.model_fields if name not in read)
        tokenizer = "" if is_vla else " model.tokenizer"
        yield (
            "a simulator has no text",
            f"{{rollout,eval}}.sampling.{{{text}}} "
            f"rollout.{{engine,max_sequence_tokens,print_outputs,check_weights}} reward.overlong "
            f"checkpoint.export_every_rounds critic.path model.chat_template{tokenizer} "
            "data.{mix,max_prompt_tokens,overlong,use_chat_template,chat_template_kwargs}",
        )
    if is_of_text(config):
        yield "env.timeouts limits the calls of text environments", "rollout.env_timeout_s"
    if is_of_text(config) and not config.data.eval and not has_own_tasks(config):
        why, keys = "there are no data.eval sources", "every_rounds,samples_per_prompt,pass_at,sampling"
        yield why, f"eval.{{{keys},batch_prompts,shuffle}} report.eval_samples"
        if plan.recipe.supervised_coef == 0:
            yield f"{why}, and algorithm.supervised_coef is 0", "eval.success_reward"
    if config.model.path is None and config.model.tokenizer is None:
        yield "neither the model nor the tokenizer comes from a folder", "model.trust_remote_code"
    if config.model.build is not None and not (config.model.tokenizer or config.model.chat_template):
        yield "the character tokenizer has no chat template", "data.chat_template_kwargs"


def _rewards_and_reports(config: RunConfig, _: Plan) -> _Unused:
    parts, report, target = config.reward.parts, config.report, config.eval.target
    if target.min_final is None and target.min_gain is None:
        yield "there are no targets", "eval.target.metric"
    if not parts:
        yield "there are no reward parts", "reward.{timeout_s,retries,concurrency}"
    if config.sft is not None and not any(source.messages_key for source in config.sft.data):
        yield "there are no conversations to imitate (messages_key)", "sft.data[].tools_key"
    if all(isinstance(part, JudgeReward) for part in parts):
        yield "judges have their own retries", "reward.retries"
    if not any(isinstance(part, CodeReward) for part in parts):
        yield "no reward part runs programs", "reward.code"
    if config.checkpoint.every_rounds > 0:
        yield "checkpoint.every_rounds is set", "checkpoint.every_s"
    if not (report.tensorboard or report.wandb or report.swanlab):
        yield "TensorBoard and trackers are off", "report.dir"


def _rollouts(config: RunConfig, plan: Plan) -> _Unused:  # noqa: ARG001
    rollout, env = config.rollout, config.env
    if (rollout.request_batch or 0) >= rollout.prompts_per_round:
        yield "a round does not have more prompts than that", "rollout.request_batch"
    samplings = (rollout.sampling, config.eval_sampling)
    longest = config.data.max_prompt_tokens + max(sampling.max_new_tokens for sampling in samplings)
    if isinstance(env, ChatEnv):
        longest = env.max_context_tokens
    if isinstance(env, ToolsEnv) and "python" not in env.tools:
        yield "env.tools does not contain the tool `python`", "env.python"
    if rollout.max_sequence_tokens is not None and rollout.max_sequence_tokens >= longest:
        keys = "rollout.max_sequence_tokens"
        yield "the limits of prompt and answer do not add up to more than that", keys
    if isinstance(env, ToolsEnv | AgentEnvConfig) and env.replies == "text":
        yield "replies are text within the policy's answer", "env.thinking"
    if isinstance(env, AgentEnvConfig):
        if env.mix:
            yield "env.mix names the environments", "env.kwargs"
        if has_own_tasks(config):
            yield "there is no data", "env.mix_key data.{max_prompt_tokens,overlong}"
        else:
            shares = [f"env.mix.{kind}.{{share,eval_share}}" for kind in env.mix]
            yield "the data gives the tasks", " ".join(("env.{tasks,eval_episodes}", *shares))


def _simulators(config: RunConfig, plan: Plan) -> _Unused:
    env = config.env
    if isinstance(env, SimulatorEnv) and env.num_envs > plan.trajectories_per_round:
        yield "a round has fewer trajectories than that", "env.num_envs"
    if isinstance(env, SimulatorEnv) and config.rollout.group_size == 1 and not env.auto_reset:
        yield "a group is a single episode (rollout.group_size)", "env.fixed_reset_states"
    if isinstance(env, SimulatorEnv) and not env.processes:
        yield "the environments are in the run's own process (env.processes)", "env.offload"
    if plan.is_pipelined:
        yield "in a pipelined run environments are always stepped", "env.offload"
    if isinstance(env, SimulatorEnv) and env.eval_reset_seeds is not None:
        yield "env.eval_reset_seeds has one for each episode", "env.eval_episodes"
    if isinstance(env, SimulatorEnv) and env.processes > env.num_envs:
        yield "there are fewer environments than that (env.num_envs)", "env.processes"
    if isinstance(env, SimulatorEnv) and not env.video.are_saved:
        yield "no videos are saved", "env.video.{num_episodes,overlay,frames_per_s,dir}"
        if isinstance(env, MetaworldEnv) and not env.cameras:
            yield "there are neither cameras nor videos", "env.{image_size,shadows}"
        if isinstance(env, MetaworldEnv) and config.model.mlp is not None:
            yield "a perceptron reads no text, and there are no videos", "env.instruction"
    if not (isinstance(env, SimulatorEnv) and env.processes):
        yield "only simulators in processes of their own have it", "rollout.env_timeout_s"


def _engines(config: RunConfig, plan: Plan) -> _Unused:
    engine, is_robot = config.rollout.engine, config.model.mlp is not None
    yield from engine.unused(config, plan)
    has_gpus, is_local = plan.layout.has_gpus, plan.layout.mode == "in_process" and not engine.is_served
    dtype = engine.dtype_in(config, plan.num_parameters, has_gpus=has_gpus)
    is_shared = is_robot or (is_local and dtype == config.model.dtype)
    if is_shared and not plan.needs_critic and not plan.needs_reference:
        yield "the engine samples with the trainer's own weights", "train.offload.weights"


def _pipeline(config: RunConfig, plan: Plan) -> _Unused:
    pipeline = config.pipeline
    if plan.verb != "train":
        yield "only braid train has a pipeline", "pipeline.*"
    if pipeline is not None and pipeline.max_lag == 0:
        keys = "pipeline.{on_new_weights,over_lag}"
        yield "with pipeline.max_lag=0 nothing runs when engines get new weights", keys


def _cluster(config: RunConfig, plan: Plan) -> _Unused:
    if plan.layout.mode == "in_process":
        why, keys = (
            "everything runs in one process",
            "cluster.{group_names,address,buffer_processes,start_timeout_s,call_timeout_s}",
        )
        yield why, f"{keys} {_TRAIN}.balance_ranks"
        if not config.cluster.placement:
            yield f"{why}, on the first device", "cluster.{num_nodes,devices_per_node}"
    if config.run.device == "cpu":
        yield "with run.device=cpu everything is in host memory", f"{_TRAIN}.offload.{{weights,optimizer}}"


def _model(config: RunConfig, _: Plan) -> _Unused:
    if config.model.lora is not None and config.model.lora.path is not None:
        yield "the adapters in model.lora.path determine it", "model.lora.{rank,alpha,targets}"
    if config.model.path is None:
        yield "a model built from sizes has no files", "model.low_memory_load"
    if config.model.mlp is not None:
        yield (
            "an MLP is not a transformer",
            "model.{architecture,attention,dtype,eos_token_id,lora,pad_token_id} "
            f"{_TRAIN}.{{compile,gradient_checkpointing,liger_kernels,logprob_chunk_bytes}}",
        )


def _vla(config: RunConfig, plan: Plan) -> _Unused:
    vla = config.model.vla
    if vla is None:
        return
    yield (
        "the checkpoint determines it",
        "model.vla.{extra_vocab_size,hidden_size,qkv_bias} model.architecture",
    )
    yield "a robot policy does not write text", "model.{chat_template,eos_token_id,pad_token_id}"
    yield (
        "its modules compute attention and log-probs themselves",
        (f"model.attention {_TRAIN}.{{compile,liger_kernels,logprob_chunk_bytes}}"),
    )
    if vla.kind == "pi0":
        yield "only OpenVLA reads it", "model.vla.{form,center_crop,use_proprio,image_size,vocab_size}"
        yield "denoising has no temperature", "{rollout,eval}.sampling.temperature"
    else:
        yield "only pi0 denoises actions", "model.vla.{denoise_steps,noise,noise_level,train_expert_only}"
        if vla.kind == "openvla":
            yield "only OpenVLA-OFT has several forms", "model.vla.form"
    if vla.evaluates_greedily is not None:
        yield "model.vla.greedy decides it, which is true for pi0 by default", "eval.sampling.greedy"
    if config.eval_sampling.greedy:
        yield "evaluation takes the likeliest actions", "eval.sampling.temperature"
    elif not plan.needs_greedy:
        yield "evaluation samples", "model.vla.eval_batch_rows"
    if vla.noise == "flow_noise":
        yield "a network predicts the noise", "model.vla.noise_level"


def _training(config: RunConfig, plan: Plan) -> _Unused:
    has_values = plan.learns_values and (not plan.needs_critic or config.critic.train is None)
    has_reference = plan.needs_reference and config.reference.train is None
    if plan.old_logprobs != "recompute" and not has_values and not has_reference:
        why = "this run has no inference passes (log-probs or values before the update)"
        yield why, "train.{infer_batch_tokens,infer_batch_rows}"
    for at in (*_sections(config), *(["sft"] if config.sft is not None else [])):
        schedule = attrgetter(at)(config).optimizer.schedule
        if not (schedule.warmup_steps or schedule.warmup_fraction):
            yield f"{at}.optimizer has no warm-up", f"{at}.optimizer.schedule.start_ratio"
    for at in _sections(config):
        section: TrainConfig = attrgetter(at)(config)
        yield from section.backend.unused(config, plan, section, at)
        if "fp16" not in (config.model.dtype, section.autocast):
            yield "fp16 is not used", f"{at}.grad_scaler"


def has_tokens(config: RunConfig) -> bool:
    """Whether trajectories have prompts and tokens; those of perceptrons do not."""
    return not isinstance(config.env, SimulatorEnv)


def has_own_tasks(config: RunConfig) -> bool:
    """Whether the environment makes its tasks itself, from seeds."""
    data = config.data
    return isinstance(config.env, AgentEnvConfig) and not data.train and not data.eval


def is_of_text(config: RunConfig) -> bool:
    """Whether the environment is one of messages."""
    return isinstance(config.env, SingleTurnEnv | ChatEnv)


_RULES: tuple[Callable[[RunConfig, Plan], _Unused], ...] = (
    _roles,
    _losses,
    _statistics,
    _prompts,
    _by_one_key,
    _always,
    _rewards_and_reports,
    _rollouts,
    _simulators,
    _engines,
    _pipeline,
    _cluster,
    _model,
    _vla,
    _training,
)
