"""ROLL's keys of data, templates, sampling and rewards: data_args, generating_args, validation, rewards."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from braid.config.data import REST

from . import roll_facts as facts
from .conditions import refused, unless
from .conversions import at_least_0, computed, greedy_at_0, null_as, unless_null
from .devices import DEVICES
from .roll_facts import HAS_IMAGES, NO_VALIDATION, role_of
from .roll_judges import check_mapping, judge_devices, judge_part, loads_judge
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Convert, Source, implied, unsupported
from .values import choice

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_OWN_TEMPLATES = ("native", "qwen2_5", "qwen3")
"""ROLL's names for the tokenizer's own template."""
_TEMPLATES = {
    **dict.fromkeys(_OWN_TEMPLATES, "auto"),
    **dict.fromkeys(
        ("chatml", "empty"), Became({"data.use_chat_template": "always", "model.chat_template": CHATML})
    ),
    **dict.fromkeys(
        ("native_nonthinking", "base", "longCOT_qwen2.5", "longcot_V3", "qwen3_coder", "qwen3_nothink",
         "qwen2-vl"),
        unsupported("set the template as Jinja: braid.model.chat_template=file.jinja"),
    ),
}  # fmt: skip
_CHOICE, _JUDGE = "CrossThinkQARuleRewardWorker", "LLMJudgeRewardWorker"
_IFEVAL, _DETECTION = "GeneralRuleRewardWorker", "DetectionRewardWorker"
_JUDGE_PROMPT = (
    "Task:\n{prompt}\n\nReference answer:\n{answer}\n\nAnswer to judge:\n{response}\n\n"
    "Does the answer agree with the reference? Reply with YES or NO."
)
_PARTS: dict[str, dict[str, Any]] = {
    "MathRuleRewardWorker": {"kind": "math"},
    "MultipleChoiceBoxedRuleRewardWorker": {"kind": "choice"},
    _CHOICE: {"kind": "choice"},
    _IFEVAL: {"kind": "ifeval"},
    _DETECTION: {"kind": "detection", "settings_key": "reward_model"},
    "CodeSandboxRewardWorker": {"kind": "code", "tests_key": "test_cases"},
    _JUDGE: {"kind": "judge", "prompt": _JUDGE_PROMPT, "scores": {"yes": 1.0, "no": 0.0}},
}
"""Reward worker -> its first reward part."""
_WORKERS = {
    "math_rule": "MathRuleRewardWorker", "multiple_choice_boxed": "MultipleChoiceBoxedRuleRewardWorker",
    "crossthinkqa": _CHOICE, "code_sandbox": "CodeSandboxRewardWorker", "llm_judge": _JUDGE,
    "ifeval": _IFEVAL,
}  # fmt: skip
"""Domain -> its default reward worker."""
_CHOICE_SCORES = {
    "loose": [1.0, 1.0, -1.0, -1.0],
    "soft": [1.0, 0.5, -0.5, -1.0],
    "strict": [1.0, -1.0, -1.0, -1.0],
}
"""reward_type of crossthinkqa -> scores of the choice part."""


def _folders(value: str | list[str], _: Source) -> Any:
    """Paths of files; of a folder all its files."""
    paths = [
        f"{path}*.*" if path.endswith("/") else path
        for path in ([value] if isinstance(value, str) else value)
    ]
    return paths[0] if isinstance(value, str) else paths


def _same_limit(value: int, source: Source) -> Any:
    """Bounds of images, which evaluation shares with training."""
    if role_of(source) == "actor_train":
        return value
    trained = source[f"actor_train.data_args.{source.name}"]
    if trained is None:
        trained = facts.image_limits(source)[source.native[0]]
    if value == trained:
        return implied("same as in training")
    return unsupported(f"set it to that of training, {trained}")


def _same_template(value: str, source: Source) -> Became:
    if facts.reads_images(source):
        return implied("the model's own template")
    trained = source["actor_train.data_args.template"]
    if value == trained or {value, trained} <= set(_OWN_TEMPLATES):
        return implied("same as in training")
    return unsupported(f"use the template of training, {trained}")


def _of_training(note: str) -> Convert:
    """A note that is true of sampling in training only."""
    return lambda value, source: (
        value
        if role_of(source) == "validation"
        else Became(dict.fromkeys(source.native, value), note=f"{note}; 0: greedy")
    )


def _interleave(value: dict[str, float] | None, source: Source) -> Became:
    if len(probabilities := value or {}) <= 1:
        return implied("one domain")
    trained, names = _scored(source), dict.fromkeys((*probabilities, *facts.domains(source)))
    shares = {name: float(probabilities.get(name, 0.0)) if name in trained else 0.0 for name in names}
    mix = [{"sources": _sources(source, name), "share": share} for name, share in shares.items()]
    if "math_rule" not in shares:
        mix.append({"sources": [REST], "share": 0.0})
    return Became({"data.mix": mix})


def _worker(source: Source, domain: str) -> str:
    """Class name of a domain's reward worker."""
    path = source[f"rewards.{domain}.worker_cls"]
    return path.rpartition(".")[2] if path else _WORKERS.get(domain, "")


def _scored(source: Source) -> list[str]:
    """Domains with native reward parts, in the file's order; the workers of the others are unsupported."""
    return [
        domain
        for domain in facts.domains(source)
        if (worker := _worker(source, domain)) in _PARTS
        and (worker != _JUDGE or source[f"rewards.{domain}.judge_model_type"] in (None, "api", "inference"))
    ]


def _sources(source: Source, domain: str) -> list[str]:
    """Native names of a domain's rows. Rows with a tag of no domain belong to math_rule, as in ROLL."""
    tags = source[f"rewards.{domain}.tag_included"] or [domain]
    return [*tags, REST] if domain == "math_rule" else list(tags)


def reward_parts(source: Source) -> list[dict[str, Any]]:
    """The parts of the domains that are scored. A single domain scores all rows."""
    out = []
    for domain in _scored(source):
        worker, at = _worker(source, domain), f"rewards.{domain}"
        tags = {"sources": _sources(source, domain)} if len(facts.domains(source)) > 1 else {}
        part = {"name": domain, **_PARTS[worker], **tags}
        out.append(part)
        if worker == _JUDGE and loads_judge(source, domain):
            part |= judge_part(source, domain)
        elif worker == _JUDGE:
            part |= {"url": source[f"{at}.judge_api_url"], "model": source[f"{at}.judge_model_name"]}
        elif worker == _CHOICE:
            part["scores"] = _CHOICE_SCORES.get(source[f"{at}.reward_type"])
        elif worker == _DETECTION:
            part["iou_threshold"] = _iou_threshold(source, at)
            part["coordinates"] = "pixels" if facts.answers_in_pixels(source) else "reference"
        if worker in (_CHOICE, _IFEVAL):
            repeated = {"kind": "repetition", "name": f"{domain}_repetition", "ngram": 3, "weight": 0.5}
            out.append(repeated | tags)
    return out if facts.domains(source) else [{"kind": "math"}]


def _iou_threshold(source: Source, at: str) -> str | float:
    """The IoU threshold of detection, which ROLL reads from the environment; another text than average or a
    number as it is."""
    variables = (source["system_envs"] or {}) | (source[f"{at}.system_envs"] or {})
    value = variables.get("DET_IOU_THRESHOLD", "average")
    return float(value) if re.fullmatch(r"\d*\.?\d+", value) else value


def missing_keys(source: Source) -> Iterator[tuple[str, str]]:
    """Keys that a domain needs, and a threshold of detection that braid lacks."""
    for domain in facts.domains(source):
        worker, at = _worker(source, domain), f"rewards.{domain}"
        threshold = _iou_threshold(source, at) if worker == _DETECTION else "average"
        if isinstance(threshold, str) and threshold != "average":
            yield "system_envs", f"DET_IOU_THRESHOLD={threshold} is not supported; use average or a number"
        needed = {} if worker else {"worker_cls": "set it to the reward worker of the domain"}
        if len(facts.domains(source)) > 1:
            needed["tag_included"] = "with several domains, each must list the tags of its rows"
        if worker == _CHOICE:
            needed["reward_type"] = f"set it to one of {', '.join(_CHOICE_SCORES)}"
        if worker == _JUDGE and loads_judge(source, domain):
            if not (source[f"rewards.{domain}.model_args"] or {}).get("model_name_or_path"):
                why = "required for a judge with judge_model_type=inference: its model folder"
                yield f"rewards.{domain}.model_args.model_name_or_path", why
        elif worker == _JUDGE and domain in _scored(source):
            why = "required for a judge: a model on an OpenAI-compatible server"
            needed |= {"judge_api_url": why, "judge_model_name": why}
        for name, why in needed.items():
            if not source[f"{at}.{name}"]:
                yield f"{at}.{name}", why


def _query_filter(_: Any, source: Source) -> Became:
    first, *others = facts.query_filters(source)
    if any(other != first for other in others):
        raise ValueError("the domains have different filters, but braid has a single filter; make them equal")
    bounds = {f"rollout.filter.{name}": value for name, value in first.items()}
    return Became({"rollout.filter.then": "resample"} | bounds) if bounds else implied("all groups are used")


def _domain(source: Source) -> str:
    return source.at.split(".")[1]


_JUDGE_CLUSTER = "set judge_model_type: inference in the domain, with model_args, strategy_args and device_mapping of its own"
_PARTS_OF_ALL = computed(reward_parts)

# One rule per line.
# fmt: off
_EVALUATES = unless(lambda s: role_of(s) == "validation" and not facts.validates(s),
                    "there is no validation.data_args.file_name")
_SAMPLES = unless(lambda s: role_of(s) == "validation" and not (facts.validates(s) and (
                      s.has("validation.generating_args") or s["val_sequence_length"])),
                  "there is no evaluation, or it uses the sampling settings of training")
_SEVERAL = unless(lambda s: len(facts.domains(s)) <= 1, "there is one reward domain, which scores all rows")
_IS_SCORED = unless(lambda s: _domain(s) not in _scored(s),
                    "the domain's worker is unsupported, so its rows are dropped")
_IS_JUDGE = unless(lambda s: _worker(s, _domain(s)) != _JUDGE or _domain(s) not in _scored(s)
                   or loads_judge(s, _domain(s)), "for judges on a server only (judge_model_type: api)")
_LOADS_JUDGE = unless(lambda s: _worker(s, _domain(s)) != _JUDGE or not loads_judge(s, _domain(s)),
                      "a rule has no model and no device")
_HAS_COLUMN = refused(lambda _, s: facts.column_of(s, role_of(s)) is None and "set its column: "
                      "data_args.prompt for plain text, or data_args.messages for chat messages")
_ONE_COLUMN = refused(lambda v, s: v and s[".prompt"] and "conflicts with data_args.prompt; set one of them, "
                      "and the other to null")
_SET_BY_PIPELINE = unless(lambda s: facts.reads_images(s) and not facts.is_geometry(s),
                          "ROLL's pipeline with images reads prompt, images, reward_model.ground_truth and data_source")
_NO_MESSAGES = unless(facts.is_geometry, "ROLL's pipeline for geometry reads data_args.prompt")
_OTHER_COLUMN = unless_null("the other one of prompt and messages is used", implied)
DATA = rows(
    to("actor_train.data_args.template", "data.use_chat_template", _TEMPLATES,
       unless(facts.is_agentic, "episodes are written in the tokenizer's own chat template, as in ROLL"),
       unless(facts.reads_images, "with images the template is the model's own, as in ROLL"), default="native",
       note="native, qwen2_5, qwen3: the tokenizer's own; without one, plain text is unchanged"),
    section("{actor_train,validation}.data_args", "{data}", _EVALUATES)(
        to("file_name", ".path", "text or [text]", _HAS_COLUMN, _folders,
           note="JSON, JSONL, CSV or Parquet; several files are concatenated"),
        to("prompt", ".prompt_key", "text?", _SET_BY_PIPELINE, _OTHER_COLUMN,
           note="plain text, to which the chat template is applied, unlike in ROLL's code"),
        to("messages", ".prompt_key", "text?", _SET_BY_PIPELINE, _NO_MESSAGES, _ONE_COLUMN, _OTHER_COLUMN,
           note="column of chat messages"),
        to("tag", ".source_key", "text?", _SET_BY_PIPELINE, _SEVERAL),
        to("domain_interleave_probs", "", "{non-negative}?",
           unless(lambda s: role_of(s) == "validation", "evaluation uses all prompts"), _interleave,
           note="share of each domain's tags in any sequence of prompts; other rows are dropped"),
        always("dataset_type", "determined by the file extension", "text or [text]"),
        ignored("id preprocessing_num_workers", "rows are identified by source and number"),
        to("response", ".answer_key", "text?", unless_null(), unless(
            lambda s: not facts.is_geometry(s), "read by ROLL's pipeline for geometry only")),
        to("image_{max,min}_pixels", "data.image.{max,min}_pixels", "count", HAS_IMAGES, _same_limit,
           note="larger and smaller images are scaled"),
        ignored("{dataset_dir,interleave_probs,eval_file_name}", "not read by ROLL"),
        missing("video_max_pixels video_min_pixels video_total_pixels video_fps video_max_frames "
                "video_resize_chunk_frames video_folder",
                "videos are not read; remove it, or write frames as images"),
        missing("audio_folder", "audio is not read; remove it"),
        missing("image_folder", "write paths of images that start from braid.run.base_dir"),
        missing("custom_data_kwargs_func",
                "write rows with the columns prompt, images, data_source and reward_model.ground_truth; "
                "ROLL's own functions are for videos and audio, which are not read")),
    section("{actor_infer,validation}.generating_args", "{sampling}", _SAMPLES)(
        to("temperature", ".temperature", "non-negative", greedy_at_0, _of_training(
           "also in training, unlike in ROLL, whose ratios compare two distributions"), default=0.95, note="0: greedy"),
        to("top_p", ".top_p", "fraction", default=0.7,
           note="0.7 if absent, which differs from the trained distribution; 1 disables it"),
        to("top_k", ".top_k", "integer >= -1", at_least_0, default=50,
           note="50 if absent, which differs from the trained distribution; 0 or -1 disables it"),
        to("do_sample", ".greedy", "bool", lambda v, s: not v or s[".temperature"] == 0, default=True),
        to("repetition_penalty", ".*", "positive", default=1.0),
        to("stop_strings", ".*", "[text]?", null_as([]), default=None),
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
        to("generating_args.max_new_tokens", "eval.sampling.max_new_tokens", "count?", _SAMPLES,
           computed(facts.eval_max_new_tokens), default=None),
        to("generating_args.num_return_sequences", "eval.samples_per_prompt", "count", NO_VALIDATION,
           default=1),
        ignored("worker_cls strategy_args.* model_args.* device_mapping world_size num_gpus_per_worker "
                "infer_batch_size", "evaluation uses the model, the engine and the rewards of training"),
        ignored("eval_steps", "not read by ROLL; use eval_steps")),
)

REWARDS = rows(
    section("rewards.*", "reward")(
        to("worker_cls", ".parts", "text",
           lambda v, _: v if v.rpartition(".")[2] in _PARTS else unsupported(
               "use a function (braid.reward.parts, kind function); if ignored, rows are dropped"),
           _IS_SCORED, _PARTS_OF_ALL, note="reward part of this domain's rows"),
        to("tag_included", ".parts", "[text]", _SEVERAL, _IS_SCORED, _PARTS_OF_ALL),
        to("reward_type", ".parts", "text", _IS_SCORED,
           unless(lambda s: _worker(s, _domain(s)) == _IFEVAL, "not read by ROLL's worker"),
           lambda v, s: v if _worker(s, _domain(s)) == _CHOICE else unsupported(
               "use a function: braid.reward.parts (kind function)"),
           refused(lambda v, _: v not in _CHOICE_SCORES and
                   f"{v!r} is not one of {', '.join(_CHOICE_SCORES)}"), _PARTS_OF_ALL,
           note="scores of a right letter in a box and elsewhere, and of a wrong one in a box and elsewhere"),
        to("query_filter_config.type", "rollout.filter.then", "no_filter|mean_filter|std_filter",
           _query_filter,
           note="drops groups with mean <= threshold_down or >= threshold_up, or deviation <= std_threshold"),
        to("query_filter_config.filter_args", "rollout.filter.min_mean", "{number}", _query_filter),
        always("response_filter_config.type", "all answers are used", choice("no_filter")),
        missing("response_length_penalty_coef", "use braid.reward.overlong.buffer_tokens", default=0),
        to("judge_api_url judge_model_name", ".parts", "text", _IS_JUDGE, _PARTS_OF_ALL,
           note="of an OpenAI-compatible server"),
        to("judge_model_type", ".parts", "text",
           unless(lambda s: _worker(s, _domain(s)) != _JUDGE, "the domain has no judge"),
           lambda v, _: v if v in ("api", "inference") else unsupported(
               f"{_JUDGE_CLUSTER}; if ignored, its rows are dropped"), _PARTS_OF_ALL,
           note="inference: a model that the run loads, by model_args and strategy_args; api: on a server"),
        to("model_args data_args generating_args strategy_args", ".parts", "{any}?", _LOADS_JUDGE,
           check_mapping, _PARTS_OF_ALL, note="of a judge with judge_model_type=inference"),
        to("device_mapping", "cluster.placement.reward", DEVICES, _LOADS_JUDGE, judge_devices,
           note="of a judge with judge_model_type=inference; on rollout's devices it is beside its engines"),
        to("num_gpus_per_worker", ".parts", "count", _LOADS_JUDGE, _PARTS_OF_ALL, default=1,
           note="devices of the judge's engine, unless tensor_parallel_size is set"),
        ignored("judge_prompt", "the judge is asked whether the answer agrees with the reference"),
        missing("judge_api_key", "remove it; name its environment variable in reward.parts (api_key_env)"),
        missing("reward_manager_config format_pattern code_url", "write a function (braid.reward.parts)"),
        ignored("name", "the domain names the part"),
        ignored("use_local world_size max_concurrency", "see reward.concurrency"),
        to("system_envs", ".parts", "{text}",
           unless(lambda s: _worker(s, _domain(s)) != _DETECTION, "a rule reads none"), _IS_SCORED, _PARTS_OF_ALL,
           note="DET_IOU_THRESHOLD only"),
        ignored("infer_batch_size", "requests of a judge are sampled together; a rule has no model")),
    missing("reward_model.*", _JUDGE_CLUSTER),
)
# fmt: on
