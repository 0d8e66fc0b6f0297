"""Rules across keys of a ROLL file."""

from __future__ import annotations

from collections.abc import Iterator

from . import roll_facts as facts
from .roll_data import CHOICE_SCORES, PARTS, scored, worker_of
from .roll_facts import CHOICE, JUDGE
from .table import Check, Source

Findings = Iterator[tuple[str, str]]


def _lengths(source: Source) -> Findings:
    sizes = {"": (source["prompt_length"], facts.sequence_length(source))}
    sizes["val_"] = (source["val_prompt_length"], source["val_sequence_length"])
    if sizes[""][1] is None:
        yield "response_length", "set response_length, or sequence_length (prompt plus response)"
    if (sizes["val_"][0] is None) != (sizes["val_"][1] is None):
        yield "val_prompt_length", "set both val_prompt_length and val_sequence_length, or neither"
    for val, (prompt, whole) in sizes.items():
        if prompt is not None and whole is not None and whole <= prompt:
            why = f"{whole} leaves no room for a response with {val}prompt_length={prompt}; raise it"
            yield f"{val}sequence_length", why


def _columns(source: Source) -> Findings:
    for data in ("actor_train.data_args", "validation.data_args"):
        if source[f"{data}.prompt"] and source[f"{data}.messages"]:
            why = "conflicts with data_args.prompt; set one of them, and the other to null"
            yield f"{data}.messages", why
    if source["actor_train.data_args.file_name"] and facts.column_of(source, "actor_train") is None:
        why = "set the column: data_args.prompt for plain text, or data_args.messages for chat messages"
        yield "actor_train.data_args.prompt", why


def _devices(source: Source) -> Findings:
    for role in (*facts.trained_roles(source), *(["reference"] if facts.kl_place(source) else [])):
        ranks, shared = facts.world(source, role), facts.model_parallel(source, role)
        if ranks % shared:
            why = f"{ranks} devices are not a multiple of {shared}, the devices per model replica"
            yield f"{role}.device_mapping", f"{why} (TP * PP * CP, or ulysses_size); use a multiple"
        key = f"{role}.{facts.CONFIG}.fsdp_size"
        size, ulysses = source[key] or 1, source[f"{role}.model_args.ulysses_size"] or 1
        if facts.file_backend(source, role) == "fsdp2" and 1 < size < ulysses:
            yield key, f"{size} is below ulysses_size={ulysses}; raise it to at least {ulysses}"
    count, each = len(facts.devices(source, "actor_infer")), facts.devices_per_engine(source)
    if count % each:
        why = f"{count} devices are not a multiple of the {each} devices per engine (num_gpus_per_worker, "
        yield "actor_infer.device_mapping", f"{why}or tensor times pipeline parallelism); use a multiple"


def _batches(source: Source) -> Findings:
    group = source["num_return_sequences_in_group"]
    for role in facts.trained_roles(source):
        whole, step = facts.samples(source), facts.global_batch(source, role)
        if whole % step == 0 and step % group == 0:
            continue
        what = (
            f"the {whole} samples of a round are not a multiple of"
            if whole % step
            else f"mini-batches consist of whole prompts with their {group} samples, which do not divide"
        )
        key, dp = f"{role}.training_args.gradient_accumulation_steps", facts.data_parallel(source, role)
        per_device = source[f"{role}.training_args.per_device_train_batch_size"]
        why = (
            f"{what} the global batch: per_device_train_batch_size={per_device} * "
            f"gradient_accumulation_steps={source[key]} * dp={dp} = {step}"
        )
        yield key, f"{why}; {_fitting(whole, group, per_device * dp)}"


def _fitting(whole: int, group: int, unit: int) -> str:
    """Suggest values of gradient_accumulation_steps that divide a round into mini-batches of whole
    prompts."""
    found = [n for n in range(1, whole // unit + 1) if whole % (n * unit) == 0 and n * unit % group == 0]
    if found:
        shown = [*found[:6], *(["..."] if len(found) > 7 else []), *found[6:][-1:]]
        return f"values that fit: {', '.join(map(str, shown))}"
    why = f"{unit} rows (per_device_train_batch_size * dp) do not divide {whole}"
    return f"no value fits, because {why}; change rollout_batch_size"


def _megatron(source: Source) -> Findings:
    if facts.backend(source, "actor_train") != "megatron":
        return
    prompts, dp = source["rollout_batch_size"], facts.data_parallel(source, "actor_train")
    if prompts % dp:
        why = f"{prompts} prompts cannot be divided among dp={dp} ranks; set it to a multiple of {dp}"
        yield "rollout_batch_size", why
    config = f"actor_train.{facts.CONFIG}"
    dispatcher, overlap = source[f"{config}.moe_token_dispatcher_type"], f"{config}.moe_shared_expert_overlap"
    if source[overlap] and dispatcher != "alltoall":
        yield overlap, f"needs moe_token_dispatcher_type=alltoall, not {dispatcher}"
    stages, chunks = (
        source[f"{config}.{kind}pipeline_model_parallel_size"] or 1 for kind in ("", "virtual_")
    )
    key = "actor_train.training_args.gradient_accumulation_steps"
    if chunks > 1 and source[key] % stages:
        why = f"{source[key]} micro-batches are not a multiple of pipeline_model_parallel_size={stages}"
        yield key, f"{why}, as required with virtual_pipeline_model_parallel_size={chunks}"


def _exclusive(source: Source) -> Findings:
    if source["profiler_timeline"] and source["profiler_memory"]:
        yield "profiler_timeline", "profiler_timeline and profiler_memory are mutually exclusive; choose one"
    if facts.kl_place(source) == "loss" and source["add_token_level_kl"]:
        why = "conflicts with use_kl_loss: braid has only one KL term, in the loss or in the reward"
        yield "add_token_level_kl", f"{why}; choose one"
    if source["enable_old_logprobs_recompute"] and source["force_disable_old_logprobs_recompute"]:
        why = "contradicts enable_old_logprobs_recompute; choose one"
        yield "force_disable_old_logprobs_recompute", why
    key = f"actor_infer.{facts.CONFIG}.mem_fraction_static"
    if facts.engine(source) == "sglang" and source[key] is None:
        yield key, "required for sglang: the fraction of memory for weights and cache, such as 0.6"


def _domains(source: Source) -> Findings:
    names = facts.domains(source)
    for name in names:
        at, worker = f"rewards.{name}", worker_of(source, name)
        if worker not in PARTS and not source[f"{at}.worker_cls"]:
            yield f"{at}.worker_cls", "set it to the reward worker of the domain"
        for key in ("judge_api_url", "judge_model_name"):
            if name in scored(source) and worker == JUDGE and not source[f"{at}.{key}"]:
                yield f"{at}.{key}", "required for a judge: a model on an OpenAI-compatible server"
        if worker == CHOICE and not source[f"{at}.reward_type"]:
            yield f"{at}.reward_type", f"set it to one of {', '.join(CHOICE_SCORES)}"
        if len(names) > 1 and not source[f"{at}.tag_included"]:
            yield f"{at}.tag_included", "with several domains, each must list the tags of its rows"


CHECKS: tuple[Check, ...] = (_lengths, _columns, _devices, _batches, _megatron, _exclusive, _domains)
