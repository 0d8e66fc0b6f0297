"""Tasks of reasoning-gym with several attempts: the policy is told that an answer is wrong, and tries
again."""

from __future__ import annotations

from typing import Any

from braid.envs.agents.base import Opening, Step
from braid.generators import reasoning_gym
from braid.types import Action, Prompt

from . import check_known, refused

_factory = reasoning_gym()


class ReasoningGym:
    """The task is that of the prompt, for data of kind `procedural`; with `generator` and its `params` one is
    made from the seed. The answer is the text in <answer> tags, otherwise all of it. The reward is the score
    of the last attempt. Runs in a process: scorers evaluate answers, and may hang. See base.AgentEnv."""

    needs_process = True

    def __init__(
        self,
        generator: str | None = None,
        attempts: int = 3,
        feedback: str = "That is not correct. Try again.",
        **params: Any,
    ) -> None:
        if generator is not None:
            check_known("reasoning-gym", generator, _factory.DATASETS)
            reasoning_gym(generator)
        self._generator, self._left, self._feedback, self._params = generator, attempts, feedback, params
        self._num = 0

    def start(self, task: Prompt, seed: int) -> Opening:
        generator, params, fields = self._generator, self._params, task.fields
        if generator is None:
            if "reasoning_gym" not in fields:
                raise refused(f"task {task.uid} is not procedural; set `generator`")
            generator, params = fields["reasoning_gym"]["generator"], fields["reasoning_gym"]["params"]
        self._dataset = _factory.create_dataset(generator, size=1, seed=seed % 2**32, **params)
        self._entry: Any = self._dataset[0]
        if self._generator is None:  # the task's, with the generator's answer whatever answer_key is
            self._entry = {**fields, "answer": fields["reasoning_gym"]["answer"]}
        return Opening(
            () if self._generator is None else [{"role": "user", "content": self._entry["question"]}]
        )

    def step(self, action: Action) -> Step:
        from reasoning_gym.utils import extract_answer

        self._num += 1
        score = float(
            self._dataset.score_answer(extract_answer(action.text) or action.text.strip(), self._entry)
        )
        if score >= 1 or self._num >= self._left:
            return Step(reward=score, is_done=True, metrics={"attempts": float(self._num)})
        return Step([{"role": "user", "content": self._feedback}])

    def close(self) -> None:
        """Nothing to free."""
