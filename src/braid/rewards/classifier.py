"""Reward-model part: scores the trajectories of a group together, in batches that depend only on these."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from braid.errors import RewardError
from braid.types import Encoded, Message, Trajectory

from .base import Classifier


class ModelPart:
    """Scores the conversation of prompt and response (the answer of the policy's last turn).

    Forward passes run in a thread, one at a time, so that the time limits of other parts' calls hold
    meanwhile.
    """

    def __init__(self, classifier: Classifier) -> None:
        self._classifier = classifier
        self._thread = ThreadPoolExecutor(1, "reward-model")

    async def score_all(self, trajectories: Sequence[Trajectory]) -> tuple[list[float | RewardError], int]:
        """Return the score of each trajectory, and the number of truncated inputs. Inputs that are too long,
        or that the model fails on, give a RewardError in place of a score."""
        scores: list[float | RewardError] = [0.0] * len(trajectories)
        rows: list[Encoded] = []
        places: list[int] = []
        num_truncated = 0
        for place, trajectory in enumerate(trajectories):
            answer = Message(role="assistant", content=trajectory.answer_text)
            try:
                row, is_cut = self._classifier.encode([*trajectory.prompt.messages, answer])
            except RewardError as error:
                scores[place] = error
                continue
            rows.append(row)
            places.append(place)
            num_truncated += is_cut
        for batch in self._classifier.batches(rows):
            batch_scores = await self._scores([rows[i] for i in batch])
            for i, score in zip(batch, batch_scores, strict=True):
                scores[places[i]] = score
        return scores, num_truncated

    async def _scores(self, rows: Sequence[Encoded]) -> Sequence[float | RewardError]:
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._classifier.scores, rows)
        except RuntimeError as error:  # out of memory, or another error of a kernel
            problem = RewardError(f"the reward model failed: {str(error).splitlines()[0]}")
            return [problem] * len(rows)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
