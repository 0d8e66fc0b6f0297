"""Constraints between RLinf keys that the native config does not have, each a generator of (key, error)."""

from __future__ import annotations

from collections.abc import Iterator

from . import rlinf_facts as facts
from .rlinf_run import critic_settings
from .table import Check, Source

Findings = Iterator[tuple[str, str]]


def _batches(source: Source) -> Findings:
    budget, longest = source["runner.max_tokens_per_mbs"], source["runner.seq_length"] or 0
    if source["runner.enable_dynamic_batch_size"] and budget is not None and budget < longest:
        why = f"{budget} is below runner.seq_length={longest}, the length of the longest row"
        yield "runner.max_tokens_per_mbs", f"{why}; raise it to at least {longest}"
    prompts, group = source["data.rollout_batch_size"], source["algorithm.group_size"]
    if facts.is_robots(source) or prompts is None or group is None:
        return
    key, num, micro = (
        "algorithm.n_minibatches", source["algorithm.n_minibatches"], source["algorithm.training_batch_size_per_gpu"]
    )  # fmt: skip
    whole, left = divmod(prompts * group, num)
    ranks = facts.dp_size(source)
    if left or not whole:
        why = f"{prompts * group} rows per round cannot be split into {num} equal mini-batches"
        yield key, f"{why}; set it to a divisor of {prompts * group}"
    elif micro is not None and whole % (micro * ranks):
        why = f"the {whole} rows of an optimizer step are not a multiple of {micro} rows per micro-batch"
        yield key, f"{why} * {ranks} data-parallel ranks = {micro * ranks}"


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
    actor, rollout, inference = (
        facts.devices_of(source, component) for component in ("actor", "rollout", "inference")
    )
    if actor is None or rollout is None or inference is None or facts.is_robots(source):
        return
    key, shared = "cluster.component_placement", sorted(set(actor.numbers) & set(rollout.numbers))
    if shared and actor.numbers != rollout.numbers:
        why = f"actor and rollout share only the devices {', '.join(map(str, shared))}"
        yield key, f"{why}; place them on the same devices, or on disjoint ones"
    sampled, trained = "rollout.tensor_parallel_size", "actor.model.tensor_model_parallel_size"
    if shared and facts.file_backend(source) == "megatron" and (source[trained] or 1) % source[sampled]:
        why = f"{source[sampled]} does not divide {trained}={source[trained] or 1}"
        yield sampled, f"{why}, as required on shared devices"
    for flag in ("runner.enable_dynamic_batch_size", "actor.enable_dp_load_balance"):
        if source[flag] and not shared:
            why = "needs all rows of a round at once, but with actor and rollout on different devices"
            yield flag, f"{why} rows arrive one by one; set it to false"
    if actor.numbers != inference.numbers and source["rollout.recompute_logprobs"] is False:
        why = "inference has devices but nothing to compute; set rollout.recompute_logprobs=true"
        yield key, f"{why}, or remove inference"


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


OF_ALL: tuple[Check, ...] = (_cadences, _megatron)
"""Checks of the files of every task."""
CHECKS: tuple[Check, ...] = (
    *OF_ALL, _batches, _logprobs, _devices, lambda source: iter(critic_settings(source)[1]),
)  # fmt: skip
