"""verl's engines and sampling."""

from __future__ import annotations

from . import verl_facts as facts
from .conditions import BY_ENGINE, of_engine, unless
from .conversions import (
    as_is,
    at_least_0,
    greedy_at_0,
    opposite,
    unless_null,
)
from .rows import always, ignored, missing, section, to
from .table import unsupported
from .verl_facts import NO_EVALUATION, ONE_PROCESS, SERVED, A

_ROLLOUT = f"{A}.rollout"

# One rule per line.
# fmt: off
_IS_SERVED, _IS_VLLM = of_engine(*SERVED), of_engine("vllm")
_IS_SAMPLED = unless(lambda s: not s[".do_sample"], "do_sample is off: greedy decoding")
_NO_TURNS = unless(lambda s: not s[f"{_ROLLOUT}.multi_turn.enable"], "multi_turn is off")
ENGINE = section(_ROLLOUT, "rollout.engine")(
    to("name", ".kind", "vllm|sglang|hf|trtllm", BY_ENGINE, lambda v, _: v if v in SERVED else unsupported("use vllm or sglang, or --engine native"),
       default="vllm"),
    to("dtype", ".dtype", {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}, default="bfloat16"),
    to("tensor_model_parallel_size", {".tensor_parallel": as_is, ".replicas": lambda _, s: facts.engine_replicas(s)}, "count", _IS_SERVED, default=2),
    to("pipeline_model_parallel_size", ".pipeline_parallel", "count", _IS_SERVED),
    missing("{data_parallel_size,expert_parallel_size}", "use more engines, or tensor parallelism", default=1),
    to("gpu_memory_utilization", ".memory_fraction", "fraction", _IS_SERVED, default=0.5),
    to("enforce_eager", ".cuda_graphs", "bool", opposite, default=False),
    to("enable_chunked_prefill", ".chunked_prefill", "bool", _IS_SERVED, default=True),
    to("enable_prefix_caching", ".prefix_caching", "bool", _IS_SERVED, default=True),
    to("max_num_batched_tokens", ".prefill_tokens", "count?", unless_null(), default=8192, note="prompt tokens per pass"),
    to("max_num_seqs", ".max_running", "count", default=1024),
    to("max_model_len", ".max_model_tokens", "count?", _IS_SERVED, unless_null("the longest prompt and answer")),
    to("disable_log_stats", ".log_stats", "bool", _IS_VLLM, opposite, default=True),
    to("update_weights_bucket_megabytes", "rollout.weight_sync.bucket_bytes", "count", ONE_PROCESS, lambda v, _: v * 2**20),
    missing("engine_kwargs.{vllm,sglang,trtllm} engine_kwargs.{vllm,sglang,trtllm}.*", "use rollout.engine in docs/config.md",
            unless(lambda s: not s.at.startswith(f"{_ROLLOUT}.engine_kwargs.{facts.engine(s)}"), "of another engine")),
    missing("{ignore_eos,skip_rollout,enable_rollout_routing_replay}", "set it to false", default=False),
    missing("{quantization,quantization_config_file}", "remove it"),
    missing("over_sample_rate", "set it to 0", default=0),
    always("calculate_log_probs", "the engine's log-probs are always kept", "bool"),
    always("free_cache_engine", "engines that share devices free their cache during training", "bool"),
    ignored("mode prompt_length response_length cudagraph_capture_sizes load_format layered_summon multi_stage_wake_up skip_dump_dir agent.num_workers "
            "skip_tokenizer_init trace.* profiler.* profiler.tool_config.* profiler.tool_config.{nsys,npu,torch,torch_memory}.* checkpoint_engine.* checkpoint_engine.engine_kwargs.* "
            "prometheus.* update_weights_bucket_megabytes_* nnodes n_gpus_per_node logprobs_mode scheduling_policy max_tool_response_length "
            "enable_sleep_mode skip.*", "engines are started, reached and freed by the run itself"),
    missing("agent.{agent_loop_config_path,default_agent_loop,custom_async_server.path,custom_async_server.name}", "use braid.env", default="single_turn_agent"),
    missing("multi_turn.enable", "use braid.env.kind=tools (docs/agents.md)", default=False),
    ignored("multi_turn.*", "for several turns: braid.env", "any"))

SAMPLING = section(_ROLLOUT)(
    to("n", "rollout.group_size", "count", default=1),
    section("", "rollout.sampling")(
        to("temperature", ".*", "positive", default=1.0, note="also in training, for all log-probs"),
        to("top_p", ".*", "fraction", default=1),
        to("top_k", ".*", "natural or -1", at_least_0, default=-1, note="-1: off"),
        to("repetition_penalty", ".*", "positive"),
        missing("do_sample", "set it to true: groups need different answers", default=True)),
    section("val_kwargs", "eval.sampling", NO_EVALUATION)(
        to("do_sample", ".greedy", "bool", opposite, default=False),
        to("temperature", ".*", "non-negative", _IS_SAMPLED, greedy_at_0, default=0),
        to("top_p", ".*", "fraction", _IS_SAMPLED, default=1.0),
        to("top_k", ".*", "natural or -1", _IS_SAMPLED, at_least_0, default=-1),
        to("n", {"eval.samples_per_prompt": as_is, "eval.pass_at": lambda v, _: [1, v] if v > 1 else [1]}, "count", default=1),
        to("repetition_penalty", ".*", "positive")))

# fmt: on
