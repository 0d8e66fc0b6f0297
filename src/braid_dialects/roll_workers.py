"""ROLL's worker keys: actor_train, critic, reference and actor_infer; their models, optimizers and
devices."""

from __future__ import annotations

from typing import Any

from braid.plan.placement import format_numbers

from . import roll_facts as facts
from .conversions import Idle, mapped, null_as, only, opposite, when
from .devices import DEVICES, parse_devices
from .roll_facts import of_backend, of_engine
from .roll_strategies import ENGINES, of_batch, per_worker, strategies
from .table import (
    Apply,
    Became,
    Convert,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    implied,
    no_effect,
    unsupported,
)
from .values import (
    ANY,
    BOOL,
    COUNT,
    NATURAL,
    NON_NEGATIVE,
    PATH,
    POSITIVE,
    TEXT,
    choice,
    mapping_of,
    nullable,
    number,
)

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}
OTHER_SCHEDULES = ("cosine_with_restarts", "polynomial", "reduce_lr_on_plateau", "cosine_with_min_lr")


def _mapping(role: str) -> Convert:
    def convert(value: Any, source: Source) -> Any:
        made: dict[str, Any] = {} if role in ("reference", "actor_infer") else {**facts.batches(source)}
        devices = parse_devices(value)
        if not facts.one_process(source):
            made[f"cluster.placement.{facts.NATIVE_ROLE[role]}"] = format_numbers(devices)
            if role == "actor_infer" and facts.engine(source) != "native":
                made[f"rollout.{facts.engine(source)}.replicas"] = facts.replicas(source)
        return Became(made) if made else no_effect(facts.one_process(source))

    return convert


def _compute_type(native: str) -> Convert:
    def convert(value: str | None, _: Source) -> Became:
        chosen = "auto" if value is None else "none" if value == "fp32" else value
        scaler = {f"{native}.grad_scaler.init_scale": 65536.0} if value == "fp16" else {}
        return Became({f"{native}.autocast": chosen} | scaler)

    return convert


def _betas(native: str, role: str) -> Convert:
    def convert(_: Any, source: Source) -> Became:
        betas = [source.get(f"{role}.training_args.adam_beta{i}") for i in (1, 2)]
        return Became({f"{native}.optimizer.betas": betas})

    return convert


def _schedule(value: str, _: Source) -> Any:
    if value in OTHER_SCHEDULES:
        return unsupported(f"use one of {', '.join(SCHEDULES)}")
    return SCHEDULES[value]


def _warmup_ratio(role: str) -> Idle:
    path = f"{role}.training_args.warmup_steps"
    return lambda source: "overridden by warmup_steps" if source.get(path) else ""


def _checkpointing(role: str) -> Idle:
    def idle(source: Source) -> str:
        is_megatron = facts.backend(source, role) == "megatron"
        return "Megatron uses recompute_granularity instead" if is_megatron else ""

    return idle


def _fixed(flag: str) -> Idle:
    return lambda source: "" if source.get(flag) else f"{flag} is false"


def _names(value: str | list[str], _: Source) -> list[str]:
    parts = value if isinstance(value, list) else value.split(",")
    return [part.strip() for part in parts]


def _model(role: str, native: str, *idle: Idle) -> tuple[Rule, ...]:
    """The model_args keys of a trained role."""
    model = f"{role}.model_args"
    return (
        Apply(
            f"{model}.dtype", f"{native}.autocast", nullable(choice("fp32", "bf16", "fp16")),
            when(*idle, then=_compute_type(native)), default="bf16",
            note="type of matrix products; trained weights are always fp32, as in ROLL except for FSDP2 with "
            "param_dtype. null: bf16 on GPUs, fp32 on CPUs",
        ),
        Apply(
            f"{model}.disable_gradient_checkpointing", f"{native}.gradient_checkpointing", BOOL,
            when(*idle, _checkpointing(role), then=opposite), default=False,
        ),
        NoEffect(f"{model}.gradient_checkpointing_use_reentrant", nullable(BOOL), "always non-reentrant"),
        Apply(
            f"{model}.ulysses_size", f"{native}.sequence_parallel", nullable(COUNT),
            when(
                *idle,
                lambda s: "for FSDP2 only; the file's strategy is Megatron" if facts.file_backend(s,
                role) == "megatron" else "",
                then=of_batch(f"{native}.sequence_parallel", of_backend("fsdp2", role)),
            ),
            default=1, note="sequence-parallel size (Ulysses); dp = devices / ulysses_size",
        ),
    )  # fmt: skip


def _any_model(role: str) -> tuple[Rule, ...]:
    """The model_args keys that braid supports for no role or overrides."""
    model = f"{role}.model_args"
    return (
        Apply(f"{model}.moe_aux_loss_coef", "", nullable(NON_NEGATIVE),
              only(None, "remove it; there is no auxiliary router loss")),
        NoEffect(f"{model}.model_type", nullable(TEXT), "determined by the role"),
        NoEffect(f"{model}.num_labels", COUNT, "determined by the role"),
        Apply(f"{model}.model_config_kwargs", "", mapping_of(ANY), only({}, "set it in config.json of the model folder")),
        Apply(f"{model}.freeze_module_prefix", "", nullable(TEXT),
              only(None, "use adapters (lora_target) instead of training some weights")),
        NoEffect(f"{model}.device_map", nullable(TEXT), "determined by the placement"),
        NoEffect(f"{model}.flash_attn", nullable(TEXT), "not read by ROLL; use attn_implementation"),
        NoEffect(f"{model}.autocast_adapter_dtype", BOOL, "adapters always have the dtype of the weights"),
        Apply(f"{model}.additional_target", "", nullable(TEXT), only(None, "list the layers in lora_target")),
    )  # fmt: skip


def _lora() -> tuple[Rule, ...]:
    model = "actor_train.model_args"
    return (
        Apply(f"{model}.lora_target", "model.lora.targets", nullable(TEXT),
              lambda v, s: implied("all weights are trained") if v is None else _names(v, s),
              note="comma-separated layer names, or all-linear"),
        Apply(f"{model}.lora_rank", "model.lora.rank", nullable(COUNT), when(facts.no_lora), default=8),
        Apply(f"{model}.lora_alpha", "model.lora.alpha", nullable(POSITIVE),
              when(facts.no_lora, then=lambda v, s: v or 2 * s.get(f"{model}.lora_rank")), default=None,
              note="null: 2 * lora_rank"),
        Apply(f"{model}.lora_dropout", "", number(0.0, 0.9),
              only(0, "set it to 0: log-probs must be the same in rollout and training", "adapters have no dropout")),
        Apply(f"{model}.adapter_name_or_path", "model.lora.path", nullable(PATH), when(facts.no_lora)),
    )  # fmt: skip


def _trainer(role: str, *idle: Idle) -> tuple[Rule, ...]:
    """Keys of a trained role (actor_train, critic)."""
    native = facts.NATIVE_TRAIN[role]
    arguments, packing = f"{role}.training_args", f"{role}.sequence_packing_args"
    schedule = f"{native}.optimizer.schedule"
    return (
        *_model(role, native, *idle),
        *_any_model(role),
        # training_args
        Apply(f"{arguments}.learning_rate", f"{native}.optimizer.lr", POSITIVE, when(*idle), default=5e-5),
        Apply(f"{arguments}.weight_decay", f"{native}.optimizer.weight_decay", NON_NEGATIVE, when(*idle),
              default=0.0),
        Apply(f"{arguments}.adam_beta1", f"{native}.optimizer.betas", number(0.0, 0.999),
              when(*idle, then=_betas(native, role)), default=0.9),
        Apply(f"{arguments}.adam_beta2", f"{native}.optimizer.betas", number(0.0, 0.9999),
              when(*idle, then=_betas(native, role)), default=0.999),
        Apply(f"{arguments}.adam_epsilon", f"{native}.optimizer.eps", POSITIVE, when(*idle), default=1e-8),
        Apply(f"{arguments}.lr_scheduler_type", f"{schedule}.decay", choice(*SCHEDULES, *OTHER_SCHEDULES),
              when(*idle, then=_schedule), default="linear", note="to the last optimizer step of the run"),
        Apply(f"{arguments}.warmup_steps", f"{schedule}.warmup_steps", NATURAL, when(*idle), default=0,
              note="optimizer steps, not rounds"),
        Apply(f"{arguments}.warmup_ratio", f"{schedule}.warmup_fraction", number(0.0, 0.9),
              when(*idle, _warmup_ratio(role)), default=0.0),
        Apply(f"{arguments}.per_device_train_batch_size", f"{native}.micro_batch_rows", COUNT,
              when(*idle, then=of_batch(f"{native}.micro_batch_rows", _dynamic(role, "train"))), default=8,
              note="rows per micro-batch; global batch = per_device_train_batch_size * gradient_accumulation_steps * dp"),
        Apply(f"{arguments}.gradient_accumulation_steps", f"{native}.steps_per_pass", COUNT,
              when(*idle, then=of_batch()), default=1,
              note="micro-batches per optimizer step; steps_per_pass = S / global batch"),
        *(
            NoEffect(f"{arguments}.{name}", ANY, "set by keys of the pipeline, as in ROLL")
            for name in ("max_steps", "num_train_epochs", "output_dir", "seed", "bf16", "fp16", "logging_steps", "save_steps", "eval_steps")
        ),
        *(
            NoEffect(f"{arguments}.{name}", ANY, "not read by ROLL in reinforcement learning")
            for name in ("tf32", "data_seed", "dataloader_num_workers")
        ),
        # Micro-batches by tokens
        *_by_tokens(role, "train", f"{native}.micro_batch", f"{packing}.max_packed_sequence_length_train", *idle),
        *_by_tokens(role, "infer", f"{native}.infer_batch", f"{packing}.max_packed_sequence_length_forward", *idle),
        Apply(f"{role}.infer_batch_size", f"{native}.infer_batch_rows", COUNT, when(*idle, _dynamic(role, "infer")),
              default=16,
              note="rows per forward pass without gradients"),
        *_packing(role),
        Implied(f"{role}.apply_loss_scale", BOOL, "denominators count the whole optimizer step"),
        Implied(f"{role}.logits_in_fp32", BOOL, "log-probs are computed in fp32"),
        Apply(f"{role}.mtp_training_mode", "", nullable(choice("disabled", "standalone", "joint")),
              only("disabled", "set it to disabled; multi-token prediction is not supported")),
        Apply(f"{role}.world_size", f"{native}.steps_per_pass", nullable(COUNT),
              when(*idle, lambda s: "overridden by device_mapping" if facts.devices(s, role) else "",
                   then=lambda v, s: implied("null: one rank") if v is None else of_batch()(v, s)),
              note="number of ranks without devices, for the batch sizes"),
        *strategies(role, *idle),
    )  # fmt: skip


def _packing(role: str) -> tuple[Rule, ...]:
    """Keys of sequence packing without a native counterpart."""
    packing = f"{role}.sequence_packing_args"
    return (
        NoEffect(f"{role}.use_sequence_packing", BOOL, "rows are always packed"),
        NoEffect(
            f"{packing}.algorithm", choice("none", "load_balance"), "rows are always packed and balanced"
        ),
        NoEffect(f"{packing}.min_num_micro_batches_train", COUNT, "results do not depend on micro-batches"),
        NoEffect(f"{packing}.min_num_micro_batches_forward", COUNT, "results do not depend on micro-batches"),
    )


def _dynamic(role: str, what: str) -> Idle:
    return lambda source: (
        f"overridden by use_dynamic_batching_in_{what}"
        if source.get(f"{role}.use_dynamic_batching_in_{what}")
        else ""
    )


def _by_tokens(role: str, what: str, native: str, packed: str, *idle: Idle) -> tuple[Rule, ...]:
    """Keys that limit micro-batches by tokens."""
    flag, limit = f"{role}.use_dynamic_batching_in_{what}", f"{role}.max_tokens_per_microbatch_in_{what}"

    def convert(_: Any, source: Source) -> Any:
        if not source.get(flag):
            return implied("micro-batches have a fixed number of rows")
        return Became({f"{native}_tokens": source.get(limit) or 8192})

    return (
        Apply(flag, f"{native}_tokens", BOOL, when(*idle, then=convert),
              note="micro-batches of max_tokens_per_microbatch tokens"),
        Apply(limit, f"{native}_tokens", nullable(NATURAL), when(*idle, _fixed(flag), then=convert)),
        NoEffect(f"{role}.sequence_length_round_in_{what}", COUNT, "rows are packed without padding"),
        Apply(packed, f"{native}_tokens", nullable(COUNT),
              when(*idle, _fixed(f"{role}.use_sequence_packing"), then=lambda v,
              _: implied("null: no separate limit") if v is None else v)),
    )  # fmt: skip


def _worker(role: str) -> tuple[Rule, ...]:
    """Keys common to all workers."""
    native = facts.NATIVE_ROLE[role]
    idle = {"critic": (facts.no_critic,), "reference": (facts.no_reference,)}.get(role, ())
    return (
        Apply(f"{role}.name", f"cluster.group_names.{native}", TEXT, when(*idle, facts.one_process)),
        Apply(f"{role}.device_mapping", f"cluster.placement.{native}", nullable(DEVICES),
              when(*idle, then=lambda v,
              s: implied("null: processes without a device") if v is None else _mapping(role)(v, s)),
              note="parsed, never evaluated. Roles on the same devices take turns"),
        Apply(f"{role}.system_envs", "cluster.env", mapping_of(TEXT, {"A_VARIABLE": "1"}, {"A_VARIABLE": "2"}),
              lambda v, _: Became({f"cluster.env.{name}": text for name, text in v.items()}),
              note="applies to every worker; roles cannot have different values"),
        NoEffect(f"{role}.max_concurrency", COUNT, "workers process one call at a time, engines many"),
        NoEffect(f"{role}.offload_nccl", BOOL, "always disabled, as in ROLL"),
        NoEffect(f"{role}.use_remove_padding", BOOL, "not read by ROLL; rows are always packed"),
    )  # fmt: skip


def _data_of(role: str) -> tuple[Rule, ...]:
    return (NoEffect(f"{role}.data_args.*", ANY, "data_args are read only under actor_train and validation"),)


def _variant(value: str, source: Source) -> Any:
    if facts.variant(source) != value:
        return no_effect("needs worker_cls: roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker, as in ROLL")
    losses = {
        "vanilla": "policy_gradient",
        "ppo": "ppo_clip",
        "tis": "cispo",
        "topr": "topr",
        "cispo": "cispo",
        "kimi15": "kimi",
    }
    made: dict[str, Any] = {"algorithm.policy_loss": losses[value]}
    if value in ("tis", "cispo"):
        low, high = facts.clip_range(source)
        made |= {"algorithm.clip_low": low, "algorithm.clip_high": high}
    return Became(made)


def _worker_class(value: str, source: Source) -> Any:
    match value.rpartition(".")[2]:
        case "ActorWorker":
            return implied("PPO's loss")
        case "ActorPGWorker":
            return _variant(facts.variant(source), source)
    return unsupported("use ActorWorker or ActorPGWorker; other workers are not supported")


def _no_topr(source: Source) -> str:
    return "" if facts.variant(source) == "topr" else "pg_variant is not topr"


ACTOR_TRAIN: tuple[Rule, ...] = (
    *_worker("actor_train"),
    *_trainer("actor_train"),
    Apply("actor_train.model_args.model_name_or_path", "model.path", PATH, note="takes precedence over pretrain"),
    Apply("actor_train.model_args.attn_implementation", "model.attention", nullable(choice("sdpa", "fa2", "auto")),
          mapped({"sdpa": "sdpa", "fa2": "flash_attention_2", "auto": "auto", None: "auto"})),
    *_lora(),
    Apply("actor_train.training_args.save_hf_model", "checkpoint.export_every_rounds", BOOL,
          lambda v, s: s.get("save_steps") if v else 0, note="a Hugging Face folder every save_steps rounds"),
    Apply("actor_train.worker_cls", "algorithm.policy_loss", TEXT, _worker_class),
    Apply("actor_train.pg_variant", "algorithm.policy_loss",
          choice("vanilla", "ppo", "tis", "topr", "cispo", "kimi15"), _variant,
          note="vanilla -A log p; tis -sg(clip(ratio, 0, 1)) A log p; cispo the same with [0.9, 1.1]; topr no ratio where the "
          "advantage is positive, clip(ratio, 0, 1) elsewhere; kimi15 -A log p + 0.05 (log p - old log p)^2"),
    Apply("actor_train.topr_positive_weight", "algorithm.topr_positive_weight", NON_NEGATIVE, when(_no_topr),
          default=1.0),
    Apply("actor_train.topr_negative_weight", "algorithm.topr_negative_weight", NON_NEGATIVE, when(_no_topr),
          default=1.0),
    Apply("actor_train.model_update_frequency", "", COUNT,
          only(1, "set it to 1; weights are synced every round", "weights are synced every round")),
    Unsupported("actor_train.opd_kl_coef", "distillation from a teacher is not implemented"),
)  # fmt: skip

CRITIC: tuple[Rule, ...] = (
    *_worker("critic"),
    *_trainer("critic", facts.no_critic),
    *_data_of("critic"),
    Apply("critic.model_args.model_name_or_path", "critic.path", PATH, when(facts.no_critic),
          note="takes precedence over reward_pretrain"),
    Implied("critic.model_args.attn_implementation", nullable(choice("sdpa", "fa2", "auto")), "same as the policy's"),
    NoEffect("critic.training_args.save_hf_model", BOOL, "only the policy is exported"),
    NoEffect("critic.worker_cls", TEXT, "there is only one kind of critic"),
)  # fmt: skip

REFERENCE: tuple[Rule, ...] = (
    *_worker("reference"),
    *strategies("reference", facts.no_reference),
    *_any_model("reference"),
    *_data_of("reference"),
    Apply("reference.model_args.model_name_or_path", "reference.path", PATH, when(facts.no_reference)),
    Apply("reference.model_args.dtype", "reference.train.autocast", nullable(choice("fp32", "bf16", "fp16")),
          when(facts.no_reference, then=lambda v, _: {None: "auto", "fp32": "none"}.get(v, v)), default="bf16"),
    Implied("reference.model_args.attn_implementation", nullable(choice("sdpa", "fa2", "auto")), "same as the policy's"),
    NoEffect("reference.model_args.disable_gradient_checkpointing", BOOL, "the reference model has no backward pass"),
    Apply("reference.model_args.ulysses_size", "reference.train.sequence_parallel", nullable(COUNT),
          when(facts.no_reference, of_backend("fsdp2", "reference"), then=null_as(1))),
    Apply("reference.infer_batch_size", "reference.train.infer_batch_rows", COUNT, when(facts.no_reference),
          default=16),
    *_by_tokens("reference", "infer", "reference.train.infer_batch", "reference.sequence_packing_args.max_packed_sequence_length_forward",
                facts.no_reference),
    *_packing("reference"),
    NoEffect("reference.sequence_packing_args.max_packed_sequence_length_train", nullable(COUNT),
             "the reference model is not trained"),
    NoEffect("reference.world_size", COUNT, "determined by device_mapping"),
    NoEffect("reference.worker_cls", TEXT, "there is only one kind of reference"),
)  # fmt: skip


ACTOR_INFER: tuple[Rule, ...] = (
    *_worker("actor_infer"),
    *_any_model("actor_infer"),
    *_data_of("actor_infer"),
    Apply("actor_infer.num_gpus_per_worker", "", COUNT,
          when(of_engine("vllm", "sglang"), facts.own_tensor_parallel, then=per_worker), default=1,
          note="devices per engine: its tensor-parallel size unless the engine's own key sets it"),
    Apply("actor_infer.strategy_args.strategy_name", "rollout.engine", choice(*facts.ENGINES),
          when(lambda s: "overridden by --engine" if s.engine else "",
          then=mapped(facts.ENGINES)),
          default="vllm", note="hf_infer is the native engine, which shares the trainer's weights"),
    Apply("actor_infer.model_args.dtype", "rollout.native.dtype", nullable(choice("fp32", "bf16", "fp16")),
          lambda v, s: Became({f"rollout.{facts.engine(s)}.dtype": v or "auto"}),
          note="dtype of the engine's weights; without it, the native engine shares the trainer's"),
    Implied("actor_infer.model_args.model_name_or_path", PATH, "the engine always uses the policy's weights"),
    NoEffect("actor_infer.model_args.disable_gradient_checkpointing", BOOL, "an engine has no backward pass"),
    NoEffect("actor_infer.model_args.attn_implementation", nullable(TEXT), "chosen by the engine"),
    *(NoEffect(f"actor_infer.model_args.{name}", ANY, "the engine always uses the policy's adapters")
      for name in ("lora_target", "lora_rank", "lora_alpha", "lora_dropout", "adapter_name_or_path")),
    NoEffect("actor_infer.infer_batch_size", COUNT, "the engine schedules requests itself, as in ROLL"),
    NoEffect("actor_infer.world_size", COUNT, "determined by device_mapping"),
    NoEffect("actor_infer.backend_timeout", COUNT, "use rpc_timeout"),
    NoEffect("actor_infer.worker_cls", TEXT, "determined by strategy_name"),
    *ENGINES,
)  # fmt: skip
