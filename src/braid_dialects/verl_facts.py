"""Values that follow from several keys of a verl file: models in use, device counts, sizes, rewards."""

from __future__ import annotations

import math
from typing import Any

from .conditions import needs, unless
from .table import Source

A = "actor_rollout_ref"
TRAIN = {"policy": "train", "critic": "critic.train", "ref": "reference.train"}
"""Role -> native path of its worker settings."""
SERVED = ("vllm", "sglang")


def role_of(source: Source) -> str:
    """The role whose key is being converted."""
    return {f"{A}.ref": "ref", "critic": "critic"}.get(
        next((at for at in (f"{A}.ref", "critic") if source.at.startswith(f"{at}.")), ""), "policy"
    )


def strategy(source: Source) -> str:
    """The training backend that the file names, or Megatron if verl's config for it is chosen."""
    by_config = "megatron" in (source["config_name"] or "") or source["model_engine"] == "megatron"
    return source[f"{A}.actor.strategy"] or ("megatron" if by_config else "fsdp")


def backend(source: Source) -> str:
    """The training backend: from the command line, else the file's strategy."""
    return source.backend or strategy(source)


def engine(source: Source) -> str:
    """The rollout engine: from the command line, else from the file."""
    return source.engine or source[f"{A}.rollout.name"]


def is_one_process(source: Source) -> bool:
    return backend(source) == "single"


def uses_critic(source: Source) -> bool:
    return source["algorithm.adv_estimator"] == "gae"


def uses_reference(source: Source) -> bool:
    return source[f"{A}.actor.use_kl_loss"] or kl_in_reward(source)


def kl_in_reward(source: Source) -> bool:
    """Whether KL is subtracted from rewards: up to 0.2 wherever it is not in the loss."""
    asked = source["algorithm.use_kl_in_reward"]
    if asked is None:
        return not source[f"{A}.actor.use_kl_loss"]
    return asked


def evaluates(source: Source) -> bool:
    trainer = "trainer"
    is_asked = source[f"{trainer}.val_before_train"] or source[f"{trainer}.test_freq"] > 0
    return bool(source["data.val_files"]) and bool(is_asked or source[f"{trainer}.val_only"])


def roles(source: Source) -> list[str]:
    """The policy, and the other roles that the file uses."""
    used = {"critic": uses_critic(source), "ref": uses_reference(source)}
    return ["policy", *(role for role, is_used in used.items() if is_used)]


def trained(source: Source) -> list[str]:
    """Native paths of the worker settings of the roles that are trained."""
    return [TRAIN[role] for role in roles(source) if role != "ref"]


def models(source: Source) -> list[str]:
    """Native paths of all worker settings. In a single process the reference shares the policy's."""
    return trained(source) if is_one_process(source) else [TRAIN[role] for role in roles(source)]


def gpus(source: Source) -> int:
    """Number of GPUs, which all roles share."""
    return source["trainer.nnodes"] * source["trainer.n_gpus_per_node"]


def model_parallel(source: Source) -> int:
    """GPUs per replica of the policy: the Ulysses size, or Megatron's TP * PP * CP."""
    if strategy(source) != "megatron":
        return source[f"{A}.actor.ulysses_sequence_parallel_size"]
    kinds = ("tensor_model", "pipeline_model", "context")
    return math.prod(source[f"{A}.actor.megatron.{kind}_parallel_size"] for kind in kinds)


def engine_replicas(source: Source) -> int:
    """Number of engines that together use all GPUs. Raises ValueError if the sizes do not divide."""
    size = source[f"{A}.rollout.tensor_model_parallel_size"]
    if gpus(source) % size:
        raise ValueError(f"the {gpus(source)} GPUs are not a multiple of {size} GPUs per engine; change one")
    return gpus(source) // size


def cluster(source: Source) -> dict[str, Any]:
    """Cluster settings: all roles on all devices."""
    native = {"policy": "policy", "critic": "critic", "ref": "reference"}
    num = gpus(source)
    names = ",".join([*(native[role] for role in roles(source)), "rollout"])
    return {
        "cluster.placement": {names: "0" if num == 1 else f"0-{num - 1}"},
        "cluster.num_nodes": source["trainer.nnodes"],
        "cluster.devices_per_node": source["trainer.n_gpus_per_node"],
    }


def paths(value: Any) -> list[str]:
    """The files of a key that takes one or several."""
    return [value] if isinstance(value, str) else list(value or ())


def trackers(source: Source) -> list[str]:
    """Native paths of the trackers in use."""
    return [f"report.{name}" for name in ("wandb", "swanlab") if name in paths(source["trainer.logger"])]


def is_dapo(source: Source) -> bool:
    """Whether answers are scored 1 or -1 by the rule of DAPO's data."""
    names = " ".join(paths(source["data.train_files"])).lower()
    return source["reward_model.reward_manager"] == "dapo" or "dapo" in names


def reads_images(source: Source) -> bool:
    """Whether prompts may have images."""
    name = (source[f"{A}.model.path"] or "").lower()
    return "data.image_key" in source.values or any(part in name for part in ("-vl", "_vl", "4.1v", "4.5v"))


ONE_PROCESS = unless(is_one_process, "train.backend=single runs everything in one process")
NO_CRITIC = needs("algorithm.adv_estimator", "gae")
NO_REFERENCE = unless(
    lambda s: not uses_reference(s), "use_kl_loss and use_kl_in_reward are false, so there is no reference"
)
NO_EVALUATION = unless(lambda s: not evaluates(s), "neither val_before_train nor test_freq asks for one")


def used(value: Any, source: Source) -> Any:
    """No effect for keys of a role that is not used."""
    steps = {"critic": NO_CRITIC, "ref": NO_REFERENCE}
    return steps[role](value, source) if (role := role_of(source)) in steps else value
