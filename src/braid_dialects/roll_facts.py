"""Values that follow from several keys of a ROLL file: backends, devices, sizes, batches, loss terms.

The batch arithmetic is ROLL's, with the file's own device counts regardless of the chosen backend:

    S = rollout_batch_size * num_return_sequences_in_group       trajectories per round
    dp = devices / (TP * PP * CP) for Megatron (experts do not count), devices / ulysses_size for FSDP2
    global batch = per_device_train_batch_size * gradient_accumulation_steps * dp
    optimizer steps per pass = S / global batch
"""

from __future__ import annotations

import math
from typing import Any

from .devices import parse_devices
from .table import Source

TRAIN = {"actor_train": "train", "critic": "critic.train", "reference": "reference.train"}
"""Role -> native path of its worker settings."""
SEATS = {"actor_train": "policy", "actor_infer": "rollout", "critic": "critic", "reference": "reference"}
"""Role -> its native name in the placement."""
BACKENDS = {
    "megatron_train": "megatron", "fsdp2_train": "fsdp2",
    "megatron_infer": "megatron", "fsdp2_infer": "fsdp2", "hf_infer": "single",
}  # fmt: skip
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "native"}
CONFIG = "strategy_args.strategy_config"
CHOICE = "CrossThinkQARuleRewardWorker"
"""The reward worker that has a reward_type."""
JUDGE = "LLMJudgeRewardWorker"


def role_of(source: Source) -> str:
    """The role whose key is being converted."""
    return source.at.partition(".")[0]


def file_backend(source: Source, role: str) -> str:
    """The training backend of a role in the file, as its native name."""
    return BACKENDS[source[f"{role}.strategy_args.strategy_name"] or "fsdp2_train"]


def backend(source: Source, role: str) -> str:
    """The training backend of a role; the command line takes precedence."""
    return source.backend or file_backend(source, role)


def engine(source: Source) -> str:
    """The rollout engine; the command line takes precedence."""
    return source.engine or ENGINES[source["actor_infer.strategy_args.strategy_name"] or "vllm"]


def is_one_process(source: Source) -> bool:
    return source.backend == "single"


def devices(source: Source, role: str) -> tuple[int, ...]:
    """The devices of a role; empty without a mapping, or with an invalid one (reported by its own key)."""
    try:
        return parse_devices(source[f"{role}.device_mapping"] or "")
    except ValueError:
        return ()


def world(source: Source, role: str) -> int:
    """Ranks of a training role: its devices, or its processes if it has no devices."""
    return len(devices(source, role)) or source[f"{role}.world_size"] or 1


def model_parallel(source: Source, role: str) -> int:
    """Ranks that process a row together: TP * PP * CP, or the Ulysses size."""
    if file_backend(source, role) != "megatron":
        return source[f"{role}.model_args.ulysses_size"] or 1
    kinds = ("tensor_model", "pipeline_model", "context")
    return math.prod(source[f"{role}.{CONFIG}.{kind}_parallel_size"] or 1 for kind in kinds)


def data_parallel(source: Source, role: str) -> int:
    """Data-parallel size (dp)."""
    return max(1, world(source, role) // model_parallel(source, role))


def samples(source: Source) -> int:
    """Trajectories per round (S)."""
    return source["rollout_batch_size"] * source["num_return_sequences_in_group"]


def global_batch(source: Source, role: str) -> int:
    """Rows of one optimizer step."""
    sizes = (source[f"{role}.training_args.{name}"] for name in
             ("per_device_train_batch_size", "gradient_accumulation_steps"))  # fmt: skip
    return math.prod(sizes) * data_parallel(source, role)


def trained_roles(source: Source) -> list[str]:
    """The roles that are trained with settings of their own."""
    return ["actor_train", "critic"] if has_own_critic(source) else ["actor_train"]


def batches(source: Source) -> dict[str, int]:
    """Native path -> optimizer steps per pass, at least 1: a separate check reports sizes that do not fit."""
    total = samples(source)
    return {
        f"{TRAIN[role]}.steps_per_pass": max(1, total // global_batch(source, role))
        for role in trained_roles(source)
    }


def sequence_length(source: Source) -> int | None:
    """Maximum length of prompt plus response, in tokens; None if the file sets neither sequence_length nor
    response_length."""
    response, whole = source["response_length"], source["sequence_length"]
    return whole or (None if response is None else source["prompt_length"] + response)


def max_new_tokens(source: Source) -> int:
    """Maximum response length in tokens: sequence length minus prompt length, or less if generating_args
    limit it further."""
    whole, own = sequence_length(source), source["actor_infer.generating_args.max_new_tokens"]
    limits = (own, None if whole is None else whole - source["prompt_length"])
    return max(1, min((limit for limit in limits if limit is not None), default=1))


def eval_max_new_tokens(source: Source) -> int:
    """Maximum response length of evaluation, in tokens."""
    prompt, whole = source["val_prompt_length"] or source["prompt_length"], source["val_sequence_length"]
    longest = max_new_tokens(source) if whole is None else whole - prompt
    own = source["validation.generating_args.max_new_tokens"]
    return max(1, longest if own is None else min(own, longest))


def engine_size(source: Source, kind: str) -> int:
    """A size of the engines under its name in vLLM or SGLang; 0 if the file does not set it."""
    short = {"tensor": "tp", "pipeline": "pp"}[kind]
    names = (f"actor_infer.{CONFIG}.{name}_size" for name in (f"{kind}_parallel", short))
    return next((size for name in names if (size := source[name]) is not None), 0)


def engine_tensor_parallel(source: Source) -> int:
    """Tensor-parallel size of an engine; derived from num_gpus_per_worker if the engine's own key is
    absent."""
    per_worker = source["actor_infer.num_gpus_per_worker"]
    return engine_size(source, "tensor") or max(1, per_worker // (engine_size(source, "pipeline") or 1))


def devices_per_engine(source: Source) -> int:
    return engine_tensor_parallel(source) * (engine_size(source, "pipeline") or 1)


def replicas(source: Source) -> int:
    """Number of engines."""
    return max(1, len(devices(source, "actor_infer")) // devices_per_engine(source))


def is_colocated(source: Source) -> bool:
    """Whether training and sampling of the policy share a device."""
    return bool(set(devices(source, "actor_train")) & set(devices(source, "actor_infer")))


def has_critic(source: Source) -> bool:
    return source["adv_estimator"] == "gae"


def has_own_critic(source: Source) -> bool:
    """Whether there is a critic with settings of its own."""
    return has_critic(source) and source.has("critic")


def kl_place(source: Source) -> str | None:
    """Where the KL term is: "loss", "reward", or None without one."""
    if source["use_kl_loss"] and source["kl_loss_coef"] > 0:
        return "loss"
    return "reward" if source["add_token_level_kl"] and source["init_kl_coef"] > 0 else None


def is_plain_grpo(source: Source) -> bool:
    """Whether ROLL's `grpo` equals the native one.

    ROLL's is the return of rewards that are normalised in their group. The two agree for one reward at the
    end, gamma 1, no KL in the reward, no whitening and no clipping of it.
    """
    is_plain = source["gamma"] == 1 and not source["whiten_rewards"] and source["reward_clip"] is None
    return source["adv_estimator"] == "grpo" and is_plain and kl_place(source) != "reward"


def normalisation(source: Source) -> tuple[str, str]:
    """(mean, deviation) for normalising rewards before advantages are computed. `grpo` uses the group's."""
    if source["adv_estimator"] == "grpo":
        return ("none", "none") if is_plain_grpo(source) else ("group", "group")
    mean, deviation = ((source[f"norm_{name}_type"] or "none").lower() for name in ("mean", "std"))
    return mean, deviation


def variant(source: Source) -> str:
    """The policy loss: pg_variant with ActorPGWorker, else ppo."""
    worker = source["actor_train.worker_cls"] or ""
    return (source["actor_train.pg_variant"] or "vanilla") if worker.endswith("ActorPGWorker") else "ppo"


def clip_range(source: Source) -> tuple[float, float]:
    """(low, high) clip range of the ratio."""
    if (fixed := {"tis": (1.0, 0.0), "cispo": (0.1, 0.1)}.get(variant(source))) is not None:
        return fixed
    names = ("pg_clip_low", "pg_clip_high") if source["use_pg_clip_range"] else ("pg_clip", "pg_clip")
    return float(source[names[0]]), float(source[names[1]])


def domains(source: Source) -> list[str]:
    """Names below `rewards`, in the file's order."""
    return list(dict.fromkeys(name.split(".")[1] for name in source.values if name.startswith("rewards.")))


def query_filter(source: Source, domain: str) -> dict[str, float]:
    """Bounds of a domain's query filter, under native names; empty without a filter."""
    where = f"rewards.{domain}.query_filter_config"
    given, threshold = source[f"{where}.filter_args"] or {}, None
    if source[f"{where}.type"] == "mean_filter":
        bounds = {"min_mean": given.get("threshold_down"), "max_mean": given.get("threshold_up")}
    elif source[f"{where}.type"] == "std_filter" and (threshold := given.get("std_threshold", -1)) >= 0:
        bounds = {"min_std": threshold}
    else:
        bounds = {}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def filters_groups(source: Source) -> bool:
    """Whether the domains have a query filter."""
    kinds = (source[f"rewards.{name}.query_filter_config.type"] for name in domains(source))
    return any(kind not in (None, "no_filter") for kind in kinds)


def validates(source: Source) -> bool:
    return bool(source["validation.data_args.file_name"])


def samples_for_itself(source: Source) -> bool:
    """Whether evaluation has its own sampling settings."""
    own = source.has("validation.generating_args") or source["val_sequence_length"] is not None
    return validates(source) and own


def sampling(source: Source, role: str) -> dict[str, Any]:
    """The generating_args of a role, under native names."""
    names = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "stop_strings")
    sample, temperature, top_p, top_k, penalty, stop = (source[f"{role}.generating_args.{n}"] for n in names)
    made = {
        "greedy": not sample or temperature == 0,
        "top_p": float(top_p),
        "top_k": max(0, top_k),
        "repetition_penalty": float(penalty),
        "stop_strings": stop or [],
    }
    return made | ({"temperature": float(temperature)} if temperature else {})


def column_of(source: Source, role: str) -> str | None:
    """The prompt column; for evaluation, the one of training by default."""
    roles = dict.fromkeys((role, "actor_train"))
    names = (f"{of}.data_args.{key}" for of in roles for key in ("messages", "prompt"))
    return next((found for name in names if (found := source[name])), None)
