"""ROLL's keys of the agentic pipeline: environments, their managers, normalisation of rewards.

A tag of `custom_envs` is an entry of env.mix, and the source of its episodes. rollout_batch_size counts
trajectories here, so a round has rollout_batch_size / group_size groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import roll_facts as facts
from .conditions import needs, refused, unless
from .conversions import algorithm, as_is, computed, unless_null
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, unsupported
from .values import choice

_GAMES = ("frozen_lake", "sokoban")
_STEPWISE = ("StepEnvManager",)
_DRAWN = "VLTrajEnvManager"
_MANAGERS = ("TrajEnvManager", *_STEPWISE, _DRAWN)
_OWN_PROGRAM = "run the agent as a program (braid.env.kind=program), or write an environment, of one or several agents: braid.env.mix"


def _tag(source: Source) -> str:
    return source.at.split(".")[1]


def is_stepwise(source: Source) -> bool:
    """Whether each turn is a training row, with the history in its prompt."""
    return any(_manager(source, tag) in _STEPWISE for tag in facts.tags(source))


def _manager(source: Source, tag: str) -> str:
    return (source[f"custom_envs.{tag}.env_manager_cls"] or "TrajEnvManager").rpartition(".")[2]


def _is_drawn(source: Source) -> bool:
    """Whether the policy sees pictures of the board of the tag whose key is converted."""
    game = source[f"custom_envs.{_tag(source)}.env_type"]
    config = source[f"custom_envs.{_tag(source)}.env_config"] or {}
    return game in _GAMES and config.get("render_mode") == "rgb_array"


def _drawn_template(source: Source) -> str:
    before, after = (source[f".{name}_step_template"] or "" for name in ("pre", "next"))
    return f"{{opening}}{before}{{suffix}}{after}"


def _supported(env_type: str) -> bool:
    return env_type in _GAMES or ":" in env_type


def _share(_: Any, source: Source) -> Became:
    """Shares of the tags of the manager whose key is converted."""
    manager = source.at.partition(".")[0]
    name = "share" if manager == "train_env_manager" else "eval_share"
    return Became({f"env.mix.{tag}.{name}": share for tag, share in facts.shares(source, manager).items()})


def base(source: Source) -> dict[str, Any]:
    """Native settings of agentic files that no key alone determines."""
    if not facts.is_agentic(source):
        return {}
    turns = [source[f"custom_envs.{tag}.max_steps"] for tag in facts.tags(source)]
    types = [source[f"custom_envs.{tag}.env_type"] or "" for tag in facts.tags(source)]
    made: dict[str, Any] = {
        "env.kind": "agent",
        "env.max_turns": max((turn for turn in turns if turn), default=10),
        "env.max_context_tokens": facts.context(source),
        "env.cut_turns": "continue",
        "env.rewards_at": "turn" if _of_turns(source) else "end",
        "env.run_in": "auto" if all(kind in _GAMES for kind in types) else "process",
        "reward.parts": [],
    }
    for tag in facts.tags(source):
        evaluated = facts.shares(source, "val_env_manager").get(tag, 0)
        kind = {"name": "templated", "share": 0, "eval_share": evaluated}
        made |= {f"env.mix.{tag}.{name}": value for name, value in kind.items()}
        if _manager(source, tag) in _STEPWISE:
            made[f"env.mix.{tag}.kwargs.history_length"] = 1
    return made


def _of_turns(source: Source) -> bool:
    return source["adv_estimator"] in ("gigpo", "step_reinforce")


def missing_tags(source: Source) -> Iterator[tuple[str, str]]:
    """Tags without an environment, and partitions that do not fit."""
    for manager in ("train_env_manager", "val_env_manager"):
        if not facts.is_agentic(source):
            return
        if not facts.tags(source):
            yield f"{manager}.tags", "name at least one of custom_envs"
        for tag in facts.shares(source, manager):
            if not source[f"custom_envs.{tag}.env_type"]:
                yield f"{manager}.tags", f"{tag!r} has no custom_envs.{tag}.env_type"
        names, parts = source[f"{manager}.tags"] or [], source[f"{manager}.num_groups_partition"]
        if parts is not None and len(parts) != len(names):
            yield f"{manager}.num_groups_partition", f"has {len(parts)} numbers for {len(names)} tags"
        total = source[f"{manager}.num_env_groups"]
        if parts is not None and total is not None and sum(parts) != total:
            yield f"{manager}.num_groups_partition", f"sums to {sum(parts)}, but num_env_groups is {total}"


_GROUPINGS = {"batch": "batch", "traj_group_id": "group", "tags": "source"}
_METHODS = {"identity": ("none", "none"), "mean": ("own", "none"), "mean_std": ("own", "own")}


def _statistics(_: Any, source: Source) -> Any:
    grouping = _GROUPINGS.get(source["reward_normalization.grouping"] or "batch", "none")
    kinds = _METHODS.get(source["reward_normalization.method"] or "identity", ("none", "none"))
    norm_types = [source[f"reward_normalization.norm_{what}_type"] for what in ("mean", "std")]
    if any(norm_types):
        kinds = tuple({"group": "own", "batch": "batch", None: "none"}[kind] for kind in norm_types)
    mean, std = (grouping if kind == "own" else kind for kind in kinds)
    if source["adv_estimator"] == "gigpo":
        if mean == "group" and std in ("group", "none"):
            return algorithm(
                advantage={"normalize_by_std": std != "none"}, reward_mean="none", reward_std="none"
            )
        return unsupported(
            f"use method=mean or mean_std: gigpo compares with the group's own statistics, not mean={mean}, "
            f"std={std}"
        )
    if std != "none" and mean != grouping and (mean == "none" or std == grouping):
        return unsupported(
            f"use the same statistics for mean and deviation, not mean={mean}, std={std}: ROLL sets rewards "
            "whose standard deviation is 0 to 0, whatever the mean"
        )
    is_lone = grouping == "group" and (source["train_env_manager.group_size"] or 1) == 1
    if is_lone and std != "none" and mean != "group":
        return unsupported(
            "use grouping=batch, or a group_size above 1: with a standard deviation, ROLL sets the reward "
            "of a group of one to 0, whatever the statistics"
        )
    return algorithm(reward_mean=mean, reward_std=std)


def estimator(value: str, source: Source) -> Any:
    """The advantage estimator in the agentic pipeline, where grpo is reinforce."""
    turn_level = {"kind": "reinforce", "level": "turn"}
    if is_stepwise(source) and not _of_turns(source):
        return unsupported(
            "use gigpo or step_reinforce, or TrajEnvManager: one step has only its own reward in ROLL"
        )
    if value == "step_reinforce" and source["reward_normalization.method"] != "identity":
        return unsupported(
            "set reward_normalization.method=identity, and whiten_advantages=true to normalize over turns"
        )
    if value == "gigpo" and source["reward_normalization.grouping"] != "traj_group_id":
        return unsupported("set reward_normalization.grouping=traj_group_id; gigpo compares within groups")
    known = {
        **{key: {"kind": "reinforce"} for key in ("reinforce", "grpo")},
        **dict.fromkeys(("agentic_reinforce", "step_reinforce"), turn_level),
    }
    return algorithm(advantage=known.get(value, {"kind": value}))


_SOME_OTHER = unless(lambda s: not facts.is_agentic(s), "there is no train_env_manager")
_IS_USED = unless(lambda s: _tag(s) not in facts.tags(s), "no manager has this tag")
_OF_GIGPO = needs("adv_estimator", "gigpo")
_OF_DRAWN = unless(lambda s: _manager(s, _tag(s)) != _DRAWN, f"for {_DRAWN} only")

# One rule per line.
# fmt: off
AGENTIC = rows(
    section("custom_envs.*", "env.mix.{tag}.kwargs", _IS_USED)(
        to("env_type", ".id", "text",
           lambda v, _: v if _supported(v) else unsupported(
               f"use {', '.join(_GAMES)} or an id of GEM, or write an environment: braid.env.mix"),
           note="boards, symbols and rewards as in ROLL; the start of a lake is always in the corner"),
        to("env_config", ".env_kwargs", "{any}?", lambda v, s: Became(
            {f"{s.native[0]}.{name}": value for name, value in (v or {}).items()}),
           note="arguments of the environment"),
        to("env_manager_cls", ".history_length", "text",
           lambda v, _: v if v.rpartition(".")[2] in _MANAGERS else unsupported(
               f"use {', '.join(_MANAGERS)}; {_OWN_PROGRAM}"),
           lambda v, s: v if _is_drawn(s) == (v.rpartition(".")[2] == _DRAWN) else unsupported(
               f"{_DRAWN} plays {' and '.join(_GAMES)} with env_config.render_mode=rgb_array, the other managers "
               "play without it"),
           lambda v, s: s[".history_length"] or 1 if v.rpartition(".")[2] in _STEPWISE else implied(
               "an episode is one conversation"),
           note="StepEnvManager: each turn is a row, which reads the history in its template"),
        to("agent_system_template", ".system", "text?", unless_null("no template")),
        to("{pre,next}_step_template", ".template", "text?", _OF_DRAWN, computed(_drawn_template),
           note="text before and after the picture of the board"),
        to("agent_template", ".template", "text?", unless_null("no template"),
           unless(lambda s: _manager(s, _tag(s)) == _DRAWN, f"not read by {_DRAWN}"),
           note="a template without {suffix} gets the board at the end of the observation"),
        to("max_steps", ".max_turns", "count", lambda v, s: Became(
            {s.native[0]: v, "env.max_turns": base(s)["env.max_turns"]}), note="turns per episode"),
        to("max_tokens_per_step", ".max_tokens", "count",
           refused(lambda v, s: {v, None} < {s[f"custom_envs.{tag}.max_tokens_per_step"] for tag in facts.tags(s)} | {None} and
                   "the tags have different values, but braid has one limit; make them equal"),
           lambda v, s: Became({s.native[0]: v, "rollout.sampling.max_new_tokens": facts.max_new_tokens(s)})),
        to("history_length", ".*", "count",
           unless(lambda s: _manager(s, _tag(s)) not in _STEPWISE, "for StepEnvManager only")),
        missing("agent_runner_cls", _OWN_PROGRAM),
        missing("tool_wrapper", "use tool calls: braid.env.kind=tools"),
        ignored("use_thread_lock max_env_step_concurrent",
                "environments share no state; see braid.env.run_in and braid.env.processes")),
    section("train_env_manager val_env_manager")(
        always("max_env_num_per_worker max_concurrency num_env_groups max_traj_per_env",
               "as many episodes as the round has run at the same time; see rollout_batch_size, "
               "val_batch_size", "int"),
        ignored("format_penalty", "not read by ROLL's managers; env_config.format_penalty is"),
        to("tags", "env.mix", "[text]", _share, note="episodes of each tag"),
        to("num_groups_partition", "env.mix", "[natural]", _share, note="shares of the tags"),
        missing("group_size_redundancy", "set it to 0: keeping the first finished episodes favors short ones",
                default=0),
        missing("llm_proxy.proxy_type", "set it to policy", default="policy"),
        missing("llm_proxy.proxy_config", "remove it; the policy answers"),
        missing("group_filter_cls", "use braid.rollout.filter",
                default="roll.pipeline.agentic.agentic_pipeline.GroupFilter"),
        ignored("worker_cls world_size name system_envs num_gpus_per_worker device_mapping infer_batch_size "
                "model_args generating_args data_args strategy_args",
                "environments run in the rollout workers, and all sample as actor_infer does")),
    to("train_env_manager.group_size", "rollout.group_size", "count",
       lambda v, s: Became({"rollout.group_size": v} | facts.round_size(s))),
    to("val_env_manager.group_size", {"eval.samples_per_prompt": as_is, "env.eval_episodes": computed(
        facts.eval_episodes)}, "count", note="samples of each evaluated seed"),
    section("reward_normalization")(
        to("grouping", "algorithm.reward_mean", dict.fromkeys(_GROUPINGS, _statistics) | dict.fromkeys(
            ("state", "inductive"), unsupported(f"use one of {', '.join(_GROUPINGS)}")), note="tags: by source"),
        to("method", "algorithm.reward_mean", dict.fromkeys(_METHODS, _statistics) | {
            "asym_clip": unsupported("use mean_std, and advantage_clip")},
           note="(r - mean) / (std + 1e-6) of the episode's summed reward, which is at its end"),
        to("norm_mean_type norm_std_type", "algorithm.reward_mean", choice("batch", "group", None), _statistics,
           note="instead of method: group is that of grouping"),
        missing("global_scale_factor global_shift_value", "use braid.reward.scale and braid.reward.shift")),
    to("episode_reward_weight", "algorithm.advantage.episode_weight", "non-negative", _OF_GIGPO),
    to("step_reward_weight", "algorithm.advantage.turn_weight", "non-negative", _OF_GIGPO),
    to("step_reward_gamma", "algorithm.advantage.gamma", "share",
       needs("adv_estimator", "gigpo", "step_reinforce"), default=0.95, note="discount per turn"),
    to("ratio_type", "algorithm.policy_loss.ratio_level", {"token": "token", "segment": "turn"}, _SOME_OTHER,
       facts.HAS_RATIO),
    ignored("batch_adjust_mode", "steps are divided by whole groups; no sample is copied or deleted"),
    ignored("render_save_dir", "episodes are stored as text in samples/ of the run folder"),
    ignored("env_monitor.{enable,monitor_interval,hung_timeout}",
            "each call of an environment has its own time limit: braid.env.timeouts"),
    ignored("partial_gpu_mode", "engines keep their devices; see pipeline.max_lag"),
    ignored("dirty_data_mask open_feedback_turn use_token_reward parse_tool_call_parameter_to_dict "
            "skip_mock_system_prompt", "not read by ROLL, or for tool calls, which follow the chat template"),
    missing("exp_mode", "use braid train, or braid eval for evaluation alone", default="train"),
    missing("reward.*", "use the environment's rewards, or braid.reward.parts"),
    ignored("{custom_env,gem_math,gem_games,gem_rg,gem_qa,gem_code}.* agent_config_common.* all_response_pattern action_pattern think_action_pattern "
            "max_tokens_per_step max_actions_per_traj sokoban_format_penalty frozen_format_penalty "
            "env_manager_cls agent_runner_cls agent_system_template agent_template "
            "single_prompt_agent_system_template single_prompt_agent_template default_history_length",
            "a variable of ROLL's presets; it counts where custom_envs refers to it"),
)
# fmt: on
