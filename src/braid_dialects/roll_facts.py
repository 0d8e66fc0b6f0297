"""Values that follow from several keys of a ROLL file: backends, devices, sizes, batches, loss terms.

The batch arithmetic is ROLL's, with the file's own device counts regardless of the chosen backend:

    S = rollout_batch_size * num_return_sequences_in_group       trajectories per round
    dp = devices / (TP * PP * CP) for Megatron (experts do not count), devices / ulysses_size for FSDP2
    global batch = per_device_train_batch_size * gradient_accumulation_steps * dp
    optimizer steps per pass = S / global batch

The functions at the end return why a key is unused in a file, or an empty string; see conversions.when.
"""

from __future__ import annotations

from typing import Any

from .conversions import Idle
from .devices import parse_devices
from .table import Source

NATIVE_TRAIN = {"actor_train": "train", "critic": "critic.train", "reference": "reference.train"}
"""Role -> native path of its worker settings."""
NATIVE_ROLE = {
    "actor_train": "policy",
    "actor_infer": "rollout",
    "critic": "critic",
    "reference": "reference",
}
"""Role -> its native name in the placement."""
BACKENDS = {
    "megatron_train": "megatron",
    "fsdp2_train": "fsdp2",
    "megatron_infer": "megatron",
    "fsdp2_infer": "fsdp2",
    "hf_infer": "single",
}
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "native"}
STRATEGY = "strategy_args.strategy_config"


def file_backend(source: Source, role: str) -> str:
    """The training backend of a role in the file, as its native name."""
    return BACKENDS[source.get(f"{role}.strategy_args.strategy_name") or "fsdp2_train"]


def backend(source: Source, role: str) -> str:
    """The training backend of a role; the command line takes precedence."""
    return source.backend or file_backend(source, role)


def engine(source: Source) -> str:
    """The rollout engine; the command line takes precedence."""
    return source.engine or ENGINES[source.get("actor_infer.strategy_args.strategy_name") or "vllm"]


def devices(source: Source, role: str) -> tuple[int, ...]:
    """The devices of a role; empty without a mapping, or with an invalid one (reported by its own key)."""
    try:
        return parse_devices(source.get(f"{role}.device_mapping") or "")
    except ValueError:
        return ()


def world(source: Source, role: str) -> int:
    """Ranks of a training role: its devices, or its processes if it has no devices."""
    return len(devices(source, role)) or source.get(f"{role}.world_size") or 1


def model_parallel(source: Source, role: str) -> int:
    """Ranks that process a row together: TP * PP * CP, or the Ulysses size."""
    if file_backend(source, role) != "megatron":
        return source.get(f"{role}.model_args.ulysses_size") or 1
    product = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        product *= source.get(f"{role}.{STRATEGY}.{name}") or 1
    return product


def data_parallel(source: Source, role: str) -> int:
    """Data-parallel size (dp)."""
    return max(1, world(source, role) // model_parallel(source, role))


def samples(source: Source) -> int:
    """Trajectories per round (S)."""
    return source.get("rollout_batch_size") * source.get("num_return_sequences_in_group")


def rank_batch(source: Source, role: str) -> int:
    """Rows of one optimizer step on one data-parallel rank."""
    arguments = f"{role}.training_args"
    per_device = source.get(f"{arguments}.per_device_train_batch_size")
    return per_device * source.get(f"{arguments}.gradient_accumulation_steps")


def global_batch(source: Source, role: str) -> int:
    """Rows of one optimizer step."""
    return rank_batch(source, role) * data_parallel(source, role)


def steps_per_pass(source: Source, role: str) -> int:
    """Optimizer steps of one pass over a round's rows; at least 1, because a separate check reports sizes
    that do not fit."""
    return max(1, samples(source) // global_batch(source, role))


def batches(source: Source) -> dict[str, int]:
    """Native path -> optimizer steps per pass, for the policy and for a critic with its own settings."""
    roles = ["actor_train"] if no_critic(source) else ["actor_train", "critic"]
    return {f"{NATIVE_TRAIN[role]}.steps_per_pass": steps_per_pass(source, role) for role in roles}


def sequence_length(source: Source) -> int | None:
    """Maximum length of prompt plus response, in tokens; None if the file sets neither sequence_length nor
    response_length."""
    response = source.get("response_length")
    whole = source.get("sequence_length")
    return whole or (None if response is None else source.get("prompt_length") + response)


def max_new_tokens(source: Source) -> int:
    """Maximum response length in tokens: sequence length minus prompt length, or less if generating_args
    limit it further."""
    limits = [source.get("actor_infer.generating_args.max_new_tokens")]
    if (whole := sequence_length(source)) is not None:
        limits.append(whole - source.get("prompt_length"))
    return max(1, min((limit for limit in limits if limit is not None), default=1))


def replicas(source: Source) -> int:
    """Number of engines."""
    return max(1, len(devices(source, "actor_infer")) // devices_per_engine(source))


def devices_per_engine(source: Source) -> int:
    """Devices per engine."""
    return engine_tensor_parallel(source) * _engine_config(source, "pipeline_parallel_size", "pp_size")


def engine_tensor_parallel(source: Source) -> int:
    """Tensor-parallel size of an engine; derived from num_gpus_per_worker if the engine's own key is
    absent."""
    given = _engine_config(source, "tensor_parallel_size", "tp_size", absent=0)
    per_worker = source.get("actor_infer.num_gpus_per_worker")
    return given or max(1, per_worker // _engine_config(source, "pipeline_parallel_size", "pp_size"))


def own_tensor_parallel(source: Source) -> str:
    """Why num_gpus_per_worker is unused."""
    is_set = _engine_config(source, "tensor_parallel_size", "tp_size", absent=0)
    return "overridden by the engine's tensor-parallel size, as in ROLL" if is_set else ""


def _engine_config(source: Source, *names: str, absent: int = 1) -> int:
    found = (source.get(f"actor_infer.{STRATEGY}.{name}") for name in names)
    return next((value for value in found if value is not None), absent)


def is_colocated(source: Source) -> bool:
    """Whether training and sampling of the policy share a device."""
    return bool(set(devices(source, "actor_train")) & set(devices(source, "actor_infer")))


def has_critic(source: Source) -> bool:
    return source.get("adv_estimator") == "gae"


def kl_place(source: Source) -> str | None:
    """Where the KL term is: "loss", "reward", or None without one."""
    if source.get("use_kl_loss") and source.get("kl_loss_coef") > 0:
        return "loss"
    return "reward" if source.get("add_token_level_kl") and source.get("init_kl_coef") > 0 else None


def is_plain_grpo(source: Source) -> bool:
    """Whether ROLL's `grpo` equals the native one.

    ROLL's is the return of rewards that are normalised in their group. The two agree for one reward at the
    end, gamma 1, no KL in the reward, no whitening and no clipping of it.
    """
    return (
        source.get("adv_estimator") == "grpo"
        and source.get("gamma") == 1
        and kl_place(source) != "reward"
        and not source.get("whiten_rewards")
        and source.get("reward_clip") is None
    )


def normalisation(source: Source) -> tuple[str, str]:
    """(mean, deviation) for normalising rewards before advantages are computed. `grpo` uses the group's."""
    if source.get("adv_estimator") == "grpo":
        return ("none", "none") if is_plain_grpo(source) else ("group", "group")
    mean, deviation = ((source.get(f"norm_{name}_type") or "none").lower() for name in ("mean", "std"))
    return mean, deviation


def variant(source: Source) -> str:
    """The policy loss: pg_variant with ActorPGWorker, else ppo."""
    worker = source.get("actor_train.worker_cls") or ""
    return (source.get("actor_train.pg_variant") or "vanilla") if worker.endswith("ActorPGWorker") else "ppo"


def clip_range(source: Source) -> tuple[float, float]:
    """(low, high) clip range of the ratio."""
    match variant(source):
        case "tis":
            return 1.0, 0.0
        case "cispo":
            return 0.1, 0.1
    if source.get("use_pg_clip_range"):
        return float(source.get("pg_clip_low")), float(source.get("pg_clip_high"))
    return float(source.get("pg_clip")), float(source.get("pg_clip"))


def domains(source: Source) -> list[str]:
    """Names below `rewards`, in the file's order."""
    return list(dict.fromkeys(name.split(".")[1] for name in source.values if name.startswith("rewards.")))


def query_filter(source: Source, domain: str) -> dict[str, float]:
    """Bounds of a domain's query filter, under native names; empty without a filter."""
    where = f"rewards.{domain}.query_filter_config"
    arguments = source.get(f"{where}.filter_args") or {}
    match source.get(f"{where}.type"):
        case "mean_filter":
            bounds = {"min_mean": arguments.get("threshold_down"), "max_mean": arguments.get("threshold_up")}
        case "std_filter":
            threshold = arguments.get("std_threshold", -1)
            bounds = {"min_std": threshold if threshold >= 0 else None}
        case _:
            bounds = {}
    return {name: bound for name, bound in bounds.items() if bound is not None}


def filters_groups(source: Source) -> bool:
    """Whether the domains have a query filter."""
    return any(
        source.get(f"rewards.{name}.query_filter_config.type") not in (None, "no_filter")
        for name in domains(source)
    )


def validates(source: Source) -> bool:
    return bool(source.get("validation.data_args.file_name"))


def one_process(source: Source) -> str:
    """Why keys of devices and processes are unused."""
    return "the run has a single process (--backend single)" if source.backend == "single" else ""


def of_backend(name: str, role: str) -> Idle:
    """Why keys of one training backend are unused."""

    def idle(source: Source) -> str:
        chosen = backend(source, role)
        return "" if chosen == name else f"for {name} only; {role} uses {chosen}"

    return idle


def of_engine(*names: str) -> Idle:
    """Why keys of the engines `names` are unused."""

    def idle(source: Source) -> str:
        chosen = engine(source)
        return "" if chosen in names else f"for {' and '.join(names)} only; the engine is {chosen}"

    return idle


def no_critic(source: Source) -> str:
    """Why keys of the critic are unused."""
    if not has_critic(source):
        return f"adv_estimator={source.get('adv_estimator')} uses no critic"
    return "" if source.has("critic") else "the critic uses the policy's settings"


def no_values(source: Source) -> str:
    """Why keys of GAE are unused."""
    return "" if has_critic(source) else f"adv_estimator={source.get('adv_estimator')} uses no values"


def no_reference(source: Source) -> str:
    """Why keys of the reference are unused. Only KL terms need its model; ROLL loads it whenever init_kl_coef
    is not 0."""
    return "" if kl_place(source) else "there is no KL term, so no reference"


def not_in_loss(source: Source) -> str:
    """Why keys of the KL term in the loss are unused."""
    return "" if kl_place(source) == "loss" else "there is no KL term in the loss (use_kl_loss, kl_loss_coef)"


def not_in_reward(source: Source) -> str:
    """Why keys of the KL term in the reward are unused."""
    return "" if kl_place(source) == "reward" else "there is no KL in the reward (add_token_level_kl)"


def no_validation(source: Source) -> str:
    """Why keys of evaluation are unused."""
    return "" if validates(source) else "there is no validation.data_args.file_name"


def no_lora(source: Source) -> str:
    """Why keys of adapters are unused."""
    target = source.get("actor_train.model_args.lora_target")
    return "" if target else "there are no adapters without actor_train.model_args.lora_target"


def only_where(path: str, value: Any, why: str) -> Idle:
    """Keys that are used only where `path` has `value`; `why` is the reason elsewhere."""
    return lambda source: "" if source.get(path) == value else why
