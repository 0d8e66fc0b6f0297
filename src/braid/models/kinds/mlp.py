"""Perceptrons for simulators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from braid.sections import Unused
from braid.types import Spaces

from .base import TRAIN, PolicyKind

if TYPE_CHECKING:
    import torch

    from braid.config.roles import TrainingRole
    from braid.config.schema import RunConfig
    from braid.models.base import TrainableModel
    from braid.plan.plan import Plan


class MlpSpec(PolicyKind):
    """A perceptron on a simulator's state and images."""

    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Sizes of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation of the hidden layers."""
    channels: tuple[PositiveInt, ...] = ()
    """Output channels of the convolutions (3 x 3, stride 2) over the images of the observations; empty if
    there are none."""
    num_action_chunks: PositiveInt = 1
    """Actions per chunk: the policy decides on this many at a time."""
    num_bins: Annotated[int, Field(ge=2)] | None = None
    """Continuous actions as a choice among this many values for each component, evenly spaced from -1 to 1;
    other bounds need env.rescale_actions. null: a Gaussian."""
    initial_std: PositiveFloat = 1.0
    """Standard deviation of Gaussian actions at the start of training; it is learned, and the same in all
    states. Where actions are between -1 and 1, values of 0.2 to 0.6 often learn faster."""

    @model_validator(mode="after")
    def _check(self) -> MlpSpec:
        if self.num_bins and self.initial_std != 1.0:
            raise ValueError(
                "initial_std is that of Gaussian actions, and num_bins makes them discrete; remove one"
            )
        return self

    key: ClassVar[str] = "model.mlp"
    reads_text: ClassVar[bool] = False
    has_tokenizer: ClassVar[bool] = False
    trains_off_policy: ClassVar[bool] = True
    why_not_exported: ClassVar[str] = (
        "trained an MLP (model.mlp), which cannot be exported to Hugging Face format"
    )
    unknown_size: ClassVar[str] = "an MLP: negligible"

    @property
    def chunk_length(self) -> int:
        return self.num_action_chunks

    def problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        yield from super().problems(config)
        if config.sac is not None and self.num_bins is not None:
            yield "model.mlp.num_bins", "SAC's policy is a squashed Gaussian; remove it"

    def make(
        self,
        role: TrainingRole,
        config: RunConfig,
        spaces: Spaces,
        device: torch.device,
        policy: TrainableModel | None = None,
        rank: int | None = None,
    ) -> TrainableModel:
        if config.sac is not None:
            from braid.models.soft_actor_critic import SquashedGaussian

            return SquashedGaussian(self, spaces, seed=config.run.seed)
        from braid.models.mlp import make_mlp

        return make_mlp(self, role, config, spaces)

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        yield (
            "an MLP is not a transformer",
            "model.{architecture,attention,dtype,eos_token_id,lora,pad_token_id} "
            f"{TRAIN}.{{compile,gradient_checkpointing,liger_kernels,logprob_chunk_bytes}}",
        )
