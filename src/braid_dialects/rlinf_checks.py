"""Constraints between RLinf keys, each a generator of (key, error)."""

from __future__ import annotations

from collections.abc import Iterator

from . import rlinf_facts as facts
from .rlinf_run import critic_settings
from .table import Check, Source

Findings = Iterator[tuple[str, str]]


def _lengths(source: Source) -> Findings:
    whole, prompt = source["runner.seq_length"], source["data.max_prompt_length"]
    if not facts.is_robots(source) and whole is not None and prompt is not None and whole <= prompt:
        why = f"{whole} leaves no room for an answer with data.max_prompt_length={prompt}"
        yield "runner.seq_length", f"{why}; raise it above {prompt}"
    budget = source["runner.max_tokens_per_mbs"]
    is_dynamic = source["runner.enable_dynamic_batch_size"]
    if is_dynamic and budget is not None and whole is not None and budget < whole:
        why = f"{budget} is below runner.seq_length={whole}, the length of the longest row"
        yield "runner.max_tokens_per_mbs", f"{why}; raise it to at least {whole}"


def _batches(source: Source) -> Findings:
    whole, ranks, is_robots = facts.global_batch(source), facts.dp_size(source), facts.is_robots(source)
    key = "actor.global_batch_size" if is_robots else "algorithm.n_minibatches"
    if whole is not None and not is_robots:
        rows = source["data.rollout_batch_size"] * source["algorithm.group_size"]
        if whole < 1 or rows % source[key]:
            why = f"{rows} rows per round cannot be split into {source[key]} equal mini-batches"
            yield key, f"{why}; set it to a divisor of {rows}"
            return
    micro = source["actor.micro_batch_size" if is_robots else "algorithm.training_batch_size_per_gpu"]
    if whole is not None and micro is not None and whole % (micro * ranks):
        why = f"the {whole} rows of an optimizer step are not a multiple of {micro} rows per micro-batch"
        yield key, f"{why} * {ranks} data-parallel ranks = {micro * ranks}"


def _robots(source: Source) -> Findings:
    if not facts.is_robots(source):
        return
    group, stages = source["algorithm.group_size"] or 1, source["rollout.pipeline_stage_num"] or 1
    for role, unit in (("train", stages * group), ("eval", stages)):
        key = f"env.{role}.total_num_envs"
        if source[key] is not None and source[key] % unit:
            why = f"{source[key]} simulators are not a multiple of rollout.pipeline_stage_num={stages}"
            yield key, why + (f" * algorithm.group_size={group}" if role == "train" else "")
    steps, chunk = source["env.train.max_episode_steps"], source["actor.model.num_action_chunks"]
    if steps is not None and chunk is not None and steps < chunk:
        why = f"{steps} env steps are fewer than an action chunk, actor.model.num_action_chunks={chunk}"
        yield "env.train.max_episode_steps", why
    if not source.has("env.train.env_type"):
        why = "an embodied task needs a simulator: mount a preset, such as env/libero_10@env.train"
        yield "env.train.env_type", f"{why}, or set this key"
    if (source["runner.val_check_interval"] or 0) > 0 and not source.has("env.eval"):
        yield "runner.val_check_interval", "validation needs env.eval; add it, or set this to -1"


def _groups(source: Source) -> Findings:
    kind = source["algorithm.adv_type"]
    is_of_groups = kind in ("grpo", "grpo_dynamic") or source["algorithm.use_reinpp_baseline"]
    if is_of_groups and source["algorithm.group_size"] == 1:
        why = f"algorithm.adv_type={kind} compares the answers of a group; raise it above 1"
        yield "algorithm.group_size", why


def _logprobs(source: Source) -> Findings:
    names = ("rollout.recompute_logprobs", "rollout.return_logprobs")
    recomputes, returns = (source.values.get(name, True) for name in names)
    if not recomputes and not returns:
        why = "false, like rollout.recompute_logprobs, so there are no log-probs; set one of them to true"
        yield "rollout.return_logprobs", why
    if source["algorithm.importance_sampling_fix"] and not recomputes:
        why = "needs recomputed log-probs; set rollout.recompute_logprobs to true"
        yield "algorithm.importance_sampling_fix", why


def _cadences(source: Source) -> Findings:
    save, validate = source["runner.save_interval"] or 0, source["runner.val_check_interval"] or 0
    if save > 0 and validate > 0 and save % validate:
        yield "runner.save_interval", f"{save} is not a multiple of runner.val_check_interval={validate}"


def _devices(source: Source) -> Findings:
    actor, rollout = facts.devices_of(source, "actor"), facts.devices_of(source, "rollout")
    if actor is None or rollout is None or facts.is_robots(source):
        return
    shared = sorted(set(actor.numbers) & set(rollout.numbers))
    is_same = actor.numbers == rollout.numbers
    if shared and not is_same:
        why = f"actor and rollout share only the devices {', '.join(map(str, shared))}"
        yield "cluster.component_placement", f"{why}; place them on the same devices, or on disjoint ones"
    per_engine, num_engines = facts.engine_parallel(source), len(rollout.numbers)
    sampled, trained = "rollout.tensor_parallel_size", "actor.model.tensor_model_parallel_size"
    if num_engines % per_engine:
        why = f"{num_engines} rollout devices are not a multiple of the {per_engine} devices per engine"
        yield sampled, why
    elif facts.file_backend(source) == "megatron":
        num, per_copy = len(actor.numbers), facts.model_parallel(source)
        if num % per_copy:
            why = f"{num} actor devices are not a multiple of the {per_copy} devices per model replica"
            yield trained, why
        if is_same and (size := source[trained] or 1) % source[sampled]:
            why = f"{source[sampled]} does not divide {trained}={size}, as required on shared devices"
            yield sampled, why


def _pipelined(source: Source) -> Findings:
    """Check files with actor and rollout on different devices, where rows arrive during training."""
    actor, rollout, inference = (facts.devices_of(source, of) for of in ("actor", "rollout", "inference"))
    if actor is not None and rollout is not None and not set(actor.numbers) & set(rollout.numbers):
        for key in ("runner.enable_dynamic_batch_size", "actor.enable_dp_load_balance"):
            if source[key]:
                why = "needs all rows of a round at once, but with actor and rollout on different devices"
                yield key, f"{why} rows arrive one by one; set it to false"
    lines = source["cluster.component_placement"] or {}
    is_apart = actor is not None and inference is not None and actor.numbers != inference.numbers
    is_placed = any("inference" in line.split(",") for line in lines)
    if is_apart and is_placed and source["rollout.recompute_logprobs"] is False:
        why = "inference has devices but nothing to compute; set rollout.recompute_logprobs=true"
        yield "cluster.component_placement", f"{why}, or remove inference"


def _megatron(source: Source) -> Findings:
    if facts.file_backend(source) != "megatron":
        return
    kind = facts.precision(source)
    if kind == "fp32" and source.has("actor.model.precision"):
        why = "Megatron needs 16 bits; set it to fp16 or bf16, or set actor.training_backend=fsdp"
        yield "actor.model.precision", why
    for flag in ("fp16", "bf16"):
        if source.values.get(f"actor.optim.{flag}") is True and kind != flag:
            yield f"actor.optim.{flag}", f"true contradicts actor.model.precision={kind}; make them agree"


CHECKS: tuple[Check, ...] = (
    _lengths, _batches, _robots, _groups, _logprobs, _cadences, _devices, _pipelined, _megatron,
    lambda source: iter(critic_settings(source)[1]),
)  # fmt: skip
