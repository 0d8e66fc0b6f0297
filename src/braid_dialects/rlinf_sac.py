"""RLinf's files of soft actor-critic and RLPD for small policies: the keys of other files of robots, of
which some have other meanings here.

A trajectory in the replay buffer is what RLinf receives at a time: the decisions of all simulators of a
rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from . import rlinf_facts as facts
from .conversions import or_null
from .rows import always, ignored, missing, rows, section, to
from .table import Dialect, Rule, Source, implied, table, unsupported
from .values import takes

ADV_TYPES = ("embodied_sac", "sac", "rlpd")
_LAYOUT = ("actor.training_backend", "actor.fsdp_config.", "cluster.component_placement", "cluster.num_nodes")


def is_sac(values: Mapping[str, Any]) -> bool:
    """Whether a file is of soft actor-critic with a policy that braid trains so."""
    is_small = values.get("actor.model.model_type") in facts.SMALL_POLICIES
    return values.get("algorithm.adv_type") in ADV_TYPES and is_small


def dialect(robots: Dialect) -> Dialect:
    """The dialect of these files, from that of other files of `robots`."""

    def base(source: Source) -> dict[str, Any]:
        native = dict(robots.base(source))
        native.pop("critic.network", None)
        if source["algorithm.actor_agg_q"] is None:
            native["sac.actor_reduce"] = source["algorithm.agg_q"] or "min"
        return native | {
            "model.mlp.hidden_sizes": [256, 256, 256],
            "model.mlp.activation": "relu",
            "sac.random_decisions": 0,
        }

    layout = {
        path: Rule(path, takes("any"), "no effect", "SAC runs in one process on one device in this version")
        for path in robots.rules
        if path.startswith(_LAYOUT)
    }
    return replace(robots, rules={**robots.rules, **layout, **table(_RULES)}, base=base, absent={}, others=())


def _observations(num_trajectories: int, source: Source) -> int:
    """Observations in the buffer of as many of RLinf's trajectories."""
    return num_trajectories * facts.episodes(source) * (facts.chunks_per_rollout(source) + 1)


def _decisions(num_trajectories: int, source: Source) -> int:
    """Decisions in as many of RLinf's trajectories."""
    return num_trajectories * facts.episodes(source) * facts.chunks_per_rollout(source)


def _constant(value: str, _: Source) -> Any:
    return "constant" if value.endswith("constant") else unsupported("use a constant learning rate")


# One rule per line.
# fmt: off
def _optimizer(native: str, max_grad_norm: str) -> list[Rule]:
    """Rules of an optimizer's section."""
    return rows(
        to("lr", f"{native}.lr", "positive"),
        to("adam_beta1", f"{native}.betas", "share", lambda v, s: [v, _default(s, "adam_beta2", 0.999)], default=0.9),
        to("adam_beta2", f"{native}.betas", "share", lambda v, s: [_default(s, "adam_beta1", 0.9), v], default=0.999),
        to("adam_eps", f"{native}.eps", "positive", default=1e-8),
        to("weight_decay", f"{native}.weight_decay", "non-negative", default=0.01),
        to("clip_grad", max_grad_norm, "non-negative", or_null, default=1.0, note="global norm; 0: none"),
        to("lr_scheduler", f"{native}.schedule.decay", "constant|cosine|torch_constant|torch_cosine", _constant),
        missing("lr_warmup_steps lr_warmup_steps_ratio total_training_steps", "use a constant learning rate", default=0))


def _default(source: Source, name: str, value: float) -> float:
    """Another key of the same section."""
    there = source[f"{source.at.rpartition('.')[0]}.{name}"]
    return value if there is None else there


_RULES = rows(
    section("algorithm", "sac")(
        always("{adv_type,loss_type}", "the section sac", "text"),
        to("gamma", ".gamma", "share", note="per decision"),
        to("tau", ".tau", "positive"),
        to("target_update_freq", ".target_every_updates", "count", default=1),
        to("target_update_type", "", "all|q_head_only", lambda v, _: unsupported("use all") if v != "all" else
           implied("all weights of the target critics move by tau")),
        to("agg_q", ".target_reduce", "min|mean", default="min"),
        to("actor_agg_q", ".actor_reduce", "min|mean|q1", lambda v, _: unsupported("use min or mean") if v == "q1" else v),
        to("critic_subsample_size", ".num_target_critics", "cadence", lambda v, _: v if v > 0 else None,
           note="0 and -1: all"),
        to("critic_actor_ratio", ".actor_every_updates", "count", default=1),
        to("backup_entropy", ".backup_entropy", "bool", default=True),
        to("bootstrap_type", ".bootstrap", {"standard": "truncated", "always": "always"}),
        to("update_epoch", ".updates_per_round", "count", default=1, note="updates per round"),
        to("train_actor_steps", ".min_transitions_actor", "natural", _decisions, default=0,
           note="trajectories in the buffer, times the decisions of each"),
        missing("enable_drq", "images are not augmented; set it to false", default=False)),
    section("algorithm.replay_buffer", "sac")(
        to("sample_window_size", ".capacity", "count", _observations,
           note="trajectories, times the observations of each; older ones are dropped"),
        to("min_buffer_size", ".min_transitions", "natural", _decisions, default=0,
           note="trajectories, times the decisions of each"),
        ignored("enable_cache cache_size auto_save auto_save_path trajectory_format *",
                "the buffer is in memory, and in checkpoints")),
    section("algorithm.demo_buffer", "sac")(
        missing("load_path", "RLinf's recorded trajectories are not read; set braid.sac.demonstrations to a LeRobot "
                "folder with rewards"),
        ignored("*", "for load_path only")),
    section("algorithm.entropy_tuning", "sac.temperature")(
        to("alpha_type", ".kind", {"softplus": "softplus", "exp": "exp", "fixed_alpha": "fixed"}, default="softplus"),
        to("initial_alpha", ".initial", "non-negative", default=0.01),
        to("target_entropy", ".target_entropy", "number?"),
        to("optim.lr", ".lr", "positive"),
        to("optim.clip_grad", ".max_grad_norm", "non-negative", or_null),
        to("optim.lr_scheduler", "", "constant|cosine|torch_constant|torch_cosine",
           lambda v, _: implied("its learning rate is constant") if v.endswith("constant")
           else unsupported("use a constant learning rate")),
        ignored("optim.*", "it is Adam without weight decay")),
    section("actor.optim")(_optimizer("sac.optimizer", "sac.max_grad_norm")),
    section("actor.critic_optim")(_optimizer("sac.critic_optimizer", "sac.critic_max_grad_norm")),
    to("actor.global_batch_size", "sac.batch_size", "count", note="transitions per update"),
    ignored("actor.micro_batch_size", "an update is a single forward pass"),
    section("actor.model", "sac")(
        always("add_q_head", "there are critics", "bool"),
        to("num_q_heads", ".num_critics", "count", default=2),
        to("q_head_type", "", "default|crossq", lambda v, _: implied("perceptrons with target networks") if v == "default"
           else unsupported("CrossQ is not supported; use default"))))
# fmt: on
