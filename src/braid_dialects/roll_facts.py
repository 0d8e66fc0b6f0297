"""Values that follow from several keys of a ROLL file.

The batch arithmetic is ROLL's, with the file's own device counts regardless of the chosen backend:

    S = rollout_batch_size * num_return_sequences_in_group       trajectories per round
    dp = devices / (TP * PP * CP) for Megatron (experts do not count), devices / ulysses_size for FSDP2
    global batch = per_device_train_batch_size * gradient_accumulation_steps * dp
    optimizer steps per pass = S / global batch
"""

from __future__ import annotations

import math
import re
from pathlib import PurePath
from typing import Any

from braid.config.source import is_within

from .conditions import unless
from .devices import parse_devices
from .table import Source, no_effect

TRAIN = {
    "actor_train": "train",
    "sft_train": "train",
    "critic": "critic.train",
    "reference": "reference.train",
}
"""Role -> native path of its worker settings."""
ROLE = {"actor_train": "policy", "actor_infer": "rollout", "critic": "critic", "reference": "reference"}
"""Role -> its native name in the placement."""
BACKENDS = {
    "megatron_train": "megatron", "fsdp2_train": "fsdp2",
    "megatron_infer": "megatron", "fsdp2_infer": "fsdp2", "hf_infer": "single",
}  # fmt: skip
ENGINES = {"vllm": "vllm", "sglang": "sglang", "hf_infer": "native"}
CONFIG = "strategy_args.strategy_config"


def role_of(source: Source) -> str:
    """The role whose key is being converted."""
    return source.at.partition(".")[0]


# Backends and devices


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


def replica_size(source: Source, role: str) -> int:
    """Devices per engine, or per replica of a trained model: TP * PP * CP, or the Ulysses size."""
    if role == "actor_infer":
        sizes = engine_sizes(source)
        return sizes["tensor_parallel"] * sizes["pipeline_parallel"]
    if file_backend(source, role) != "megatron":
        return source[f"{role}.model_args.ulysses_size"] or 1
    kinds = ("tensor_model", "pipeline_model", "context")
    return math.prod(source[f"{role}.{CONFIG}.{kind}_parallel_size"] or 1 for kind in kinds)


def engine_sizes(source: Source) -> dict[str, int]:
    """Native sizes of the engines. num_gpus_per_worker counts if the engine's own key is absent."""
    config, per_worker = f"actor_infer.{CONFIG}", source["actor_infer.num_gpus_per_worker"]
    pipeline = source[f"{config}.pipeline_parallel_size"] or source[f"{config}.pp_size"] or 1
    tensor = source[f"{config}.tensor_parallel_size"] or source[f"{config}.tp_size"]
    tensor = tensor or max(1, per_worker // pipeline)
    replicas = max(1, len(devices(source, "actor_infer")) // (tensor * pipeline))
    return {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "replicas": replicas}


# Batches and lengths


def data_parallel(source: Source, role: str) -> int:
    """Data-parallel size (dp)."""
    return max(1, world(source, role) // replica_size(source, role))


def is_supervised(source: Source) -> bool:
    """Whether the file is of the pipeline for supervised fine-tuning."""
    return source.has("sft_train")


def is_agentic(source: Source) -> bool:
    """Whether the file is of the agentic pipeline."""
    return source.has("train_env_manager") or source.has("custom_envs")


def shares(source: Source, manager: str) -> dict[str, int]:
    """Groups of each tag of a manager; equal ones without a partition. Without tags, evaluation has those of
    training."""
    if not (tags := source[f"{manager}.tags"]):
        return {} if manager == "train_env_manager" else shares(source, "train_env_manager")
    return dict(zip(tags, source[f"{manager}.num_groups_partition"] or [1] * len(tags), strict=False))


def tags(source: Source) -> list[str]:
    """The tags that a manager names."""
    return list(shares(source, "train_env_manager") | shares(source, "val_env_manager"))


def context(source: Source) -> int:
    """Tokens of an agentic episode."""
    return source["sequence_length"] or source["prompt_length"] + (source["response_length"] or 1)


def group_size(source: Source) -> int:
    if is_agentic(source):
        return source["train_env_manager.group_size"] or 1
    return source["num_return_sequences_in_group"]


def round_size(source: Source) -> dict[str, int]:
    """Native sizes of an agentic round, whose rollout_batch_size counts trajectories. Raises ValueError."""
    size, group = source["rollout_batch_size"], group_size(source)
    if size % group:
        raise ValueError(
            f"groups of {group} do not divide rollout_batch_size={size} trajectories; change one of them"
        )
    return {"rollout.prompts_per_round": size // group, **batches(source)}


def eval_episodes(source: Source) -> int:
    """Seeds of an agentic evaluation."""
    return max(1, source["val_batch_size"] // (source["val_env_manager.group_size"] or 1))


def samples(source: Source) -> int:
    """Trajectories per round (S)."""
    if is_agentic(source):
        return source["rollout_batch_size"]
    return source["rollout_batch_size"] * source["num_return_sequences_in_group"]


def global_batch(source: Source, role: str) -> int:
    """Rows of one optimizer step."""
    at = f"{role}.training_args"
    rows_of, num = source[f"{at}.per_device_train_batch_size"], source[f"{at}.gradient_accumulation_steps"]
    return rows_of * num * data_parallel(source, role)


def batches(source: Source) -> dict[str, int]:
    """Native path -> optimizer steps per pass, at least 1: gradient_accumulation_steps is refused if sizes do
    not fit. In supervised fine-tuning the rows of a step."""
    if is_supervised(source):
        return {"sft.rows_per_step": global_batch(source, "sft_train")}
    steps = {role: max(1, samples(source) // global_batch(source, role)) for role in trained_roles(source)}
    if is_agentic(source):  # the most of these into which whole groups divide
        groups = samples(source) // group_size(source)
        steps = {role: largest_divisor(groups, num) for role, num in steps.items()}
    return {f"{TRAIN[role]}.steps_per_pass": num for role, num in steps.items()}


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`; beyond 10^12, the largest that one below 10^6 leads
    to."""
    small = [n for n in range(1, min(math.isqrt(number), 10**6) + 1) if number % n == 0]
    return max(n for divisor in small for n in (divisor, number // divisor) if n <= most)


def max_new_tokens(source: Source) -> int:
    """Maximum response length in tokens: what the prompt leaves of sequence_length, or less if
    generating_args limit it further."""
    prompt, most = source["prompt_length"], source["actor_infer.generating_args.max_new_tokens"]
    if is_agentic(source):
        limits = (value for name, value in source.values.items() if name.endswith(".max_tokens_per_step"))
        return min(limit for limit in (most, *limits, context(source)) if limit)
    whole = source["sequence_length"] or prompt + (source["response_length"] or 1)
    return max(1, min(most or whole, whole - prompt))


def eval_max_new_tokens(source: Source) -> int:
    """Maximum response length of evaluation, in tokens."""
    prompt, whole = source["val_prompt_length"], source["val_sequence_length"]
    longest = whole - prompt if whole and prompt else max_new_tokens(source)
    return max(1, min(source["validation.generating_args.max_new_tokens"] or longest, longest))


# Roles and the algorithm


def trained_roles(source: Source) -> list[str]:
    """The roles that are trained with separate settings."""
    if is_supervised(source):
        return ["sft_train"]
    uses_critic = source["adv_estimator"] == "gae" and not source["is_pure_opd"]
    has_own_critic = uses_critic and source.has("critic")
    return ["actor_train", "critic"] if has_own_critic else ["actor_train"]


def used(value: Any, source: Source) -> Any:
    """No effect for keys of a critic or reference that is not used, or has no separate settings."""
    role = role_of(source)
    if role == "reference" and not is_supervised(source) and kl_place(source) is None:
        return no_effect("there is no KL term, so no reference")
    if role == "critic" and role not in trained_roles(source):
        return no_effect(f"adv_estimator={source['adv_estimator']} uses no critic")
    return value


def distils(source: Source) -> bool:
    """Whether a teacher is distilled, with rewards (use_opd) or without (is_pure_opd)."""
    return bool(source["use_opd"] or source["is_pure_opd"])


def kl_place(source: Source) -> str | None:
    """Where the KL term is: "advantage", "loss", "reward", or None without one."""
    if distils(source):
        return "advantage"
    if source["use_kl_loss"] and source["kl_loss_coef"] > 0:
        return "loss"
    return "reward" if source["add_token_level_kl"] and source["init_kl_coef"] > 0 else None


def recomputes_old_logprobs(source: Source) -> bool:
    """Whether ROLL computes log-probs again before an update; otherwise it has only the engine's."""
    if source["force_disable_old_logprobs_recompute"]:
        return False
    has_steps = max(batches(source).values()) > 1 or source["adv_estimator"] in ("gigpo", "step_reinforce")
    return source["enable_old_logprobs_recompute"] or source["init_kl_coef"] > 0 or has_steps


def is_plain_grpo(source: Source) -> bool:
    """Whether ROLL's `grpo`, the return of rewards that are normalized in their group, equals the native one:
    for one reward at the end, gamma 1, no KL in the reward, no whitening and no clipping of it."""
    if is_agentic(source):
        return False
    is_plain = source["gamma"] == 1 and not source["whiten_rewards"] and source["reward_clip"] is None
    return source["adv_estimator"] == "grpo" and is_plain and kl_place(source) != "reward"


def variant(source: Source) -> str:
    """The policy loss: pg_variant with ActorPGWorker, else ppo."""
    worker = source["actor_train.worker_cls"] or ""
    return (source["actor_train.pg_variant"] or "vanilla") if worker.endswith("ActorPGWorker") else "ppo"


HAS_RATIO = unless(
    lambda s: variant(s) in ("vanilla", "kimi15"), lambda s: f"pg_variant={variant(s)} uses no ratio"
)


# Data and rewards


def domains(source: Source) -> list[str]:
    """Names below `rewards`, in the file's order."""
    return list(dict.fromkeys(name.split(".")[1] for name in source.values if name.startswith("rewards.")))


def query_filters(source: Source) -> list[dict[str, float]]:
    """Bounds of each domain's query filter, under native names; empty without a filter."""
    out = []
    for domain in domains(source):
        where = f"rewards.{domain}.query_filter_config"
        thresholds, kind = source[f"{where}.filter_args"] or {}, source[f"{where}.type"]
        bounds = {}
        if kind == "mean_filter":
            bounds = {
                "min_mean": thresholds.get("threshold_down"),
                "max_mean": thresholds.get("threshold_up"),
            }
        elif kind == "std_filter" and thresholds.get("std_threshold", -1) >= 0:
            bounds = {"min_std": thresholds["std_threshold"]}
        out.append({name: bound for name, bound in bounds.items() if bound is not None})
    return out


def validates(source: Source) -> bool:
    return is_agentic(source) or bool(source["validation.data_args.file_name"])


_NAMED_VISION = re.compile(r"(?<![a-z])vl(?![a-z])", re.IGNORECASE)
"""In the name of a vision-language model, such as Qwen3-VL-4B."""


def reads_images(source: Source) -> bool:
    """Whether the file is of the RLVR pipeline with images, which ROLL tells by the script that starts it:
    here by what only such files have, or by braid's own `model.vision`."""
    for path, value in source.braid_values.items():
        if is_within(path, "model.vision"):
            return value is not None
    if is_agentic(source):
        managers = (source[f"custom_envs.{tag}.env_manager_cls"] or "" for tag in tags(source))
        return any(manager.endswith(".VLTrajEnvManager") for manager in managers)
    workers = [source[f"rewards.{domain}.worker_cls"] or "" for domain in domains(source)]
    return (
        any(source.has(f"actor_train.data_args.image_{name}_pixels") for name in ("min", "max"))
        or any(worker.endswith("DetectionRewardWorker") for worker in workers)
        or source["actor_train.data_args.template"] == "qwen2-vl"
        or _NAMED_VISION.search(_model_name(source)) is not None
    )


def _model_name(source: Source) -> str:
    model = source["actor_train.model_args.model_name_or_path"] or source["pretrain"] or ""
    return PurePath(model).name


def answers_in_pixels(source: Source) -> bool:
    """Whether the model, told by its name, gives boxes in pixels; ROLL tells it by the model's processor."""
    return re.search(r"qwen2[._]5[-_]?vl", _model_name(source), re.IGNORECASE) is not None


def is_geometry(source: Source) -> bool:
    """Whether the file is of the older pipeline with images, which has one domain of questions about
    geometry and names its columns otherwise."""
    return reads_images(source) and source["actor_train.data_args.template"] == "qwen2-vl"


def trained_tower(source: Source) -> str:
    """What is trained of the vision tower: all, unless adapters or freeze_module_prefix freeze it. Raises
    ValueError for modules that can only be trained or frozen together with others."""
    if source["actor_train.model_args.lora_target"]:
        return "none"
    names = frozen_modules(source)
    if not names:
        return "all"
    if all(name.rpartition(".")[2] in _TOWERS for name in names):
        return "none"
    if all(re.search(r"\.(blocks|patch_embed|pos_embed)$", name) for name in names):
        return "projector"
    raise ValueError(
        f"freezes {', '.join(names)}, but braid freezes the vision tower (vision_model.blocks,"
        "vision_model.patch_embed), the tower with the layers that project its features (vision_model), or "
        "nothing (null); audio is not read"
    )


_TOWERS = ("vision_model", "visual", "vision_tower")
"""Names of the module with the vision tower and the layers that project its features."""


def frozen_modules(source: Source) -> list[str]:
    """Names in freeze_module_prefix."""
    value = source["actor_train.model_args.freeze_module_prefix"] or ()
    return [name.strip() for name in (value.split(",") if isinstance(value, str) else value)]


def columns_of_images(source: Source, role: str) -> dict[str, str]:
    """Native names of columns in a file with images, which ROLL's pipeline sets itself."""
    if is_geometry(source):
        answer = source[f"{role}.data_args.response"] or "solution"
        return {"answer_key": answer, "images_key": "image"}
    keys = {"answer_key": "reward_model.ground_truth", "images_key": "images"}
    return keys | ({"source_key": "data_source"} if len(domains(source)) > 1 else {})


def image_limits(source: Source) -> dict[str, int]:
    """Bounds of an image's pixels that ROLL has unless the file sets others."""
    return {
        "data.image.min_pixels": 56 * 56,
        "data.image.max_pixels": 768 * 768 if is_geometry(source) else 4096 * 4096,
    }


def column_of(source: Source, role: str) -> str | None:
    """The prompt column; for evaluation, the one of training by default."""
    if reads_images(source):
        return (source[f"{role}.data_args.prompt"] or "problem") if is_geometry(source) else "prompt"
    roles = dict.fromkeys((role, "actor_train"))
    names = (f"{each}.data_args.{key}" for each in roles for key in ("messages", "prompt"))
    return next((column for name in names if (column := source[name])), None)


ONE_PROCESS = unless(is_one_process, "the run has a single process (--backend single)")
HAS_IMAGES = unless(lambda s: not reads_images(s), "the model reads only text")
NO_VALIDATION = unless(lambda s: not validates(s), "there is no validation.data_args.file_name")
