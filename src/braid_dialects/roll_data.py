"""ROLL's keys of data, templates, sampling and rewards: data_args, generating_args, validation, rewards."""

from __future__ import annotations

from typing import Any

from braid.config.data import REST

from . import roll_facts as facts
from .conversions import Idle, only, when
from .roll_run import max_new_tokens
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
    NON_NEGATIVE,
    NUMBER,
    POSITIVE,
    TEXT,
    choice,
    either,
    integer,
    list_of,
    mapping_of,
    nullable,
    number,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OWN_TEMPLATES = ("native", "qwen2_5", "qwen3")
"""ROLL's names for the tokenizer's own template."""
_OTHER_TEMPLATES = (
    "native_nonthinking",
    "base",
    "longCOT_qwen2.5",
    "longcot_V3",
    "qwen3_coder",
    "qwen3_nothink",
    "qwen2-vl",
)


def _template(value: str, _: Source) -> Any:
    if value in OWN_TEMPLATES:
        return Became({"data.use_chat_template": "auto"})
    if value in ("chatml", "empty"):
        return Became({"data.use_chat_template": "always", "model.chat_template": CHATML})
    return unsupported("set the template as Jinja: braid.model.chat_template=file.jinja")


def column_of(source: Source, role: str) -> str | None:
    """The prompt column; for evaluation, the one of training by default."""
    names = (
        f"{worker}.data_args.{key}" for worker in (role, "actor_train") for key in ("messages", "prompt")
    )
    return next((found for name in names if (found := source.get(name))), None)


def _data(role: str, native: str, *idle: Idle) -> tuple[Rule, ...]:
    """The data_args keys of training or evaluation."""
    data = f"{role}.data_args"

    def column(value: str | None, source: Source) -> Any:
        if value is None:
            return implied("null: the other one of prompt and messages is used")
        return Became({f"{native}.prompt_key": column_of(source, role)})

    def interleave(value: dict[str, float], source: Source) -> Any:
        if role == "validation":
            return no_effect("evaluation uses all prompts")
        if len(value) <= 1:
            return implied("one domain")
        trained = scored(source)
        mix = [
            {"sources": sources_of(source, name), "share": float(share) if name in trained else 0.0}
            for name, share in value.items()
        ]
        if rest := [name for name in facts.domains(source) if name not in value]:
            mix.append({"sources": [tag for name in rest for tag in sources_of(source, name)], "share": 0.0})
        if not any(REST in of["sources"] for of in mix):
            mix.append({"sources": [REST], "share": 0.0})
        return Became({"data.mix": mix})

    return (
        Apply(f"{data}.file_name", f"{native}.path", either(TEXT, list_of(TEXT)), when(*idle),
              note="JSON, JSONL, CSV or Parquet; several files are concatenated"),
        Apply(f"{data}.prompt", f"{native}.prompt_key", nullable(TEXT), when(*idle, then=column),
              note="column of plain text; the "
              "chat template is applied, as documented. ROLL's code uses the text unchanged (braid.data.use_chat_template=never)"),
        Apply(f"{data}.messages", f"{native}.prompt_key", nullable(TEXT), when(*idle, then=column),
              note="column of chat messages"),
        Apply(f"{data}.tag", f"{native}.source_key", nullable(TEXT),
              when(*idle, lambda s: "" if len(facts.domains(s)) > 1 else "there is only one reward domain")),
        Apply(f"{data}.domain_interleave_probs", "", nullable(mapping_of(NON_NEGATIVE, {"math_rule": 1.0})),
              when(*idle, then=lambda v, s: interleave(v or {}, s)),
              note="fraction of each domain's tags among the prompts, maintained throughout; other rows are dropped. "
              "ROLL rounds int(share * rollout_batch_size) down in each round, and gives the last domain the rest"),
        Implied(f"{data}.dataset_type", either(TEXT, list_of(TEXT)), "determined by the file extension"),
        NoEffect(f"{data}.preprocessing_num_workers", nullable(COUNT), "tokenizers always use all cores"),
        NoEffect(f"{data}.id", TEXT, "prompts are identified by source and row"),
        NoEffect(f"{data}.response", TEXT, "for supervised fine-tuning only"),
        *(NoEffect(f"{data}.{name}", ANY, "not read by ROLL") for name in ("dataset_dir", "interleave_probs",
        "eval_file_name")),
        *(
            Unsupported(f"{data}.{name}", "remove it; only text prompts are supported")
            for name in (
                "image_max_pixels", "image_min_pixels", "video_max_pixels", "video_min_pixels", "video_total_pixels", "video_fps",
                "video_max_frames", "video_resize_chunk_frames", "image_folder", "video_folder", "audio_folder",
                "custom_data_kwargs_func",
            )
        ),
    )  # fmt: skip


# Sampling


def sampling(source: Source, role: str) -> dict[str, Any]:
    """The generating_args of a role, under native names."""
    given = {name: source.get(f"{role}.generating_args.{name}") for name in _SAMPLING}
    made = {
        "greedy": not given["do_sample"] or given["temperature"] == 0,
        "top_p": float(given["top_p"]),
        "top_k": max(0, given["top_k"]),
        "repetition_penalty": float(given["repetition_penalty"]),
        "stop_strings": given["stop_strings"] or [],
    }
    return made | ({"temperature": float(given["temperature"])} if given["temperature"] else {})


_SAMPLING = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "stop_strings")


def eval_max_new_tokens(source: Source) -> int:
    """Maximum response length of evaluation, in tokens."""
    prompt, whole = source.get("val_prompt_length"), source.get("val_sequence_length")
    longest = (
        facts.max_new_tokens(source) if whole is None else whole - (prompt or source.get("prompt_length"))
    )
    own = source.get("validation.generating_args.max_new_tokens")
    return max(1, longest if own is None else min(own, longest))


def samples_for_itself(source: Source) -> bool:
    """Whether evaluation has its own sampling settings."""
    own = source.has("validation.generating_args") or source.get("val_sequence_length") is not None
    return facts.validates(source) and own


def _generating(role: str, native: str, *idle: Idle) -> tuple[Rule, ...]:
    """The generating_args keys of training and evaluation."""
    generating = f"{role}.generating_args"

    def sampled(*names: str) -> Convert:
        def convert(_: Any, source: Source) -> Became:
            made = sampling(source, role)
            return Became({f"{native}.{name}": made[name] for name in names if name in made})

        return when(*idle, then=convert)

    return (
        Apply(f"{generating}.temperature", f"{native}.temperature", NON_NEGATIVE, sampled("temperature", "greedy"),
              default=0.95,
              note="also used in training; ROLL's trainer does not, so its ratios compare two different "
              "distributions. 0: greedy"),
        Apply(f"{generating}.top_p", f"{native}.top_p", number(0.0, 1.0, above=True, samples=(0.5, 0.9)),
              sampled("top_p"), default=0.7,
              note="0.7 if absent, which differs from the trained distribution; 1 disables it"),
        Apply(f"{generating}.top_k", f"{native}.top_k", integer(-1, samples=(20, 40)), sampled("top_k"), default=50,
              note="50 if absent, which differs from the trained distribution; 0 or -1 disables it"),
        Apply(f"{generating}.do_sample", f"{native}.greedy", BOOL, sampled("greedy"), default=True),
        Apply(f"{generating}.repetition_penalty", f"{native}.repetition_penalty", POSITIVE,
              sampled("repetition_penalty"), default=1.0),
        Apply(f"{generating}.stop_strings", f"{native}.stop_strings", nullable(list_of(TEXT)),
              sampled("stop_strings"), default=None),
        Implied(f"{generating}.include_stop_str_in_output", nullable(BOOL), "the stop string is always kept"),
        Apply(f"{generating}.num_beams", "", COUNT, only(1, "set it to 1; beam search is not supported", "no beam search")),
        NoEffect(f"{generating}.length_penalty", NUMBER, "for beam search only"),
        NoEffect(f"{generating}.max_length", COUNT, "overridden by response_length and max_new_tokens, as in ROLL"),
        NoEffect(f"{generating}.logprobs", nullable(COUNT), "log-probs of all tokens are always kept"),
    )  # fmt: skip


def _no_own_sampling(source: Source) -> str:
    own = samples_for_itself(source)
    return facts.no_validation(source) or ("" if own else "evaluation uses the sampling settings of training")


def _eval_new(_: Any, source: Source) -> Became:
    return Became({"eval.sampling.max_new_tokens": eval_max_new_tokens(source)})


def _same_template(value: str, source: Source) -> Any:
    trained = source.get("actor_train.data_args.template")
    same = value == trained or {value, trained} <= set(OWN_TEMPLATES)
    return implied("same as in training") if same else unsupported(f"use the template of training, {trained}")


DATA: tuple[Rule, ...] = (
    Apply("actor_train.data_args.template", "data.use_chat_template",
          choice(*OWN_TEMPLATES, "chatml", "empty", *_OTHER_TEMPLATES), _template, default="native",
          note="native, qwen2_5 and qwen3 are the tokenizer's own (apply_chat_template); without one, plain text is unchanged"),
    *_data("actor_train", "data.train[0]"),
    *_generating("actor_infer", "rollout.sampling"),
    Apply("actor_infer.generating_args.max_new_tokens", "rollout.sampling.max_new_tokens", COUNT, max_new_tokens,
          note="at most sequence_length - prompt_length; ROLL overwrites it with that"),
    NoEffect("actor_infer.generating_args.num_return_sequences", COUNT,
          "overridden by num_return_sequences_in_group, as in ROLL"),
    # Evaluation
    Apply("validation.data_args.template", "", TEXT, when(facts.no_validation, then=_same_template)),
    *_data("validation", "data.eval[0]", facts.no_validation),
    *_generating("validation", "eval.sampling", _no_own_sampling),
    Apply("validation.generating_args.max_new_tokens", "eval.sampling.max_new_tokens", COUNT,
          when(facts.no_validation, then=_eval_new)),
    Apply("validation.generating_args.num_return_sequences", "eval.samples_per_prompt", COUNT,
          when(facts.no_validation), default=1),
    NoEffect("validation.worker_cls", TEXT, "evaluation uses the same reward parts as training"),
    NoEffect("validation.strategy_args.*", ANY, "evaluation uses the engine of training"),
    NoEffect("validation.device_mapping", ANY, "evaluation uses the engine of training"),
    NoEffect("validation.world_size", COUNT, "evaluation uses the engine of training"),
    NoEffect("validation.num_gpus_per_worker", COUNT, "evaluation uses the engine of training"),
    NoEffect("validation.infer_batch_size", COUNT, "the engine schedules requests itself"),
    NoEffect("validation.model_args.*", ANY, "evaluation uses the policy's model"),
    NoEffect("validation.eval_steps", COUNT, "not read by ROLL; use eval_steps"),
)  # fmt: skip


# Rewards

JUDGE_PROMPT = (
    "Task:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n{response}\n\n"
    "Does the answer agree with the reference? Reply with YES or NO."
)
PARTS: dict[str, dict[str, Any]] = {
    "MathRuleRewardWorker": {"kind": "math"},
    "MultipleChoiceBoxedRuleRewardWorker": {"kind": "choice"},
    "CrossThinkQARuleRewardWorker": {"kind": "choice"},
    "CodeSandboxRewardWorker": {"kind": "code", "tests_key": "test_cases"},
    "LLMJudgeRewardWorker": {"kind": "judge", "prompt": JUDGE_PROMPT, "scores": {"yes": 1.0, "no": 0.0}},
}
"""Reward worker -> its first reward part."""
CHOICE_SCORES = {
    "loose": [1.0, 1.0, -1.0, -1.0],
    "soft": [1.0, 0.5, -0.5, -1.0],
    "strict": [1.0, -1.0, -1.0, -1.0],
}
"""reward_type of crossthinkqa -> scores of the choice part."""
REPETITION = {"kind": "repetition", "ngram": 3, "weight": 0.5}
"""Second part of crossthinkqa."""
_BY_NAME = {
    "math_rule": "MathRuleRewardWorker",
    "multiple_choice_boxed": "MultipleChoiceBoxedRuleRewardWorker",
    "crossthinkqa": "CrossThinkQARuleRewardWorker",
    "code_sandbox": "CodeSandboxRewardWorker",
    "llm_judge": "LLMJudgeRewardWorker",
}
"""Domain -> its default reward worker."""
ANSWER = "ground_truth"
"""Column of the reference answer in ROLL's rows."""
_UNSCORED = "the domain's worker is unsupported, so its rows are dropped"


def worker_of(source: Source, domain: str) -> str:
    """Class name of a domain's reward worker."""
    given = source.get(f"rewards.{domain}.worker_cls")
    return given.rpartition(".")[2] if given else _BY_NAME.get(domain, "")


def is_choice(source: Source, domain: str) -> bool:
    """Whether a domain's worker has a reward_type."""
    return worker_of(source, domain) == "CrossThinkQARuleRewardWorker"


def scored(source: Source) -> list[str]:
    """Domains with native reward parts, in the file's order; the workers of the others are unsupported."""

    def has_part(domain: str) -> bool:
        is_server = (source.get(f"rewards.{domain}.judge_model_type") or "api") == "api"
        worker = worker_of(source, domain)
        return worker in PARTS and (is_server or worker != "LLMJudgeRewardWorker")

    return [domain for domain in facts.domains(source) if has_part(domain)]


def _parts(source: Source, domain: str) -> list[dict[str, Any]]:
    first = {"name": domain} | PARTS[worker_of(source, domain)]
    if not is_choice(source, domain):
        return [first]
    kind = source.get(f"rewards.{domain}.reward_type")
    return [
        first | ({"scores": CHOICE_SCORES[kind]} if kind in CHOICE_SCORES else {}),
        {"name": f"{domain}_repetition"} | REPETITION,
    ]


def part(source: Source, domain: str) -> dict[str, Any]:
    """Native path -> value of a domain's reward parts; empty for an unsupported domain."""
    if domain not in scored(source):
        return {}
    paths = _paths(source, domain)
    return {
        f"{path}.{name}": value
        for path, of in zip(paths, _parts(source, domain), strict=True)
        for name, value in of.items()
    }


def _paths(source: Source, domain: str) -> list[str]:
    """Native paths of a scored domain's parts."""
    names = scored(source)
    before = sum(len(_parts(source, name)) for name in names[: names.index(domain)])
    return [f"reward.parts[{before + i}]" for i in range(len(_parts(source, domain)))]


def _domain(source: Source) -> str:
    return source.at.split(".")[1]


def _worker_class(value: str, source: Source) -> Any:
    if value.rpartition(".")[2] not in PARTS:
        return unsupported(f"use a function (braid.reward.parts, kind function){_left_out(source)}")
    native = part(source, _domain(source))
    return (
        Became(native)
        if native
        else no_effect("judge_model_type is unsupported, so the domain has no reward")
    )


def _left_out(source: Source) -> str:
    return "; if ignored, rows of this domain are dropped" if len(facts.domains(source)) > 1 else ""


def sources_of(source: Source, domain: str) -> list[str]:
    """Native names of a domain's rows. Rows with a tag of no domain belong to math_rule, as in ROLL."""
    tags = source.get(f"rewards.{domain}.tag_included") or [domain]
    return [*tags, REST] if domain == "math_rule" else list(tags)


def _tags(_: list[str], source: Source) -> Any:
    if len(facts.domains(source)) == 1:
        return no_effect("a single domain scores all rows")
    if (domain := _domain(source)) not in scored(source):
        return no_effect(_UNSCORED)
    names = sources_of(source, domain)
    return Became({f"{path}.sources": names for path in _paths(source, domain)})


def _judge(name: str) -> Convert:
    """Conversion of a key of the judge's server."""

    def convert(value: str, source: Source) -> Any:
        domain = _domain(source)
        if worker_of(source, domain) != "LLMJudgeRewardWorker" or domain not in scored(source):
            return no_effect("for judges on a server only (judge_model_type: api)")
        return Became({f"{_paths(source, domain)[0]}.{name}": value})

    return convert


def _reward_type(value: str, source: Source) -> Any:
    domain = _domain(source)
    if is_choice(source, domain):
        if value not in CHOICE_SCORES:
            raise ValueError(f"{value!r} is not one of {', '.join(CHOICE_SCORES)}")
        return Became({f"{_paths(source, domain)[0]}.scores": CHOICE_SCORES[value]})
    if domain not in scored(source):
        return no_effect(_UNSCORED)
    return unsupported("use a function: braid.reward.parts (kind function)")


def _query_filter(_: Any, source: Source) -> Any:
    filters = [facts.query_filter(source, domain) for domain in facts.domains(source)]
    if any(other != filters[0] for other in filters):
        raise ValueError("the domains have different filters, but braid has a single filter; make them equal")
    if not facts.filters_groups(source):
        return implied("all groups are used")
    bounds = {f"rollout.filter.{name}": value for name, value in filters[0].items()}
    return Became({"rollout.filter.then": "resample"} | bounds)


_LOCAL_JUDGE = (
    "start a server for the judge, and set judge_model_type: api, judge_api_url and judge_model_name"
)

REWARDS: tuple[Rule, ...] = (
    Apply("rewards.*.worker_cls", "", TEXT, _worker_class, note="reward part of this domain's rows"),
    Apply("rewards.*.tag_included", "", list_of(TEXT), _tags,
          note="tags (see data_args.tag) of the rows that the part scores"),
    Apply("rewards.*.reward_type", "", TEXT, _reward_type,
          note="of crossthinkqa: scores of a right letter in a box and elsewhere, and of a wrong one in a box and elsewhere; loose "
          "1, 1, -1, -1, soft 1, 0.5, -0.5, -1, strict 1, -1, -1, -1. ROLL takes the first capital letter of the last box, of what "
          "follows 'answer is', or of the whole text; in evaluation it shows the share of scores above 0"),
    Apply("rewards.*.query_filter_config.type", "rollout.filter.then",
          choice("no_filter", "mean_filter", "std_filter"), _query_filter,
          note="groups are dropped when mean <= threshold_down, mean >= threshold_up, or unbiased deviation <= std_threshold; then "
          "more prompts are sampled until the round is full"),
    Apply("rewards.*.query_filter_config.filter_args", "rollout.filter.min_mean",
          mapping_of(NUMBER, {"threshold_down": 0.1, "threshold_up": 0.9}, {"threshold_down": 0.2}, {"std_threshold": 0.0}), _query_filter),
    Apply("rewards.*.response_filter_config.type", "", choice("no_filter"),
          only("no_filter", "", "all answers are used")),
    Apply("rewards.*.response_length_penalty_coef", "", NON_NEGATIVE,
          only(0, "use reward.overlong: braid.reward.overlong.buffer_tokens")),
    Apply("rewards.*.judge_api_url", "", TEXT, _judge("url"), note="base URL of an OpenAI-compatible server"),
    Apply("rewards.*.judge_model_name", "", TEXT, _judge("model")),
    Apply("rewards.*.judge_model_type", "", choice("api", "inference", "cluster"),
          lambda v, s: implied("a server's") if v == "api" else unsupported(_LOCAL_JUDGE + _left_out(s))),
    NoEffect("rewards.*.judge_prompt", TEXT,
          "it names a text of ROLL's; the judge is asked whether the answer agrees with the reference"),
    Unsupported("rewards.*.judge_api_key",
          "it would be kept in the run's folder; remove it, and name its environment variable natively "
                "(reward.parts, api_key_env)"),
    *(Unsupported(f"rewards.*.{name}",
    "write a function: braid.reward.parts (kind function)") for name in ("reward_manager_config", "format_pattern", "code_url")),
    NoEffect("rewards.*.use_local", BOOL, "rewards run in processes of their own on this machine"),
    NoEffect("rewards.*.name", TEXT, "the domain names the part"),
    NoEffect("rewards.*.world_size", COUNT, "see reward.concurrency"),
    NoEffect("rewards.*.max_concurrency", COUNT, "see reward.concurrency"),
    NoEffect("rewards.*.infer_batch_size", COUNT, "a rule has no batches"),
    NoEffect("rewards.*.num_gpus_per_worker", COUNT, "a rule has no device"),
    NoEffect("rewards.*.device_mapping", ANY, "a rule has no device"),
    *(NoEffect(f"rewards.*.{name}", ANY, "a rule has no model")
      for name in ("model_args", "data_args", "generating_args", "strategy_args", "system_envs")),
    Unsupported("reward_model.*", _LOCAL_JUDGE),
)  # fmt: skip
