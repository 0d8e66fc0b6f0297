"""RLinf's keys for the run, the cluster, the data, rewards and the critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from braid.errors import suggest
from braid.plan.placement import parse_devices, split_roles

from . import rlinf_facts as facts
from .compat import (
    Apply,
    Became,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    become,
    folder_name,
    no_effect,
    unless_null,
    unsupported,
    wandb_mode,
    when,
)
from .rlinf_facts import cluster, robots_only, text_only
from .values import ANY, BOOL, COUNT, NATURAL, PATH, TEXT, Takes, choice, integer, list_of, nullable, number

PATHS = Takes(
    "a path or a list of paths",
    lambda v: TEXT.accepts(v) or (isinstance(v, list) and bool(v) and all(TEXT.accepts(item) for item in v)),
    (["one.jsonl"], ["two.jsonl", "three.jsonl"]),
)
PLACEMENT = Takes(
    "a mapping of components to devices, such as actor,rollout: 0-3",
    lambda v: isinstance(v, dict) and bool(v),
    ({"actor,rollout": "0"}, {"actor": "0-1", "rollout": "2-3"}),
)
LIST = Takes("a list", lambda v: isinstance(v, list), (["_self_"],))
CADENCE = integer(-1, samples=(2, 3, -1))


def _placement(value: Mapping[str, Any], source: Source) -> Any:
    native, seen = {}, set[str]()
    for line, text in value.items():
        if isinstance(text, dict):
            return unsupported("remove node groups and number the devices across nodes, such as actor: 0-7")
        parse_devices(str(text), facts.num_devices(source))
        names = split_roles(line)
        for name in names:
            if name not in facts.ROLES:
                known = ", ".join(facts.ROLES)
                raise ValueError(
                    f"unknown component {name!r}{suggest(name, facts.ROLES)}; the components are {known}"
                )
            if name in seen:
                raise ValueError(f"{name} is placed twice; remove one of them")
            seen.add(name)
        native["cluster.placement." + ",".join(facts.ROLES[name] for name in names)] = str(text)
    why = cluster(source)
    return no_effect(why) if why else Became(native)


def _task(value: str, source: Source) -> Became:
    if value in ("coding_online_rl", "sft", "offline"):
        return unsupported(
            "use math or embodied; for supervised fine-tuning use `braid sft` with a native `sft` section"
        )
    native: dict[str, Any] = {"run.eval_only": True} if value.endswith("_eval") else {}
    kind = source.get("env.train.env_type") if facts.is_robots(source) else "single_turn"
    return Became(native | ({} if kind is None else {"env.kind": kind}))


def _logger_path(value: str, _: Source) -> str:
    path = Path(value)
    return str(path.parent if path.name == "tensorboard" else path)


def _backends(value: list[str] | None, source: Source) -> Became:
    chosen = value or []
    native: dict[str, Any] = {"report.tensorboard": "tensorboard" in chosen}
    if "wandb" in chosen:
        native["report.wandb.mode"], _ = wandb_mode()
    if "swanlab" in chosen:
        native["report.swanlab.mode"] = source.get("runner.logger.swanlab_mode") or "cloud"
    return Became(native)


def _wandb(value: bool, _: Source) -> Became:
    if not value:
        return Became({"report.wandb": None})
    mode, why = wandb_mode()
    return Became({"report.wandb.mode": mode}, note=why)


def _of_sinks(name: str) -> Any:
    """Set `name` for the sinks in runner.logger.logger_backends."""

    def convert(value: str, source: Source) -> Became:
        chosen = source.get("runner.logger.logger_backends") or []
        native = {f"report.{sink}.{name}": value for sink in ("wandb", "swanlab") if sink in chosen}
        return (
            Became(native)
            if native
            else no_effect("runner.logger.logger_backends has neither wandb nor swanlab")
        )

    return convert


def _of_wandb(name: str) -> Any:
    def convert(value: str, source: Source) -> Any:
        is_on = source.get("runner.logger.wandb.enable") is True
        return (
            Became({f"report.wandb.{name}": value})
            if is_on
            else no_effect("runner.logger.wandb.enable is false")
        )

    return convert


def _epochs(value: int, source: Source) -> Became:
    if not facts.is_robots(source):
        return Became({"run.max_epochs": value})
    return Became(
        {"run.max_rounds": _robot_rounds(source)},
        note="a simulator has no prompts: an epoch is a round",
    )


def _steps(value: int, source: Source) -> Became:
    if value == 0:
        raise ValueError(
            "a run needs at least one step; to only evaluate set runner.only_eval=true, for no limit set it to -1"
        )
    if facts.is_robots(source):
        return Became({"run.max_rounds": _robot_rounds(source)})
    return Became({"run.max_rounds": value if value > 0 else None})


def _robot_rounds(source: Source) -> int | None:
    limits = (source.get("runner.max_epochs"), source.get("runner.max_steps"))
    return min((limit for limit in limits if limit is not None and limit > 0), default=None)


def _validation(value: int, _: Source) -> Became:
    return Became({"eval.every_rounds": max(value, 0), "eval.at_end": value > 0, "eval.before": False})


def _saving(value: int, _: Source) -> Became:
    return Became(
        {"checkpoint.every_rounds": max(value, 0), "checkpoint.at_end": value > 0, "checkpoint.keep": None}
    )


def _seq_length(source: Source) -> int:
    return source.get("runner.seq_length") or 2048


def _dynamic(value: bool, source: Source) -> Became:
    """Bound micro-batches by tokens, or set a fixed number of rows."""
    if facts.is_robots(source):
        return no_effect("for text tasks only; robots use actor.micro_batch_size")
    if value:
        tokens = source.get("runner.max_tokens_per_mbs")
        return Became(
            {"train.micro_batch_rows": None} | ({"train.micro_batch_tokens": tokens} if tokens else {})
        )
    rows = source.get("algorithm.training_batch_size_per_gpu")
    return Became({"train.micro_batch_rows": rows, "train.micro_batch_tokens": rows * _seq_length(source)})


def _token_budget(value: int, source: Source) -> Any:
    if not source.get("runner.enable_dynamic_batch_size"):
        return no_effect("runner.enable_dynamic_batch_size is false")
    return value


def logprob_rows(value: int, source: Source) -> Became:
    """Set a fixed number of rows per pass without gradients, regardless of their length."""
    return Became({"train.infer_batch_rows": value, "train.infer_batch_tokens": value * _seq_length(source)})


def _resume(value: str | None, _: Source) -> str:
    return {None: "none", "auto": "latest"}.get(value, value or "none")


def _data_type(value: str, source: Source) -> Became:
    if value not in ("math", "reasoning"):
        return unsupported("use math: rows with a prompt and its solutions")
    native = {"data.train[0].kind": "file"} if source.get("data.train_data_paths") else {}
    return Became(native, note="rows have a prompt and `solutions`, a list; any of them is accepted")


def _sources(name: str) -> Any:
    """Set the files of `data.train` or `data.eval` as one source, read in sequence."""

    def convert(value: str | list[str], _: Source) -> Became:
        paths = [value] if isinstance(value, str) else value
        return Became({f"data.{name}[0].kind": "file", f"data.{name}[0].path": paths})

    return convert


def _column(name: str) -> Any:
    """Set `name` for all sources in the file."""

    def convert(value: Any, source: Source) -> Any:
        given = {"train": "data.train_data_paths", "eval": "data.val_data_paths"}
        native = {f"data.{role}[0].{name}": value for role, key in given.items() if source.get(key)}
        return Became(native) if native else no_effect("data.train_data_paths is not set")

    return convert


def eval_prompts(_: Any, source: Source) -> Became:
    """Compute the evaluation batch in prompts: the smaller of the global limit and the sum of the per-device
    limits."""
    whole = source.get("data.val_rollout_batch_size") or source.get("data.rollout_batch_size")
    per_device = source.get("algorithm.val_rollout_batch_size_per_gpu")
    limits = [whole, per_device and per_device * facts.rollout_devices(source)]
    return Became({"eval.batch_prompts": min((limit for limit in limits if limit), default=None)})


def _reward_model(value: bool, source: Source) -> Became:
    if not value:
        return Became({"reward.parts[0].kind": source.get("reward.reward_type")})
    if not source.has("reward.model.model_path"):
        raise ValueError("with true, set reward.model.model_path to the folder of the reward model")
    return Became({"reward.parts[0].kind": "model"})


def _reward_type(value: str, source: Source) -> Became:
    if source.get("reward.use_reward_model"):
        return no_effect("overridden by reward.use_reward_model")
    if value != "math":
        return unsupported(
            "use math, or a custom function: braid.reward.parts=[{kind: function, path: file.py:score}]"
        )
    return Became({"reward.parts[0].kind": value})


def _reward_scale(_: Any, source: Source) -> Became:
    """Map a score s in [0, 1] to scale * (low + (high - low) * s)."""
    low, high, scale = (
        source.get(f"reward.{name}") for name in ("reward_min_val", "reward_max_val", "reward_scale")
    )
    if source.get("reward.use_reward_model"):
        return Became({"reward.scale": float(scale)}, note="a reward model's score times reward_scale")
    return Became({"reward.scale": float(scale * (high - low)), "reward.shift": float(scale * low)})


def _critic(value: bool, source: Source) -> Any:
    if facts.advantage(source) != "gae":
        if value:
            raise ValueError(
                f"algorithm.adv_type={source.get('algorithm.adv_type')} does not use values; set it to gae, or this to false"
            )
        return no_effect("algorithm.adv_type does not use values")
    return Became({"algorithm.advantage": "gae" if facts.has_critic(source) else "reinforce"})


def critic_view(source: Source) -> Source:
    """Return a view of the file in which the `critic` keys replace those of `actor`."""
    own = {
        f"actor{key.removeprefix('critic')}": v
        for key, v in source.values.items()
        if key.startswith("critic.")
    }
    names = {source.dialect.aliases.get(key, key): value for key, value in own.items()}
    return replace(source, values={**source.values, **names})


def of_critic(native: Mapping[str, Any]) -> dict[str, Any]:
    """Return the training settings among native values, moved to the critic's section."""
    return {f"critic.{key}": value for key, value in native.items() if key.startswith("train.")}


def _as_actor(value: Any, source: Source) -> Became:
    """Convert a key that the actor has too, using the actor's rule."""
    if not facts.has_critic(source):
        return no_effect("there is no critic")
    key = f"actor{source.at.removeprefix('critic')}"
    name = source.dialect.aliases.get(key, key)
    rule = source.dialect.rule_of(name)
    if rule is None:
        raise ValueError(f"the critic has the same keys as the actor, and {key} does not exist")
    if not rule.takes.accepts(value):
        raise ValueError(f"{value!r} is not {rule.takes.words}")
    made = become(rule, value, replace(critic_view(source), at=name))
    if made.disposition != "applied":
        return made
    native = of_critic(made.native)
    return Became(native) if native else no_effect("the actor's value applies to both models")


_LOADED_ONCE = "prompts are always read and tokenized once, before the run starts"

# fmt: off
RULES: tuple[Rule, ...] = (
    # Hydra
    Implied("defaults", LIST, "the keys of the presets are listed here, with file and line"),
    Apply(
        "hydra.run.dir", "run.base_dir", PATH, lambda value, _: str(Path.cwd() / value), default=".",
        note="relative data paths start at the working directory, not at the file",
    ),
    Implied("hydra.output_subdir", nullable(TEXT), "the resolved config is always stored in the run folder"),
    Implied("hydra.searchpath", LIST, "folders searched for the presets of `defaults`, after the file's own folder"),
    NoEffect("hydra.job.*", ANY, "braid does not use Hydra jobs"),
    # cluster
    Apply("cluster.num_nodes", "cluster.num_nodes", COUNT, when(cluster)),
    Apply("cluster.num_gpus_per_node", "cluster.devices_per_node", COUNT, when(cluster)),
    Apply(
        "cluster.component_placement", "", PLACEMENT, _placement,
        note="cluster.placement.ROLES=DEVICES; actor is the policy. Roles on the same devices take turns",
    ),
    Unsupported("cluster.node_groups", "number the devices across nodes in cluster.component_placement"),
    Unsupported("cluster.auto_scheduler", "set cluster.component_placement", default=False),
    *(NoEffect(f"cluster.{key}", ANY, "for cluster.auto_scheduler only") for key in (
        "assign_policy", "use_pre_process_policy", "rollout_use_all_gpus", "monitor_interval", "preprocess_threshold",
        "migrate_out_max_bs", "use_wait_before_last_iter_policy", "fuse_rollout_inference_only", "recreate_nccl_groups")),
    NoEffect("profile_data.*", ANY, "for RLinf's placement search only"),
    # runner
    Apply(
        "runner.task_type", "",
        choice("math", "reasoning", "embodied", "reasoning_eval", "embodied_eval", "coding_online_rl", "sft", "offline"),
        _task, note="math (newer: reasoning): prompts answered once. embodied: a robot in a simulator",
    ),
    Apply(
        "runner.logger.path", "report.dir", PATH, _logger_path,
        note="TensorBoard's files are in `tensorboard/` there",
    ),
    Apply("runner.logger.log_path", "report.dir", PATH, note="each sink writes to a folder of its name there"),
    Apply("runner.logger.tensorboard.enable", "report.tensorboard", BOOL),
    Apply("runner.logger.tensorboard.queue_size", "report.tensorboard_queue", COUNT),
    Apply("runner.logger.wandb.enable", "", BOOL, _wandb),
    Apply("runner.logger.wandb.project_name", "", TEXT, _of_wandb("project")),
    Apply("runner.logger.wandb.experiment_name", "", TEXT, _of_wandb("name")),
    Apply("runner.logger.project_name", "", TEXT, _of_sinks("project")),
    Apply("runner.logger.experiment_name", "", TEXT, _of_sinks("name")),
    Apply(
        "runner.logger.logger_backends", "",
        Takes(
            "a list of tensorboard, wandb, swanlab, or null",
            nullable(list_of(choice("tensorboard", "wandb", "swanlab"))).accepts,
            (["tensorboard"], ["wandb", "swanlab"], [], None),
        ),
        _backends, note="metrics.jsonl is always written as well",
    ),
    Apply(
        "runner.logger.swanlab_mode", "", choice("cloud", "local", "offline"),
        lambda value, source: Became({"report.swanlab.mode": value})
        if "swanlab" in (source.get("runner.logger.logger_backends") or [])
        else no_effect("runner.logger.logger_backends does not have swanlab"),
    ),
    Unsupported("runner.logger.wandb_proxy", "set HTTPS_PROXY in the environment"),
    Unsupported("runner.logger.wandb_entity", "set WANDB_ENTITY in the environment"),
    Apply("runner.max_epochs", "", COUNT, _epochs, note="an epoch is one pass over the training prompts"),
    Apply(
        "runner.max_steps", "", CADENCE, _steps,
        note="a step is a round: one rollout batch with its n_minibatches optimizer steps. The smaller of this and max_epochs",
    ),
    Apply(
        "runner.val_check_interval", "", CADENCE, _validation, default=-1,
        note="in rounds, and after the last; 0 or -1 for off. RLinf's math task never validates; here it does",
    ),
    Apply(
        "runner.save_interval", "", CADENCE, _saving,
        note="in rounds, and after the last; 0 or -1 for off. All are kept; braid.checkpoint.keep=2 keeps the newest two",
    ),
    Apply("runner.seq_length", "rollout.max_sequence_tokens", COUNT, when(text_only)),
    Apply(
        "runner.enable_dynamic_batch_size", "", BOOL, _dynamic, default=False,
        note="true: train.micro_batch_tokens bounds a pass; false: train.micro_batch_rows. Results do not depend on it",
    ),
    Apply("runner.max_tokens_per_mbs", "train.micro_batch_tokens", COUNT, when(text_only, then=_token_budget)),
    Apply(
        "runner.resume_dir", "run.resume", nullable(PATH), _resume,
        note="auto: the newest of this run. Checkpoints are braid's own; RLinf's cannot be read",
    ),
    Apply("runner.experiment_name", "run.name", TEXT, lambda value, _: folder_name(value)),
    Apply("runner.output_dir", "run.output_dir", PATH),
    Apply("runner.only_eval", "run.eval_only", BOOL),
    Apply("runner.max_prompt_length", "model.vla.max_prompt_tokens", COUNT, when(robots_only)),
    Implied("runner.weight_sync_interval", choice(1), "weights are synced after every round"),
    Unsupported("runner.overlap_env_bootstrap", "use env.pipeline_stages to overlap simulation and policy"),
    Unsupported("runner.use_training_pipeline", "the update always starts when the round is complete"),
    # data
    Apply(
        "data.type", "", choice("math", "reasoning", "vision_language", "wideseek_r1", "rstar2", "searchr1"),
        when(text_only, then=_data_type),
    ),
    Apply("data.max_prompt_length", "data.max_prompt_tokens", COUNT, when(text_only)),
    Apply(
        "data.filter_prompt_by_length", "data.overlong", BOOL,
        when(text_only, then=lambda value, _: "drop" if value else "truncate_right"), default=True,
    ),
    Apply(
        "data.rollout_batch_size", "rollout.prompts_per_round", COUNT, when(text_only),
        note="in prompts, each answered group_size times. ROLL's rollout_batch_size and SkyRL's train_batch_size too",
    ),
    Apply(
        "data.val_rollout_batch_size", "", nullable(COUNT), when(text_only, then=eval_prompts),
        note="null: data.rollout_batch_size. RLinf takes the whole set when it is given, and no batch when not",
    ),
    NoEffect("data.num_workers", NATURAL, _LOADED_ONCE),
    NoEffect("data.process_workers", NATURAL, _LOADED_ONCE),
    NoEffect("data.process_batch_size", COUNT, _LOADED_ONCE),
    NoEffect("data.dataset_name", nullable(TEXT), "data.type determines how rows are read"),
    Apply("data.prompt_key", "", TEXT, when(text_only, then=_column("prompt_key"))),
    Apply(
        "data.answer_key", "", TEXT, when(text_only, then=_column("answer_key")), default="solutions",
        note="text, or a list of accepted answers",
    ),
    Apply(
        "data.apply_chat_template", "data.use_chat_template", BOOL,
        when(text_only, then=lambda value, _: "always" if value else "never"), default=False,
        note="false: prompts are tokenized as they are; the data RLinf trains on is chat-formatted already",
    ),
    Apply(
        "data.data_size", "", CADENCE,
        when(text_only, then=lambda value, _: Became({"data.train[0].limit": value if value > 0 else None})),
        note="0 or -1: all rows",
    ),
    Apply("data.shuffle", "data.shuffle", BOOL, when(text_only), note="false: in the files' order"),
    Apply("data.validation_shuffle", "eval.shuffle", BOOL, when(text_only)),
    Apply("data.seed", "data.seed", NATURAL, when(text_only)),
    Apply("data.train_data_paths", "", nullable(PATHS), when(text_only, then=unless_null(_sources("train")))),
    Apply("data.val_data_paths", "", nullable(PATHS), when(text_only, then=unless_null(_sources("eval")))),
    # reward
    Apply("reward.use_reward_model", "", BOOL, when(text_only, then=_reward_model), default=False),
    Apply(
        "reward.model.model_path", "reward.parts[0].path", PATH,
        lambda value, source: value
        if source.get("reward.use_reward_model")
        else no_effect("reward.use_reward_model is false"),
    ),
    Apply(
        "reward.reward_type", "", choice("math", "vqa", "code_offline", "searchr1", "rstar2"),
        when(text_only, then=_reward_type), default="math",
        note="1 if math-verify finds the answer equal to one of the solutions, else 0; see reward_scale",
    ),
    Apply(
        "reward.reward_scale", "", number(0.0, above=True), when(text_only, then=_reward_scale), default=1.0,
        note="correct: +reward_scale, wrong: -reward_scale, in training; evaluation reports the share of correct answers",
    ),
    Apply("reward.reward_min_val", "", number(), when(text_only, then=_reward_scale), default=-1.0),
    Apply("reward.reward_max_val", "", number(), when(text_only, then=_reward_scale), default=1.0),
    *(NoEffect(f"reward.{part}.*", ANY, why) for part, why in (
        ("tokenizer", "rewards receive text; a reward model uses its own tokenizer"),
        ("reward_weights", "for reward.reward_type=vqa only"))),
    *(NoEffect(f"reward.{key}", ANY, "not read by RLinf") for key in ("len_reward_penalty", "safe_length", "max_length")),
    Apply("reward.group_name", "cluster.group_names.reward", TEXT, when(cluster)),
    # critic
    Apply(
        "critic.use_critic_model", "", BOOL, when(text_only, then=_critic), default=False,
        note="with adv_type gae; without values gae is the plain return: gamma = lambda = 1",
    ),
    *(Apply(f"critic.{part}*", "", ANY, when(text_only, then=_as_actor)) for part in (
        "", "model.", "optim.", "lr_sched.", "tokenizer.", "megatron.", "megatron.ckpt_convertor.", "megatron.profiler.",
        "fsdp_config.", "fsdp_config.mixed_precision.", "fsdp_config.amp_autocast.", "fsdp_config.grad_scaler.")),
    Apply("critic.group_name", "cluster.group_names.critic", TEXT, when(cluster)),
    Apply("critic.model.model_path", "critic.path", nullable(PATH), when(text_only)),
)
# fmt: on
