"""Which changes of a config a resume has to accept explicitly."""

from __future__ import annotations

import pytest

from braid.config.changes import Change


@pytest.mark.parametrize(
    "key",
    [
        "algorithm.recipe",
        "model.path",
        "data.train[0].path",
        "critic.path",
        "reward.parts[0].kind",
        "sft.data[0].path",
    ],
)
def test_changes_of_the_training_task_are_guarded(key: str) -> None:
    assert Change(key, "a", "b").is_guarded


@pytest.mark.parametrize(
    "key",
    [
        "run.max_rounds",
        "train.backend",
        "reference.train.backend",
        "critic.train",
        "data.eval[0].path",
        "env.processes",
        "sft.steps",
    ],
)
def test_a_change_of_layout_evaluation_or_length_is_free(key: str) -> None:
    assert not Change(key, "a", "b").is_guarded
