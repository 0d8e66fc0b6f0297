"""The simulator driver: a policy and a simulator make trajectories."""

from __future__ import annotations

from braid.cluster.loops import all_of
from braid.rollout.engines.simulators import Episode, SimulatorEngine
from braid.types import Group, Prompt


class SimulatorDriver:
    """Turns prompts (reset states) into groups of episodes, played by `engine`.

    All episodes of a group start from the same reset seed, drawn from the run's seed and the group's key. With
    `greedy` the policy takes its most probable action.
    """

    def __init__(self, engine: SimulatorEngine, *, seed: int, greedy: bool = False) -> None:
        self._engine = engine
        self._seed = seed
        self._greedy = greedy

    async def group(self, prompt: Prompt, group_size: int, key: tuple[int, ...]) -> Group:
        """See Driver; rewards are returns. Raises EngineError if the policy fails."""
        episodes = [Episode(prompt, sample, (self._seed, *key), self._greedy) for sample in range(group_size)]
        return Group(prompt, await all_of(self._engine.play(episode) for episode in episodes))
