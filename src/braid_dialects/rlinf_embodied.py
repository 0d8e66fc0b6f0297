"""RLinf's keys for robots: simulators and vision-language-action policies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import rlinf_facts as facts
from .compat import (
    Apply,
    Became,
    Convert,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    mapped,
    opposite,
    unsupported,
    when,
)
from .rlinf_facts import cluster, robots_only
from .values import (
    BOOL,
    COUNT,
    NATURAL,
    PATH,
    POSITIVE,
    TEXT,
    Takes,
    choice,
    list_of,
    nullable,
)

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130")
SIMULATORS = choice(
    "maniskill", "libero",
    "robotwin", "isaaclab", "metaworld", "behavior", "calvin", "robocasa", "realworld", "habitat",
)  # fmt: skip


def _simulator(value: str, source: Source) -> Became:
    if value not in ("maniskill", "libero"):
        return unsupported("use maniskill or libero")
    trained = source.get("env.train.env_type")
    if trained is not None and trained != value:
        raise ValueError(
            f"evaluation must use the simulator of training, env.train.env_type={trained}; make them agree"
        )
    return Became({"env.kind": value})


def _of_simulator(name: str) -> Any:
    """Condition of keys for the simulator `name`: the reason why they have no effect in other simulators."""

    def idle(source: Source) -> str:
        kind = source.get("env.train.env_type")
        return "" if kind == name else f"for {name} only; the simulator is {kind}"

    return idle


def _task(key: str) -> Convert:
    """Convert the task name; raises ValueError if training and evaluation differ."""

    def convert(value: str, source: Source) -> str:
        trained = source.values.get(f"env.train.{key}")
        if trained is not None and trained != value:
            raise ValueError(
                f"evaluation must use the task of training, env.train.{key}={trained}; make them agree"
            )
        return value

    return convert


def _number_of_prompts(value: int | None, source: Source) -> Became:
    """Compute the prompts (reset states) per round: simulators times episodes of each, divided by the group
    size."""
    episodes, group = (
        facts.num_envs(source) * facts.rollout_epochs(source),
        source.get("algorithm.group_size") or 1,
    )
    return Became({"env.num_envs": value, "rollout.prompts_per_round": max(1, episodes // group)})


def _env_rules(role: str, native: str) -> Iterator[Rule]:
    """Rules of env.train or env.eval: the documented section and the keys of presets mounted there."""

    def apply(
        key: str,
        name: str,
        takes: Takes,
        then: Convert | None = None,
        note: str = "",
        idle: Any = robots_only,
    ) -> Rule:
        return Apply(
            f"env.{role}.{key}",
            f"{native}.{name}" if name else "",
            takes,
            when(robots_only, idle, then=then),
            note=note,
        )

    is_train = role == "train"
    yield Apply(f"env.{role}.env_type", "", SIMULATORS, when(robots_only, then=_simulator), note="env.kind")
    for key in ("task_name", "init_params.id"):
        yield Apply(
            f"env.{role}.{key}",
            "env.task",
            TEXT,
            when(robots_only, _of_simulator("maniskill"), then=_task(key)),
        )
    suite = when(robots_only, _of_simulator("libero"), then=_task("task_suite_name"))
    yield Apply(f"env.{role}.task_suite_name", "env.suite", choice(*SUITES), suite)
    if is_train:
        yield Apply(
            "env.train.total_num_envs", "", nullable(COUNT), when(robots_only, then=_number_of_prompts),
            note="rollout.prompts_per_round = this * rollout_epoch // group_size; null: as many as one optimizer batch needs",
        )  # fmt: skip
        yield Apply("env.train.rollout_epoch", "env.episodes_per_round", COUNT, when(robots_only))
    else:
        yield apply("total_num_envs", "num_envs", nullable(COUNT))
        yield Unsupported("env.eval.rollout_epoch", "evaluation always runs each reset state once")
    yield Unsupported(
        f"env.{role}.max_steps_per_rollout_epoch",
        f"use env.{role}.max_episode_steps: simulators always run whole episodes",
    )
    yield apply("auto_reset", "auto_reset", BOOL, note="at the end of an action chunk")
    yield apply("ignore_terminations", "ignore_terminations", BOOL)
    yield apply(
        "use_fixed_reset_state_ids",
        "fixed_reset_states",
        BOOL,
        note="true for GRPO: a group shares its reset state",
    )
    yield apply("max_episode_steps", "max_episode_steps", COUNT, note="in env steps, not action chunks")
    yield apply("use_rel_reward", "relative_reward", BOOL)
    yield apply("reward_coef", "reward_scale", POSITIVE)
    yield apply("seed", "seed", NATURAL)
    yield apply("group_size", "group_size", COUNT)
    yield apply("video_cfg.save_video", "video.save", BOOL)
    yield apply("video_cfg.info_on_video", "video.overlay", BOOL)
    yield apply("video_cfg.video_base_dir", "video.dir", PATH)
    yield apply("init_params.camera_heights", "camera_height", COUNT)
    yield apply("init_params.camera_widths", "camera_width", COUNT)


def _vla(key: str, name: str, takes: Takes, then: Convert | None = None, note: str = "") -> Rule:
    """Map a key of the robot policy."""
    return Apply(f"actor.model.{key}", f"model.vla.{name}", takes, when(robots_only, then=then), note=note)


def _channels(section: str) -> Iterator[Rule]:
    """Rules of the named queue that a role reads from."""
    why = "data is passed between roles without named queues"
    yield NoEffect(f"{section}.channel.name", TEXT, why)
    yield NoEffect(f"{section}.channel.queue_name", TEXT, why)
    yield NoEffect(f"{section}.channel.queue_size", NATURAL, why)


# fmt: off
RULES: tuple[Rule, ...] = (
    # simulators
    Apply("env.group_name", "cluster.group_names.env", TEXT, when(cluster)),
    *_channels("env"),
    *_channels("rollout"),
    *_channels("actor"),
    Apply("env.enable_offload", "env.offload", BOOL, when(robots_only)),
    *_env_rules("train", "env"),
    *_env_rules("eval", "env.eval"),
    # the policy
    _vla("action_dim", "action_dim", COUNT),
    _vla("num_action_chunks", "num_action_chunks", COUNT, note="actions of one answer"),
    _vla("use_proprio", "use_proprio", BOOL),
    _vla("unnorm_key", "unnorm_key", nullable(TEXT)),
    _vla("value_type", "value_level", choice("chunk_level", "action_level"),
         mapped({"chunk_level": "chunk", "action_level": "action"})),
    _vla("val_micro_batch_size", "eval_batch_rows", COUNT, note="not read by RLinf"),
    _vla("center_crop", "center_crop", BOOL),
    _vla("do_sample", "greedy", BOOL, opposite, note="in evaluation; training always samples"),
    _vla("add_qkv_bias", "qkv_bias", BOOL, note="checked against the folder"),
    _vla("vocab_size", "vocab_size", COUNT, note="action tokens are counted backwards from it"),
    _vla("hidden_size", "hidden_size", COUNT, note="input of the value head"),
    _vla("policy_setup", "policy_setup", TEXT),
    _vla("image_size", "image_size", list_of(COUNT, length=2), note="height and width"),
    _vla("num_images_in_input", "num_images", COUNT),
    Implied("actor.model.add_value_head", BOOL, "there is a value head whenever values are learned"),
    Implied("actor.model.implement_version", choice("rlinf", "official"), "one implementation supports both"),
    Unsupported("actor.model.use_film", "use a policy without FiLM"),
)
# fmt: on
