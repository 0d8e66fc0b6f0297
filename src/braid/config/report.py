"""Run, evaluation, checkpoints and reports."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from .base import Section
from .data import Source
from .rollout import SamplingConfig
from .train import OptimizerConfig


class RunSection(Section):
    """Name, place, length and seed of the run."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_.-]+$")
    """Folder name of the run."""
    output_dir: str = "runs"
    """Parent of the run's folder. As all paths of a config, it starts from the config's folder, or from where `braid` is run when it
    is given on the command line."""
    seed: NonNegativeInt = 0
    """Seed of everything drawn at random."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there is a GPU."""
    num_threads: PositiveInt | None = None
    """CPU threads of torch; its own choice when null."""
    max_rounds: PositiveInt | None = None
    """Rounds to run; with max_epochs the smaller counts."""
    max_epochs: PositiveInt | None = None
    """Passes over the training prompts."""
    resume: str = "none"
    """none, latest, or the path of a checkpoint folder."""
    allow_changes: bool = False
    """Resume although the algorithm, the model, the data, the environment or the reward is not what the checkpoint was trained
    with, or the checkpoint is of another run."""
    stop_within_s: NonNegativeFloat = 20.0
    """Time that the first SIGINT (Ctrl-C), SIGTERM or SIGHUP leaves a training run to end with a checkpoint. A round that fits is
    finished; else it is given up and the state before it saved. An update or save under way is finished, however long it takes.
    A second signal ends the run at once; with 0 the first one does."""
    if_exists: Literal["refuse", "new"] = "refuse"
    """When the folder holds a run and resume is none: stop, or take the next free name (name-2, ...)."""
    eval_only: bool = False
    """`braid train` evaluates the config's model, or the checkpoint that `resume` names, as `braid eval` does, and ends."""
    max_restarts: NonNegativeInt = 0
    """Times that a run goes on by itself from its newest checkpoint after a failure that may pass: of a worker, the engine, an
    environment, a service, or the network."""
    base_dir: str | None = None
    """Folder that relative paths in the config file start from; that of the file when null."""

    @field_validator("name")
    @classmethod
    def _is_no_way_out(cls, name: str) -> str:
        if not name.strip("."):
            raise ValueError(
                f"{name!r} is no folder below run.output_dir; give a name with a letter or a digit"
            )
        return name


class EvalTarget(Section):
    """What the run must reach; `braid train` exits with 3 when it does not."""

    min_final: float | None = None
    """Least mean@n over all evaluation prompts at the end."""
    min_gain: float | None = None
    """Least difference between the last and the first evaluation."""


class EvalConfig(Section):
    """Evaluation on the eval sources."""

    before: bool = True
    """Evaluate before training."""
    every_rounds: NonNegativeInt = 0
    """Cadence; 0 for none."""
    at_end: bool = True
    """Evaluate after the last round."""
    batch_prompts: PositiveInt | None = None
    """Prompts evaluated at a time; all when null."""
    shuffle: bool = False
    """Evaluate in an order drawn by the run's seed (it matters with batch_prompts for the order of samples only)."""
    samples_per_prompt: PositiveInt = 1
    """n of mean@n."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """The ks of pass@k, each at most samples_per_prompt (unbiased estimator)."""
    success_reward: float = 1.0
    """Rewards of at least this count as passed."""
    sampling: SamplingConfig | None = None
    """How evaluation samples; that of the rollout when null."""
    target: EvalTarget = EvalTarget()
    """What the run must reach."""


class CheckpointConfig(Section):
    """Saving the whole state."""

    every_rounds: NonNegativeInt = 0
    """Cadence in rounds; 0: by time, as every_s says."""
    every_s: NonNegativeFloat = 600.0
    """With every_rounds 0: save at the end of a round, or of a step of the warm-up, when so many seconds have passed since the
    last save; sooner, down to 10 s, where saving takes less than 2 % of the time. 0: never by time."""
    at_end: bool = True
    """Save after the last round."""
    keep: PositiveInt | None = 2
    """Newest checkpoints kept; null for all."""
    dir: str | None = None
    """Folder of the checkpoints; `checkpoints/` in the run's folder when null."""
    export_every_rounds: NonNegativeInt = 0
    """Cadence of Hugging Face folders; 0 for none (`braid export` makes one from any checkpoint)."""
    export_dir: str | None = None
    """Parent of those folders; `exports/` in the run's folder when null."""


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "braid"
    """Project name."""
    name: str | None = None
    """Name of the run there; run.name when null."""
    mode: Literal["online", "offline"] = "offline"
    """offline writes to the run's folder only."""


class SwanlabConfig(Section):
    """SwanLab."""

    project: str = "braid"
    """Project name."""
    name: str | None = None
    """Name of the run there; run.name when null."""
    mode: Literal["cloud", "local", "offline"] = "offline"
    """offline writes to the run's folder only."""


class ReportConfig(Section):
    """What is told where. metrics.jsonl is always written."""

    console: Literal["auto", "live", "plain", "none"] = "auto"
    """Live display on a terminal, a line per round elsewhere."""
    dir: str | None = None
    """Folder of the sinks' own files; the run's folder when null."""
    tensorboard: bool = True
    """Write event files to tensorboard/."""
    tensorboard_queue: PositiveInt = 10
    """Values that wait before they are written together."""
    wandb: WandbConfig | None = None
    """Weights & Biases (extra `wandb`)."""
    swanlab: SwanlabConfig | None = None
    """SwanLab (extra `swanlab`)."""
    samples_every_rounds: NonNegativeInt = 10
    """Store every trajectory of each such round in samples/; 0 for none."""
    eval_samples: bool = True
    """Store the trajectories of every evaluation in samples/."""
    batches_every_rounds: NonNegativeInt = 0
    """Store all arrays of the training rows of each such round in batches/ (safetensors); 0 for none."""


class SftConfig(Section):
    """Supervised learning on worked examples: `braid sft`, or a warm-up before reinforcement."""

    data: tuple[Source, ...]
    """Sources whose response_key or response_function gives what to imitate."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-3)
    """AdamW and its schedule, apart from the one of reinforcement."""
    steps: PositiveInt = 100
    """Optimizer steps."""
    rows_per_step: PositiveInt = 64
    """Examples per optimizer step."""
