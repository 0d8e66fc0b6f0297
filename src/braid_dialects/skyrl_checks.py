"""Rules between keys of a SkyRL file: sizes, devices, and options that exclude each other.

Each check yields (key, message). Device counts are the file's own regardless of the chosen backend, so a file
that SkyRL refuses is refused here too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from .compat import Check, Source
from .skyrl_algorithm import corrections
from .skyrl_facts import (
    Role,
    backend,
    engine_gpus,
    is_colocated,
    is_remote,
    model_parallel,
    ranks,
    uses_critic,
    uses_reference,
    world,
)

Finding = tuple[str, str]
_LARGE = 10**9
"""Divisors of larger batches are not searched."""


def _trained(source: Source) -> list[Role]:
    has_critic = source.get("trainer.critic.model.path") is not None
    return ["policy", "critic"] if has_critic else ["policy"]


def _batches(source: Source) -> Iterator[Finding]:
    """Check that train_batch_size (prompts) divides into mini-batches (prompts), those into samples per rank,
    and those into micro batches (samples)."""
    batch, num = source.get("trainer.train_batch_size"), source.get("generator.n_samples_per_prompt")
    micro = source.get("trainer.micro_train_batch_size_per_gpu")
    is_counted_in_tokens = source.get("trainer.max_tokens_per_microbatch") > 0
    for role in _trained(source):
        key = f"trainer.{role}_mini_batch_size"
        mini, dp = source.get(key), ranks(source, role)
        if batch < mini:
            yield key, f"{mini} is above trainer.train_batch_size={batch}; lower it"
            continue
        if batch % mini:
            yield (
                key,
                f"trainer.train_batch_size={batch} is not divisible by {mini}; set it to {_fitting(mini, batch)}",
            )
            continue
        if dp == 0:
            continue  # reported by the checks of devices
        per_rank = mini * num // dp
        arithmetic = (
            f"{role}_mini_batch_size * n_samples_per_prompt // ranks = {mini}*{num}//{dp} = {per_rank}"
        )
        if per_rank == 0:
            yield (
                key,
                f"the mini-batch of one rank is empty: {arithmetic}; raise it to at least {math.ceil(dp / num)}",
            )
            continue
        if per_rank % micro and not is_counted_in_tokens:
            yield (
                "trainer.micro_train_batch_size_per_gpu",
                f"the mini-batch of one rank of the {role} is not divisible by {micro}: {arithmetic}; "
                f"set it to {_fitting(micro, per_rank)}",
            )
        if (batch * num // dp) % per_rank:
            yield (
                key,
                f"the samples per rank of a batch, {batch}*{num}//{dp} = {batch * num // dp}, are not divisible by those of a "
                f"mini-batch: {arithmetic}",
            )


def _fitting(value: int, total: int) -> str:
    """The divisors of `total` closest to `value`, in words."""
    if total > _LARGE:
        return "a divisor"
    low = [n for n in range(1, math.isqrt(total) + 1) if total % n == 0]
    divisors = sorted({*low, *(total // n for n in low)})
    around = [[n for n in divisors if n <= value][-1:], [n for n in divisors if n > value][:1]]
    return " or ".join(str(n) for found in around for n in found)


def _ranks(source: Source) -> Iterator[Finding]:
    used: list[Role] = [
        "policy",
        *(["critic"] if uses_critic(source) else []),
        *(["ref"] if uses_reference(source) else []),
    ]
    for role in used:
        size, shared = world(source, role), model_parallel(source, role)
        if size % shared:
            yield (
                f"trainer.placement.{role}_num_gpus_per_node",
                f"the {role}'s {size} GPUs are not a multiple of the {shared} GPUs per model replica; change one of them",
            )
            return
    batch = source.get("trainer.train_batch_size") * source.get("generator.n_samples_per_prompt")
    least = math.lcm(*(ranks(source, role) for role in used))
    if batch < least:
        yield (
            "trainer.train_batch_size",
            f"a batch has {batch} samples, fewer than the {least} needed by the models' data-parallel ranks; raise it",
        )


def _devices(source: Source) -> Iterator[Finding]:
    at = "trainer.placement"
    used: list[Role] = [
        *(["ref"] if uses_reference(source) else []),
        *(["critic"] if uses_critic(source) else []),
    ]
    if is_colocated(source):
        policy, engines = world(source, "policy"), engine_gpus(source)
        if not is_remote(source) and engines != policy:
            yield (
                "generator.num_inference_engines",
                f"with colocate_all the engines use the policy's {policy} GPUs, but num_inference_engines times their "
                f"parallel sizes is {engines}; make them equal, or set {at}.colocate_all=false",
            )
        for role in used:
            if world(source, role) != policy:
                yield (
                    f"{at}.{role}_num_gpus_per_node",
                    f"with colocate_all the {role} uses the policy's {policy} GPUs, not {world(source, role)}; make them equal, "
                    f"or set {at}.colocate_all=false",
                )
    elif source.get(f"{at}.colocate_policy_ref") and uses_reference(source):
        for what in ("num_nodes", "num_gpus_per_node"):
            policy, ref = source.get(f"{at}.policy_{what}"), source.get(f"{at}.ref_{what}")
            if policy != ref:
                yield (
                    f"{at}.ref_{what}",
                    f"with colocate_policy_ref it must equal {at}.policy_{what}={policy}, not {ref}; make them equal, or set "
                    f"{at}.colocate_policy_ref=false",
                )


def _lengths(source: Source) -> Iterator[Finding]:
    prompt, given = source.get("trainer.max_prompt_length"), source.get("generator.max_input_length")
    key = "generator.max_input_length"
    if given is None:
        return
    if source.get("generator.max_turns") == 1 and given != prompt:
        yield key, f"for a single turn it must equal trainer.max_prompt_length={prompt}, not {given}"
    elif given < prompt:
        yield key, f"{given} is below trainer.max_prompt_length={prompt}; raise it"


def _engines(source: Source) -> Iterator[Finding]:
    urls, num = (
        source.get("generator.remote_inference_engine_urls"),
        source.get("generator.num_inference_engines"),
    )
    if is_remote(source):
        if not urls:
            yield (
                "generator.remote_inference_engine_urls",
                "with run_engines_locally=false, list the URLs of running servers",
            )
        elif num != len(urls):
            yield (
                "generator.num_inference_engines",
                f"{num} differs from the number of generator.remote_inference_engine_urls, {len(urls)}",
            )
    if not source.get("generator.async_engine") and not source.get("generator.batched"):
        yield "generator.batched", "async_engine=false can only generate in batches; set batched=true"


def _algorithm(source: Source) -> Iterator[Finding]:
    at = "trainer.algorithm"
    if uses_critic(source) and source.get("trainer.critic.model.path") is None:
        yield (
            "trainer.critic.model.path",
            "advantage_estimator=gae needs a critic; set its path, for example to the policy's",
        )
    if source.get(f"{at}.use_kl_in_reward") and source.get(f"{at}.use_kl_loss"):
        yield (
            f"{at}.use_kl_in_reward",
            "use_kl_in_reward and use_kl_loss are mutually exclusive; set one of them to false",
        )
    if (
        source.get(f"{at}.loss_reduction") == "seq_mean_token_sum_norm"
        and source.get(f"{at}.max_seq_len") is None
    ):
        yield f"{at}.max_seq_len", "loss_reduction=seq_mean_token_sum_norm needs it; set it"
    if source.get(f"{at}.use_tis") and source.get(f"{at}.tis_imp_ratio_cap") <= 0:
        yield (
            f"{at}.tis_imp_ratio_cap",
            "use_tis needs a cap above 0; set it, or use off_policy_correction.tis_ratio_type",
        )
    fixes, loss = corrections(source), source.get(f"{at}.ppo_loss_type")
    if fixes and loss in ("clip_cov", "kl_cov"):
        yield f"{at}.off_policy_correction", f"does not apply to ppo_loss_type={loss}; disable it"
    if loss == "cispo" and source.get(f"{at}.cispo.cispo_anchor") == "rollout" and fixes:
        yield (
            f"{at}.off_policy_correction",
            "cispo_anchor=rollout already corrects; disable the correction, or set cispo_anchor=old",
        )
    for name in ("geo_mask", "product_mask", "token_mask_is_threshold"):
        low, high = (source.get(f"{at}.off_policy_correction.{name}_{end}") for end in ("low", "high"))
        if low is not None and high is not None and low > high:
            yield f"{at}.off_policy_correction.{name}_low", f"{low} is above {name}_high={high}; lower it"


def _backends(source: Source) -> Iterator[Finding]:
    used: list[Role] = ["policy", *(["critic"] if uses_critic(source) else [])]
    chosen = backend(source)
    for role in used:
        if chosen == "fsdp" and source.get(f"trainer.{role}.fsdp_config.cpu_offload"):
            yield (
                f"trainer.{role}.fsdp_config.cpu_offload",
                "FSDP1 cannot offload a trained model; set it to false, or use trainer.strategy=fsdp2",
            )
        if chosen == "deepspeed" and not source.get(f"trainer.{role}.optimizer_config.offload_after_step"):
            yield (
                f"trainer.{role}.optimizer_config.offload_after_step",
                "DeepSpeed always offloads the optimizer after a step; set it to true, or use another trainer.strategy",
            )
    if chosen == "megatron" and uses_critic(source):
        yield (
            "trainer.strategy",
            "megatron does not support critics; use fsdp2, or another advantage_estimator",
        )
    packed: list[Role] = [*used, *(["ref"] if uses_reference(source) else [])]
    for role in packed:
        if source.get(f"trainer.{role}.sequence_parallel_size") > 1 and not source.get(
            "trainer.use_sample_packing"
        ):
            yield (
                f"trainer.{role}.sequence_parallel_size",
                "sequence parallelism needs trainer.use_sample_packing=true",
            )


def _resume(source: Source) -> Iterator[Finding]:
    if source.get("trainer.resume_mode") == "from_path" and source.get("trainer.resume_path") is None:
        yield (
            "trainer.resume_path",
            "resume_mode=from_path needs the folder of a checkpoint; set it, or use latest",
        )


CHECKS: tuple[Check, ...] = (_batches, _ranks, _devices, _lengths, _engines, _algorithm, _backends, _resume)
