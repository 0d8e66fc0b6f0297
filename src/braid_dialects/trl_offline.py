"""Arguments of TRL's SFTTrainer, DPOTrainer and RewardTrainer."""

from __future__ import annotations

from typing import Any

from .conditions import needs, unless
from .conversions import part_of, unless_null
from .rows import always, ignored, missing, rows, to
from .table import Became, Source, implied, unsupported

_KINDS = {
    **{name: name for name in ("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard",
                               "aot", "apo_zero", "apo_down", "discopop", "sft")},
    "aot_pair": "aot",
}  # fmt: skip
_NAMES = (*_KINDS, "aot_unpaired")
_BETA = unless(lambda s: _first(s) in ("sft",), "the loss has no beta")


def _losses(source: Source) -> list[str]:
    value = source["loss_type"]
    return [value] if isinstance(value, str) else value


def _first(source: Source) -> str:
    """The loss of pairs, beside cross-entropy."""
    return next((name for name in _losses(source) if name != "sft"), "sft")


def _loss(_: str | list[str], source: Source) -> Any:
    """One loss, and with it the cross-entropy of the preferred responses (MPO)."""
    names = _losses(source)
    if unknown := [name for name in names if name not in _NAMES]:
        raise ValueError(f"{', '.join(unknown)}: no such loss; the losses are {', '.join(_NAMES)}")
    weights = source["loss_weights"] or [1.0] * len(names)
    if len(weights) != len(names):
        raise ValueError(f"there are {len(names)} losses, but {len(weights)} loss_weights; give one for each")
    others = [name for name in names if name != "sft"]
    first = _first(source)
    if len(others) > 1 or first not in _KINDS or dict(zip(names, weights, strict=True))[first] != 1:
        return unsupported("use one loss with weight 1, and sft beside it")
    made: dict[str, Any] = {"prefer.loss.kind": _KINDS[first]}
    if len(names) > 1:
        made["prefer.sft_coef"] = float(weights[names.index("sft")])
    return Became(made)


_DIVERGENCES = {"reverse_kl": "reverse_kl", "forward_kl": "forward_kl", "js_divergence": "js"}
_SMOOTHED = unless(
    lambda s: (
        _first(s) not in ("robust", "exo_pair", "aot", *(("sigmoid",) if s.dialect.version == "0" else ()))
    ),
    "the loss has no label_smoothing; TRL smooths robust, exo_pair and aot, before 1.0 sigmoid too",
)

# One rule per line.
# fmt: off
_PAIRS = rows(
    to("max_length", "prefer.max_tokens", "count?", unless_null("the model's positions"), default=1024,
       note="longer pairs are dropped and counted; TRL cuts them"),
    to("max_prompt_length", "data.max_prompt_tokens data.overlong", "count?", unless_null("no limit"),
       lambda v, _: Became({"data.max_prompt_tokens": v, "data.overlong": "truncate_left"}), note="of TRL before 1.0"),
    ignored("truncation_mode max_completion_length padding_free padding_value label_pad_token_id eos_token", "pairs are packed; longer ones are dropped"))

DPO = rows(_PAIRS,
    to("learning_rate", "prefer.optimizer.lr", "positive", default=1e-6),
    to("loss_type", "prefer.loss.kind", "text or [text]", _loss, default="sigmoid"),
    to("loss_weights", "", "[number]?", unless_null("1 each"), part_of("loss_type")),
    to("beta", "prefer.loss.beta", "positive", _BETA, default=0.1),
    to("label_smoothing", "prefer.loss.label_smoothing", "number >= 0 and <= 0.5", _SMOOTHED, default=0.0),
    to("f_divergence_type", "prefer.loss.f_divergence", "text", unless(lambda s: _first(s) not in ("sigmoid", "sigmoid_norm"), "for sigmoid only"),
       lambda v, _: _DIVERGENCES.get(v) or unsupported(f"use {', '.join(_DIVERGENCES)}"), default="reverse_kl"),
    missing("f_alpha_divergence_coef", "use another divergence", default=0.5),
    to("reference_free", "prefer.loss.reference_free", "bool", needs("loss_type", "sigmoid")),
    to("rpo_alpha", "prefer.sft_coef", "non-negative?", unless_null("no cross-entropy")),
    to("precompute_ref_log_probs", "prefer.precompute_reference", "bool", default=False),
    to("ref_model", "reference.path", "text?", unless_null("the initial policy")),
    ignored("precompute_ref_batch_size base_model_attribute_name force_use_ref_model discopop_tau_default generate_during_eval", "memory and names of TRL's own"),
    to("discopop_tau", "prefer.loss.temperature", "positive", needs("loss_type", "discopop")),
    missing("{use_weighting,sync_ref_model,use_logits_to_keep}", "set it to false", default=False),
    ignored("ref_model_mixup_alpha ref_model_sync_steps", "for sync_ref_model only"),
    missing("ld_alpha ref_model_init_kwargs model_adapter_name ref_adapter_name", "remove it"))

REWARD = rows(_PAIRS,
    to("learning_rate", "prefer.optimizer.lr", "positive", default=1e-4, note="default: 1e-4, before TRL 1.0 5e-5"),
    to("center_rewards_coefficient", "prefer.loss.center_coef", "non-negative?", lambda v, _: v or 0.0, default=None))

SFT = rows(
    to("learning_rate", "sft.optimizer.lr", "positive", default=2e-5),
    to("max_length", "sft.max_tokens", "count?", unless_null("the model's positions"), default=1024, note="longer rows are cut at their end"),
    to("max_seq_length", "sft.max_tokens", "count?", unless_null("max_length")),
    always("{packing,padding_free}", "rows are always packed, without reading each other", "bool"),
    ignored("packing_strategy eval_packing truncation_mode", "rows are packed whole"),
    always("shuffle_dataset", "the sampler shuffles in any case", "bool"),
    always("assistant_only_loss", "the assistant's turns are learned; with false TRL learns the others too", "bool"),
    to("completion_only_loss", "", "bool?", part_of("dataset_name"), note="true: columns prompt and completion, else messages"),
    missing("dataset_text_field", "write rows of messages, or of prompt and completion with completion_only_loss=true", default="text"),
    missing("loss_type", "use nll", lambda v, _: implied("the mean cross-entropy") if v in ("nll", "chunked_nll", None) else v),
    missing("eos_token", "set braid.model.eos_token_id"))
# fmt: on
