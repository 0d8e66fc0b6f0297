"""The simulator driver: a policy and a simulator make trajectories."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from braid.cluster.loops import all_of
from braid.rollout.engines.simulators import Episode, SimulatorEngine
from braid.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class SimulatorDriver:
    """Turns prompts (reset states) into groups of episodes, played by `engine`.

    All episodes of a group start from the same reset seed, drawn from the run's seed and the group's key. With
    `greedy` the policy takes its most probable action. The first episodes of the first `num_filmed` prompts are
    filmed.
    """

    engine: SimulatorEngine
    _: KW_ONLY
    seed: int
    greedy: bool = False
    num_filmed: int = 0

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        """See Driver; rewards are returns. Raises EngineError if the policy fails."""
        episodes = [Episode(prompt, sample, (self.seed, *key), self.greedy) for sample in range(group_size)]
        episodes[0].is_filmed = key[-1] < self.num_filmed
        return Group(prompt, await all_of(self.engine.play(episode) for episode in episodes))
