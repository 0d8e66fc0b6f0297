"""The simulator driver: a policy and a simulator make trajectories."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from braid.cluster.loops import task_group
from braid.rollout.engines.simulators import Episode, SimulatorEngine
from braid.types import Group, Prompt, Trajectory


@dataclass(frozen=True, slots=True)
class SimulatorDriver:
    """Turns prompts (reset states) into groups of episodes, played by `engine`.

    All episodes of a group start from the same reset seed, drawn from the run's seed and the group's key,
    unless the prompt has one; without `shares_reset` each has a different seed. If `temperature` is None, the
    policy takes its most probable actions. A sample is one episode of at most `max_decisions`, or with
    `auto_reset` as many as fit into them, of which the last one may be cut; an invalid episode ends it too.
    The first episodes of the first `num_filmed` prompts of each round are filmed, or of each `film_every`-th.
    """

    engine: SimulatorEngine
    _: KW_ONLY
    seed: int
    temperature: float | None = 1.0
    num_filmed: int = 0
    film_every: int = 1
    max_decisions: int | None = None
    auto_reset: bool = False
    shares_reset: bool = True

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        """See Driver; rewards are returns. Raises EngineError if the policy fails."""
        async with task_group() as tasks:
            samples = [tasks.create_task(self._sample(prompt, i, key)) for i in range(group_size)]
        trajectories = [trajectory for episodes in samples for trajectory in episodes.result()]
        for number, trajectory in enumerate(trajectories):
            trajectory.sample = number
        return Group(prompt, trajectories)

    async def _sample(self, prompt: Prompt, sample: int, key: tuple[int, ...]) -> list[Trajectory]:
        is_filmed = sample == 0 and key[-1] < self.num_filmed and key[-2] % self.film_every == 0
        left, attempts, trajectories = self.max_decisions, 0, []
        while True:
            episode = Episode(
                prompt,
                sample,
                (self.seed, *key),
                self.temperature,
                is_filmed and not trajectories,
                left,
                first_attempt=attempts,
                own_reset=None if self.shares_reset else len(trajectories),
            )
            trajectory = await self.engine.play(episode)
            trajectories.append(trajectory)
            attempts += trajectory.attempts
            if not self.auto_reset or not trajectory.is_valid:
                return trajectories
            assert left is not None, "the config asks for it"
            assert episode.steps is not None, "the trajectory is valid"
            left -= len(episode.steps.rewards)
            if left == 0:
                return trajectories
