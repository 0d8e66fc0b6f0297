"""verl's models, and the workers of actor, critic and reference: batches, optimizers, FSDP and Megatron."""

from __future__ import annotations

import os

from . import verl_facts as facts
from .conditions import BY_BACKEND, needs, of_backend, unless
from .conversions import (
    as_is,
    computed,
    listed,
    null_as,
    unless_null,
)
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, no_effect
from .values import choice, list_of
from .verl_facts import NO_CRITIC, A, used


def _steps(value: int | None, source: Source) -> int:
    """Optimizer steps of a pass: the batch in mini-batches, both in prompts."""
    mini, batch = value or source[f"{A}.actor.ppo_mini_batch_size"] or 256, source["data.train_batch_size"]
    if batch % mini:
        raise ValueError(f"data.train_batch_size={batch} is not a multiple of {mini}; change one of them")
    return batch // mini


def _rows_and_tokens(value: int, source: Source) -> Became:
    """Samples per forward pass; the token limit is set so that it never binds."""
    whole = value * (source["data.max_prompt_length"] + source["data.max_response_length"])
    return Became({path: whole if path.endswith("tokens") else value for path in source.native})


def _of_all_gpus(value: int, source: Source) -> int:
    return max(1, value // facts.gpus(source))


def _is_dynamic(source: Source) -> bool:
    """Whether the role's micro-batches are limited by tokens; if the role does not say, as the actor's are."""
    flag = ".log_prob_use_dynamic_bsz" if ".log_prob_" in source.at else ".use_dynamic_bsz"
    value = source[flag]
    return source[f"{A}.actor.use_dynamic_bsz"] if value is None else value


_BY_ROWS = unless(_is_dynamic, "use_dynamic_bsz counts tokens instead")
_BY_TOKENS = unless(
    lambda s: not _is_dynamic(s), "use_dynamic_bsz is off: micro-batches are counted in samples"
)

# One rule per line.
# fmt: off
MODEL = section(f"{A}.model")(
    to("path", "model.path", "text", lambda v, _: os.path.expanduser(v)),
    to("tokenizer_path", "model.tokenizer", "text?", unless_null("the model's own")),
    to("custom_chat_template", "model.chat_template", "text?", unless_null("the tokenizer's")),
    to("trust_remote_code", "model.trust_remote_code", "bool", default=False),
    to("enable_gradient_checkpointing", "train.gradient_checkpointing", "bool", default=True),
    always("use_remove_padding", "rows are always packed", "bool"),
    to("use_liger", "train.liger_kernels", "bool", default=False),
    to("lora_rank", "model.lora.rank", "natural", lambda v, _: v or no_effect("0 trains all weights"), default=0),
    to("lora_alpha", "model.lora.alpha", "positive", needs(".lora_rank"), default=16),
    to("target_modules", "model.lora.targets", "text or [text]?", needs(".lora_rank"), listed, default="all-linear"),
    to("lora_adapter_path", "model.lora.path", "text?", unless_null("new adapters")),
    missing("exclude_modules", "list the wanted layers in target_modules"),
    missing("external_lib", "set braid.model.trust_remote_code, or register the model in your own code"),
    to("override_config.attn_implementation", "model.attention", {"flash_attention_2": "auto", "sdpa": "sdpa", "eager": "eager"}),
    missing("override_config.{attention_dropout,embd_pdrop,resid_pdrop,hidden_dropout}",
            "set it to 0: log-probs must be the same in rollout and training", default=0.0),
    missing("override_config.* override_config.model_config.* override_config.moe_config.*", "set it in config.json of the model folder"),
    missing("enable_activation_offload", "use gradient checkpointing", default=False),
    missing("{lora,mtp}.*", "set braid.model.lora, without draft heads", default=False),
    ignored("use_shm use_fused_kernels fused_kernel_options.* hf_config_path load_tokenizer tiled_mlp.*", "log-probs are computed in chunks of train.logprob_chunk_bytes"))

WORKER = section(f"{{{A}.actor,critic}}", "{train}", used)(
    to("ppo_mini_batch_size", ".steps_per_pass", "count?", _steps, default=None,
       note="optimizer steps = train_batch_size / ppo_mini_batch_size, both in prompts"),
    to("ppo_micro_batch_size_per_gpu", ".micro_batch_rows .micro_batch_tokens", "count?", unless_null(), _BY_ROWS,
       _rows_and_tokens, note="memory only"),
    to("ppo_micro_batch_size", ".micro_batch_rows .micro_batch_tokens", "count?", unless_null(), _BY_ROWS, _of_all_gpus,
       _rows_and_tokens, note="samples of all GPUs; memory only"),
    ignored("use_dynamic_bsz", "decides whether micro-batches are counted in samples or tokens", "bool?"),
    to("ppo_epochs", ".passes_per_round", "count?", lambda v, s: v or s[f"{A}.actor.ppo_epochs"] or 1, default=None),
    to("shuffle", ".shuffle", "bool?", lambda v, s: bool(s[f"{A}.actor.shuffle"] if v is None else v), default=None),
    to("grad_clip", ".max_grad_norm", "positive", default=1.0),
    to("ulysses_sequence_parallel_size", ".sequence_parallel", "count?", of_backend("fsdp", "fsdp2"), unless_null(), default=1),
    ignored("checkpoint.* profiler.* profiler.tool_config.* profiler.tool_config.{nsys,npu,torch,torch_memory}.* data_loader_seed rollout_n",
            "checkpoints hold all of the training state; profilers are external"),
    section("optim", ".optimizer")(
        to("lr_warmup_steps", ".schedule.warmup_steps", "int?", lambda v, _: max(v or 0, 0), default=-1),
        to("lr_warmup_steps_ratio", ".schedule.warmup_fraction", "share",
           unless(lambda s: (s[".lr_warmup_steps"] or 0) > 0, "overridden by lr_warmup_steps"), default=0.0),
        to("weight_decay", ".weight_decay", "non-negative", default=0.01, note="decoupled; not of biases and norms"),
        to("betas", ".betas", list_of("share", length=2), default=[0.9, 0.999]),
        to("lr_scheduler_type", ".schedule.decay", "constant|cosine", default="constant"),
        to("lr_decay_style", ".schedule.decay", "constant|cosine|linear"),
        to("min_lr_ratio", ".schedule.min_ratio", "share?", needs(".lr_scheduler_type", "cosine"), lambda v, _: v or 0.0, default=0.0),
        to("clip_grad", "{train}.max_grad_norm", "positive", of_backend("megatron")),
        missing("num_cycles", "use 0.5", default=0.5),
        always("optimizer optimizer_impl", "the optimizer is AdamW", "text"),
        ignored("total_training_steps lr_decay_steps zero_indexed_step lr_warmup_init weight_decay_incr_style lr_wsd_decay_style "
                "lr_wsd_decay_steps min_lr use_checkpoint_opt_param_scheduler", "schedules follow from the run's length"),
        missing("override_optimizer_config override_optimizer_config.*", "use train.optimizer in docs/config.md")))

ACTOR = section(f"{A}.actor", "train")(
    to("optim.lr", ".optimizer.lr", "positive", default=1e-6),
    to("strategy", "{models}.backend.kind", "fsdp|fsdp2|megatron?", BY_BACKEND, computed(facts.backend), default=None,
       note="fsdp by default, megatron with ppo_megatron_trainer"),
    to("ppo_max_token_len_per_gpu", ".micro_batch_tokens", "count", _BY_TOKENS, default=16384, note="memory only"),
    ignored("ppo_infer_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu counts"),
    to("use_torch_compile", ".compile", "bool", note="rounding only"),
    to("router_replay.mode", ".router_replay", {"disabled": "none", "R2": "old", "R3": "rollout"}),
    ignored("router_replay.{record_file,replay_file} use_remove_padding use_fused_kernels calculate_entropy calculate_sum_pi_squared "
            "sum_pi_squared_checkpointing entropy_from_logits_with_chunking entropy_checkpointing use_rollout_log_probs "
            "load_weight use_dynamic_bsz_balance", "log-probs and entropy are computed in chunks of train.logprob_chunk_bytes"),
    missing("{use_prefix_grouper,self_distillation.enable}", "set it to false", default=False),
    to("freeze_vision_tower", "model.vision.train", "bool", unless(lambda s: not facts.reads_images(s), "there are no images"),
       lambda v, _: "none" if v else "all"))

CRITIC = section("critic", "critic", NO_CRITIC)(
    to("optim.lr", ".train.optimizer.lr", "positive", default=1e-5),
    to("model.path", ".path", "text?", unless_null("the policy's"), lambda v, _: os.path.expanduser(v),
       note="with a random value head"),
    to("model.enable_gradient_checkpointing", ".train.gradient_checkpointing", "bool", default=True),
    to("ppo_max_token_len_per_gpu", ".train.micro_batch_tokens", "count", _BY_TOKENS, default=32768, note="memory only"),
    to("forward_max_token_len_per_gpu", ".train.infer_batch_tokens", "count?", _BY_TOKENS, unless_null()),
    to("forward_micro_batch_size_per_gpu", ".train.infer_batch_rows .train.infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _rows_and_tokens),
    to("forward_micro_batch_size", ".train.infer_batch_rows .train.infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _of_all_gpus, _rows_and_tokens),
    to("cliprange_value", "algorithm.value_clip", "positive", default=0.5),
    ignored("strategy enable loss_agg_mode model.{tokenizer_path,use_remove_padding,trust_remote_code,use_shm,external_lib} "
            "nccl_timeout load_weight", "as of the policy"),
    missing("model.{override_config,exclude_modules}", "set it in config.json of the model folder"),
    missing("model.enable_activation_offload", "use gradient checkpointing", default=False),
    missing("model.lora_rank", "only the policy has adapters", default=0),
    ignored("model.{lora_alpha,target_modules}", "only the policy has adapters"))

FSDP = section(f"{{{A}.actor.fsdp_config,{A}.ref.fsdp_config,critic.fsdp_config,critic.model.fsdp_config}}", "{train}", of_backend("fsdp", "fsdp2"), used)(
    to("param_offload", ".offload.weights", "bool", default=False),
    to("optimizer_offload", ".offload.optimizer", "bool"),
    to("offload_policy", ".backend.cpu_offload", "bool", of_backend("fsdp2")),
    to("fsdp_size", ".backend.size", "int", lambda v, _: v if v > 0 else None, default=-1, note="-1: all"),
    to("reshard_after_forward", ".backend.*", "bool", of_backend("fsdp2"), default=True),
    to("forward_prefetch", ".backend.*", "bool", of_backend("fsdp"), default=False),
    to("mixed_precision.{param_dtype,reduce_dtype,buffer_dtype}", ".backend.*", "bf16|fp32|fp16"),
    to("ulysses_sequence_parallel_size", ".sequence_parallel", "count"),
    to("strategy", "{models}.backend.kind", "fsdp|fsdp2", BY_BACKEND, note="as actor.strategy"),
    missing("model_dtype", "trained weights are fp32, with bf16 products", default="fp32"),
    always("dtype", "products are bf16", choice("bfloat16")),
    ignored("grad_offload wrap_policy.* use_orig_params seed full_determinism forward_only use_torch_compile entropy_from_logits_with_chunking "
            "use_fused_kernels entropy_checkpointing qat.*", "each layer is a unit; offload.weights covers gradients"))

MEGATRON = section(f"{{{A}.actor.megatron,{A}.ref.megatron,critic.megatron}}", "{train}", of_backend("megatron"), used)(
    to("tensor_model_parallel_size", {".backend.tensor_parallel": as_is, ".backend.sequence_parallel": lambda v, _: v > 1}, "count", default=1),
    to("{pipeline_model,context,expert_model}_parallel_size", ".backend.{pipeline,context,expert}_parallel", "count", default=1),
    to("expert_tensor_parallel_size", ".backend.expert_tensor_parallel", "count?"),
    to("param_offload", ".offload.weights", "bool", default=False),
    to("grad_offload", ".offload.gradients", "bool"),
    to("optimizer_offload", ".offload.optimizer", "bool"),
    to("use_distributed_optimizer", ".backend.distributed_optimizer", "bool"),
    always("sequence_parallel", "with tensor parallelism always", "bool"),
    missing("virtual_pipeline_model_parallel_size", "use braid.train.backend.virtual_pipeline, in chunks per stage"),
    section("override_transformer_config", "{train}.backend")(
        to("recompute_granularity", ".*", "full|selective?", null_as("off")),
        to("recompute_method", ".*", "block|uniform?"),
        to("recompute_num_layers", ".*", "count?"),
        to("moe_token_dispatcher_type", ".moe_token_dispatcher", "alltoall|allgather|flex"),
        to("moe_grouped_gemm", ".*", "bool"),
        to("{apply_rope_fusion,gradient_accumulation_fusion,bias_dropout_fusion,bias_activation_fusion}", ".transformer.*", "bool"),
        to("moe_aux_loss_coeff", "train.router_aux_coef", "non-negative"),
        ignored("attention_backend moe_router_dtype moe_permute_fusion moe_enable_deepep moe_shared_expert_overlap recompute_modules "
                "masked_softmax_fusion deallocate_pipeline_outputs persist_layer_norm variable_seq_lengths",
                "kernels and memory; braid sets its own"),
        missing("*", "use train.backend in docs/config.md")),
    missing("override_ddp_config.*", "use train.backend in docs/config.md"),
    missing("dist_checkpointing_path", "the Hugging Face folder is read"),
    missing("use_dist_checkpointing forward_only", "set it to false: the Hugging Face folder is read", default=False),
    always("use_mbridge vanilla_mbridge", "Hugging Face weights are read and written directly", "bool"),
    always("dtype", "products are bf16", choice("bfloat16")),
    ignored("seed extra.* use_remove_padding load_weight override_mcore_model_config.* dist_checkpointing_prefix "
            "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient use_megatron_fsdp",
            "not needed where the Hugging Face folder is read"))

REF = section(f"{A}.ref", "{train}", used)(
    to("model.path", "reference.path", "text?", unless_null("the policy's")),
    ignored("model", "null: the policy's", choice(None)),
    to("ulysses_sequence_parallel_size", ".sequence_parallel", "count?", of_backend("fsdp", "fsdp2"), unless_null()),
    ignored("strategy use_torch_compile use_remove_padding use_fused_kernels entropy_from_logits_with_chunking entropy_checkpointing "
            "profiler.* profiler.tool_config.* profiler.tool_config.{nsys,npu,torch,torch_memory}.* load_weight router_replay.*",
            "as of the policy"))
LOGPROBS = section(f"{{{A}.rollout,{A}.ref}}", "{train}", used)(
    to("log_prob_micro_batch_size_per_gpu", ".infer_batch_rows .infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _rows_and_tokens, note="memory only"),
    to("log_prob_micro_batch_size", ".infer_batch_rows .infer_batch_tokens", "count?", unless_null(), _BY_ROWS, _of_all_gpus, _rows_and_tokens,
       note="samples of all GPUs; memory only"),
    ignored("log_prob_use_dynamic_bsz", "decides whether micro-batches are counted in samples or tokens", "bool?"),
    to("log_prob_max_token_len_per_gpu", ".infer_batch_tokens", "count?", unless_null(), _BY_TOKENS, note="memory only"))

# fmt: on

WORKERS = rows(MODEL, WORKER, ACTOR, CRITIC, FSDP, MEGATRON, REF, LOGPROBS)
