"""The native config as one tree of frozen sections. Keys are described in each section's file."""

from __future__ import annotations

from braid.sections import Section
from braid.types import DecisionLevel

from .algorithm import AlgorithmConfig
from .cluster import ClusterConfig, InferenceConfig
from .data import DataConfig
from .env import EnvConfig, SingleTurnEnv
from .model import CriticConfig, ModelConfig, ReferenceConfig
from .pipeline import PipelineConfig
from .report import CheckpointConfig, EvalConfig, ReportConfig, RunSection, SftConfig
from .reward import RewardConfig
from .rollout import RolloutConfig, SamplingConfig
from .train import TrainConfig


class RunConfig(Section):
    """Config of a run. `resolve` derives the plan from it."""

    run: RunSection = RunSection()
    """Name, output folder, length and seed."""
    cluster: ClusterConfig = ClusterConfig()
    """Devices, and the placement of roles."""
    model: ModelConfig
    """The policy."""
    critic: CriticConfig = CriticConfig()
    """The value model, if the algorithm needs one."""
    reference: ReferenceConfig = ReferenceConfig()
    """The frozen model of the KL terms, if the algorithm needs one."""
    inference: InferenceConfig = InferenceConfig()
    """Workers that compute log-probs before the update, if they have their own devices."""
    data: DataConfig = DataConfig()
    """Training and evaluation prompts."""
    env: EnvConfig = SingleTurnEnv()
    """The environment."""
    reward: RewardConfig = RewardConfig()
    """Scoring of trajectories."""
    rollout: RolloutConfig = RolloutConfig()
    """Rollout: sampling, engine and filter."""
    pipeline: PipelineConfig | None = None
    """Sample while training, on separate devices; null to alternate sampling and training."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """The algorithm: advantages and losses."""
    train: TrainConfig = TrainConfig()
    """Training: batches, optimizer, backend."""
    sft: SftConfig | None = None
    """Supervised fine-tuning: alone with `braid sft`, as a warm-up with `braid train`."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the whole training state."""
    report: ReportConfig = ReportConfig()
    """Logging and reports."""

    @property
    def robot_logprob_level(self) -> DecisionLevel:
        """Level of a robot policy's log-probs: a position of its rows is one of these."""
        vla = self.model.vla
        own = "action" if vla is None else "chunk" if vla.kind == "pi0" else "token"
        return self.algorithm.logprob_level or own

    @property
    def max_lag(self) -> int:
        """Bound on the lag of tokens; 0 without a pipeline."""
        return 0 if self.pipeline is None else self.pipeline.max_lag

    @property
    def eval_sampling(self) -> SamplingConfig:
        """Sampling settings of evaluation."""
        sampling, vla = self.eval.sampling or self.rollout.sampling, self.model.vla
        greedy = None if vla is None else vla.evaluates_greedily
        return sampling if greedy is None else sampling.model_copy(update={"greedy": greedy})
