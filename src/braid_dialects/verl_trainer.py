"""verl's `trainer`: length, devices, checkpoints and reports; and what belongs to no role."""

from __future__ import annotations

import os
from typing import Any

from . import verl_facts as facts
from .conditions import BY_BACKEND, unless
from .conversions import (
    as_is,
    at_least_0,
    computed,
    folder_name,
    positive,
    trackers,
    unless_null,
)
from .launcher import CONFIG_NAME, VERL_CONFIGS
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, unsupported
from .values import choice
from .verl_facts import NO_CRITIC, NO_EVALUATION, ONE_PROCESS, A


def _placed(_: Any, source: Source) -> Became:
    if facts.gpus(source) % (shared := facts.model_parallel(source)):
        raise ValueError(
            f"the {facts.gpus(source)} GPUs are not a multiple of the {shared} per model replica; change one"
        )
    settings = facts.cluster(source)
    return Became({path: settings[path] for path in source.native})


def _loggers(value: str | list[str], _: Source) -> Became:
    return trackers(facts.paths(value), others=("console", "file"))


def _resume(value: str, source: Source) -> Any:
    if value == "resume_path" and not source["trainer.resume_from_path"]:
        raise ValueError("needs the folder of a checkpoint in resume_from_path; set it, or use auto")
    return {"auto": "latest", "disable": "none"}.get(value) or source["trainer.resume_from_path"]


# One rule per line.
# fmt: off
CHOSEN = rows(
    to(CONFIG_NAME, "{models}.backend.kind", choice(*VERL_CONFIGS), BY_BACKEND,
       unless(lambda s: s[f"{A}.actor.strategy"], f"overridden by {A}.actor.strategy"),
       computed(facts.backend), note="a config of verl's own, whose keys have verl's defaults"),
    to("model_engine", "{models}.backend.kind", "dp|megatron|fsdp", BY_BACKEND,
       unless(lambda s: s[f"{A}.actor.strategy"], f"overridden by {A}.actor.strategy"), computed(facts.backend)))

TRAINER = section("trainer")(
    to("total_epochs", "run.max_epochs", "count", default=30),
    to("total_training_steps", "run.max_rounds", "count?", unless_null("total_epochs")),
    to("nnodes", "cluster.num_nodes cluster.placement", "count", ONE_PROCESS, _placed, default=1),
    to("n_gpus_per_node", "cluster.devices_per_node cluster.placement", "count", ONE_PROCESS, _placed, default=8),
    to("save_freq", {"checkpoint.every_rounds": at_least_0, "checkpoint.at_end": positive}, "int", default=-1),
    to("test_freq", {"eval.every_rounds": at_least_0, "eval.at_end": positive}, "int", default=-1),
    to("val_before_train", "eval.before", "bool", NO_EVALUATION, default=True),
    to("val_only", "run.eval_only", "bool", default=False),
    to("critic_warmup", "critic.warmup_rounds", "natural", NO_CRITIC, default=0),
    to("balance_batch", "{models}.balance_ranks", "bool", default=True),
    to("default_local_dir", "checkpoint.dir", "text", lambda v, _: os.path.expanduser(v)),
    to("resume_mode", "run.resume", "auto|disable|resume_path", _resume, default="auto",
       note="checkpoints of braid; of verl's, Hugging Face exports can be read as the model"),
    ignored("resume_from_path", "for resume_mode=resume_path", "text?"),
    to("max_actor_ckpt_to_keep", "checkpoint.keep", "count?", default=None),
    to("logger", "report.tensorboard", "text or [text]", _loggers, default=["console", "wandb"]),
    to("project_name", "{trackers}.project", "text", unless(lambda s: not facts.trackers(s), "no tracker is used"), default="verl_examples"),
    to("experiment_name", {"run.name": folder_name, "{trackers}.name": as_is}, "text", default="gsm8k"),
    to("device", "run.device", {"cuda": implied("a GPU is used where there is one"), "cpu": "cpu",
                                "npu": unsupported("braid runs on CUDA devices and CPUs")}),
    missing("default_hdfs_dir", "copy the checkpoints yourself"),
    ignored("log_val_generations rollout_data_dir validation_data_dir", "answers are stored in samples/ in the run's folder"),
    ignored("max_critic_ckpt_to_keep del_local_ckpt_after_load ray_wait_register_center_timeout esi_redundant_time use_legacy_worker_impl "
            "remove_previous_ckpt_in_save use_v1 npu_profile.* profile_steps controller_nsight_options.* worker_nsight_options.* "
            "max_ckpt_to_keep v1.*", "checkpoints and workers are braid's own"))

OTHERS = rows(
    always(f"{A}.hybrid_engine", "policy and engine share the devices", choice(True)),
    ignored(f"{A}.nccl_timeout", "see braid.cluster.call_timeout_s"),
    ignored("global_profiler.* global_profiler.global_tool_config.* global_profiler.global_tool_config.{nsys,torch_memory}.* "
            "global_profiler.global_tool_config.nsys.{controller_nsight_options,worker_nsight_options}.* ray_init.* ray_kwargs.* ray_kwargs.ray_init.* transfer_queue.*",
            "profilers are external, and Ray is started by the run"),
    ignored(" ".join(f"{at}._target_" for at in (
        f"{A}.actor", f"{A}.actor.policy_loss", f"{A}.actor.optim", f"{A}.actor.checkpoint", f"{A}.actor.profiler", f"{A}.actor.fsdp_config",
        f"{A}.ref", f"{A}.ref.fsdp_config", f"{A}.rollout", f"{A}.rollout.val_kwargs", f"{A}.rollout.multi_turn", f"{A}.rollout.agent",
        f"{A}.rollout.agent.custom_async_server", f"{A}.rollout.trace", f"{A}.model", "critic", "critic.optim", "critic.model", "critic.model.fsdp_config", "critic.checkpoint",
        "algorithm", "algorithm.kl_ctrl", "algorithm.rollout_correction", "algorithm.filter_groups", "global_profiler", "data", "trainer")), "classes of verl's own", "text"),
    missing("distillation.enabled", "see docs/distillation.md", default=False),
    ignored("distillation.*", "distillation is off"))
# fmt: on
