"""The whole native config, as one tree of frozen sections. Each section's file describes its keys."""

from __future__ import annotations

from .algorithm import AlgorithmConfig
from .base import Section
from .cluster import ClusterConfig, InferenceConfig
from .data import DataConfig
from .model import CriticConfig, ModelConfig, ReferenceConfig
from .report import CheckpointConfig, EvalConfig, ReportConfig, RunSection, SftConfig
from .reward import RewardConfig
from .rollout import EnvConfig, RolloutConfig, SingleTurnEnv
from .train import TrainConfig


class RunConfig(Section):
    """A run, as the user described it. `resolve` derives the plan from it."""

    run: RunSection = RunSection()
    """Name, place, length and seed."""
    cluster: ClusterConfig = ClusterConfig()
    """Devices, and which roles sit on which."""
    model: ModelConfig
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """The value model, where the algorithm needs one."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL terms, where the algorithm needs one."""
    inference: InferenceConfig = InferenceConfig()
    """Log-probs before the update, where they have devices of their own."""
    data: DataConfig = DataConfig()
    """Training and evaluation prompts."""
    env: EnvConfig = SingleTurnEnv()
    """What the policy acts in."""
    reward: RewardConfig = RewardConfig()
    """How trajectories are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """How trajectories are produced."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """How rewards become gradients."""
    train: TrainConfig = TrainConfig()
    """How rows become optimizer steps."""
    sft: SftConfig | None = None
    """Supervised learning: alone under `braid sft`, before reinforcement under `braid train`."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving the whole state."""
    report: ReportConfig = ReportConfig()
    """What is told where."""
