"""Which changes of a config a resume has to accept explicitly."""

from __future__ import annotations

import pytest

from braid.config.changes import Change, changes
from braid.config.load import load_config, to_yaml


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


def test_a_key_that_a_newer_version_has_added_with_null_as_its_default_is_no_change() -> None:
    loaded = load_config(None, [
        "model.build.architecture=llama", "env={kind: agent, name: guess, max_context_tokens: 64, tasks: 8}",
        "env.kwargs={highest: 7, turns: null}",
    ])  # fmt: skip
    new = to_yaml(loaded)
    old = "\n".join(
        line for line in new.splitlines() if line.split(":")[0].strip() not in ("reward_mean", "turns")
    )
    assert "reward_mean: null" in new
    assert "reward_mean" not in old
    (change,) = changes(old, new, loaded.origins)
    assert (change.key, change.before, change.after) == ("env.kwargs.turns", None, "null"), "set by the user"
