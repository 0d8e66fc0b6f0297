"""RLinf's evaluations of robot policies: `runner.only_eval`, or the task `embodied_eval`.

RLinf builds their policy from `rollout.model` and their simulator from `env.eval`. The table has such keys at
`actor.model` and `env.train`, where files that train have them; here the keys of an evaluation take those
places.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import rlinf_facts as facts
from .rlinf_rollout import OTHER_MODELS, ROBOT_MODELS
from .table import Dialect, Rule, Source
from .values import takes

_OWN = [
    "total_num_envs",
    "rollout_epoch",
    "max_steps_per_rollout_epoch",
    "auto_reset",
    "use_fixed_reset_state_ids",
    "group_size",
    "use_ordered_reset_state_ids",
    "is_eval",
    "specific_reset_id",
    "video_cfg",
]
"""Keys and sections of `env.eval` that keep their meaning: how many episodes, which reset states, videos."""


def of_file(dialect: Dialect, values: Mapping[str, Any], _: str | None) -> Dialect:
    """The dialect of a file: RLinf's, with the keys of an evaluation in the places of those of training."""
    task = values.get("runner.task_type")
    is_robots = (
        any(path.startswith("env.eval.") for path in values)
        if task is None
        else str(task).startswith("embodied")
    )
    if not is_robots or not (values.get("runner.only_eval") is True or task == "embodied_eval"):
        return dialect
    named = {dialect.name_of(path): value for path, value in values.items()}
    is_whole = named.get("rollout.model.model_type") in (*ROBOT_MODELS, *OTHER_MODELS)
    moved = ("model_path", "precision")  # of a policy whose other keys are at actor.model
    aliases, rules = dict(dialect.aliases), dict(dialect.rules)
    for path in values:
        name = dialect.name_of(path)
        place, _, key = (
            name.removeprefix("env.").removeprefix("actor.").removeprefix("rollout.").partition(".")
        )
        if name.startswith("rollout.model."):
            twin = f"actor.model.{key}"
            if is_whole or key in moved:
                aliases[path] = dialect.name_of(twin)
        elif name.startswith("env.eval.") and key.partition(".")[0] not in _OWN:
            if dialect.rule_of(f"env.train.{key}") is not None:
                aliases[path] = dialect.name_of(f"env.train.{key}")
        elif dialect.rule_of(path) is None:
            continue
        elif name.startswith("env.train.") or (
            name.startswith("actor.model.")
            and (is_whole or (key in moved and f"rollout.model.{key}" in named))
        ):
            used = "rollout.model" if place == "model" else "env.eval"
            aliases[path] = hidden = f"training.{path}"
            rules[hidden] = Rule(hidden, takes("any"), "no effect", f"an evaluation uses {used}")
    rules["actor.training_backend"] = replace(rules["actor.training_backend"], default="fsdp")
    model = {"actor.model.": "rollout.model."} if is_whole else {}
    spelled = {"env.train.": "env.eval.", **model}
    return replace(
        dialect, aliases=aliases, rules=rules, spelled=spelled, base=lambda source: _base(dialect, source)
    )


def _base(dialect: Dialect, source: Source) -> dict[str, Any]:
    """The number of simulators of a rollout worker is that of the evaluation's."""
    native = dict(dialect.base(source))
    if (num_envs := source["env.eval.total_num_envs"]) is not None:
        native["env.num_envs"] = math.ceil(num_envs / facts.rollout_workers(source))
    return native
