"""Values that follow from several keys of a SkyRL file: models in use, device counts, sizes, unused keys."""

from __future__ import annotations

import math
import re
from typing import Any

from .conditions import needs, unless
from .table import Source

TRAIN = {"policy": "train", "critic": "critic.train", "ref": "reference.train"}
"""Role -> native path of its worker settings."""
AT = "trainer.algorithm"
FIX = f"{AT}.off_policy_correction"
SERVED = ("vllm", "sglang")


GYM = ("gsm8k_multi_turn", "lcb", "search", "searchcode", "text2sql")
"""Environments of skyrl-gym besides gsm8k and aime, which are rules for a single turn."""


EXAMPLES = {"geometry3k": "examples.train.geometry3k.env.Geometry3kEnv"}
"""Environments that scripts in SkyRL's repository register -> their classes."""


def reads_images(source: Source) -> bool:
    """Whether prompts may have images."""
    return bool(source["generator.vision_language_generator"])


def trained_tower(source: Source) -> str:
    """What is trained of the vision tower: all, unless adapters or Megatron's keys freeze it. Raises
    ValueError if only the layers that project its features are frozen."""
    if source["trainer.policy.model.lora.rank"]:
        return "none"
    if source["trainer.strategy"] != "megatron":
        return "all"
    at = "trainer.policy.megatron_config.transformer_config_kwargs.freeze_vision"
    tower, projector = (source[f"{at}_{what}"] for what in ("model", "projection"))
    if projector and not tower:
        raise ValueError("freezes the projector alone; set freeze_vision_model too, or neither")
    return ("none" if projector else "projector") if tower else "all"


def has_turns(source: Source) -> bool:
    """Whether the file's environment is played in turns, by an environment of skyrl-gym or one of the
    user's."""
    name = source["environment.env_class"] or ""
    if "env.kind" in source.braid_values or "reward.parts" in source.braid_values:
        return False
    return name in (*GYM, *EXAMPLES) or "." in name or ":" in name or (source["generator.max_turns"] or 1) > 1


def role_of(source: Source) -> str:
    """The role whose key is being converted; empty for other keys."""
    match = re.match(r"trainer\.(?:placement\.)?(policy|critic|ref)[._]", source.at)
    return match[1] if match else ""


def backend(source: Source) -> str:
    """The training backend: from the command line, else the file's strategy."""
    if source.backend is not None:
        return source.backend
    strategy = source["trainer.strategy"]
    return "fsdp2" if strategy == "fsdp" and source.dialect.version >= "0.5" else strategy


def engine(source: Source) -> str:
    """The rollout engine: from the command line, else from the file."""
    return source.engine or source["generator.backend"]


def is_remote(source: Source) -> bool:
    """Whether the engines are servers that are already running."""
    return not source["generator.run_engines_locally"]


def is_one_process(source: Source) -> bool:
    return backend(source) == "single"


def is_colocated(source: Source) -> bool:
    return source["trainer.placement.colocate_all"]


def uses_critic(source: Source) -> bool:
    return source[f"{AT}.advantage_estimator"] == "gae"


def uses_reference(source: Source) -> bool:
    return source[f"{AT}.use_kl_loss"] or source[f"{AT}.use_kl_in_reward"]


def world(source: Source, role: str) -> int:
    """Number of GPUs of a role."""
    return math.prod(source[f"trainer.placement.{role}_num_{what}"] for what in ("nodes", "gpus_per_node"))


def model_parallel(source: Source, role: str) -> int:
    """GPUs per model replica of a role: the Ulysses size, or Megatron's TP * PP * CP."""
    if source["trainer.strategy"] != "megatron":
        return source[f"trainer.{role}.sequence_parallel_size"]
    kinds = ("tensor_model", "pipeline_model", "context")
    return math.prod(source[f"trainer.{role}.megatron_config.{kind}_parallel_size"] or 1 for kind in kinds)


def ranks(source: Source, role: str) -> int:
    """Data-parallel size of a role, from the file's own device counts regardless of the chosen backend."""
    return max(1, world(source, role) // model_parallel(source, role))


def engine_gpus(source: Source) -> int:
    """Number of GPUs of all engines that the run starts."""
    kinds = ("tensor", "pipeline")
    sizes = (source[f"generator.inference_engine_{kind}_parallel_size"] for kind in kinds)
    return source["generator.num_inference_engines"] * math.prod(sizes)


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


def shares(source: Source, role: str) -> str:
    """The flag by which a role uses the policy's devices; empty if it has its own."""
    if is_colocated(source):
        return "colocate_all"
    return "colocate_policy_ref" if role == "ref" and source["trainer.placement.colocate_policy_ref"] else ""


def cluster(source: Source) -> dict[str, Any]:
    """Cluster settings. The file does not give the number of devices per node: all of them if the policy is
    on one node, else the number that the policy uses on each."""
    native = {"policy": "policy", "critic": "critic", "ref": "reference"}
    used, apart = roles(source), not is_colocated(source)
    first = [native[role] for role in used if role == "policy" or shares(source, role)]
    sizes = {",".join(first if apart else [*first, "rollout"]): world(source, "policy")}
    for role in ("ref", "critic"):
        if role in used and not shares(source, role):
            sizes[native[role]] = world(source, role)
    if apart and not is_remote(source):
        sizes["rollout"] = engine_gpus(source)
    placed, start = {}, 0
    for names, num in sizes.items():
        placed[names] = str(start) if num == 1 else f"{start}-{start + num - 1}"
        start += num
    is_one = source["trainer.placement.policy_num_nodes"] == 1
    per_node = start if is_one else source["trainer.placement.policy_num_gpus_per_node"]
    return {
        "cluster.placement": placed,
        "cluster.num_nodes": math.ceil(start / per_node),
        "cluster.devices_per_node": per_node,
    }


ONE_PROCESS = unless(is_one_process, "train.backend=single runs everything in one process")
HAS_IMAGES = unless(
    lambda s: not reads_images(s), "vision_language_generator is off: the model reads only text"
)
NO_CRITIC = needs(f"{AT}.advantage_estimator", "gae")
NO_REFERENCE = unless(
    lambda s: not uses_reference(s), "use_kl_loss and use_kl_in_reward are false, so there is no reference"
)
NO_EVALUATION = unless(lambda s: s["trainer.eval_interval"] <= 0, "eval_interval disables evaluation")


def used(value: Any, source: Source) -> Any:
    """No effect for keys of a role that is not used."""
    steps = {"critic": NO_CRITIC, "ref": NO_REFERENCE}
    return steps[role](value, source) if (role := role_of(source)) in steps else value
