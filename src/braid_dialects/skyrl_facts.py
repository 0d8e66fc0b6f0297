"""Values that follow from several keys of a SkyRL file: models in use, device counts, sizes, unused keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from .compat import Became, Convert, Idle, Source, implied, no_effect, unsupported

Role = Literal["policy", "critic", "ref"]

NATIVE_TRAIN: dict[Role, str] = {"policy": "train", "critic": "critic.train", "ref": "reference.train"}
"""Role -> native path of its worker settings."""

NO_REWARD_WORKERS = (
    "reward models are reward parts (braid.reward.parts), not workers; SkyRL did not implement them"
)


def backend(source: Source) -> str:
    """The training backend: from the command line, else the file's strategy."""
    return source.backend or source.get("trainer.strategy")


def engine(source: Source) -> str:
    """The rollout engine: from the command line, else from the file."""
    return source.engine or source.get("generator.backend")


def is_remote(source: Source) -> bool:
    """Whether the engines are servers that are already running."""
    return not source.get("generator.run_engines_locally")


def is_distributed(source: Source) -> bool:
    return backend(source) != "single"


def is_colocated(source: Source) -> bool:
    return source.get("trainer.placement.colocate_all")


def uses_critic(source: Source) -> bool:
    return source.get("trainer.algorithm.advantage_estimator") == "gae"


def uses_reference(source: Source) -> bool:
    return source.get("trainer.algorithm.use_kl_loss") or source.get("trainer.algorithm.use_kl_in_reward")


def loss(source: Source) -> str:
    return source.get("trainer.algorithm.ppo_loss_type")


def longest_input(source: Source) -> int:
    """Maximum number of tokens before a response."""
    return source.get("generator.max_input_length") or source.get("trainer.max_prompt_length")


def longest_row(source: Source) -> int:
    """Maximum number of tokens of a training row."""
    return longest_input(source) + source.get("generator.sampling_params.max_generate_length")


def world(source: Source, role: Role) -> int:
    """Number of GPUs of a role."""
    counts = [source.get(f"trainer.placement.{role}_num_{what}") for what in ("nodes", "gpus_per_node")]
    return math.prod(counts)


def model_parallel(source: Source, role: Role) -> int:
    """GPUs per model replica of a role: the Ulysses size, or Megatron's TP * PP * CP."""
    if source.get("trainer.strategy") != "megatron":
        return source.get(f"trainer.{role}.sequence_parallel_size")
    kinds = ("tensor_model", "pipeline_model", "context")
    sizes = (source.get(f"trainer.{role}.megatron_config.{kind}_parallel_size") for kind in kinds)
    return math.prod(size or 1 for size in sizes)


def ranks(source: Source, role: Role) -> int:
    """Data-parallel size of a role, from the file's own device counts regardless of the chosen backend."""
    return world(source, role) // model_parallel(source, role)


def engine_gpus(source: Source) -> int:
    """Number of GPUs of all engines that the run starts."""
    sizes = ("tensor", "pipeline", "data")
    prefix, num = "generator.inference_engine_", source.get("generator.num_inference_engines")
    return num * math.prod(source.get(f"{prefix}{size}_parallel_size") for size in sizes)


def trained_roles(source: Source) -> list[Role]:
    """Roles that are trained."""
    return ["policy", "critic"] if uses_critic(source) else ["policy"]


def roles(source: Source) -> list[Role]:
    """Roles with their own worker settings. In a single process the reference shares the policy's."""
    has_own = uses_reference(source) and is_distributed(source)
    return [*trained_roles(source), "ref"] if has_own else trained_roles(source)


def shared(key: str, then: Convert | None = None) -> Convert:
    """Conversion of a key that applies to policy and critic: the same value in the native settings of
    each."""
    return _at(key, then, trained_roles)


def everywhere(key: str, then: Convert | None = None) -> Convert:
    """Conversion of a key that applies to all models, including the reference."""
    return _at(key, then, roles)


def _at(key: str, then: Convert | None, chosen: Callable[[Source], list[Role]]) -> Convert:
    def convert(value: Any, source: Source) -> Became:
        made = value if then is None else then(value, source)
        return Became({f"{NATIVE_TRAIN[role]}.{key}": made for role in chosen(source)})

    return convert


def of_engine(key: str, then: Convert | None = None, *, only: tuple[str, ...] = ()) -> Convert:
    """Conversion to an option of the selected rollout engine; no effect if that is not one of `only`."""

    def convert(value: Any, source: Source) -> Any:
        chosen = engine(source)
        if only and chosen not in only:
            return Became({}, "no effect", f"for {' and '.join(only)} only; the engine is {chosen}")
        made = value if then is None else then(value, source)
        return made if isinstance(made, Became) else Became({f"rollout.{chosen}.{key}": made})

    return convert


def off_only(why: str, instead: str) -> Convert:
    """Conversion of a feature that braid lacks: supported only when disabled (false, null, 0, empty)."""
    return lambda value, _: unsupported(instead) if value else implied(why)


def always(why: str) -> Convert:
    """Conversion of a flag for something that braid always does; false has no effect."""
    return lambda value, _: implied(why) if value else no_effect(why)


def without_critic(source: Source) -> str:
    estimator = source.get("trainer.algorithm.advantage_estimator")
    return "" if uses_critic(source) else f"advantage_estimator={estimator} uses no critic"


def without_reference(source: Source) -> str:
    return (
        ""
        if uses_reference(source)
        else "use_kl_loss and use_kl_in_reward are false, so there is no reference"
    )


def in_one_process(source: Source) -> str:
    return "" if is_distributed(source) else "train.backend=single runs everything in one process"


def not_backend(*names: str) -> Idle:
    """No effect unless the training backend is one of `names`."""
    return lambda source: (
        ""
        if backend(source) in names
        else f"for {' and '.join(names)} only; the backend is {backend(source)}"
    )


def not_loss(*names: str) -> Idle:
    """No effect unless the policy loss is one of `names`."""
    return lambda source: "" if loss(source) in names else f"ppo_loss_type={loss(source)} does not use it"


def not_estimator(*names: str) -> Idle:
    """No effect unless the advantage estimator is one of `names`."""
    key = "trainer.algorithm.advantage_estimator"
    return lambda source: (
        "" if source.get(key) in names else f"advantage_estimator={source.get(key)} does not use it"
    )
