"""verl's `data`, and the rewards of its rows."""

from __future__ import annotations

import os
from typing import Any

from . import verl_facts as facts
from .conditions import needs, unless
from .conversions import (
    part_of,
    unless_null,
)
from .rows import always, ignored, missing, rows, section, to
from .table import Became, Source, no_effect, unsupported
from .verl_facts import NO_EVALUATION, A


def _sources(value: str | list[str], source: Source) -> list[dict[str, Any]]:
    """One native source of all files, in verl's columns; none without files."""
    columns = {
        "prompt_key": source["data.prompt_key"],
        "answer_key": "reward_model.ground_truth",
        "source_key": source["data.reward_fn_key"],
    }
    if facts.reads_images(source):
        columns["images_key"] = source["data.image_key"] or "images"
    files = [os.path.expanduser(path) for path in facts.paths(value)]
    return [{"kind": "file", "path": files, **columns}] if files else []


_GSM8K = {"kind": "exact", "name": "gsm8k", "pattern": r"####\s*(-?[\d.,]*\d)", "ignore": ",$"}
_DAPO = {"kind": "math", "name": "dapo", "pattern": r"(?i)Answer\s*:\s*([^\n]+)"}
_MATH = {"kind": "math", "name": "math"}


def _reward(_: str, source: Source) -> Became:
    """The rule of the data, which verl chooses by each row's `data_source`."""
    if source["custom_reward_function.path"] or "reward.parts" in source.braid_values:
        return no_effect("the reward is a function of the user's own")
    if facts.is_dapo(source):
        native: dict[str, Any] = {"reward.parts": [_DAPO], "reward.scale": 2.0, "reward.shift": -1.0}
        return Became(
            native,
            note="math_dapo: 1 if the text after the last `Answer:` is right, else -1 (0 in evaluation)",
        )
    are_gsm8k = ["gsm8k" in path.lower() for path in facts.paths(source["data.train_files"])]
    if all(are_gsm8k):
        return Became(
            {"reward.parts": [_GSM8K]}, note="gsm8k: 1 if the number after the last #### is right, else 0"
        )
    if not any(are_gsm8k):
        return Became(
            {"reward.parts": [_MATH]},
            note="1 if the boxed answer is right, else 0; others: braid.reward.parts",
        )
    parts = [{**_GSM8K, "sources": ["openai/gsm8k"]}, {**_MATH, "sources": ["*"]}]
    return Became(
        {"reward.parts": parts},
        note="openai/gsm8k: the number after the last ####; the others: the boxed answer",
    )


_OWN_REWARD = (
    "verl calls it with data_source, solution_str, ground_truth and extra_info; give it the parameters text and "
    "answer, and set braid.reward.parts=[{kind: function, path: FILE.py:NAME}]"
)


def _overlong(value: float, source: Source) -> Any:
    """The penalty before the reward's scale, which is applied after it."""
    return value / 2 if facts.is_dapo(source) and "reward.parts" not in source.braid_values else value


# One rule per line.
# fmt: off
DATA = section("data")(
    to("train_files", "data.train", "text or [text]", _sources, default="~/data/rlhf/gsm8k/train.parquet",
       note="columns prompt, reward_model.ground_truth, data_source"),
    to("val_files", "data.eval", "text or [text]?", NO_EVALUATION, _sources, default="~/data/rlhf/gsm8k/test.parquet"),
    to("prompt_key", "", "text", part_of("data.train_files"), default="prompt"),
    to("reward_fn_key", "", "text", part_of("data.train_files"), default="data_source"),
    to("image_key", "model.vision.train", "text", unless(lambda s: not facts.reads_images(s), "there are no images"),
       lambda _, s: "none" if s[f"{A}.actor.freeze_vision_tower"] or s[f"{A}.model.lora_rank"] else "all",
       note="images are read by the key; the vision tower is trained too"),
    missing("video_key", "only images are read", default="videos"),
    to("tokenizer", "model.tokenizer", "text?", unless_null("the model's own")),
    to("train_batch_size", "rollout.prompts_per_round", "count", default=1024, note="in prompts"),
    ignored("gen_batch_size", "each further batch has train_batch_size prompts, until the round is full"),
    to("val_batch_size", "eval.batch_prompts", "count?", NO_EVALUATION, unless_null("all at once"), default=None),
    to("max_prompt_length", "data.max_prompt_tokens", "count", default=512),
    to("max_response_length", "rollout.sampling.max_new_tokens", "count", default=512),
    to("truncation", "data.overlong", "error|left|right|middle",
       unless(lambda s: s[".filter_overlong_prompts"], "overridden by filter_overlong_prompts"),
       lambda v, _: unsupported("use left, right or error, or filter_overlong_prompts") if v == "middle" else
       {"error": "error"}.get(v, f"truncate_{v}"), default="error"),
    to("filter_overlong_prompts", "data.overlong", "bool", lambda v, _: "drop" if v else no_effect("truncation decides"),
       default=False),
    to("shuffle", "data.shuffle", "bool", default=True),
    to("seed", "data.seed", "natural?", unless_null()),
    to("validation_shuffle", "eval.shuffle", "bool", NO_EVALUATION, default=False),
    to("trust_remote_code", "model.trust_remote_code", "bool", default=False),
    to("apply_chat_template_kwargs", "data.chat_template_kwargs", "{any}?", lambda v, _: v or no_effect("no arguments")),
    always("return_raw_chat return_raw_input_ids return_full_prompt return_multi_modal_inputs",
           "rows keep their columns and messages", "bool"),
    ignored("filter_overlong_prompts_workers dataloader_num_workers use_shm tokenizer_kwargs cache_dir "
            "image_patch_size need_tools_kwargs", "data is read as it is needed"),
    to("train_max_samples", "data.train[0].limit", "int", lambda v, _: v if v > 0 else no_effect("-1: all rows")),
    to("val_max_samples", "data.eval[0].limit", "int", NO_EVALUATION, lambda v, _: v if v > 0 else no_effect("-1: all rows")),
    missing("custom_cls.{path,name} datagen.{path,name} sampler.{class_path,class_name} tool_config_path "
            "return_multi_modal_audio", "write the rows in the columns prompt, data_source and reward_model"))

REWARD = rows(
    to("reward_model.reward_manager", "reward.parts", "text", _reward, default="naive",
       note="verl scores each row by the rule of its data_source"),
    missing("custom_reward_function.path", _OWN_REWARD,
            unless(lambda s: "reward.parts" in s.braid_values, "overridden by braid.reward.parts")),
    ignored("custom_reward_function.{name,reward_kwargs} custom_reward_function.reward_kwargs.*", "of custom_reward_function.path"),
    section("reward_model.reward_kwargs.overlong_buffer_cfg", "reward.overlong")(
        ignored("enable", "decides whether the penalty applies", "bool"),
        to("len", ".buffer_tokens", "count", needs(".enable")),
        to("penalty_factor", ".penalty", "positive", needs(".enable"), _overlong, note="where answers score 1 or -1, before the scale of 2"),
        ignored("log", "reward/overlong is always reported")),
    ignored("reward_model.reward_kwargs.{max_resp_len,max_response_length}", "data.max_response_length counts"),
    missing("reward_model.enable", "use braid.reward.parts=[{kind: model, path: ...}]", default=False),
    missing("reward_model.{sandbox_fusion.url,reward_loop_source,reward_loop_module_path,reward_loop_class_name,reward_manager_path}",
            "use braid.reward.parts"),
    ignored("reward_model.* reward_model.{model,rollout,megatron,profiler,sandbox_fusion,data_processor_config}.* reward_model.{model.fsdp_config,model.override_config,profiler.tool_config}.* "
            "reward_model.model.fsdp_config.wrap_policy.* reward.{num_workers,reward_model,sandbox_fusion}.*", "reward models are reward parts (braid.reward.parts)"))

# fmt: on
