"""SkyRL's `trainer`: sizes, schedules, models, backends, checkpoints, loggers. The algorithm is in
skyrl_algorithm.py.

SkyRL's batch sizes count prompts, its micro batch sizes count samples. Both systems divide a batch into
mini-batches of whole prompts, but group different prompts together (see docs/dialects.md).
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path, PurePath
from typing import Any

from .compat import (
    Apply,
    Became,
    Implied,
    NoEffect,
    Rule,
    Source,
    folder_name,
    implied,
    mapped,
    no_effect,
    unsupported,
    wandb_mode,
    when,
)
from .skyrl_facts import (
    NATIVE_TRAIN,
    NO_REWARD_WORKERS,
    Role,
    engine_gpus,
    everywhere,
    in_one_process,
    is_colocated,
    is_distributed,
    is_remote,
    longest_row,
    off_only,
    shared,
    uses_critic,
    uses_reference,
    without_critic,
    without_reference,
    world,
)
from .values import (
    ANY,
    BOOL,
    COUNT,
    INT,
    NATURAL,
    PATH,
    TEXT,
    choice,
    either,
    integer,
    nullable,
    text,
)

_NEVER = integer(samples=(-1, 5, 3))
"""A cadence; -1 and 0 mean never."""
_STEP_FOLDER = re.compile(r"(global_)?step_\d+")


def _cadence(value: int, _: Source) -> int:
    return max(value, 0)


def _expanded(value: str, _: Source) -> str:
    return os.path.expanduser(value)


# --- placement ---------------------------------------------------------------------------------------------------


def _blocks(source: Source) -> list[tuple[list[str], int]]:
    """(roles, number of devices they share) of each set of devices, in order of device number."""
    extra = [("critic", uses_critic(source)), ("reference", uses_reference(source))]
    if is_colocated(source):
        return [
            (["policy", *(role for role, is_used in extra if is_used), "rollout"], world(source, "policy"))
        ]
    blocks = [(["policy"], world(source, "policy"))]
    if uses_reference(source):
        if source.get("trainer.placement.colocate_policy_ref"):
            blocks[0][0].append("reference")
        else:
            blocks.append((["reference"], world(source, "ref")))
    if uses_critic(source):
        blocks.append((["critic"], world(source, "critic")))
    if not is_remote(source):
        blocks.append((["rollout"], engine_gpus(source)))
    return blocks


def _placement(source: Source) -> dict[str, str]:
    """Role names -> device numbers, in native syntax."""
    placed, first = {}, 0
    for roles, num in _blocks(source):
        last = first + num - 1
        placed[",".join(roles)] = str(first) if num == 1 else f"{first}-{last}"
        first = last + 1
    return placed


def _cluster(source: Source) -> dict[str, Any]:
    """Cluster settings. The file does not give the number of devices per node: all of them if the policy is
    on one node, else the number that the policy uses on each."""
    devices = sum(num for _, num in _blocks(source))
    is_one = source.get("trainer.placement.policy_num_nodes") == 1
    per_node = devices if is_one else source.get("trainer.placement.policy_num_gpus_per_node")
    return {
        "cluster.placement": _placement(source),
        "cluster.num_nodes": math.ceil(devices / per_node),
        "cluster.devices_per_node": per_node,
    }


def _place(*keys: str) -> Any:
    """Conversion to the cluster settings `keys`, which depend on several placement keys."""
    return lambda _, source: Became({key: _cluster(source)[key] for key in keys})


def _colocate_all(value: bool, source: Source) -> Became:
    if not is_distributed(source):
        return no_effect(in_one_process(source))
    trained = [NATIVE_TRAIN["policy"], *([NATIVE_TRAIN["critic"]] if uses_critic(source) else [])]
    moved = {f"{path}.offload.{what}": value for path in trained for what in ("weights", "gradients")}
    return Became({"cluster.placement": _placement(source), **moved})


def _colocate_policy_ref(_: bool, source: Source) -> Became:
    if is_colocated(source):
        return no_effect("colocate_all places all roles on the same devices")
    return Became({"cluster.placement": _placement(source)})


PLACEMENT: tuple[Rule, ...] = (
    Apply(
        "trainer.placement.colocate_all",
        "",
        BOOL,
        _colocate_all,
        default=True,
        note="all roles share the same devices in turns; weights and gradients are offloaded meanwhile",
    ),
    Apply(
        "trainer.placement.colocate_policy_ref",
        "cluster.placement",
        BOOL,
        when(in_one_process, without_reference, then=_colocate_policy_ref),
        default=True,
        note="if colocate_all is false",
    ),
    NoEffect("trainer.placement.colocate_critic_reward", BOOL, NO_REWARD_WORKERS),
    Apply(
        "trainer.placement.policy_num_nodes",
        "cluster.num_nodes",
        COUNT,
        when(in_one_process, then=_place("cluster.num_nodes", "cluster.placement")),
        default=1,
    ),
    Apply(
        "trainer.placement.policy_num_gpus_per_node",
        "cluster.devices_per_node",
        COUNT,
        when(in_one_process, then=_place("cluster.devices_per_node", "cluster.placement")),
        default=4,
        note="the first release's default; later ones have 1",
    ),
    *(
        Apply(
            f"trainer.placement.{role}_{what}",
            "cluster.placement",
            COUNT,
            when(in_one_process, idle, then=_place("cluster.placement")),
            default=default,
        )
        for role, idle in (("critic", without_critic), ("ref", without_reference))
        for what, default in (("num_nodes", 1), ("num_gpus_per_node", 4))
    ),
    NoEffect("trainer.placement.reward_num_nodes", COUNT, NO_REWARD_WORKERS),
    NoEffect("trainer.placement.reward_num_gpus_per_node", COUNT, NO_REWARD_WORKERS),
)


# --- batches and length ------------------------------------------------------------------------------------------


def _policy_steps(value: int, source: Source) -> int:
    return max(source.get("trainer.train_batch_size") // value, 1)


def _micro_rows(key: str) -> Any:
    """Conversion of samples per forward pass; the token limit is set so that it never binds."""

    def convert(value: int, source: Source) -> Became:
        if source.get("trainer.max_tokens_per_microbatch") > 0:
            return no_effect("overridden by max_tokens_per_microbatch")
        to = everywhere if key == "infer_batch" else shared
        rows = to(f"{key}_rows")(value, source).native
        tokens = to(f"{key}_tokens")(value * longest_row(source), source).native
        return Became({**rows, **tokens})

    return convert


def _micro_tokens(value: int, source: Source) -> Became:
    if value <= 0:
        return no_effect("micro-batches are counted in samples")
    return Became(
        {
            **shared("micro_batch_tokens")(value, source).native,
            **everywhere("infer_batch_tokens")(value, source).native,
        }
    )


def _packing(value: bool, _: Source) -> Became:
    return (
        implied("rows are always packed")
        if value
        else no_effect("rows are always packed; padding would not change results")
    )


def _warmup(value: int, source: Source) -> Became:
    roles: list[Role] = ["policy", *(["critic"] if uses_critic(source) else [])]
    return Became({f"{NATIVE_TRAIN[role]}.optimizer.schedule.warmup_steps": value for role in roles})


GENERAL: tuple[Rule, ...] = (
    Implied("defaults", ANY, "the keys of the presets are listed here, with file and line"),
    Implied("hydra.searchpath", ANY, "folders searched for the presets of `defaults`"),
    Apply("trainer.epochs", "run.max_epochs", COUNT, default=1,
        note="the last round of an epoch may include prompts of the next; SkyRL drops the rest of an epoch"),
    Apply("trainer.max_training_steps", "run.max_rounds", nullable(COUNT),
        note="a step of SkyRL is a round of braid; the smaller of this and epochs applies"),
    Apply("trainer.update_epochs_per_batch", "train.passes_per_round", COUNT, shared("passes_per_round"),
        default=1),
    Apply("trainer.train_batch_size", "rollout.prompts_per_round", COUNT, default=1024,
        note="in prompts, each sampled n_samples_per_prompt times"),
    Apply("trainer.policy_mini_batch_size", "train.steps_per_pass", COUNT, _policy_steps, default=256,
        note="optimizer steps = train_batch_size / policy_mini_batch_size, in prompts over all ranks"),
    Apply("trainer.critic_mini_batch_size", "critic.train.steps_per_pass", COUNT,
        when(without_critic, then=_policy_steps), default=256,
        note="the critic's optimizer steps = train_batch_size / critic_mini_batch_size"),
    Apply("trainer.micro_train_batch_size_per_gpu", "train.micro_batch_rows", COUNT, _micro_rows("micro_batch"),
        default=1, note="memory only: denominators count the whole optimizer step"),
    Apply("trainer.micro_forward_batch_size_per_gpu", "train.infer_batch_rows", COUNT, _micro_rows("infer_batch"),
        default=1, note="memory only"),
    Apply("trainer.max_tokens_per_microbatch", "train.micro_batch_tokens", either(COUNT, choice(-1)), _micro_tokens,
        default=-1),
    Implied("trainer.recompute_old_logprobs_per_minibatch", BOOL,
        "log-probs do not depend on batching, so the time of recomputation does not change results"),
    Apply("trainer.update_ref_every_epoch", "reference.update_every_epochs", BOOL,
        when(without_reference, then=lambda v, _: int(v)), default=False),
    Apply("trainer.num_warmup_steps", "train.optimizer.schedule.warmup_steps", NATURAL, _warmup,
        note="optimizer steps, for policy and critic; early versions of SkyRL ignored it with FSDP"),
    Apply("trainer.use_sample_packing", "", BOOL, _packing, default=True),
    Apply("trainer.max_prompt_length", "data.max_prompt_tokens", COUNT, lambda v,
        _: Became({"data.max_prompt_tokens": v, "data.overlong": "truncate_left"}), default=512,
        note="longer prompts are truncated on the left, as documented; SkyRL's code drops such rows "
        "(braid.data.overlong=drop)"),
    Apply("trainer.gradient_checkpointing", "train.gradient_checkpointing", BOOL, shared("gradient_checkpointing"),
        default=True),
    NoEffect("trainer.gradient_checkpointing_use_reentrant", BOOL,
        "always non-reentrant; it does not change gradients"),
    Apply("trainer.seed", "run.seed", NATURAL, default=42,
        note="also for the engine: random numbers depend on (seed, prompt, sample, position)"),
    Apply("trainer.bf16", "train.autocast", BOOL, everywhere("autocast", mapped({True: "auto", False: "none"})),
        default=True, note="matrix products in bf16 with fp32 weights on CUDA; fp32 on CPUs"),
    Apply("trainer.flash_attn", "model.attention", BOOL, mapped({True: "auto", False: "sdpa"}), default=True,
        note="true: the fastest available kernel for packed rows"),
    NoEffect("trainer.disable_fast_tokenizer", BOOL, "transformers' fast tokenizers are always used"),
    NoEffect("trainer.use_orm_score", BOOL, "not read by SkyRL"),
    NoEffect("trainer.use_expandable_segments", BOOL, "set PYTORCH_CUDA_ALLOC_CONF in braid.cluster.env"),
    NoEffect("trainer.logprobs_chunk_size", INT, "log-probs are computed in chunks of train.logprob_chunk_bytes"),
    NoEffect("trainer.vocab_entropy_chunk_size", INT, "entropy is computed in chunks of train.logprob_chunk_bytes"),
    NoEffect("trainer.vocab_entropy_chunk_memory_mb", INT,
        "entropy is computed in chunks of train.logprob_chunk_bytes"),
    NoEffect("trainer.fused_lm_head_logprob", BOOL, "logits are always computed for one chunk of tokens at a time"),
    NoEffect("trainer.fused_lm_head_logprob_backend", TEXT,
        "logits are always computed for one chunk of tokens at a time"),
    Apply("trainer.mtp.enabled", "", BOOL, off_only("no draft heads", "set it to false; draft heads are not supported"), default=False),
    NoEffect("trainer.mtp.*", ANY, "there are no draft heads"),
    Apply("trainer.fully_async.enabled", "", BOOL, off_only("training is on-policy", "set it to false; only on-policy training is supported"),
        default=False),
    NoEffect("trainer.fully_async.*", ANY, "training is on-policy"),
)  # fmt: skip


# --- evaluation, checkpoints, loggers ----------------------------------------------------------------------------


def _evaluates(source: Source) -> str:
    return "" if source.get("trainer.eval_interval") > 0 else "eval_interval disables evaluation"


def _eval_interval(value: int, _: Source) -> Became:
    if value <= 0:
        return Became({"eval.every_rounds": 0, "eval.before": False, "eval.at_end": False})
    return Became({"eval.every_rounds": value, "eval.at_end": True})


def _resume_mode(value: str | None, source: Source) -> Became:
    if value == "from_path":
        path = source.get("trainer.resume_path")
        return Became({"run.resume": path or "none"})
    return Became({"run.resume": "latest" if value == "latest" else "none"})


def _resume_path(value: str | None, source: Source) -> Became:
    if source.get("trainer.resume_mode") != "from_path":
        return no_effect("resume_mode is not from_path")
    if value is not None and not _STEP_FOLDER.fullmatch(PurePath(value).name):
        raise ValueError(f"{value} is not a checkpoint: the folder's name must be step_N (or global_step_N)")
    return Became({"run.resume": value or "none"})


def _max_ckpts(value: int, _: Source) -> int | None:
    if value == 0:
        raise ValueError(
            "0 would keep no checkpoint; set it to -1 to keep all, or to the number of checkpoints to keep"
        )
    return None if value < 0 else value


def _ckpt_interval(value: int, _: Source) -> Became:
    return Became({"checkpoint.every_rounds": max(value, 0), "checkpoint.at_end": value > 0})


def _exports(source: Source) -> str:
    return "" if source.get("trainer.hf_save_interval") > 0 else "hf_save_interval disables exports"


_TRACKERS = ("wandb", "swanlab")


def _logger(value: str, _: Source) -> Became:
    if value in ("mlflow", "vemlp_wandb"):
        return unsupported("use tensorboard, wandb or swanlab, or read metrics.jsonl")
    off = {"report.tensorboard": value == "tensorboard"}
    if value == "wandb":
        mode, why = wandb_mode()
        return Became({"report.wandb.mode": mode, **off}, note=why)
    if value == "swanlab":
        return Became({"report.swanlab.mode": "cloud", **off})
    return Became(off)


def _project(value: str, source: Source) -> Became:
    tracker = source.get("trainer.logger")
    return (
        Became({f"report.{tracker}.project": value})
        if tracker in _TRACKERS
        else no_effect(f"{tracker} has no projects")
    )


def _run_name(value: str, source: Source) -> Became:
    tracker, folder = source.get("trainer.logger"), folder_name(value)
    named = {f"report.{tracker}.name": value} if tracker in _TRACKERS else {}
    return Became({"run.name": folder, **named})


REPORT: tuple[Rule, ...] = (
    Apply("trainer.eval_batch_size", "eval.batch_prompts", COUNT, when(_evaluates), default=1024,
        note="prompts; a smaller last batch is kept"),
    Apply("trainer.eval_before_train", "eval.before", BOOL, when(_evaluates), default=True),
    Apply("trainer.eval_interval", "eval.every_rounds", _NEVER, _eval_interval, default=5,
        note="rounds, and after the last; -1 for never"),
    Apply("trainer.resume_mode", "run.resume", choice(None, "none", "latest", "from_path"), _resume_mode,
        default="latest",
        note="latest starts a new run if there is no checkpoint; a resumed run ends at the same round as an uninterrupted one "
        "(SkyRL runs further epochs)"),
    Apply("trainer.resume_path", "run.resume", nullable(text("a/global_step_10", "b/step_20")), _resume_path,
        note="a checkpoint of braid; SkyRL's sharded checkpoints cannot be read (start from its HF export instead)"),
    Apply("trainer.ckpt_path", "checkpoint.dir", PATH, _expanded,
        note="contains folders step_N; in the run folder by default"),
    Apply("trainer.max_ckpts_to_keep", "checkpoint.keep", integer(samples=(-1, 2, 5)), _max_ckpts, default=-1,
        note="-1 keeps all"),
    Apply("trainer.ckpt_interval", "checkpoint.every_rounds", _NEVER, _ckpt_interval, default=10,
        note="rounds, and after the last; -1 for never"),
    Apply("trainer.hf_save_interval", "checkpoint.export_every_rounds", _NEVER, _cadence, default=-1),
    Apply("trainer.export_path", "checkpoint.export_dir", PATH, when(_exports, then=_expanded),
        note="Hugging Face folders; dumps are in the run folder (batches/, samples/)"),
    NoEffect("trainer.log_path", TEXT, "logs are written to the terminal"),
    Apply("trainer.logger", "report", choice("wandb", "console", "tensorboard", "swanlab", "mlflow", "vemlp_wandb"),
        _logger, default="wandb", note="the console and metrics.jsonl are always written"),
    Apply("trainer.project_name", "report.wandb.project", TEXT, _project, default="skyrl"),
    Apply("trainer.run_name", "run.name", TEXT, _run_name, default="test_run", note="also names the run folder"),
    NoEffect("trainer.tags", ANY, "trackers always receive the whole config"),
    Apply("trainer.dump_data_batch", "report.batches_every_rounds", BOOL, lambda v, _: int(v), default=False,
        note="in batches/ of the run folder, as safetensors instead of pickles"),
    Apply("trainer.dump_eval_results", "report.eval_samples", BOOL, when(_evaluates), default=True,
        note="in samples/eval_N.jsonl of the run folder"),
    NoEffect("trainer.print_example_interval", INT, "use braid.rollout.print_outputs to log samples"),
    NoEffect("trainer.num_logger_eval_samples", INT, "all evaluated samples are stored"),
    NoEffect("trainer.num_logger_train_samples", INT,
        "use braid.report.samples_every_rounds"),
    NoEffect("trainer.enable_ray_gpu_monitor", BOOL, "braid has no GPU monitor"),
    Apply("trainer.s3_export.enabled", "", BOOL,
        off_only("nothing is uploaded", "copy the export folder manually")),
    NoEffect("trainer.s3_export.*", ANY, "nothing is uploaded"),
)  # fmt: skip


def base(source: Source) -> dict[str, Any]:
    """Settings common to all files: rows in rollout order, all roles on the chosen backend, paths relative to
    the working directory."""
    out: dict[str, Any] = {"run.base_dir": str(Path.cwd()), **shared("shuffle")(False, source).native}
    if source.backend is not None:
        out |= everywhere("backend")(source.backend, source).native
    return out | (_cluster(source) if is_distributed(source) else {})


TRAINER: tuple[Rule, ...] = (*PLACEMENT, *GENERAL, *REPORT)
