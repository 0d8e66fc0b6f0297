"""ROLL's keys of data, templates, sampling and rewards: data_args, generating_args, validation, rewards."""

from __future__ import annotations

from typing import Any

from braid.config.data import REST

from . import roll_facts as facts
from .conditions import unless
from .conversions import computed, unless_null
from .roll_facts import CHOICE, JUDGE, role_of
from .roll_pipeline import NO_VALIDATION
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, implied, no_effect, unsupported
from .values import choice

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
OWN_TEMPLATES = ("native", "qwen2_5", "qwen3")
"""ROLL's names for the tokenizer's own template."""
_TEMPLATES = (
    "native|qwen2_5|qwen3|chatml|empty|native_nonthinking|base|longCOT_qwen2.5|longcot_V3|qwen3_coder|"
    "qwen3_nothink|qwen2-vl"
)
JUDGE_PROMPT = (
    "Task:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n{response}\n\n"
    "Does the answer agree with the reference? Reply with YES or NO."
)
PARTS: dict[str, dict[str, Any]] = {
    "MathRuleRewardWorker": {"kind": "math"},
    "MultipleChoiceBoxedRuleRewardWorker": {"kind": "choice"},
    CHOICE: {"kind": "choice"},
    "CodeSandboxRewardWorker": {"kind": "code", "tests_key": "test_cases"},
    JUDGE: {"kind": "judge", "prompt": JUDGE_PROMPT, "scores": {"yes": 1.0, "no": 0.0}},
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
    "crossthinkqa": CHOICE,
    "code_sandbox": "CodeSandboxRewardWorker",
    "llm_judge": JUDGE,
}
"""Domain -> its default reward worker."""


def _template(value: str, _: Source) -> Became:
    if value in OWN_TEMPLATES:
        return Became({"data.use_chat_template": "auto"})
    if value in ("chatml", "empty"):
        return Became({"data.use_chat_template": "always", "model.chat_template": CHATML})
    return unsupported("set the template as Jinja: braid.model.chat_template=file.jinja")


def _same_template(value: str, source: Source) -> Became:
    trained = source["actor_train.data_args.template"]
    if value == trained or {value, trained} <= set(OWN_TEMPLATES):
        return implied("same as in training")
    return unsupported(f"use the template of training, {trained}")


def _interleave(value: dict[str, float] | None, source: Source) -> Became:
    if role_of(source) == "validation":
        return no_effect("evaluation uses all prompts")
    if len(shares := value or {}) <= 1:
        return implied("one domain")
    trained, rest = scored(source), [name for name in facts.domains(source) if name not in shares]
    mix = [
        {"sources": sources_of(source, name), "share": float(share) if name in trained else 0.0}
        for name, share in shares.items()
    ]
    if rest:
        mix.append({"sources": [tag for name in rest for tag in sources_of(source, name)], "share": 0.0})
    if not any(REST in of["sources"] for of in mix):
        mix.append({"sources": [REST], "share": 0.0})
    return Became({"data.mix": mix})


def _sampled(_: Any, source: Source) -> Became:
    made, (native,) = facts.sampling(source, role_of(source)), source.native
    into, name = native.rpartition(".")[::2]
    names = ("temperature", "greedy") if name == "temperature" else (name,)
    return Became({f"{into}.{of}": made[of] for of in names if of in made})


def worker_of(source: Source, domain: str) -> str:
    """Class name of a domain's reward worker."""
    given = source[f"rewards.{domain}.worker_cls"]
    return given.rpartition(".")[2] if given else _BY_NAME.get(domain, "")


def scored(source: Source) -> list[str]:
    """Domains with native reward parts, in the file's order; the workers of the others are unsupported."""

    def has_part(domain: str) -> bool:
        is_server = (source[f"rewards.{domain}.judge_model_type"] or "api") == "api"
        worker = worker_of(source, domain)
        return worker in PARTS and (is_server or worker != JUDGE)

    return [domain for domain in facts.domains(source) if has_part(domain)]


def parts_of(source: Source) -> dict[str, dict[str, dict[str, Any]]]:
    """Domain -> native path -> reward part, of the domains that are scored."""
    out, num = {}, 0
    for domain in scored(source):
        parts = [{"name": domain} | PARTS[worker_of(source, domain)]]
        if worker_of(source, domain) == CHOICE:
            if (kind := source[f"rewards.{domain}.reward_type"]) in CHOICE_SCORES:
                parts[0]["scores"] = CHOICE_SCORES[kind]
            parts.append({"name": f"{domain}_repetition"} | REPETITION)
        out[domain] = {f"reward.parts[{num + i}]": part for i, part in enumerate(parts)}
        num += len(parts)
    return out


def part(source: Source, domain: str) -> dict[str, Any]:
    """Native path -> value of a domain's reward parts; empty for an unsupported domain."""
    parts = parts_of(source).get(domain, {})
    return {f"{path}.{name}": value for path, of in parts.items() for name, value in of.items()}


def sources_of(source: Source, domain: str) -> list[str]:
    """Native names of a domain's rows. Rows with a tag of no domain belong to math_rule, as in ROLL."""
    tags = source[f"rewards.{domain}.tag_included"] or [domain]
    return [*tags, REST] if domain == "math_rule" else list(tags)


def _domain(source: Source) -> str:
    return source.at.split(".")[1]


def _worker_class(value: str, source: Source) -> Became:
    if value.rpartition(".")[2] not in PARTS:
        return unsupported("use a function (braid.reward.parts, kind function); if ignored, rows are dropped")
    native = part(source, _domain(source))
    why = "judge_model_type is unsupported, so the domain has no reward"
    return Became(native) if native else no_effect(why)


def _tags(_: list[str], source: Source) -> Became:
    names = sources_of(source, _domain(source))
    return Became({f"{path}.sources": names for path in parts_of(source)[_domain(source)]})


def _of_judge(value: str, source: Source) -> Became:
    domain, name = _domain(source), {"judge_api_url": "url", "judge_model_name": "model"}
    if worker_of(source, domain) != JUDGE or domain not in scored(source):
        return no_effect("for judges on a server only (judge_model_type: api)")
    (path,) = parts_of(source)[domain]
    return Became({f"{path}.{name[source.at.rpartition('.')[2]]}": value})


def _reward_type(value: str, source: Source) -> Became:
    domain = _domain(source)
    if worker_of(source, domain) != CHOICE:
        return unsupported("use a function: braid.reward.parts (kind function)")
    if value not in CHOICE_SCORES:
        raise ValueError(f"{value!r} is not one of {', '.join(CHOICE_SCORES)}")
    return Became({f"{next(iter(parts_of(source)[domain]))}.scores": CHOICE_SCORES[value]})


def _query_filter(_: Any, source: Source) -> Became:
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
_EVALUATES = unless(
    lambda s: role_of(s) == "validation" and not facts.validates(s),
    "there is no validation.data_args.file_name",
)
_SAMPLES = unless(
    lambda s: role_of(s) == "validation" and not facts.samples_for_itself(s),
    "evaluation uses the sampling settings of training",
)
_IS_SCORED = unless(
    lambda s: _domain(s) not in scored(s), "the domain's worker is unsupported, so its rows are dropped"
)
_COLUMN = (
    unless_null("the other one of prompt and messages is used", implied),
    computed(lambda s: facts.column_of(s, role_of(s))),
)
_FILES = "text or [text]"
_BOUNDS = "{number}"

# One rule per line.
# fmt: off
DATA = rows(
    to("actor_train.data_args.template", "data.use_chat_template", _TEMPLATES, _template, default="native",
       note="native, qwen2_5, qwen3: the tokenizer's own; without one, plain text is unchanged"),
    section("{actor_train,validation}.data_args", "{data}", _EVALUATES)(
        to("file_name", ".path", _FILES, note="JSON, JSONL, CSV or Parquet; several files are concatenated"),
        to("prompt", ".prompt_key", "text?", *_COLUMN,
           note="plain text, to which the chat template is applied, unlike in ROLL's code"),
        to("messages", ".prompt_key", "text?", *_COLUMN, note="column of chat messages"),
        to("tag", ".source_key", "text?",
           unless(lambda s: len(facts.domains(s)) <= 1, "there is only one reward domain")),
        to("domain_interleave_probs", "", "{non-negative}?", _interleave,
           note="share of each domain's tags in any sequence of prompts; other rows are dropped"),
        always("dataset_type", "determined by the file extension", _FILES),
        ignored("id response preprocessing_num_workers", "rows are identified by source and number"),
        ignored("{dataset_dir,interleave_probs,eval_file_name}", "not read by ROLL"),
        missing("image_max_pixels image_min_pixels video_max_pixels video_min_pixels video_total_pixels "
                "video_fps video_max_frames video_resize_chunk_frames image_folder video_folder audio_folder "
                "custom_data_kwargs_func", "remove it; only text prompts are supported")),
    section("{actor_infer,validation}.generating_args", "{sampling}", _EVALUATES, _SAMPLES)(
        to("temperature", ".temperature", "non-negative", _sampled, default=0.95,
           note="also in training, unlike in ROLL, whose ratios compare two distributions. 0: greedy"),
        to("top_p", ".top_p", "fraction", _sampled, default=0.7,
           note="0.7 if absent, which differs from the trained distribution; 1 disables it"),
        to("top_k", ".top_k", "integer >= -1", _sampled, default=50,
           note="50 if absent, which differs from the trained distribution; 0 or -1 disables it"),
        to("do_sample", ".greedy", "bool", _sampled, default=True),
        to("repetition_penalty", ".*", "positive", _sampled, default=1.0),
        to("stop_strings", ".*", "[text]?", _sampled, default=None),
        always("include_stop_str_in_output", "the stop string is always kept", "bool?")),
    section("{actor_infer,validation}.generating_args")(
        missing("num_beams", "set it to 1; beam search is not supported", default=1),
        ignored("length_penalty", "for beam search only"),
        ignored("max_length", "overridden by response_length and max_new_tokens, as in ROLL"),
        ignored("logprobs", "log-probs of all tokens are always kept")),
    to("actor_infer.generating_args.max_new_tokens", "rollout.sampling.max_new_tokens", "count",
       computed(facts.max_new_tokens)),
    ignored("actor_infer.generating_args.num_return_sequences",
            "overridden by num_return_sequences_in_group, as in ROLL"),
    section("validation")(
        to("data_args.template", "", "text", NO_VALIDATION, _same_template),
        to("generating_args.max_new_tokens", "eval.sampling.max_new_tokens", "count", NO_VALIDATION,
           computed(facts.eval_max_new_tokens)),
        to("generating_args.num_return_sequences", "eval.samples_per_prompt", "count", NO_VALIDATION,
           default=1),
        ignored("worker_cls strategy_args.* model_args.* device_mapping world_size num_gpus_per_worker "
                "infer_batch_size", "evaluation uses the model, the engine and the rewards of training"),
        ignored("eval_steps", "not read by ROLL; use eval_steps")),
)

REWARDS = rows(
    section("rewards.*")(
        to("worker_cls", "", "text", _worker_class, note="reward part of this domain's rows"),
        to("tag_included", "", "[text]",
           unless(lambda s: len(facts.domains(s)) == 1, "a single domain scores all rows"), _IS_SCORED,
           _tags),
        to("reward_type", "", "text", _IS_SCORED, _reward_type,
           note="scores of a right letter in a box and elsewhere, and of a wrong one in a box and elsewhere"),
        to("query_filter_config.type", "rollout.filter.then", "no_filter|mean_filter|std_filter",
           _query_filter,
           note="drops groups with mean <= threshold_down, mean >= threshold_up or deviation <= "
           "std_threshold"),
        to("query_filter_config.filter_args", "rollout.filter.min_mean", _BOUNDS, _query_filter),
        always("response_filter_config.type", "all answers are used", choice("no_filter")),
        missing("response_length_penalty_coef", "use braid.reward.overlong.buffer_tokens", default=0),
        to("judge_api_url", "", "text", _of_judge, note="base URL of an OpenAI-compatible server"),
        to("judge_model_name", "", "text", _of_judge),
        missing("judge_model_type", f"{_LOCAL_JUDGE}; if ignored, its rows are dropped", default="api"),
        ignored("judge_prompt", "the judge is asked whether the answer agrees with the reference"),
        missing("judge_api_key", "remove it; name its environment variable in reward.parts (api_key_env)"),
        missing("reward_manager_config format_pattern code_url", "write a function (braid.reward.parts)"),
        ignored("name", "the domain names the part"),
        ignored("use_local world_size max_concurrency", "see reward.concurrency"),
        ignored("infer_batch_size num_gpus_per_worker device_mapping model_args data_args generating_args "
                "strategy_args system_envs", "a rule has no model and no device")),
    missing("reward_model.*", _LOCAL_JUDGE),
)
# fmt: on
