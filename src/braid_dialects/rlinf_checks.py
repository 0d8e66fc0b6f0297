"""Constraints between RLinf keys, each a generator of (key, error)."""

from __future__ import annotations

from collections.abc import Iterator

from . import rlinf_facts as facts
from .compat import Check, Source

_Found = Iterator[tuple[str, str]]


def _lengths(source: Source) -> _Found:
    whole, prompt = source.get("runner.seq_length"), source.get("data.max_prompt_length")
    if not facts.is_robots(source) and whole is not None and prompt is not None and whole <= prompt:
        yield (
            "runner.seq_length",
            f"{whole} leaves no room for an answer with data.max_prompt_length={prompt}; raise it above {prompt}",
        )
    budget = source.get("runner.max_tokens_per_mbs")
    if (
        source.get("runner.enable_dynamic_batch_size")
        and budget is not None
        and whole is not None
        and budget < whole
    ):
        yield (
            "runner.max_tokens_per_mbs",
            f"{budget} is below runner.seq_length={whole}, the length of the longest row; raise it to at least {whole}",
        )


def _batches(source: Source) -> _Found:
    whole, micro, ranks = facts.global_batch(source), facts.micro_batch(source), facts.dp_size(source)
    key = "actor.global_batch_size" if facts.is_robots(source) else "algorithm.n_minibatches"
    if not facts.is_robots(source):
        rows = (source.get("data.rollout_batch_size") or 0) * (source.get("algorithm.group_size") or 0)
        parts = source.get("algorithm.n_minibatches")
        if whole is not None and (whole < 1 or rows % parts):
            yield (
                key,
                f"{rows} rows per round cannot be split into {parts} equal mini-batches; set it to a divisor of {rows}",
            )
            return
    if whole is not None and micro is not None and whole % (micro * ranks):
        yield (
            key,
            f"the {whole} rows of an optimizer step are not a multiple of {micro} rows per micro-batch * {ranks} data-parallel "
            f"ranks = {micro * ranks}",
        )


def _robots(source: Source) -> _Found:
    if not facts.is_robots(source):
        return
    group, stages = source.get("algorithm.group_size") or 1, source.get("rollout.pipeline_stage_num") or 1
    for role in ("train", "eval"):
        total = source.get(f"env.{role}.total_num_envs")
        unit = stages * (group if role == "train" else 1)
        if total is not None and total % unit:
            yield (
                f"env.{role}.total_num_envs",
                f"{total} simulators are not a multiple of rollout.pipeline_stage_num={stages}"
                + (f" * algorithm.group_size={group}" if role == "train" else ""),
            )
    steps, chunk = source.get("env.train.max_episode_steps"), source.get("actor.model.num_action_chunks")
    if steps is not None and chunk is not None and steps < chunk:
        yield (
            "env.train.max_episode_steps",
            f"{steps} env steps are fewer than an action chunk, actor.model.num_action_chunks={chunk}",
        )
    if not source.has("env.train.env_type"):
        yield (
            "env.train.env_type",
            "an embodied task needs a simulator: mount a preset, such as env/libero_10@env.train, or set this key",
        )
    if (source.get("runner.val_check_interval") or 0) > 0 and not source.has("env.eval"):
        yield "runner.val_check_interval", "validation needs env.eval; add it, or set this to -1"


def _groups(source: Source) -> _Found:
    kind, size = source.get("algorithm.adv_type"), source.get("algorithm.group_size")
    is_of_groups = kind in ("grpo", "grpo_dynamic") or source.get("algorithm.use_reinpp_baseline") is True
    if is_of_groups and size == 1:
        yield (
            "algorithm.group_size",
            f"algorithm.adv_type={kind} compares the answers of a group; raise it above 1",
        )


def _logprobs(source: Source) -> _Found:
    recomputes, returns = (
        source.values.get(f"rollout.{name}_logprobs", True) for name in ("recompute", "return")
    )
    if not recomputes and not returns:
        yield (
            "rollout.return_logprobs",
            "false, like rollout.recompute_logprobs, so there are no log-probs; set one of them to true",
        )
    if source.get("algorithm.importance_sampling_fix") and not recomputes:
        yield (
            "algorithm.importance_sampling_fix",
            "needs recomputed log-probs; set rollout.recompute_logprobs to true",
        )


def _cadences(source: Source) -> _Found:
    save, validate = source.get("runner.save_interval"), source.get("runner.val_check_interval")
    if save is not None and validate is not None and save > 0 and validate > 0 and save % validate:
        yield "runner.save_interval", f"{save} is not a multiple of runner.val_check_interval={validate}"


def _devices(source: Source) -> _Found:
    actor, rollout = facts.devices_of(source, "actor"), facts.devices_of(source, "rollout")
    if actor is None or rollout is None or facts.is_robots(source):
        return
    shared = sorted(set(actor.numbers) & set(rollout.numbers))
    if shared and actor.numbers != rollout.numbers:
        yield (
            "cluster.component_placement",
            f"actor and rollout share only the devices {', '.join(map(str, shared))}; place them on the same devices, or on "
            "disjoint ones",
        )
    per_engine, num_devices = facts.engine_parallel(source), len(rollout.numbers)
    if num_devices % per_engine:
        yield (
            "rollout.tensor_parallel_size",
            f"{num_devices} rollout devices are not a multiple of the {per_engine} devices per engine",
        )
    elif facts.file_backend(source) == "megatron":
        yield from _model_parallel(source, len(actor.numbers), is_shared=actor.numbers == rollout.numbers)


def _model_parallel(source: Source, num_devices: int, *, is_shared: bool) -> _Found:
    per_copy = facts.model_parallel(source)
    if num_devices % per_copy:
        yield (
            "actor.model.tensor_model_parallel_size",
            f"{num_devices} actor devices are not a multiple of the {per_copy} devices per model replica",
        )
    trained, sampled = (
        source.get("actor.model.tensor_model_parallel_size") or 1,
        source.get("rollout.tensor_parallel_size"),
    )
    if is_shared and trained % sampled:
        yield (
            "rollout.tensor_parallel_size",
            f"{sampled} does not divide actor.model.tensor_model_parallel_size={trained}, as required on shared devices",
        )


def _pipelined(source: Source) -> _Found:
    """Check files with actor and rollout on different devices, where rows arrive during training."""
    actor, rollout = facts.devices_of(source, "actor"), facts.devices_of(source, "rollout")
    if actor is not None and rollout is not None and not set(actor.numbers) & set(rollout.numbers):
        for key in ("runner.enable_dynamic_batch_size", "actor.enable_dp_load_balance"):
            if source.get(key):
                yield (
                    key,
                    "needs all rows of a round at once, but with actor and rollout on different devices rows arrive one by "
                    "one; set it to false",
                )
    lines = source.get("cluster.component_placement") or {}
    is_placed = any("inference" in line.split(",") for line in lines)
    inference = facts.devices_of(source, "inference")
    is_apart = (
        is_placed and inference is not None and actor is not None and inference.numbers != actor.numbers
    )
    if is_apart and source.get("rollout.recompute_logprobs") is False:
        yield (
            "cluster.component_placement",
            "inference has devices but nothing to compute; set rollout.recompute_logprobs=true, or remove inference",
        )


def _precision(source: Source) -> _Found:
    kind = facts.precision(source)
    if facts.file_backend(source) == "megatron":
        if kind == "fp32" and source.has("actor.model.precision"):
            yield (
                "actor.model.precision",
                "Megatron needs 16 bits; set it to fp16 or bf16, or set actor.training_backend=fsdp",
            )
        for flag in ("fp16", "bf16"):
            if source.values.get(f"actor.optim.{flag}") is True and kind != flag:
                yield f"actor.optim.{flag}", f"true contradicts actor.model.precision={kind}; make them agree"


def _megatron_start(source: Source) -> _Found:
    path, converts = source.get("actor.model.megatron_checkpoint"), source.get("actor.megatron.use_hf_ckpt")
    if facts.file_backend(source) != "megatron":
        return
    if path is not None and converts is True:
        yield (
            "actor.model.megatron_checkpoint",
            "conflicts with actor.megatron.use_hf_ckpt=true: both set the initial weights; remove one",
        )
    if path is None and converts is False:
        yield (
            "actor.megatron.use_hf_ckpt",
            "with false, set actor.model.megatron_checkpoint to the initial weights",
        )


CHECKS: tuple[Check, ...] = (
    _lengths,
    _batches,
    _robots,
    _groups,
    _logprobs,
    _cadences,
    _devices,
    _pipelined,
    _precision,
    _megatron_start,
)
