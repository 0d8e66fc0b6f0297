"""SkyRL's `data`, `environment` and `generator`: prompts, the environment that scores, engines and
sampling."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from .compat import (
    Apply,
    Became,
    Implied,
    NoEffect,
    Rule,
    Source,
    Unsupported,
    implied,
    mapped,
    no_effect,
    only,
    opposite,
    unless_null,
    unsupported,
    when,
)
from .skyrl_facts import (
    always,
    engine,
    engine_gpus,
    in_one_process,
    is_colocated,
    is_remote,
    longest_input,
    of_engine,
    off_only,
)
from .values import (
    ANY,
    BOOL,
    COUNT,
    INT,
    NATURAL,
    NON_NEGATIVE,
    POSITIVE,
    TEXT,
    Takes,
    choice,
    either,
    list_of,
    mapping_of,
    nullable,
    number,
    text,
)

# --- data and environment ----------------------------------------------------------------------------------------

_FILES = (".parquet", ".json", ".jsonl")
ANSWER_KEYS = {"gsm8k": "reward_spec.ground_truth", "aime": "reward_model.ground_truth"}
"""Environment -> column of the reference answer."""


def _sources(values: list[str], source: Source) -> list[dict[str, Any]]:
    """One native source for all files, which SkyRL concatenates, and one for each data set on the hub."""
    columns = {
        "prompt_key": "prompt",
        "answer_key": ANSWER_KEYS.get(source.get("environment.env_class"), "reward_spec.ground_truth"),
        "source_key": "data_source",
    }
    files = [value for value in values if PurePath(value).suffix in _FILES]
    out: list[dict[str, Any]] = [{"kind": "file", "path": files, **columns}] if files else []
    for value in values:
        if value not in files:
            name, _, split = value.partition(":")
            out.append({"kind": "hub", "path": name, "split": split or "train", **columns})
    return out


def _evaluates(source: Source) -> str:
    return "" if source.get("trainer.eval_interval") > 0 else "eval_interval disables evaluation"


def _environment(value: str, _: Source) -> Became:
    if value == "gsm8k":
        part = {"kind": "exact", "name": "gsm8k", "pattern": r"####\s*(-?[\d.,]*\d)", "ignore": ",$"}
        return Became(
            {"reward.parts": [part]}, note="1 if the number after the last #### equals the reference, else 0"
        )
    if value == "aime":
        return Became(
            {"reward.parts": [{"kind": "math", "name": "aime"}], "reward.scale": 2.0, "reward.shift": -1.0},
            note="1 if the boxed answer equals the reference, else -1 (0 in evaluation)",
        )
    return unsupported(f"use {' or '.join(ANSWER_KEYS)}, or define the reward with braid.reward.parts=[...]")


_ENVIRONMENTS = Takes(
    f"the name of an environment; supported are {', '.join(ANSWER_KEYS)}",
    lambda v: isinstance(v, str) and v != "",
    tuple(ANSWER_KEYS),
)
_DATA = list_of(text("one/train.parquet", "two/train.json"))

DATA: tuple[Rule, ...] = (
    Apply("data.train_data", "data.train", _DATA, _sources, default=["~/data/gsm8k/train.parquet"],
        note="rows: prompt (chat messages), reward_spec.ground_truth, data_source; .parquet, .json, .jsonl, or a "
        "dataset on the hub (name:split)"),
    Apply("data.val_data", "data.eval", _DATA, when(_evaluates, then=_sources),
        default=["~/data/gsm8k/validation.parquet"], note="results per data_source and overall"),
    NoEffect("data.dataloader.num_workers", nullable(NATURAL), "prompts are always read into memory once"),
    NoEffect("data.dataloader.persistent_workers", BOOL, "prompts are always read into memory once"),
    Apply("environment.env_class", "reward.parts", _ENVIRONMENTS, _environment, default="gsm8k",
        note="applies to all rows; a column env_class is not read"),
    NoEffect("environment.max_env_workers", INT, "concurrency of scoring is set by braid.reward.concurrency"),
    NoEffect("environment.skyrl_gym.max_env_workers", INT,
        "concurrency of scoring is set by braid.reward.concurrency"),
    *(
        NoEffect(f"environment.skyrl_gym.{name}.*", ANY, "for an environment that is not used")
        for name in ("text2sql", "search", "llm_as_a_judge")
    ),
)  # fmt: skip


# --- engines -----------------------------------------------------------------------------------------------------

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SERVED = ("vllm", "sglang")
_AT = "generator"


def _backend(value: str, source: Source) -> Became:
    if source.engine is not None:
        return no_effect(f"overridden by --engine {source.engine}")
    return Became({"rollout.engine": value})


def _local(value: bool, source: Source) -> Became:
    if engine(source) == "native":
        return no_effect("the native engine does not use servers")
    urls = source.get(f"{_AT}.remote_inference_engine_urls")
    if value:
        return implied("the run starts its own engines")
    return Became({f"rollout.{engine(source)}.servers": _urls(urls)})


def _urls(values: list[str]) -> list[str]:
    return [value if "://" in value else f"http://{value}" for value in values]


def _remote_urls(value: list[str] | None, source: Source) -> Became:
    if not is_remote(source) or engine(source) == "native":
        return no_effect("the run starts its own engines")
    return Became({f"rollout.{engine(source)}.servers": _urls(value or [])})


def _engines(value: int, source: Source) -> Became:
    if is_remote(source):
        return implied("one engine per URL")
    made = of_engine("replicas", only=_SERVED)(value, source)
    return _with_placement(made, source)


def _tensor_parallel(value: int, source: Source) -> Became:
    return _with_placement(of_engine("tensor_parallel", only=_SERVED)(value, source), source)


def _with_placement(made: Became, source: Source) -> Became:
    """Add a note where the engines have their own devices, so that the placement changes too."""
    if not made.native or in_one_process(source) or is_colocated(source):
        return made
    return Became(made.native, note=f"on {engine_gpus(source)} separate devices (cluster.placement)")


def _served_elsewhere(source: Source) -> str:
    return "remote engines have their own setting" if is_remote(source) else ""


def _sync(value: str, source: Source) -> Became:
    if value == "delta":
        return unsupported("use nccl or gloo")
    if in_one_process(source) and engine(source) == "native":
        return no_effect("in a single process the engine uses the trainer's tensors")
    if value == "nccl" and is_colocated(source):
        return Became({"rollout.publish.transport": "auto"}, note="CUDA IPC on the same devices, as in SkyRL")
    return Became({"rollout.publish.transport": value})


def _existing_group(value: str, source: Source) -> Became:
    if not is_remote(source):
        return no_effect("for remote engines only")
    return Became(
        {"rollout.publish.existing_group": {"enable": "replace", "disable": "refuse"}.get(value, "auto")}
    )


def _input_length(value: int | None, source: Source) -> Became:
    """Limit of a conversation, and of the engine's context: tokens before a response plus the longest
    response."""
    answers = [
        source.get(f"{_AT}.{name}.max_generate_length")
        for name in ("sampling_params", "eval_sampling_params")
    ]
    longest = (value or longest_input(source)) + max(answer or 0 for answer in answers)
    native: dict[str, Any] = {}
    if source.own.get("env.kind") == "tools":
        native["env.max_context_tokens"] = longest
    if engine(source) in _SERVED:
        native[f"rollout.{engine(source)}.max_model_tokens"] = longest
    return (
        Became(native) if native else implied("for a single turn the input is limited by max_prompt_length")
    )


def _max_turns(value: int, source: Source) -> Became:
    if source.own.get("env.kind") == "tools":
        return Became({"env.max_turns": value})
    if value == 1:
        return implied("the environment has a single turn")
    return no_effect("the environment has a single turn; for tools set braid.env.kind=tools")


def _conversation(value: bool, source: Source) -> Became:
    if source.own.get("env.kind") != "tools":
        return no_effect("the environment has a single turn")
    if value:
        raise ValueError("tool replies are part of the policy's turn; set it to false")
    return implied("tool replies are always part of the policy's turn, token for token")


def _template(value: str | None, source: Source) -> Became:
    if value is None:
        return implied("the tokenizer's template")
    if source.get(f"{_AT}.chat_template.source") != "file":
        return unsupported("use the path of a Jinja file, with source: file")
    return Became({"model.chat_template": value})


_IGNORED = (
    ("model_name", "requests do not contain a model name"),
    ("served_model_name", "requests do not contain a model name"),
    ("http_endpoint_host", "braid does not open an HTTP endpoint"),
    ("http_endpoint_port", "braid does not open an HTTP endpoint"),
    ("enable_ray_prometheus_stats", "braid writes its own metrics"),
    ("use_expandable_segments", "set PYTORCH_CUDA_ALLOC_CONF in braid.cluster.env"),
    ("language_model_only", "only text models are supported"),
    ("fully_sharded_loras", "engines always receive merged weights"),
    ("offload_kv_for_weight_sync", "engines release memory as required by the placement"),
    ("router_init_kwargs", "requests always go to the least loaded engine"),
    ("num_prefill", "prefill and decoding always share an engine"),
)
_MISSING = (
    ("engine_init_kwargs", None, "use the options of rollout.vllm in docs/config.md"),
    ("speculative_config", None, "remove it; speculative decoding is not supported"),
    ("enable_return_routed_experts", False, "set it to false; routing replay is not supported"),
    ("enable_pd", False, "set it to false; prefill and decoding share an engine"),
    ("serialized_weight_sync_mode", None, "remove it; weights are sent in the engine's dtype"),
    ("delta_weight_sync", None, "use weight_sync_backend=nccl"),
    ("external_proxy_url", None, "use remote_inference_engine_urls"),
    ("external_server_urls", None, "use remote_inference_engine_urls"),
)
"""Engine keys of later releases: (key, value that requests nothing, what to use instead)."""

ENGINES: tuple[Rule, ...] = (
    Apply(f"{_AT}.backend", "rollout.engine", choice("vllm", "sglang"), _backend, default="vllm",
        note="sglang can also run locally, unlike in SkyRL"),
    Apply(f"{_AT}.model_dtype", "rollout.vllm.dtype", choice(*_DTYPES), of_engine("dtype", mapped(_DTYPES)),
        default="bfloat16",
        note="dtype of the engine's weights; log-probs before the update are computed by the trainer"),
    Apply(f"{_AT}.run_engines_locally", "rollout.vllm.servers", BOOL, _local, default=True),
    Apply(f"{_AT}.num_inference_engines", "rollout.vllm.replicas", COUNT, _engines, default=1),
    Apply(f"{_AT}.remote_inference_engine_urls", "rollout.vllm.servers",
        nullable(list_of(text("127.0.0.1:8001", "http://host:8002"))), _remote_urls, default=["127.0.0.1:8001"],
        note="host:port as in SkyRL, or URLs"),
    Apply(f"{_AT}.inference_engine_tensor_parallel_size", "rollout.vllm.tensor_parallel", COUNT, _tensor_parallel,
        default=4, note="the first release's default; later ones have 1"),
    Apply(f"{_AT}.inference_engine_pipeline_parallel_size", "rollout.vllm.pipeline_parallel", COUNT,
        of_engine("pipeline_parallel", only=_SERVED), default=1),
    Apply(f"{_AT}.inference_engine_data_parallel_size", "", COUNT,
        only(1, "use more engines, or tensor parallelism", "one model replica per engine"), default=1),
    Apply(f"{_AT}.inference_engine_expert_parallel_size", "", COUNT,
        only(1, "use tensor and pipeline parallelism", "no expert parallelism"), default=1),
    Apply(f"{_AT}.weight_sync_backend", "rollout.publish.transport", choice("nccl", "gloo", "delta"), _sync,
        default="nccl"),
    Apply(f"{_AT}.override_existing_update_group", "rollout.publish.existing_group",
        choice("auto", "enable", "disable"), _existing_group, default="auto"),
    Apply(f"{_AT}.weight_transfer_threshold_cuda_ipc_GB", "rollout.publish.bucket_bytes", POSITIVE,
        when(in_one_process, then=lambda v, _: int(v * 2**30)), note="GiB"),
    Apply(f"{_AT}.async_engine", "", BOOL, always("engines are always asynchronous"), default=True),
    Apply(f"{_AT}.batched", "", BOOL, always("all prompts of a round are requested at once"), default=True),
    Apply(f"{_AT}.vllm_v1_disable_multiproc", "rollout.vllm.in_process", BOOL,
        of_engine("in_process", only=("vllm",)), default=True, note="the order of requests is deterministic"),
    Apply(f"{_AT}.enable_prefix_caching", "rollout.vllm.prefix_caching", BOOL,
        of_engine("prefix_caching", only=("vllm",)), default=True),
    Apply(f"{_AT}.enable_chunked_prefill", "rollout.vllm.chunked_prefill", BOOL,
        of_engine("chunked_prefill", only=("vllm",)), default=True),
    Apply(f"{_AT}.max_num_batched_tokens", "rollout.vllm.prefill_tokens", COUNT, of_engine("prefill_tokens"),
        default=8192, note="prompt tokens per forward pass"),
    Apply(f"{_AT}.max_num_seqs", "rollout.vllm.max_running", COUNT, of_engine("max_running"), default=1024,
        note="sequences decoded concurrently"),
    Apply(f"{_AT}.enforce_eager", "rollout.vllm.cuda_graphs", BOOL, of_engine("cuda_graphs", opposite),
        default=False),
    Apply(f"{_AT}.gpu_memory_utilization", "rollout.vllm.memory_fraction",
        number(0.0, 1.0, above=True, samples=(0.5, 0.7)),
        when(_served_elsewhere, then=of_engine("memory_fraction", only=_SERVED)), default=0.8),
    Apply(f"{_AT}.inference_engine.distributed_executor_backend", "rollout.vllm.executor",
        choice("ray", "mp", "uni"), of_engine("executor", only=("vllm",)), default="ray"),
    Implied(f"{_AT}.use_cache_salt", BOOL, "caches are always reset when weights change"),
    Apply(f"{_AT}.enable_http_endpoint", "", BOOL,
        off_only("requests go to the engines directly", "use separately started servers as engines")),
    *(NoEffect(f"{_AT}.{key}", ANY, why) for key, why in _IGNORED),
    *(NoEffect(f"{_AT}.inference_engine.{key}", ANY, why) for key, why in _IGNORED),
    *(Unsupported(f"{_AT}.{key}", instead, default=default) for key, default, instead in _MISSING),
    *(Unsupported(f"{_AT}.inference_engine.{key}", instead, default=default) for key, default, instead in _MISSING
        if key != "external_server_urls"),
    *(Unsupported(f"{_AT}.{key}", "set it in config.json of the model folder") for key in
        ("rope_scaling", "rope_theta")),
)  # fmt: skip


# --- sampling ----------------------------------------------------------------------------------------------------


def _temperature(native: str) -> Any:
    def convert(value: float, _: Source) -> Became:
        if value == 0:
            return Became({f"{native}.greedy": True}, note="greedy decoding")
        return Became({f"{native}.temperature": float(value), f"{native}.greedy": False})

    return convert


def _top_k(value: int, _: Source) -> int:
    return max(value, 0)


def _eval_length(value: int | None, source: Source) -> int:
    return value or source.get(f"{_AT}.sampling_params.max_generate_length")


def _sampling(name: str, native: str, length: Takes, longest: int | None) -> tuple[Rule, ...]:
    """The rules of `generator.sampling_params`, and of the same for evaluation."""
    at = f"{_AT}.{name}"
    idle = () if name == "sampling_params" else (_evaluates,)
    return (
        Apply(f"{at}.max_generate_length", f"{native}.max_new_tokens", length, when(*idle, then=_eval_length),
            default=longest, note="tokens of one response (turn)"),
        Apply(f"{at}.temperature", f"{native}.temperature", NON_NEGATIVE, when(*idle, then=_temperature(native)),
            default=1.0,
            note="also used in training, for the log-probs of policy, old policy and reference; 0: greedy"),
        Apply(f"{at}.top_p", f"{native}.top_p", number(0.0, 1.0, above=True, samples=(0.5, 0.9)), when(*idle),
            default=1.0),
        Apply(f"{at}.min_p", f"{native}.min_p", number(0.0, 1.0, samples=(0.1, 0.2)), when(*idle), default=0.0),
        Apply(f"{at}.top_k", f"{native}.top_k", either(NATURAL, choice(-1)), when(*idle, then=_top_k), default=-1,
            note="-1 for off"),
        Apply(f"{at}.repetition_penalty", f"{native}.repetition_penalty", POSITIVE, when(*idle), default=1.0),
        Apply(f"{at}.stop", f"{native}.stop_strings", nullable(list_of(TEXT)),
            when(*idle, then=lambda v, _: v or []), note="the stop string is kept in the response"),
        NoEffect(f"{at}.logprobs", nullable(INT), "the log-probs of sampled tokens are always kept"),
        Apply(f"{at}.additional_kwargs", "", nullable(ANY),
            off_only("no additional sampling options", "use the other keys of this section")),
    )  # fmt: skip


def _eval_samples(value: int, _: Source) -> Became:
    return Became({"eval.samples_per_prompt": value, "eval.pass_at": [1, value] if value > 1 else [1]})


SAMPLING: tuple[Rule, ...] = (
    Apply(f"{_AT}.n_samples_per_prompt", "rollout.group_size", COUNT, default=5,
        note="samples per round = train_batch_size * n_samples_per_prompt"),
    Apply(f"{_AT}.max_input_length", "rollout.vllm.max_model_tokens", nullable(COUNT), _input_length, default=None,
        note="tokens before a response plus the longest response; max_prompt_length for a single turn"),
    Apply(f"{_AT}.max_turns", "env.max_turns", COUNT, _max_turns, default=1),
    Apply(f"{_AT}.use_conversation_multi_turn", "", BOOL, _conversation, default=False),
    NoEffect(f"{_AT}.append_eos_token_after_stop_str_in_multi_turn", BOOL,
        "turns are always token for token as sampled"),
    *_sampling("sampling_params", "rollout.sampling", COUNT, 1024),
    *_sampling("eval_sampling_params", "eval.sampling", nullable(COUNT), None),
    Apply(f"{_AT}.eval_n_samples_per_prompt", "eval.samples_per_prompt", COUNT,
        when(_evaluates, then=_eval_samples), default=1,
        note="pass@k is the unbiased estimator; in SkyRL the fraction of prompts with any reward"),
    Apply(f"{_AT}.zero_reward_on_non_stop", "reward.truncated", BOOL, mapped({True: "zero", False: "keep"}),
        default=False, note="for every truncated response (SkyRL ignored it with batched=true)"),
    Apply(f"{_AT}.apply_overlong_filtering", "algorithm.mask_truncated", BOOL, default=False,
        note="they still count in the statistics of their group"),
    Apply(f"{_AT}.chat_template.name_or_path", "model.chat_template", nullable(TEXT), _template),
    NoEffect(f"{_AT}.chat_template.source", choice("name", "file"), "determines the meaning of name_or_path"),
    Apply(f"{_AT}.chat_template_kwargs", "data.chat_template_kwargs",
        nullable(mapping_of(ANY, {"enable_thinking": False}, {"reasoning_effort": "low"})),
        unless_null(why="null: no arguments")),
    *(
        Apply(f"{_AT}.{key}", "", BOOL, off_only("trajectories are always trained as a whole", "set it to false; trajectories are trained as a whole"))
        for key in ("step_wise_trajectories", "merge_stepwise_output")
    ),
    Apply(f"{_AT}.vision_language_generator", "", BOOL, off_only("only text models are supported", "use a text model")),
)  # fmt: skip

GENERATOR: tuple[Rule, ...] = (*DATA, *ENGINES, *SAMPLING)
