"""The native config as one tree of frozen sections. Keys are described in each section's file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Union

from pydantic import Field

from braid.envs.kinds import ENVIRONMENTS, Environment, SimulatorEnv, SingleTurnEnv, TextEnv
from braid.sections import Section, Unused
from braid.types import DecisionLevel

from .algorithm import AlgorithmConfig
from .checks import ChecksConfig
from .cluster import ClusterConfig, InferenceConfig
from .data import DataConfig, Source
from .model import CriticConfig, ModelConfig, ReferenceConfig
from .pipeline import PipelineConfig
from .prefer import PreferConfig
from .report import CheckpointConfig, EvalConfig, ReportConfig, RunSection
from .reward import RewardConfig
from .rollout import RolloutConfig, SamplingConfig
from .sac import SacConfig
from .sft import SftConfig
from .train import TrainConfig

if TYPE_CHECKING:
    from braid.plan.plan import Plan, Verb

    EnvKind = Environment
else:
    EnvKind = Annotated[Union[tuple(ENVIRONMENTS.values())], Field(discriminator="kind")]  # noqa: UP007


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
    env: EnvKind = SingleTurnEnv()
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
    prefer: PreferConfig | None = None
    """Learning from preferences with `braid prefer`."""
    sac: SacConfig | None = None
    """Soft actor-critic with `braid train`, for perceptrons in simulators; null for on-policy learning."""
    eval: EvalConfig = EvalConfig()
    """Evaluation."""
    checks: ChecksConfig = ChecksConfig()
    """Checks of the training loop."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the whole training state."""
    report: ReportConfig = ReportConfig()
    """Logging and reports."""

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if not plan.learns_values or (plan.needs_critic and self.critic.train is not None):
            why = "the policy has no value head, and a critic has its own settings"
            yield why, "train.optimizer.value_lr"
        has_values = plan.learns_values and (not plan.needs_critic or self.critic.train is None)
        has_reference = plan.needs_reference and self.reference.train is None
        has_inference = has_values or has_reference or bool(self.held_out(plan.verb))
        if plan.old_logprobs != "recompute" and not has_inference:
            why = "this run has no inference passes (log-probs or values before the update)"
            yield why, "train.{infer_batch_tokens,infer_batch_rows}"

    @property
    def simulator(self) -> SimulatorEnv:
        """`env` of a run in a simulator."""
        assert isinstance(self.env, SimulatorEnv), "other environments are of text"
        return self.env

    @property
    def text_env(self) -> TextEnv:
        """`env` of a run of text."""
        assert isinstance(self.env, TextEnv), "simulators have no text"
        return self.env

    @property
    def makes_tasks(self) -> bool:
        """Whether the environment makes all tasks of the run itself, from seeds."""
        return self.env.makes_tasks and not self.data.train and not self.data.eval

    @property
    def has_rollouts(self) -> bool:
        """Whether the config is for reinforcement learning, perhaps besides other commands."""
        return bool(self.data.train) or self.env.is_simulator or self.makes_tasks

    def held_out(self, verb: Verb) -> tuple[Source, ...]:
        """Sources of held-out examples or pairs, on which a command measures its loss."""
        section = {"sft": self.sft, "prefer": self.prefer}.get(verb)
        return () if section is None else section.eval_data

    @property
    def robot_logprob_level(self) -> DecisionLevel:
        """Level of a robot policy's log-probs: a position of its rows is one of these."""
        return self.algorithm.logprob_level or self.model.kind.decision_level

    @property
    def max_lag(self) -> int:
        """Bound on the lag of tokens; 0 without a pipeline."""
        return 0 if self.pipeline is None else self.pipeline.max_lag

    @property
    def eval_sampling(self) -> SamplingConfig:
        """Sampling settings of evaluation."""
        sampling, greedy = self.eval.sampling or self.rollout.sampling, self.model.kind.evaluates_greedily
        return sampling if greedy is None else sampling.model_copy(update={"greedy": greedy})
