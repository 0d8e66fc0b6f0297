"""Rules between keys of a SkyRL file: sizes, devices, and options that exclude each other.

Each check yields (key, message). Device counts are the file's own regardless of the chosen backend, so a file
that SkyRL refuses is refused here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from . import skyrl_facts as facts
from .skyrl_algorithm import corrections
from .skyrl_facts import AT, FIX, backend, engine_gpus, is_colocated, is_remote, ranks, roles, world
from .table import Check, Source

Findings = Iterator[tuple[str, str]]
_LARGE = 10**9
"""Divisors of larger batches are not searched."""


def _batches(source: Source) -> Findings:
    """Check that train_batch_size (prompts) divides into mini-batches (prompts), those into samples per rank,
    and those into micro batches (samples)."""
    batch, num = source["trainer.train_batch_size"], source["generator.n_samples_per_prompt"]
    micro = source["trainer.micro_train_batch_size_per_gpu"]
    for role in ("policy", "critic") if source["trainer.critic.model.path"] else ("policy",):
        key, dp = f"trainer.{role}_mini_batch_size", ranks(source, role)
        mini = source[key]
        if batch < mini:
            yield key, f"{mini} is above trainer.train_batch_size={batch}; lower it"
        elif batch % mini:
            fit = _fitting(mini, batch)
            yield key, f"trainer.train_batch_size={batch} is not divisible by {mini}; set it to {fit}"
        if batch % mini or dp == 0:  # without ranks, the checks of devices report it
            continue
        per_rank, all_of_rank = mini * num // dp, batch * num // dp
        how = f"{role}_mini_batch_size * n_samples_per_prompt // ranks = {mini}*{num}//{dp} = {per_rank}"
        if per_rank == 0:
            least = math.ceil(dp / num)
            yield key, f"the mini-batch of one rank is empty: {how}; raise it to at least {least}"
            continue
        if per_rank % micro and source["trainer.max_tokens_per_microbatch"] <= 0:
            why = f"the mini-batch of one rank of the {role} is not divisible by {micro}: {how}"
            yield "trainer.micro_train_batch_size_per_gpu", f"{why}; set it to {_fitting(micro, per_rank)}"
        if all_of_rank % per_rank:
            why = f"the samples per rank of a batch, {batch}*{num}//{dp} = {all_of_rank}, are not divisible"
            yield key, f"{why} by those of a mini-batch: {how}"


def _fitting(value: int, total: int) -> str:
    """The divisors of `total` closest to `value`, in words."""
    if total > _LARGE:
        return "a divisor"
    low = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = sorted({*low, *(total // n for n in low)})
    around = [[n for n in divisors if n <= value][-1:], [n for n in divisors if n > value][:1]]
    return " or ".join(str(n) for found in around for n in found)


def _ranks(source: Source) -> Findings:
    for role in roles(source):
        size, shared = world(source, role), facts.model_parallel(source, role)
        if size % shared:
            why = f"the {role}'s {size} GPUs are not a multiple of the {shared} GPUs per model replica"
            yield f"trainer.placement.{role}_num_gpus_per_node", f"{why}; change one of them"
            return
    batch = source["trainer.train_batch_size"] * source["generator.n_samples_per_prompt"]
    least = math.lcm(*(ranks(source, role) for role in roles(source)))
    if batch < least:
        why = f"a batch has {batch} samples, fewer than the {least} needed by the models' data-parallel ranks"
        yield "trainer.train_batch_size", f"{why}; raise it"


def _devices(source: Source) -> Findings:
    at, policy, engines = "trainer.placement", world(source, "policy"), engine_gpus(source)
    fix = f"make them equal, or set {at}.colocate_all=false"
    if is_colocated(source):
        if not is_remote(source) and engines != policy:
            why = f"with colocate_all the engines use the policy's {policy} GPUs, but num_inference_engines"
            yield "generator.num_inference_engines", f"{why} times their parallel sizes is {engines}; {fix}"
        for role in reversed(roles(source)):
            if (own := world(source, role)) != policy:
                why = f"with colocate_all the {role} uses the policy's {policy} GPUs, not {own}"
                yield f"{at}.{role}_num_gpus_per_node", f"{why}; {fix}"
    elif source[f"{at}.colocate_policy_ref"] and facts.uses_reference(source):
        for what in ("num_nodes", "num_gpus_per_node"):
            policy, ref = source[f"{at}.policy_{what}"], source[f"{at}.ref_{what}"]
            if policy != ref:
                why = f"with colocate_policy_ref it must equal {at}.policy_{what}={policy}, not {ref}"
                yield f"{at}.ref_{what}", f"{why}; make them equal, or set {at}.colocate_policy_ref=false"


def _lengths(source: Source) -> Findings:
    prompt, key = source["trainer.max_prompt_length"], "generator.max_input_length"
    given = source[key]
    if given is None:
        return
    if source["generator.max_turns"] == 1 and given != prompt:
        yield key, f"for a single turn it must equal trainer.max_prompt_length={prompt}, not {given}"
    elif given < prompt:
        yield key, f"{given} is below trainer.max_prompt_length={prompt}; raise it"


def _engines(source: Source) -> Findings:
    key, num = "generator.remote_inference_engine_urls", source["generator.num_inference_engines"]
    if is_remote(source) and not source[key]:
        yield key, "with run_engines_locally=false, list the URLs of running servers"
    elif is_remote(source) and num != len(source[key]):
        yield "generator.num_inference_engines", f"{num} differs from the number of {key}, {len(source[key])}"
    if not source["generator.async_engine"] and not source["generator.batched"]:
        yield "generator.batched", "async_engine=false can only generate in batches; set batched=true"


def _algorithm(source: Source) -> Findings:
    if facts.uses_critic(source) and source["trainer.critic.model.path"] is None:
        why = "advantage_estimator=gae needs a critic; set its path, for example to the policy's"
        yield "trainer.critic.model.path", why
    if source[f"{AT}.use_kl_in_reward"] and source[f"{AT}.use_kl_loss"]:
        why = "use_kl_in_reward and use_kl_loss are mutually exclusive; set one of them to false"
        yield f"{AT}.use_kl_in_reward", why
    if source[f"{AT}.loss_reduction"] == "seq_mean_token_sum_norm" and source[f"{AT}.max_seq_len"] is None:
        yield f"{AT}.max_seq_len", "loss_reduction=seq_mean_token_sum_norm needs it; set it"
    if source[f"{AT}.use_tis"] and source[f"{AT}.tis_imp_ratio_cap"] <= 0:
        why = "use_tis needs a cap above 0; set it, or use off_policy_correction.tis_ratio_type"
        yield f"{AT}.tis_imp_ratio_cap", why
    fixes, loss = corrections(source), source[f"{AT}.ppo_loss_type"]
    if fixes and loss in ("clip_cov", "kl_cov"):
        yield FIX, f"does not apply to ppo_loss_type={loss}; disable it"
    if loss == "cispo" and source[f"{AT}.cispo.cispo_anchor"] == "rollout" and fixes:
        yield FIX, "cispo_anchor=rollout already corrects; disable the correction, or set cispo_anchor=old"
    for name in ("geo_mask", "product_mask", "token_mask_is_threshold"):
        low, high = (source[f"{FIX}.{name}_{end}"] for end in ("low", "high"))
        if low is not None and high is not None and low > high:
            yield f"{FIX}.{name}_low", f"{low} is above {name}_high={high}; lower it"


def _backends(source: Source) -> Findings:
    chosen = backend(source)
    for role in roles(source):
        key = f"trainer.{role}.fsdp_config.cpu_offload"
        if role != "ref" and chosen == "fsdp" and source[key]:
            why = "FSDP1 cannot offload a trained model"
            yield key, f"{why}; set it to false, or use trainer.strategy=fsdp2"
        key = f"trainer.{role}.optimizer_config.offload_after_step"
        if role != "ref" and chosen == "deepspeed" and not source[key]:
            why = "DeepSpeed always offloads the optimizer after a step; set it to true"
            yield key, f"{why}, or use another trainer.strategy"
        key = f"trainer.{role}.sequence_parallel_size"
        if source[key] > 1 and not source["trainer.use_sample_packing"]:
            yield key, "sequence parallelism needs trainer.use_sample_packing=true"
    if chosen == "megatron" and facts.uses_critic(source):
        why = "megatron does not support critics; use fsdp2, or another advantage_estimator"
        yield "trainer.strategy", why


def _resume(source: Source) -> Findings:
    if source["trainer.resume_mode"] == "from_path" and source["trainer.resume_path"] is None:
        why = "resume_mode=from_path needs the folder of a checkpoint; set it, or use latest"
        yield "trainer.resume_path", why


CHECKS: tuple[Check, ...] = (_batches, _ranks, _devices, _lengths, _engines, _algorithm, _backends, _resume)
