"""Training settings of each role."""

from __future__ import annotations

from typing import Literal

from .schema import RunConfig
from .train import TrainConfig

TrainingRole = Literal["policy", "critic", "reference", "inference"]
"""inference: the copy of the policy that computes log-probs on its own devices."""


def train_config(config: RunConfig, role: TrainingRole) -> TrainConfig:
    """Training settings of a role: its own section, or the policy's."""
    match role:
        case "critic":
            return config.critic.train or config.train
        case "reference":
            return config.reference.train or config.train
        case "inference":
            backend = config.train.backend.for_inference(config.inference)
            return config.train.model_copy(update={"backend": backend})
        case "policy":
            return config.train
