"""What code asks of every kind of policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from braid.sections import Section
from braid.types import DecisionLevel, Spaces

if TYPE_CHECKING:
    import torch

    from braid.config.roles import TrainingRole
    from braid.config.schema import RunConfig
    from braid.models.base import TrainableModel

TRAIN = "{train,critic.train,reference.train}"
"""Pattern of the sections of training settings."""


class PolicyKind(Section):
    """What a policy is: a language model, a perceptron, or a vision-language-action model."""

    key: ClassVar[str] = ""
    """Config key of its section."""
    is_robot: ClassVar[bool] = True
    """Whether it acts in a simulator, and so not in environments of text."""
    reads_text: ClassVar[bool] = True
    """Whether it reads text, such as the instructions of a simulator's tasks."""
    has_tokenizer: ClassVar[bool] = True
    """Whether it reads and writes tokens of a tokenizer."""
    imitates: ClassVar[Literal["examples", "demonstrations"] | None] = None
    """What supervised fine-tuning trains it on; None if it cannot be trained so."""
    trains_off_policy: ClassVar[bool] = False
    """Whether it can be trained from a replay buffer (sac)."""
    sampled_by: ClassVar[frozenset[str]] = frozenset({"greedy"})
    """Sampling settings that it depends on in a simulator."""
    adapts_critic: ClassVar[bool] = False
    """Whether its critic has adapters too, with model.lora."""
    why_not_exported: ClassVar[str] = ""
    """What a run has done whose policy cannot be exported; empty if it can."""
    unknown_size: ClassVar[str] = "unknown: the model is not in a local folder"
    """What `braid show` says of the memory of a model whose size no file has."""

    @property
    def chunk_length(self) -> int:
        """Actions that it decides on at a time; 1 for text."""
        return 1

    @property
    def decision_level(self) -> DecisionLevel:
        """Level of a robot policy's log-probs, unless algorithm.logprob_level sets another."""
        return "action"

    @property
    def evaluates_greedily(self) -> bool | None:
        """Whether evaluations are greedy; None: as eval.sampling.greedy says."""
        return None

    def problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        """(key, message) of why it cannot act in the run's environment."""
        env = config.env.kind
        if not config.env.is_simulator:
            why = f"a robot policy cannot act in env.kind={env}, a text environment"
            yield (
                self.key,
                f"{why}; set env.kind=gymnasium or metaworld, or use model.path or model.build alone",
            )

    def make(
        self,
        role: TrainingRole,
        config: RunConfig,
        spaces: Spaces,
        device: torch.device,
        policy: TrainableModel | None = None,
        rank: int | None = None,
    ) -> TrainableModel:
        """Build the model of a role for a simulator's observations and actions, the critic from a copy of
        `policy` if it is given and of this kind; `rank` as in models.loading.load_policy."""
        raise NotImplementedError

    def export(self, config: RunConfig, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        """Write trained `weights` of a run as a folder that transformers loads. Raises CheckpointError and
        ModelError."""
        raise NotImplementedError
