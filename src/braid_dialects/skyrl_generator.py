"""SkyRL's `data`, `environment` and `generator`: prompts, the environment that scores, engines and
sampling."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from . import skyrl_facts as facts
from .conditions import BY_ENGINE, of_engine, refused, unless
from .conversions import already, as_is, at_least_0, greedy_at_0, opposite, unless_null
from .rows import always, ignored, missing, rows, section, to
from .skyrl_facts import HAS_IMAGES, NO_EVALUATION, ONE_PROCESS, SERVED, engine, is_remote
from .table import Became, Source, implied, unsupported

_FILES = (".parquet", ".json", ".jsonl")
ANSWER_KEYS = {"gsm8k": "reward_spec.ground_truth", "aime": "reward_model.ground_truth"}
"""Environment -> column of the reference answer."""


def _sources(values: list[str], source: Source) -> list[dict[str, Any]]:
    """One native source for all files, which SkyRL concatenates, and one for each data set on the hub."""
    columns: dict[str, Any] = {
        "prompt_key": "prompt",
        "answer_key": ANSWER_KEYS.get(source["environment.env_class"], "reward_spec.ground_truth"),
        "source_key": "data_source",
    }
    if facts.has_turns(source):
        columns["answer_key"] = None
    if source["environment.env_class"] in facts.EXAMPLES:
        columns["source_key"] = None
    files = [value for value in values if PurePath(value).suffix in _FILES]
    out: list[dict[str, Any]] = [{"kind": "file", "path": files, **columns}] if files else []
    for name, _, split in (value.partition(":") for value in values if value not in files):
        out.append({"kind": "hub", "path": name, "split": split or "train", **columns})
    return out


_OTHER_ENVIRONMENT = unsupported(
    f"use {', '.join((*ANSWER_KEYS, *facts.GYM, *facts.EXAMPLES))}, the module that registers it (module:name), or its class "
    "(package.module.Class)"
)
_GSM8K = {"kind": "exact", "name": "gsm8k", "pattern": r"####\s*(-?[\d.,]*\d)", "ignore": ",$"}
_REWARDS = {
    "gsm8k": Became(
        {"reward.parts": [_GSM8K]}, note="1 if the number after the last #### equals the reference, else 0"
    ),
    "aime": Became(
        {"reward.parts": [{"kind": "math", "name": "aime"}], "reward.scale": 2.0, "reward.shift": -1.0},
        note="1 if the boxed answer equals the reference, else -1 (0 in evaluation)",
    ),
}


def _environment(value: str, source: Source) -> Became:
    if value in facts.EXAMPLES:
        note = "an environment of SkyRL's repository, whose folder must be on PYTHONPATH; for all rows"
        return Became({"env.kwargs.id": facts.EXAMPLES[value]}, note=note)
    if value == "visgym":
        where = "examples.train.visgym.env_instruct.VisGymEnv, or env_sft (--env_variant)"
        return unsupported(f"name the class in SkyRL's repository: {where}")
    if value not in (*_REWARDS, *facts.GYM) and not {".", ":"} & set(value):
        return _OTHER_ENVIRONMENT
    return Became({"env.kwargs.id": value}) if facts.has_turns(source) else _REWARDS[value]


def _servers(value: bool, source: Source) -> Any:
    if value:
        return implied("the run starts its own engines")
    return _urls(source["generator.remote_inference_engine_urls"], source)


def _urls(values: list[str] | None, _: Source) -> list[str]:
    return [value if "://" in value else f"http://{value}" for value in values or []]


def _num_engines(value: int, source: Source) -> str:
    key, policy = "generator.remote_inference_engine_urls", facts.world(source, "policy")
    num_urls, gpus = len(source[key] or ()), facts.engine_gpus(source)
    if is_remote(source):
        return f"{value} differs from the number of {key}, {num_urls}" if value != num_urls else ""
    if not facts.is_colocated(source) or gpus == policy:
        return ""
    return (
        f"with colocate_all the engines use the policy's {policy} GPUs, but num_inference_engines times "
        f"their parallel sizes is {gpus}; make them equal, or set trainer.placement.colocate_all=false"
    )


_TRANSPORTS = {
    "nccl": lambda _, source: "auto" if facts.is_colocated(source) else "nccl",
    "gloo": "gloo",
    "delta": unsupported("use nccl or gloo"),
}


def _input_length(value: int | None, source: Source) -> Became:
    """Limit of a conversation, and of the engine's context: tokens before a response plus the longest
    response."""
    prompt = source["trainer.max_prompt_length"]
    if value is not None and source["generator.max_turns"] == 1 and value != prompt:
        why = f"for a single turn it must equal trainer.max_prompt_length={prompt}, not {value}"
        raise ValueError(why)
    if (value or prompt) < prompt:
        raise ValueError(f"{value} is below trainer.max_prompt_length={prompt}; raise it")
    longest = _longest(source)
    native = {"env.max_context_tokens": longest} if _has_tools(source) else {}
    if engine(source) in SERVED:
        native["rollout.engine.max_model_tokens"] = longest
    return Became(native) if native else implied("a single turn is limited by max_prompt_length")


def _longest(source: Source) -> int:
    """Tokens of the longest request with its answer."""
    names = ("sampling_params", "eval_sampling_params")
    answers = [source[f"generator.{name}.max_generate_length"] or 0 for name in names]
    return (source["generator.max_input_length"] or source["trainer.max_prompt_length"]) + max(answers)


def _has_tools(source: Source) -> bool:
    return source.braid_values.get("env.kind") == "tools" or facts.has_turns(source)


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_IS_SERVED, _IS_VLLM = of_engine(*SERVED), of_engine("vllm")
_IS_LOCAL = unless(lambda s: not is_remote(s) or engine(s) == "native", "the run starts its own engines")
_NO_TOOLS = unless(lambda s: not _has_tools(s), "the environment has a single turn; see braid.env.kind=tools")
_NO_TURNS = unless(lambda s: not facts.has_turns(s), "the environment has a single turn")
_EVALUATES = unless(
    lambda s: "eval_sampling" in s.at and s["trainer.eval_interval"] <= 0, "eval_interval disables evaluation"
)

# One rule per line.
# fmt: off
DATA = rows(
    to("data.train_data", "data.train", "[path]", _sources, default=["~/data/gsm8k/train.parquet"],
       note="columns prompt, reward_spec.ground_truth, data_source; files or hub (name:split)"),
    to("data.val_data", "data.eval", "[path]", NO_EVALUATION, _sources,
       default=["~/data/gsm8k/validation.parquet"]),
    ignored("data.dataloader.{num_workers,persistent_workers}", "prompts are read into memory once"),
    to("environment.env_class", "reward.parts", "text",
       _environment, default="gsm8k",
       note=
           "a single turn of gsm8k or aime is scored by a rule, for all rows; others are skyrl-gym's, or "
           "that of a row's env_class"),
    ignored("environment.max_env_workers environment.skyrl_gym.max_env_workers",
            "each episode has a thread; concurrency of scoring is set by braid.reward.concurrency"),
    section("environment.skyrl_gym.{text2sql,search,llm_as_a_judge}", "env.kwargs.env_config")(
        to("*", ".*", "any", unless(lambda s: s.at.split(".")[2] not in (s["environment.env_class"] or ""),
                                    "its environment is not used"))),
)

ENGINES = section("generator", "rollout.engine")(
    to("backend", "rollout.engine.kind", "vllm|sglang", BY_ENGINE, default="vllm"),
    to("model_dtype", ".dtype", _DTYPES, default="bfloat16"),
    to("run_engines_locally", ".servers", "bool", _IS_SERVED, _servers, default=True),
    to("num_inference_engines", ".replicas", "count",
       refused(_num_engines), lambda v, s: implied("one engine per URL") if is_remote(s) else v, _IS_SERVED,
       default=1),
    to("remote_inference_engine_urls", ".servers", "[text]?",
       refused(lambda v, s: is_remote(s) and not v and
               "with run_engines_locally=false, list the URLs of running servers"), _IS_LOCAL, _urls,
       default=["127.0.0.1:8001"]),
    to("inference_engine_tensor_parallel_size", ".tensor_parallel", "count", _IS_SERVED,
       default=4, note="default: 4, from SkyRL 0.4 on 1"),
    to("inference_engine_pipeline_parallel_size", ".pipeline_parallel", "count", _IS_SERVED, default=1),
    missing("inference_engine_data_parallel_size", "use more engines, or tensor parallelism", default=1),
    to("weight_sync_backend", "rollout.weight_sync.transport", _TRANSPORTS,
       unless(lambda s: facts.is_one_process(s) and engine(s) == "native",
              "in a single process the engine uses the trainer's tensors"), default="nccl",
       note="on the same devices CUDA IPC, as in SkyRL"),
    to("override_existing_update_group", "rollout.weight_sync.existing_group",
       {"auto": "auto", "enable": "replace", "disable": "refuse"},
       unless(lambda s: not is_remote(s), "for remote engines only"), default="auto"),
    to("weight_transfer_threshold_cuda_ipc_GB", "rollout.weight_sync.bucket_bytes", "positive", ONE_PROCESS,
       lambda v, _: int(v * 2**30), note="GiB"),
    to("async_engine", "", "bool", already("engines are always asynchronous"), default=True),
    to("batched", "", "bool",
       refused(lambda v, s: not v and not s[".async_engine"] and
               "async_engine=false can only generate in batches; set batched=true"),
       already("all prompts of a round are requested at once"), default=True),
    to("{vllm_v1_disable_multiproc,enable_prefix_caching,enable_chunked_prefill}",
       ".{in_process,prefix_caching,chunked_prefill}", "bool", _IS_VLLM, default=True),
    to("max_num_batched_tokens", ".prefill_tokens", "count", default=8192, note="prompt tokens per pass"),
    to("max_num_seqs", ".max_running", "count", default=1024, note="sequences decoded concurrently"),
    to("enforce_eager", ".cuda_graphs", "bool", opposite, default=False),
    to("gpu_memory_utilization", ".memory_fraction", "fraction",
       unless(is_remote, "remote engines have their own setting"), _IS_SERVED, default=0.8),
    to("inference_engine.distributed_executor_backend", ".executor", "ray|mp|uni", _IS_VLLM, default="ray"),
    always("use_cache_salt", "caches are always reset when weights change", "bool"),
    missing("inference_engine_expert_parallel_size", "use tensor and pipeline parallelism", default=1),
    missing("enable_http_endpoint", "use separately started servers as engines", default=False),
    missing("{rope_scaling,rope_theta}", "set it in config.json of the model folder"),
    missing("external_server_urls", "use remote_inference_engine_urls"))
NEWER = section("{generator,generator.inference_engine}")(
    ignored("model_name served_model_name http_endpoint_host http_endpoint_port num_prefill "
            "enable_ray_prometheus_stats offload_kv_for_weight_sync router_init_kwargs",
            "engines are started, reached and freed by the run itself, which writes its own metrics"),
    ignored("use_expandable_segments", "set PYTORCH_CUDA_ALLOC_CONF in braid.cluster.env"),
    ignored("fully_sharded_loras", "engines receive merged weights"),
    missing("language_model_only", "set it to false, or vision_language_generator",
            unless(lambda s: not facts.reads_images(s),
                   "the model reads only text, with the language model alone"), default=False),
    section("engine_init_kwargs")(
        to("max_model_len", "rollout.max_sequence_tokens", "count",
           unless(lambda s: (s[s.at] or 0) >= _longest(s), "the context is max_input_length plus the longest answer"),
           note="a response ends where the engine's context does"),
        to("max_num_batched_tokens max_num_seqs gpu_memory_utilization block_size attention_backend",
           "rollout.engine.{prefill_tokens,max_running,memory_fraction,block_size,attention}", "any", _IS_SERVED),
        to("{enable_prefix_caching,enable_chunked_prefill}",
           "rollout.engine.{prefix_caching,chunked_prefill}", "bool", _IS_VLLM),
        to("enforce_eager disable_log_stats", "rollout.engine.{cuda_graphs,log_stats}", "bool", _IS_VLLM, opposite),
        to("chat_template", "model.chat_template", "path", note="path of a Jinja file"),
        ignored("compilation_config gdn_prefill_backend enable_log_requests disable_log_requests seed",
                "vLLM's kernels and logs, which change no result; requests have seeds of their own"),
        missing("language_model_only", "set it to false, or vision_language_generator",
                unless(lambda s: not facts.reads_images(s),
                       "the model reads only text, with the language model alone"), default=False),
        missing("*", "an argument of vLLM that braid does not pass; remove it, or use rollout.engine in docs/config.md")),
    missing("speculative_config", "remove it, or use rollout.engine in docs/config.md"),
    ignored("enable_return_routed_experts", "engines return them where they are replayed: see "
            "trainer.policy.megatron_config.moe_enable_routing_replay", "bool"),
    missing("enable_pd", "set it to false; prefill and decoding share an engine", default=False),
    missing("serialized_weight_sync_mode delta_weight_sync", "use weight_sync_backend=nccl"),
    missing("external_proxy_url", "use remote_inference_engine_urls"))

SAMPLING = section("generator")(
    to("n_samples_per_prompt", "rollout.group_size", "count", default=5),
    to("max_input_length", "rollout.engine.max_model_tokens", "count?", _input_length, default=None,
       note="tokens before a response plus the longest response; max_prompt_length for a single turn"),
    to("max_turns", "env.max_turns", "count", _NO_TOOLS, lambda v, s: Became(
        {"env.max_turns": v} | ({"env.kwargs.max_turns": v} if facts.has_turns(s) else {})), default=1),
    to("use_conversation_multi_turn", "env.replies", "bool", _NO_TOOLS,
       lambda v, s: implied("replies are messages of the chat template, appended to the tokens as sampled")
       if v or s.braid_values.get("env.kind") == "tools" else "text", default=False),
    always("append_eos_token_after_stop_str_in_multi_turn",
           "the chat template's end of a turn is added, untrained, where the policy did not write it", "bool"),
    to("sampling_params.max_generate_length", "rollout.sampling.max_new_tokens", "count", default=1024),
    to("eval_sampling_params.max_generate_length", "eval.sampling.max_new_tokens", "count?", NO_EVALUATION,
       lambda v, s: v or s["generator.sampling_params.max_generate_length"], default=None),
    section("{sampling_params,eval_sampling_params}", "{sampling}", _EVALUATES)(
        to("temperature", ".*", "non-negative", greedy_at_0, lambda v, s: v if "eval_sampling" in s.at else Became(
           dict.fromkeys(s.native, v), note="also in training, for all log-probs; 0: greedy"), default=1.0, note="0: greedy"),
        to("top_p", ".*", "fraction", default=1.0),
        to("min_p", ".*", "share", default=0.0),
        to("top_k", ".*", "natural or -1", at_least_0, default=-1, note="-1: off"),
        to("repetition_penalty", ".*", "positive", default=1.0),
        to("stop", ".stop_strings", "[text]?", lambda v, _: v or [], note="kept in the response"),
        ignored("logprobs", "the log-probs of sampled tokens are always kept")),
    missing("{sampling_params,eval_sampling_params}.additional_kwargs", "use the other keys of this section"),
    to("eval_n_samples_per_prompt",
       {"eval.samples_per_prompt": as_is, "eval.pass_at": lambda v, _: [1, v] if v > 1 else [1]}, "count",
       NO_EVALUATION, default=1, note="pass@k is the unbiased estimator; in SkyRL any reward of a prompt"),
    to("zero_reward_on_non_stop", "reward.truncated", {True: "zero", False: "keep"}, default=False,
       note="for every truncated response (SkyRL ignored it with batched=true)"),
    to("apply_overlong_filtering", "algorithm.mask_truncated", "bool", default=False),
    to("chat_template.name_or_path", "model.chat_template", "text?",
       unless_null("the tokenizer's template", implied),
       lambda v, s: v if s[".source"] == "file" else
       unsupported("use the path of a Jinja file, with source: file")),
    ignored("chat_template.source", "determines the meaning of name_or_path"),
    to("chat_template_kwargs", "data.chat_template_kwargs", "{any}?", unless_null("no arguments")),
    to("step_wise_trajectories", "env.thinking", {True: "as_template", False: "keep"}, _NO_TURNS,
       note="true: a row for each turn whose prompt does not begin with the tokens before, as where the chat "
       "template drops reasoning"),
    always("merge_stepwise_output", "turns that continue the tokens before are one row", "bool"),
    to("vision_language_generator", "model.vision.train", "bool", HAS_IMAGES,
       lambda _, s: facts.trained_tower(s), default=False,
       note=
           "images are parts of messages; the tower is trained too, unless adapters or Megatron's keys "
           "freeze it"))

GENERATOR = rows(DATA, ENGINES, NEWER, SAMPLING)
# fmt: on
