"""Environments of simulators: what they share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from braid.config.rollout import SamplingConfig
from braid.sections import Section, Unused
from braid.types import Prompt

from .base import Environment

if TYPE_CHECKING:
    from braid.config.schema import RunConfig
    from braid.envs.simulators.base import EpisodeRules, Simulator
    from braid.plan.plan import Plan


ADAPTERS = "braid.envs.simulators.adapters"
NUM_RESET_STATES = 2**12
"""Number of reset states in an epoch, unless they are listed."""


@dataclass(frozen=True, slots=True)
class Maker:
    """What makes the environments of a simulator: their name, the registered id, class or function, its
    arguments, and whether it makes a VectorEnv."""

    name: str
    id: str
    kwargs: dict[str, Any]
    is_vectorized: bool = False


class VideoConfig(Section):
    """Videos of episodes (extra `video`)."""

    save: bool = False
    """Save a video of every evaluation: a grid of its first episodes. Frames are the first image of the
    observations, or what the environment renders (render_mode rgb_array)."""
    train_every_rounds: PositiveInt | None = None
    """Save a video of the first episodes of a round's rollout, too, every so many rounds; null: never."""
    num_episodes: PositiveInt = 9
    """Episodes in a video."""
    overlay: bool = True
    """Draw instruction, step, reward, return and success below each episode."""
    frames_per_s: PositiveInt = 10
    """Frames per second."""
    dir: str | None = None
    """Output folder; `video/` in the run's folder when null."""

    @property
    def are_saved(self) -> bool:
        """Whether there are any."""
        return self.save or self.train_every_rounds is not None


class SimulatorEnv(Environment):
    """Environments of a simulator."""

    num_envs: PositiveInt = 8
    """Environments stepped together; at most prompts_per_round * group_size of them are used."""
    processes: NonNegativeInt = 1
    """Child processes among which the environments are divided; they step in parallel, with the deadline
    rollout.env_timeout_s. 0: in the run's own process, without a deadline; for debuggers, and for
    environments whose steps take microseconds. Changes no result."""
    pipeline_stages: PositiveInt = 1
    """Parts into which the environments of each process are divided: while one part is stepped, the actions
    of another are computed. Changes no result. Needs env.processes of at least 1."""
    offload: bool = False
    """End the child processes after each sampling, and start them again for the next, so that the policy is
    trained with the memory that they had."""
    max_episode_steps: PositiveInt | None = None
    """Maximum env steps, after which an episode is truncated; null for the environment's own limit."""
    ignore_terminations: bool = False
    """Go on after the task itself has ended, until max_episode_steps; success_once still tells whether the
    task was fulfilled in between."""
    reward_scale: float = Field(default=1.0, allow_inf_nan=False)
    """Factor on the environment's rewards, also in evaluations and metrics."""
    step_penalty: float = Field(default=0.0, allow_inf_nan=False)
    """Subtracted from the scaled reward of each env step."""
    relative_reward: bool = False
    """Use the change of the environment's reward since the previous env step as the reward of an env step; 0
    before the first."""
    auto_reset: bool = False
    """Start another episode when one ends, at the end of its action chunk, until max_steps_per_rollout. Each
    is a trajectory of the group. Evaluations run one episode per reset state."""
    max_steps_per_rollout: PositiveInt | None = None
    """Env steps of each of a round's prompts_per_round * group_size rollouts, in whole action chunks; an
    episode that has not ended by then is truncated, and its last state's value bootstrapped. null: until the
    episode ends."""
    fixed_reset_states: bool = True
    """Start all episodes of a group in the same reset state. If false, each has its own."""
    reset_seeds: PositiveInt | tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] | None = None
    """Seeds of the reset states of training: a list, or a number for the seeds below it; visited once per
    epoch, in order without data.shuffle. null: new random ones in every round."""
    eval_reset_seeds: PositiveInt | tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] | None = None
    """Seeds of the reset states of evaluations, a list or the seeds below a number, one episode each; null:
    eval_episodes random ones, the same in every evaluation."""
    eval_episodes: PositiveInt = 100
    """Episodes per evaluation, each from a different reset state."""
    video: VideoConfig = VideoConfig()
    """Videos of episodes."""

    @model_validator(mode="after")
    def _rollouts(self) -> SimulatorEnv:
        if self.auto_reset and self.max_steps_per_rollout is None:
            raise ValueError("auto_reset=true needs the length of a rollout; set max_steps_per_rollout")
        if self.ignore_terminations and self.max_episode_steps is None:
            raise ValueError("ignore_terminations=true needs a time limit; set max_episode_steps")
        for key in ("reset_seeds", "eval_reset_seeds"):
            if getattr(self, key) == ():
                raise ValueError(f"{key} is empty; name at least one seed, or set it to null")
        if self.reset_seeds is not None and not self.fixed_reset_states:
            raise ValueError("reset_seeds are those of whole groups; set fixed_reset_states=true")
        return self

    is_simulator: ClassVar[bool] = True
    gives_rewards: ClassVar[bool] = True

    @property
    def made_by(self) -> Maker:
        """What makes its environments."""
        raise NotImplementedError

    @property
    def steps_together(self) -> bool:
        """Whether the environments of a process are one object, which steps them all."""
        return False

    @property
    def rescales(self) -> bool:
        """Whether actions are rescaled from [-1, 1] to the environment's bounds."""
        return False

    @property
    def goes_on(self) -> bool:
        """Whether braid, not the simulator, lets episodes go on after the task itself has ended."""
        return self.ignore_terminations

    @property
    def has_equal_starts(self) -> bool:
        return self.fixed_reset_states

    def video_of(self, use: Literal["train", "eval"]) -> VideoConfig | None:
        is_filmed = self.video.save if use == "eval" else self.video.train_every_rounds is not None
        return self.video if is_filmed else None

    def rules(self) -> EpisodeRules:
        """The rules of its episodes."""
        from braid.envs.simulators.base import EpisodeRules

        return EpisodeRules(
            self.max_episode_steps,
            self.goes_on,
            self.relative_reward,
            self.reward_scale,
            self.rescales,
            self.step_penalty,
        )

    def make(self, base_dir: Path, timeout_s: float, num_envs: int | None = None) -> Simulator:
        """Make `num_envs` of its environments, by default all, in child processes if there are any; one of
        their calls takes at most `timeout_s`. Raises ConfigError."""
        from braid.envs.simulators.processes import SimulatorProcesses
        from braid.envs.simulators.vector import make_simulator

        new: Callable[..., Simulator] = make_simulator
        if self.processes:
            new = partial(SimulatorProcesses, num_processes=self.processes, timeout_s=timeout_s)
        maker = self.made_by
        return new(
            maker.id,
            num_envs or self.num_envs,
            maker.kwargs,
            base_dir=base_dir,
            rules=self.rules(),
            is_vectorized=maker.is_vectorized,
        )

    def reset_states(self) -> dict[Literal["train", "eval"], list[Prompt]]:
        """The reset states of training, in an epoch, and of an evaluation, as prompts."""
        from braid.envs.simulators.base import reset_prompts

        def states(count: int, seeds: int | Sequence[int] | None) -> list[Prompt]:
            seeds = range(seeds) if isinstance(seeds, int) else seeds
            return reset_prompts(self.made_by.name, count, seeds)

        return {
            "train": states(NUM_RESET_STATES, self.reset_seeds),
            "eval": states(self.eval_episodes, self.eval_reset_seeds),
        }

    def own_settings(self) -> dict[str, Any]:
        """The settings that only this kind has, and the time limit."""
        settings = self.model_dump(exclude={"kind", *SimulatorEnv.model_fields})
        return settings | {"max_episode_steps": self.max_episode_steps}

    def problems(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        yield from self._other_sections(config, plan)
        stages, placed = self.pipeline_stages, plan.layout.role("env")
        if stages > 1 and self.processes == 0 and placed is None:
            why = "environments in the run's own process are not stepped while the policy acts"
            yield "env.pipeline_stages", f"{why}; set env.processes to 1 or more, or this to 1"
        if stages > 1 and self.steps_together:
            yield (
                "env.pipeline_stages",
                "the environments of a VectorEnv or a scene step together; set it to 1",
            )
        if stages > self.num_envs:
            why = f"there are only {self.num_envs} environments (env.num_envs); lower it"
            yield "env.pipeline_stages", why
        rollout = plan.layout.role("rollout")
        if placed and rollout and (each := len(placed.workers) // len(rollout.workers)) > self.num_envs:
            yield (
                "env.num_envs",
                f"each rollout worker has {each} processes of env; raise it to {each} or more",
            )
        steps, chunk = self.max_steps_per_rollout, config.model.num_action_chunks
        if steps is not None and steps < chunk:
            why = f"a rollout of {steps} env steps ends before the first chunk of {chunk} actions"
            yield "env.max_steps_per_rollout", f"{why}; raise it to {chunk} or more"

    def _other_sections(self, config: RunConfig, plan: Plan) -> Iterator[tuple[str, str]]:
        """(key, message) of what only a run of text has."""
        sft = config.sft is not None and config.model.kind.imitates != "demonstrations"
        for key, is_set, why in (
            ("data.train", config.data.train, "a simulator has its own reset states; remove the data"),
            ("data.eval", config.data.eval, "a simulator has its own reset states; remove the data"),
            (
                "reward.parts",
                config.reward.parts,
                "reward parts score text, but a simulator computes its own rewards; remove them",
            ),
            (
                "algorithm.kl_coef",
                plan.needs_reference,
                "robot policies have no reference model; set algorithm.kl_coef=0",
            ),
            (
                "sft",
                sft,
                "supervised fine-tuning for a simulator needs a vision-language-action policy (model.vla); "
                "remove it",
            ),
            (
                "run.max_epochs",
                config.run.max_epochs,
                "a simulator has no prompts and so no epochs; set run.max_rounds",
            ),
        ):
            if is_set:
                yield key, why

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        policy = config.model.kind
        text = ",".join(name for name in SamplingConfig.model_fields if name not in policy.sampled_by)
        yield (
            "a simulator has no text",
            f"{{rollout,eval}}.sampling.{{{text}}} "
            "rollout.{engine,max_sequence_tokens,print_outputs,check_weights} reward.overlong "
            "checkpoint.export_every_rounds model.chat_template "
            "data.{mix,max_prompt_tokens,overlong,use_chat_template,chat_template_kwargs}"
            + ("" if policy.has_tokenizer else " model.tokenizer"),
        )
        if not self.processes:
            yield "only simulators in processes of their own have it", "rollout.env_timeout_s"
            yield "the environments are in the run's own process (env.processes)", "env.offload"
        if plan.is_pipelined:
            yield "in a pipelined run environments are always stepped", "env.offload"
        if self.num_envs > plan.trajectories_per_round:
            yield "a round has fewer trajectories than that", "env.num_envs"
        if config.rollout.group_size == 1 and not self.auto_reset:
            yield "a group is a single episode (rollout.group_size)", "env.fixed_reset_states"
        if self.eval_reset_seeds is not None:
            yield "env.eval_reset_seeds has one for each episode", "env.eval_episodes"
        if self.processes > self.num_envs:
            yield "there are fewer environments than that (env.num_envs)", "env.processes"
        if not self.video.are_saved:
            yield "no videos are saved", "env.video.{num_episodes,overlay,frames_per_s,dir}"


class CameraEnv(SimulatorEnv):
    """Environments whose observations have camera images of one size."""

    camera_height: PositiveInt = 256
    """Height of camera images, in pixels."""
    camera_width: PositiveInt = 256
    """Width of camera images, in pixels."""
