"""The records of a plan, which holds everything derived from a config."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from braid.algorithms.recipes import Recipe
from braid.errors import Problem

from .layout import Layout
from .sizes import ModelSize

Verb = Literal["train", "sft", "prefer", "eval"]
OldLogprobs = Literal["current", "recompute", "behavior", "interpolated"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that one role occupies permanently, in bytes. `parameters` is its number of weights."""

    role: str
    parameters: int
    weights_bytes: int
    gradients_bytes: int = 0
    optimizer_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything derived from a config.

    Token counts are upper bounds; None if there are no tokens (simulators). With `learns_values`, values are
    learned by a separate critic (`needs_critic`) or by a value head of the policy. `planned_rounds` and the
    planned steps are None while they depend on an unknown number of training prompts, and 0 for commands
    other than train; `planned_warmup_steps` are those of critic warm-up on a value head of the policy. Steps
    are upper bounds too: a round with fewer valid prompts than mini-batches has fewer. `sft_steps` and
    `prefer_steps` are None while they depend on an unknown number of examples or pairs. With
    `trains_reward_model` a reward model, which samples nothing, takes the policy's place. `memory` is empty
    if the model's size is unknown. `round_bytes` is the least and the most host memory of a round's
    trajectories.
    """

    verb: Verb
    recipe: Recipe
    old_logprobs: OldLogprobs
    aggregation_constant: float | None
    learns_values: bool
    needs_critic: bool
    needs_reference: bool
    needs_greedy: bool
    num_prompts: int | None
    trajectories_per_round: int
    steps_per_round: int
    rows_per_step: int
    planned_rounds: int | None
    planned_steps: int | None
    planned_critic_steps: int | None
    planned_warmup_steps: int | None
    sft_steps: int | None
    prefer_steps: int | None
    trains_reward_model: bool
    max_output_tokens: int | None
    max_trajectory_tokens: int | None
    eval_max_trajectory_tokens: int | None
    max_tokens_per_round: int | None
    max_tokens_per_step: int | None
    round_bytes: tuple[int, int] | None
    kv_bytes_per_token: int | None
    kv_budget_bytes: int | None
    state_bytes_per_sequence: int
    max_concurrent: int | None
    model_size: ModelSize | None
    memory: tuple[Memory, ...]
    layout: Layout
    is_pipelined: bool
    warnings: tuple[Problem, ...] = ()

    @property
    def engines_in_turns(self) -> tuple[int, ...]:
        """Rollout ranks whose engines sleep during training, since it uses their devices. None with a
        pipeline."""
        return () if self.is_pipelined else self.layout.sharing_devices("rollout")

    @property
    def judges_in_turns(self) -> tuple[int, ...]:
        """Ranks of the role reward whose judges sleep during training, as in `engines_in_turns`."""
        return () if self.is_pipelined else self.layout.sharing_devices("reward")

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the policy, if known."""
        return None if self.model_size is None else self.model_size.parameters

    @property
    def last_round(self) -> int | None:
        """The run's last round, where it is known: for supervised learning and preferences a round is one
        optimizer step."""
        rounds = {"train": self.planned_rounds, "sft": self.sft_steps, "prefer": self.prefer_steps}
        return rounds.get(self.verb)

    @property
    def num_rounds(self) -> int:
        """Total number of rounds, once it is known."""
        assert self.planned_rounds is not None, "with max_epochs, pass num_prompts to resolve()"
        return self.planned_rounds

    @property
    def num_steps(self) -> int:
        """Total optimizer steps of the policy, once they are known."""
        assert self.planned_steps is not None, "with max_epochs, pass num_prompts to resolve()"
        return self.planned_steps

    @property
    def num_schedule_steps(self) -> int:
        """Total optimizer steps of the policy's model, those of critic warm-up on its value head among
        them."""
        assert self.planned_warmup_steps is not None, "with max_epochs, pass num_prompts to resolve()"
        return self.num_steps + self.planned_warmup_steps

    @property
    def num_critic_steps(self) -> int:
        """Total optimizer steps of the critic, once they are known."""
        assert self.planned_critic_steps is not None, "with max_epochs, pass num_prompts to resolve()"
        return self.planned_critic_steps

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data for json.dump."""
        kinds = {"advantage": self.recipe.advantage, "policy_loss": self.recipe.policy_loss}
        dumped = {name: kind.model_dump(mode="json") for name, kind in kinds.items()}
        recipe = asdict(self.recipe) | dumped
        return {
            **asdict(self),
            "recipe": recipe,
            "total_bytes": sum(role.total_bytes for role in self.memory) or None,
        }
