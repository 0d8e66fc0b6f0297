"""The config language of ROLL's RLVR pipeline: tables of its keys by topic, and rules across keys.

roll_facts.py       values derived from several keys, and the batch arithmetic
roll_run.py         the run, sizes, rollouts, evaluation; keys of other pipelines
roll_algorithm.py   advantages and loss
roll_data.py        data_args, generating_args, validation, rewards
roll_workers.py     actor_train, critic, reference, actor_infer
roll_strategies.py  strategy_args: Megatron, FSDP2, vLLM, SGLang
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from . import roll_facts as facts
from .roll_algorithm import ALGORITHM
from .roll_data import (
    ANSWER,
    CHOICE_SCORES,
    DATA,
    PARTS,
    REWARDS,
    column_of,
    eval_max_new_tokens,
    is_choice,
    part,
    samples_for_itself,
    sampling,
    scored,
    worker_of,
)
from .roll_facts import STRATEGY
from .roll_run import ALIASES, OTHER_PIPELINES, PIPELINE
from .roll_workers import ACTOR_INFER, ACTOR_TRAIN, CRITIC, REFERENCE
from .table import Dialect, Source, table

NO_MODEL = "(none: set pretrain)"
"""Placeholder for the model folder in a file that names none: the file can be explained, but not run."""


def _base(source: Source) -> Mapping[str, Any]:
    """Native settings that depend on several keys: data, rewards, evaluation, micro-batches, offloading."""
    return {
        "model.path": NO_MODEL,
        **_data(source),
        **_rewards(source),
        **_evaluation(source),
        **_micro_batches(source),
        **_sharing(source),
    }


def _data(source: Source) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for role, native in (("actor_train", "data.train[0]"), ("validation", "data.eval[0]")):
        if source.get(f"{role}.data_args.file_name"):
            made |= {f"{native}.kind": "file", f"{native}.answer_key": ANSWER}
            made[f"{native}.prompt_key"] = column_of(source, role)
            if len(facts.domains(source)) > 1:
                made[f"{native}.source_key"] = source.get(f"{role}.data_args.tag") or "tag"
    return made


def _rewards(source: Source) -> dict[str, Any]:
    """One reward part per domain; a math part if the file has no domains."""
    names = facts.domains(source)
    if not names:
        return {"reward.parts[0].kind": "math"}
    return {path: value for name in names for path, value in part(source, name).items()}


def _evaluation(source: Source) -> dict[str, Any]:
    """Sampling settings of evaluation if the file sets any; those it omits equal the ones of training."""
    if not samples_for_itself(source):
        return {}
    role = "validation" if source.has("validation.generating_args") else "actor_infer"
    values = sampling(source, role) | {"max_new_tokens": eval_max_new_tokens(source)}
    return {f"eval.sampling.{name}": value for name, value in values.items()}


def _micro_batches(source: Source) -> dict[str, Any]:
    """Micro-batch token limits: as many tokens as the configured number of rows can have, so that they never
    bind."""
    whole = source.get("prompt_length") + facts.max_new_tokens(source)
    roles = {"actor_train": True, "critic": not facts.no_critic(source)}
    made: dict[str, Any] = {}
    for role in (name for name, is_there in roles.items() if is_there):
        native = facts.NATIVE_TRAIN[role]
        made[f"{native}.micro_batch_tokens"] = whole * source.get(
            f"{role}.training_args.per_device_train_batch_size"
        )
        made[f"{native}.infer_batch_tokens"] = whole * source.get(f"{role}.infer_batch_size")
    if not facts.no_critic(source):
        made["critic.train.backend"] = facts.backend(source, "critic")
    if not facts.no_reference(source) and source.has("reference"):
        made["reference.train.backend"] = facts.backend(source, "reference")
        made["reference.train.infer_batch_tokens"] = whole * source.get("reference.infer_batch_size")
    return made


def _sharing(source: Source) -> dict[str, Any]:
    """Offload a policy that shares devices with its engine while the engine runs."""
    if facts.one_process(source) or not facts.is_colocated(source):
        return {}
    return {f"train.offload.{what}": True for what in ("weights", "gradients", "optimizer")}


# Rules across keys: (key, error)

Findings = Iterator[tuple[str, str]]


def _lengths(source: Source) -> Findings:
    whole, prompt = facts.sequence_length(source), source.get("prompt_length")
    if whole is None:
        yield "response_length", "set response_length, or sequence_length (prompt plus response)"
    elif whole <= prompt:
        yield (
            "sequence_length",
            f"{whole} leaves no room for a response with prompt_length={prompt}; raise it",
        )
    given = [source.get(f"val_{name}_length") for name in ("prompt", "sequence")]
    if (given[0] is None) != (given[1] is None):
        yield "val_prompt_length", "set both val_prompt_length and val_sequence_length, or neither"
    elif given[0] is not None and given[1] <= given[0]:
        yield (
            "val_sequence_length",
            f"{given[1]} leaves no room for a response with val_prompt_length={given[0]}; raise it",
        )


def _columns(source: Source) -> Findings:
    for role in ("actor_train", "validation"):
        data = f"{role}.data_args"
        if source.get(f"{data}.prompt") and source.get(f"{data}.messages"):
            yield (
                f"{data}.messages",
                "conflicts with data_args.prompt; set one of them, and the other to null",
            )
    if source.get("actor_train.data_args.file_name") and column_of(source, "actor_train") is None:
        yield (
            "actor_train.data_args.prompt",
            "set the column: data_args.prompt for plain text, or data_args.messages for chat messages (image datasets, which "
            "need neither in ROLL, are not supported)",
        )


def _devices(source: Source) -> Findings:
    for role in ("actor_train", "critic", "reference"):
        if (role == "critic" and facts.no_critic(source)) or (
            role == "reference" and facts.no_reference(source)
        ):
            continue
        ranks, shared = facts.world(source, role), facts.model_parallel(source, role)
        if ranks % shared:
            yield (
                f"{role}.device_mapping",
                f"{ranks} devices are not a multiple of {shared}, the devices per model replica (TP * PP * CP, or "
                "ulysses_size); use a multiple",
            )
        size, ulysses = (
            source.get(f"{role}.{STRATEGY}.fsdp_size") or 1,
            source.get(f"{role}.model_args.ulysses_size") or 1,
        )
        if facts.file_backend(source, role) == "fsdp2" and 1 < size < ulysses:
            yield (
                f"{role}.{STRATEGY}.fsdp_size",
                f"{size} is below ulysses_size={ulysses}; raise it to at least {ulysses}",
            )
    count, each = len(facts.devices(source, "actor_infer")), facts.devices_per_engine(source)
    if count % each:
        yield (
            "actor_infer.device_mapping",
            f"{count} devices are not a multiple of the {each} devices per engine (num_gpus_per_worker, or tensor times "
            "pipeline parallelism); use a multiple",
        )


def _batches(source: Source) -> Findings:
    roles = ["actor_train"] if facts.no_critic(source) else ["actor_train", "critic"]
    for role in roles:
        whole, step = facts.samples(source), facts.global_batch(source, role)
        group = source.get("num_return_sequences_in_group")
        key = f"{role}.training_args.gradient_accumulation_steps"
        if whole % step == 0 and step % group == 0:
            continue
        what = (
            f"the {whole} samples of a round are not a multiple of"
            if whole % step
            else f"mini-batches consist of whole prompts with their {group} samples, which do not divide"
        )
        dp = facts.data_parallel(source, role)
        per_device = source.get(f"{role}.training_args.per_device_train_batch_size")
        yield (
            key,
            (
                f"{what} the global batch: per_device_train_batch_size={per_device} * gradient_accumulation_steps="
                f"{source.get(key)} * dp={dp} = {step}; {_fitting(whole, group, per_device * dp)}"
            ),
        )


def _fitting(whole: int, group: int, unit: int) -> str:
    """Suggest values of gradient_accumulation_steps that divide a round into mini-batches of whole
    prompts."""
    found = [n for n in range(1, whole // unit + 1) if whole % (n * unit) == 0 and n * unit % group == 0]
    if found:
        shown = [*found[:6], *(["..."] if len(found) > 7 else []), *found[6:][-1:]]
        return f"values that fit: {', '.join(map(str, shown))}"
    return f"no value fits, because {unit} rows (per_device_train_batch_size * dp) do not divide {whole}; change rollout_batch_size"


def _megatron(source: Source) -> Findings:
    if facts.backend(source, "actor_train") != "megatron":
        return
    prompts, dp = source.get("rollout_batch_size"), facts.data_parallel(source, "actor_train")
    if prompts % dp:
        yield (
            "rollout_batch_size",
            f"{prompts} prompts cannot be divided among dp={dp} ranks; set it to a multiple of {dp}",
        )
    config = f"actor_train.{STRATEGY}"
    dispatcher = source.get(f"{config}.moe_token_dispatcher_type")
    if source.get(f"{config}.moe_shared_expert_overlap") and dispatcher != "alltoall":
        yield (
            f"{config}.moe_shared_expert_overlap",
            f"needs moe_token_dispatcher_type=alltoall, not {dispatcher}",
        )
    stages, chunks = (
        source.get(f"{config}.{name}") or 1
        for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
    )
    accumulated = source.get("actor_train.training_args.gradient_accumulation_steps")
    if chunks > 1 and accumulated % stages:
        yield (
            "actor_train.training_args.gradient_accumulation_steps",
            f"{accumulated} micro-batches are not a multiple of pipeline_model_parallel_size={stages}, as required by the "
            f"interleaved schedule (virtual_pipeline_model_parallel_size={chunks})",
        )


def _exclusive(source: Source) -> Findings:
    if source.get("profiler_timeline") and source.get("profiler_memory"):
        yield "profiler_timeline", "profiler_timeline and profiler_memory are mutually exclusive; choose one"
    if source.get("use_kl_loss") and source.get("kl_loss_coef") > 0 and source.get("add_token_level_kl"):
        yield (
            "add_token_level_kl",
            "conflicts with use_kl_loss: braid has only one KL term, in the loss or in the reward; choose one",
        )
    if source.get("enable_old_logprobs_recompute") and source.get("force_disable_old_logprobs_recompute"):
        yield (
            "force_disable_old_logprobs_recompute",
            "contradicts enable_old_logprobs_recompute; choose one",
        )
    if facts.engine(source) == "sglang" and source.get(f"actor_infer.{STRATEGY}.mem_fraction_static") is None:
        yield (
            f"actor_infer.{STRATEGY}.mem_fraction_static",
            "required for sglang: the fraction of memory for weights and cache, such as 0.6",
        )


def _domains(source: Source) -> Findings:
    names = facts.domains(source)
    for name in names:
        if worker_of(source, name) not in PARTS and not source.get(f"rewards.{name}.worker_cls"):
            yield f"rewards.{name}.worker_cls", "set it to the reward worker of the domain"
        if name in scored(source) and worker_of(source, name) == "LLMJudgeRewardWorker":
            for key in ("judge_api_url", "judge_model_name"):
                if not source.get(f"rewards.{name}.{key}"):
                    yield (
                        f"rewards.{name}.{key}",
                        "required for a judge: a model on an OpenAI-compatible server",
                    )
        if is_choice(source, name) and not source.get(f"rewards.{name}.reward_type"):
            yield f"rewards.{name}.reward_type", f"set it to one of {', '.join(CHOICE_SCORES)}"
        if len(names) > 1 and not source.get(f"rewards.{name}.tag_included"):
            yield f"rewards.{name}.tag_included", "with several domains, each must list the tags of its rows"


ROLL = Dialect(
    name="roll",
    title="ROLL",
    marks=frozenset(
        [
            "rollout_batch_size",
            "prompt_length",
            "response_length",
            "sequence_length",
            "num_return_sequences_in_group",
            "adv_estimator",
            "actor_train",
            "actor_infer",
            "reference",
            "rewards",
            "pretrain",
            "hydra",
            "defaults",
        ]
    ),
    rules=table(
        *PIPELINE,
        *ALGORITHM,
        *ACTOR_TRAIN,
        *CRITIC,
        *REFERENCE,
        *ACTOR_INFER,
        *DATA,
        *REWARDS,
        *OTHER_PIPELINES,
    ),
    base=_base,
    checks=(_lengths, _columns, _devices, _batches, _megatron, _exclusive, _domains),
    aliases=ALIASES,
)
