"""The family of training backends: what the config, the plan and the workers ask a kind.

What trains, one model and its optimizer, is a training.backend.TrainingBackend, which a kind builds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from braid.kinds import Kind
from braid.sections import Unused
from braid.types import Groups

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from braid.config.backends import DType
    from braid.config.cluster import InferenceConfig
    from braid.config.schema import RunConfig
    from braid.config.train import TrainConfig
    from braid.models.base import TrainableModel
    from braid.plan import Plan
    from braid.plan.sizes import ModelSize
    from braid.training.backend import TrainingBackend


class Split(NamedTuple):
    """A parallel size that divides a model: its key in the training settings, the size, what it divides, and
    which sizes would fit."""

    key: str
    size: int
    what: str
    fits: Callable[[int], bool]


class Shares(NamedTuple):
    """Which fraction of a model's weights, gradients, optimizer states and activations a rank has on its
    device, and how many layers of whole weights it gathers in passes; None for all layers."""

    weights: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    activations: float = 1.0
    gathered_layers: int | None = 0


class Backend(Kind):
    """A kind of training backend. Methods get the training settings `train` that it belongs to, whose key is
    `at` (such as critic.train)."""

    config_key = "train.backend"
    is_sharded: ClassVar[bool] = True
    """Whether it has a process for each device of its role. Others have one, in which roles share models."""
    parallel_sizes: ClassVar[tuple[str, ...]] = ()
    """Its keys that ask for several devices, whose defaults are those of one."""
    joins_others: ClassVar[bool] = True
    """Whether it trains several roles in the same processes."""
    package: ClassVar[str] = ""
    """The package that it imports, installed by the extra of the kind's name; none if empty."""
    needs_gpu: ClassVar[bool] = False
    """Whether it cannot train on CPUs."""
    splits_sequences: ClassVar[bool] = False
    """Whether it has sequence parallelism (train.sequence_parallel)."""
    instead_of_sequence_parallel: ClassVar[str] = "{}.backend=fsdp2"
    """What to use where it has none; `{}` is the key of the training settings."""
    trains_robots: ClassVar[bool] = True
    """Whether it trains models other than language models."""
    trains_reward_models: ClassVar[bool] = True
    """Whether it trains a reward model of pairs (prefer.loss)."""
    trains_causal_lm: ClassVar[bool] = True
    """Whether language models are CausalLM itself, whose routers replay choices of experts and have a balance
    loss, and which computes the likeliest tokens."""
    reads_images: ClassVar[bool] = True
    """Whether it trains language models with their vision tower (model.vision)."""
    gathers_weights: ClassVar[bool] = False
    """Whether passes compute with weights gathered in the dtype of autocast, instead of under autocast."""
    frees_gradients: ClassVar[bool] = True
    """Whether gradients are freed after each step, so that there are none to offload."""

    def build(
        self, model: TrainableModel, train: TrainConfig, *, total_steps: int, device: torch.device
    ) -> TrainingBackend:
        """What trains `model` in this process: all of it, or one rank's part, in the initialised process
        group, where `model` has its weights on rank 0. `total_steps` is the length of the schedule; 0 for a
        model that is never trained."""
        raise NotImplementedError

    def must_define(self) -> tuple[str, ...]:
        return ("build",)

    def for_inference(self, inference: InferenceConfig) -> Backend:
        """The settings of workers that compute log-probs on their own devices."""
        return self

    def unused_inference(self, inference: InferenceConfig) -> Iterator[tuple[str, str]]:
        """(reason, keys) of the settings of such workers without effect."""
        keys = ",".join(type(inference).model_fields)
        yield f"workers of the backend {self.kind} have no sizes of their own", f"inference.{{{keys}}}"

    def parameter_dtype(self) -> DType | None:
        """The dtype of gathered weights, if it is set."""
        return None

    def copy_devices(self, train: TrainConfig) -> int:
        """Devices that process the same rows: those of one model replica."""
        return 1

    def divisors(self, train: TrainConfig) -> Iterator[tuple[str, int, str]]:
        """(key in the training settings, divisor of the role's number of devices, its description)."""
        yield from ()

    def splits(self, train: TrainConfig, model: ModelSize) -> Iterator[Split]:
        """How the model's heads, layers and experts are divided."""
        yield from ()

    def groups(self, train: TrainConfig, count: int) -> Groups:
        """Process groups among `count` ranks, for each parallel dimension of more than one rank. Ranks of a
        `data` group get different rows."""
        return {}

    def master_bytes(self, trained: int, held: int, width: int) -> int:
        """Bytes of the float32 copies of weights of `width` bytes: of `held` parameters, `trained` of
        them."""
        return 4 * trained

    def shares(self, train: TrainConfig, count: int) -> Shares:
        """What each of the role's `count` ranks has, without `train.offload`."""
        return Shares()

    def environment(self) -> dict[str, str | None]:
        """Environment variables of the role's processes."""
        return {}

    def problems(self, config: RunConfig, train: TrainConfig, at: str) -> Iterator[tuple[str, str]]:
        """(key, message) of what it cannot do in this run."""
        yield from ()

    def check_model(self, model: PreTrainedConfig) -> None:
        """Raise ModelError for an architecture that it does not support or cannot divide."""

    @property
    def checks_models(self) -> bool:
        """Whether `check_model` restricts the architectures."""
        return type(self).check_model is not Backend.check_model

    def unused_in(self, config: RunConfig, plan: Plan, train: TrainConfig) -> Unused:
        """As Section.unused, for the training settings that it belongs to."""
        if self.frees_gradients:
            yield "@.backend always frees gradients after a step", "@.offload.gradients"


class Sharded(Backend):
    """Backends whose ranks have their own rows, and a part of each weight: built on ranks.RankBackend."""

    splits_sequences = True

    def shard_size(self, count: int) -> int:
        """Devices of a shard group among `count` ranks."""
        return count

    def copy_devices(self, train: TrainConfig) -> int:
        return train.sequence_parallel

    def shares(self, train: TrainConfig, count: int) -> Shares:
        """Weights, gradients and optimizer states are sharded over all ranks (ZeRO stage 3, arXiv
        1910.02054), the next layer's weights gathered while one computes."""
        part = 1.0 / count
        return Shares(part, part, part, 1.0 / train.sequence_parallel, gathered_layers=2)

    def divisors(self, train: TrainConfig) -> Iterator[tuple[str, int, str]]:
        size = train.sequence_parallel
        yield "sequence_parallel", size, f"a sequence-parallel group needs {size} devices"

    def splits(self, train: TrainConfig, model: ModelSize) -> Iterator[Split]:
        yield Split("sequence_parallel", train.sequence_parallel, heads_of(model), has_heads(model))

    def groups(self, train: TrainConfig, count: int) -> Groups:
        by_rows = grid({"sequence": train.sequence_parallel, "data": count // train.sequence_parallel})
        part = self.shard_size(count)
        is_hybrid = 1 < part < count
        return by_rows | (grid({"shard": part, "replica": count // part}) if is_hybrid else {})


def heads_of(model: ModelSize) -> str:
    """The heads that a model has, for messages."""
    return f"{model.num_heads} attention heads and {model.num_kv_heads} key/value heads"


def has_heads(model: ModelSize) -> Callable[[int], bool]:
    """Whether the heads of a model divide into n parts."""
    heads, kv_heads = model.num_heads, model.num_kv_heads
    return lambda n: heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)


def grid(sizes: Mapping[str, int], repeats: int = 1) -> Groups:
    """Groups of each dimension of `repeats` grids with these `sizes`; ranks of the first dimension are
    adjacent."""
    total, stride, out = math.prod(sizes.values()) * repeats, 1, Groups()
    for name, size in sizes.items():
        if size > 1:
            firsts = [rank for rank in range(total) if rank // stride % size == 0]
            out[name] = tuple(tuple(range(first, first + size * stride, stride)) for first in firsts)
        stride *= size
    return out
