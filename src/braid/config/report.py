"""Run, evaluation, checkpoints and reporting."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from braid.sections import Section, Unused

from .rollout import SamplingConfig

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig


class RunSection(Section):
    """Name, output folder, length and seed of the run."""

    unused_while = (("resume", "none", "allow_changes"),)

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the run and of its folder."""
    output_dir: str = "runs"
    """Parent of the run's folder. Like all paths in a config, relative to the config file's folder, or to the
    working directory when given on the command line."""
    seed: NonNegativeInt = 0
    """Random seed of the run."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type. auto: CUDA if a GPU is present."""
    num_threads: PositiveInt | Literal["auto"] = "auto"
    """CPU threads of each process that computes. auto: OMP_NUM_THREADS if it is set; otherwise the machine's
    cores, divided among the run's processes there that compute at the same time. Trainers take turns with
    engines and simulators, except in a pipeline."""
    max_rounds: PositiveInt | None = None
    """Number of rounds; if max_epochs is set too, the run ends at whichever comes first."""
    max_epochs: PositiveInt | None = None
    """Number of passes over the training prompts."""
    resume: str = "none"
    """Checkpoint to resume from: none, latest, or the path of a checkpoint folder."""
    allow_changes: bool = False
    """Resume even if the algorithm, the model, the data, the environment or the reward has changed since the
    checkpoint, or if the checkpoint belongs to another run."""
    stop_within_s: NonNegativeFloat = 20.0
    """Seconds in which a training run stops with a checkpoint after the first SIGINT (Ctrl-C), SIGTERM or
    SIGHUP. The current round is finished if it fits; otherwise it is discarded and the state before it is
    saved. An update or save in progress is always finished, however long it takes. A second signal, or the
    first one with 0, ends the run immediately."""
    if_exists: Literal["refuse", "new"] = "refuse"
    """If the folder holds a run and resume is none: refuse, or use the next free name (name-2, ...)."""
    eval_only: bool = False
    """Make `braid train` only evaluate the config's model, or the checkpoint of `resume`."""
    max_restarts: NonNegativeInt = 0
    """Maximum number of automatic restarts from the newest checkpoint after a transient failure of a worker,
    the engine, an environment, a service, or the network."""
    base_dir: str | None = None
    """Folder to which relative paths in the config file refer; the config file's folder when null."""

    @field_validator("num_threads", mode="before")
    @classmethod
    def _auto_if_null(cls, num_threads: object) -> object:
        return "auto" if num_threads is None else num_threads  # null, in older configs and checkpoints

    @field_validator("name")
    @classmethod
    def _is_no_way_out(cls, name: str) -> str:
        if not name.strip("."):
            raise ValueError(
                f"{name!r} is not a folder below run.output_dir; use a name with a letter or a digit"
            )
        return name

    only_for_training: ClassVar[str] = "run.{max_rounds,max_epochs,max_restarts}"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.verb in ("sft", "prefer") and not config.has_rollouts:
            yield f"{plan.verb}.epochs or {plan.verb}.steps sets the length", "run.{max_rounds,max_epochs}"


class EvalTarget(Section):
    """Targets of the run; `braid train` exits with status 3 if it misses one."""

    metric: str | None = None
    """Result over all evaluation data that the targets are for: mean@n or pass@k of answers, mean@n when
    null; accuracy, margin or loss of held-out pairs; loss or perplexity of held-out examples. pass@1 of a
    simulator's episodes is their success rate."""
    min_final: float | None = None
    """Lowest value in the last evaluation."""
    max_final: float | None = None
    """Highest value in the last evaluation, for example of a loss."""
    min_gain: float | None = None
    """Smallest improvement from the first to the last evaluation; of loss and perplexity the smallest
    decrease."""

    @property
    def is_set(self) -> bool:
        """Whether there is a target."""
        return not (self.min_final is None and self.max_final is None and self.min_gain is None)

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if not (self.is_set or config.eval.patience or config.checkpoint.keep_best):
            yield "no target is set, and evaluations are not compared", "eval.target.metric"


class EvalConfig(Section):
    """Evaluation on data.eval."""

    before: bool = True
    """Evaluate before training."""
    every_rounds: NonNegativeInt = 0
    """Evaluate every this many rounds; 0 for never."""
    at_end: bool = True
    """Evaluate after the last round."""
    patience: PositiveInt | None = None
    """Stop the run early, with a checkpoint and the status `stopped`, after this many evaluations in a row
    that do not improve on the best one before them, by target.metric; null for never."""
    batch_prompts: PositiveInt | None = None
    """Prompts evaluated at a time; all when null."""
    shuffle: bool = False
    """Evaluate in an order shuffled by the run's seed (with batch_prompts, this only changes the order of the
    stored samples)."""
    samples_per_prompt: PositiveInt = 1
    """Samples per prompt, the n of mean@n."""
    pass_at: tuple[PositiveInt, ...] = (1,)
    """Values of k for pass@k, each at most samples_per_prompt (unbiased estimator)."""
    success_reward: float = 1.0
    """Reward from which a trajectory counts as a success, unless a simulator says which are
    (info["success"])."""
    sampling: SamplingConfig | None = None
    """Sampling settings of evaluation; those of the rollout when null."""
    target: EvalTarget = EvalTarget()
    """Targets of the run."""

    @property
    def target_metric(self) -> str:
        """Name of the result that `target` is for, and by which evaluations are compared."""
        return self.target.metric or f"mean@{self.samples_per_prompt}"

    @property
    def is_lower_better(self) -> bool:
        """Whether learning lowers target_metric."""
        return self.target_metric in ("loss", "perplexity")

    only_for_training: ClassVar[str] = "eval.{every_rounds,before,at_end,patience}"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if self.every_rounds == 0:
            yield "the run is not evaluated between its rounds", "eval.patience"
        if config.env.is_simulator or config.data.eval or config.makes_tasks:
            return
        why, keys = "there are no data.eval sources", "samples_per_prompt,pass_at,sampling"
        if not config.held_out(plan.verb):
            keys = f"every_rounds,{keys}"
        yield why, f"eval.{{{keys},batch_prompts,shuffle}} report.eval_samples"
        if plan.recipe.supervised_coef == 0:
            yield f"{why}, and algorithm.supervised_coef is 0", "eval.success_reward"


class CheckpointConfig(Section):
    """Checkpoints of the whole training state."""

    unused_while = (("export_every_rounds", 0, "export_dir"),)

    every_rounds: NonNegativeInt = 0
    """Save every this many rounds; with 0, every_s decides."""
    every_s: NonNegativeFloat = 600.0
    """With every_rounds 0: save at the end of a round, or of a warm-up step, this many seconds after the last
    save; sooner, down to 10 s, if saving takes less than 2 % of the time. 0 disables it."""
    at_end: bool = True
    """Save after the last round."""
    keep: PositiveInt | None = 2
    """Number of newest checkpoints to keep; null for all."""
    keep_best: bool = False
    """Also save after each evaluation that is better, by eval.target.metric, than all before it, and keep the
    checkpoint of the best one (`braid export RUN --step best`)."""
    dir: str | None = None
    """Checkpoint folder; `checkpoints/` in the run's folder when null."""
    export_every_rounds: NonNegativeInt = 0
    """Export a Hugging Face folder every this many rounds; 0 for never (see also `braid export`)."""
    export_dir: str | None = None
    """Parent folder of the exports; `exports/` in the run's folder when null."""

    only_for_training: ClassVar[str] = "checkpoint.{every_rounds,every_s,at_end,keep,keep_best}"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if self.every_rounds > 0:
            yield "checkpoint.every_rounds is set", "checkpoint.every_s"


class WandbConfig(Section):
    """Weights & Biases."""

    project: str = "braid"
    """Project name."""
    name: str | None = None
    """Name of the run in Weights & Biases; run.name when null."""
    mode: Literal["online", "offline"] = "offline"
    """Mode; offline writes only to the run's folder."""
    samples: NonNegativeInt = 0
    """Trajectories shown as a table whenever samples are stored; 0 for none."""


class SwanlabConfig(Section):
    """SwanLab."""

    project: str = "braid"
    """Project name."""
    name: str | None = None
    """Name of the run in SwanLab; run.name when null."""
    mode: Literal["cloud", "local", "offline"] = "offline"
    """Mode; offline writes only to the run's folder."""
    samples: NonNegativeInt = 0
    """Trajectories shown as texts whenever samples are stored; 0 for none."""


class ReportConfig(Section):
    """Logging and reports. metrics.jsonl is always written."""

    unused_while = (("tensorboard", False, "tensorboard_queue tensorboard_samples"),)

    console: Literal["auto", "live", "plain", "none"] = "auto"
    """Console output. auto: a live display on a terminal, one line per round otherwise."""
    dir: str | None = None
    """Folder of the TensorBoard, Weights & Biases and SwanLab files; the run's folder when null."""
    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/."""
    tensorboard_queue: PositiveInt = 10
    """Number of values buffered before they are written."""
    tensorboard_samples: NonNegativeInt = 8
    """Trajectories shown as text whenever samples are stored; 0 for none."""
    wandb: WandbConfig | None = None
    """Weights & Biases (extra `wandb`)."""
    swanlab: SwanlabConfig | None = None
    """SwanLab (extra `swanlab`)."""
    samples_every_rounds: NonNegativeInt = 10
    """Store all trajectories in samples/ every this many rounds; 0 for never."""
    eval_samples: bool = True
    """Store the trajectories of every evaluation in samples/."""
    batches_every_rounds: NonNegativeInt = 0
    """Store all arrays of the training rows in batches/ (safetensors) every this many rounds; 0 for never."""

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if not (self.tensorboard or self.wandb or self.swanlab):
            yield "TensorBoard and trackers are off", "report.dir"
