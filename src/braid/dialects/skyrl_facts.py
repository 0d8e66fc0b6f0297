"""What a SkyRL file as a whole says: models in use, device counts, sizes; and why keys have no effect in it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

from .conversions import Idle
from .table import Became, Convert, Source, implied, no_effect, unsupported

Role = Literal["policy", "critic", "ref"]

NATIVE_TRAIN: dict[Role, str] = {"policy": "train", "critic": "critic.train", "ref": "reference.train"}
"""Where the settings of a role's workers stand natively."""

NO_REWARD_WORKERS = (
    "models that score are reward parts (braid.reward.parts), not workers; SkyRL never built them"
)


def backend(source: Source) -> str:
    """The training backend: the command line's, or the file's strategy."""
    return source.backend or source.get("trainer.strategy")


def engine(source: Source) -> str:
    """The rollout engine: the command line's, or the file's."""
    return source.engine or source.get("generator.backend")


def is_remote(source: Source) -> bool:
    """Whether the engines are servers that run already."""
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
    """Tokens before the policy's answer at most."""
    return source.get("generator.max_input_length") or source.get("trainer.max_prompt_length")


def longest_row(source: Source) -> int:
    """Tokens of a trained sequence at most."""
    return longest_input(source) + source.get("generator.sampling_params.max_generate_length")


def world(source: Source, role: Role) -> int:
    """GPUs of a role."""
    counts = [source.get(f"trainer.placement.{role}_num_{what}") for what in ("nodes", "gpus_per_node")]
    return math.prod(counts)


def model_parallel(source: Source, role: Role) -> int:
    """GPUs that hold one copy of a role's model together: Ulysses ranks, or Megatron's three kinds."""
    if source.get("trainer.strategy") != "megatron":
        return source.get(f"trainer.{role}.sequence_parallel_size")
    kinds = ("tensor_model", "pipeline_model", "context")
    sizes = (source.get(f"trainer.{role}.megatron_config.{kind}_parallel_size") for kind in kinds)
    return math.prod(size or 1 for size in sizes)


def ranks(source: Source, role: Role) -> int:
    """Data-parallel ranks of a role, by the file's own device counts whatever runs it."""
    return world(source, role) // model_parallel(source, role)


def engine_gpus(source: Source) -> int:
    """GPUs of all engines that the run starts."""
    sizes = ("tensor", "pipeline", "data")
    prefix, num = "generator.inference_engine_", source.get("generator.num_inference_engines")
    return num * math.prod(source.get(f"{prefix}{size}_parallel_size") for size in sizes)


def trained_roles(source: Source) -> list[Role]:
    """Roles that are trained."""
    return ["policy", "critic"] if uses_critic(source) else ["policy"]


def roles(source: Source) -> list[Role]:
    """All roles with settings of their own. In one process the reference shares the policy's."""
    has_own = uses_reference(source) and is_distributed(source)
    return [*trained_roles(source), "ref"] if has_own else trained_roles(source)


def shared(key: str, then: Convert | None = None) -> Convert:
    """A key for policy and critic at once: the same value in the native settings of each."""
    return _at(key, then, trained_roles)


def everywhere(key: str, then: Convert | None = None) -> Convert:
    """A key for all models at once, the reference too."""
    return _at(key, then, roles)


def _at(key: str, then: Convert | None, chosen: Callable[[Source], list[Role]]) -> Convert:
    def convert(value: Any, source: Source) -> Became:
        made = value if then is None else then(value, source)
        return Became({f"{NATIVE_TRAIN[role]}.{key}": made for role in chosen(source)})

    return convert


def of_engine(key: str, then: Convert | None = None, *, only: tuple[str, ...] = ()) -> Convert:
    """An option of the rollout engine in use; no effect where that is none of `only`."""

    def convert(value: Any, source: Source) -> Any:
        chosen = engine(source)
        if only and chosen not in only:
            return Became({}, "no effect", f"the engine is {chosen}; an option of {' and '.join(only)}")
        made = value if then is None else then(value, source)
        return made if isinstance(made, Became) else Became({f"rollout.{chosen}.{key}": made})

    return convert


def off_only(why: str, instead: str) -> Convert:
    """A feature that braid does not have: its absence (false, null, 0, nothing) is braid's way."""
    return lambda value, _: unsupported(instead) if value else implied(why)


def always(why: str) -> Convert:
    """A flag that asks for what braid always does; false changes nothing."""
    return lambda value, _: implied(why) if value else no_effect(why)


def without_critic(source: Source) -> str:
    estimator = source.get("trainer.algorithm.advantage_estimator")
    return "" if uses_critic(source) else f"advantage_estimator={estimator} has no critic"


def without_reference(source: Source) -> str:
    return "" if uses_reference(source) else "neither use_kl_loss nor use_kl_in_reward is on, so no reference"


def in_one_process(source: Source) -> str:
    return "" if is_distributed(source) else "train.backend=single runs everything in one process"


def not_backend(*names: str) -> Idle:
    """No effect under other training backends than these."""
    return lambda source: (
        ""
        if backend(source) in names
        else f"an option of {' and '.join(names)}; the backend is {backend(source)}"
    )


def not_loss(*names: str) -> Idle:
    """No effect under other policy losses than these."""
    return lambda source: "" if loss(source) in names else f"ppo_loss_type={loss(source)} does not read it"


def not_estimator(*names: str) -> Idle:
    """No effect under other advantage estimators than these."""
    key = "trainer.algorithm.advantage_estimator"
    return lambda source: (
        "" if source.get(key) in names else f"advantage_estimator={source.get(key)} does not read it"
    )
