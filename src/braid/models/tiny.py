"""Tiny copies of a model's architecture, for checks that would take too long on the model itself. Sizes are
reduced, and so are the lengths at which an architecture changes its behavior (windows, chunks, the original
length of rotary embeddings). Config keys are matched by name patterns; there are no special cases per
architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .stateful import use_step_limits

VOCAB = 96
_WIDTH, _HEADS, _HEAD_DIM, _INNER = 64, 4, 16, 48
_MOST_PARAMETERS = 20_000_000
SHORT, NEVER = 8, 4096
"""A length that the rows of a check exceed, and one that they never reach."""

_SIZES: tuple[tuple[str, int], ...] = (
    (
        r"n_shared_experts|(moe_)?num_shared_experts|first_k_dense_replace|num_dense_layers|moe_layer_start_index",
        1,
    ),
    (r"(mamba_d_|ssm_)?state(_size)?", 16),
    (r"n_groups?|topk_group|index_(topk|local)_blocks|num_expert_group|mamba_n_groups|mamba_ngroups", 1),
    (
        r"(num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|moe_num_active_experts|top_k_experts)",
        2,
    ),
    (r"(num|n)_.*experts|num_experts|moe_num_experts|zero_expert_num", 4),
    (r"(num_|n_|.*_)?(attention_heads|query_heads|head|heads|num_query_groups|index_n_heads)", _HEADS),
    (r".*head_dim|kv_channels|dim_head|d_head|d_kv|attention_head_size|rotary_dim|.*_lora_rank", _HEAD_DIM),
    (
        r"(.*_)?intermediate_size(_mlp)?|.*ffn.*(dim|size)|n_inner|dff|dim_ff|feed_forward_size|d_inner|mamba_d_ssm",
        _INNER,
    ),
    (
        r"(.*_)?hidden_size(_.*)?|lru_width|d_model|n_embd|dim_model|emb_dim|embedding_(size|dim)|.*_embed(ding)?_(dim|size)",
        _WIDTH,
    ),
)
"""(pattern of a config key, maximum value); the first full match applies."""
_VOCAB = r"(.*_)?vocab_size(_.*)?"
_CHUNK = r"(mamba_)?chunk_size"
"""Positions that a state-space layer computes at a time. They change results by rounding only."""
_LAYERS = r"num_hidden_layers|n_layers?|num_layers|num_blocks|(en|de)coder_layers|num_(en|de)coder_layers"
_LENGTHS = (
    r"(.*_)?(sliding_|attention_|keep_)?window(_size)?|attention_chunk_size|local_attention|rel_extent|"
    r"original_max_position_embeddings|(.*_)?block_size|index_topk|floor_scale"
)
_POSITIONS = (
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(target|source)_positions"
)


def length_keys(config: PreTrainedConfig) -> dict[str, int]:
    """Lengths at which an architecture may change its behavior, from every part of the config: key ->
    tokens."""
    lengths: dict[str, int] = {}
    for part in _parts(config):
        values = vars(part)
        ropes = list(_ropes(part))
        for section in (values, *ropes):
            lengths |= {
                k: v for k, v in section.items() if re.fullmatch(_LENGTHS, k) and type(v) is int and v > 0
            }
        if ropes:
            lengths |= {k: v for k, v in values.items() if re.fullmatch(_POSITIONS, k) and type(v) is int}
    return lengths


def tiny_config(config: PreTrainedConfig, passed: frozenset[str]) -> PreTrainedConfig:
    """Return a copy of `config` with small sizes. Of its length_keys those in `passed` become SHORT and the
    others NEVER."""
    config = deepcopy(config)
    for part in _parts(config):
        values, of_layers = vars(part), part.to_dict().get("per_layer_config") or {}
        is_large = _width(values) > _WIDTH
        if is_large:
            _shrink_sizes(values)
        values |= {
            k: VOCAB for k, v in values.items() if re.fullmatch(_VOCAB, k) and type(v) is int and v > VOCAB
        }
        values |= {k: min(v, SHORT) for k, v in values.items() if re.fullmatch(_CHUNK, k) and type(v) is int}
        _shrink_layers(values, getattr(part, "layer_types", None))
        for section in (values, *_ropes(part)):
            for key in [k for k in section if k in length_keys(part)]:
                section[key] = SHORT if key in passed else NEVER
        for key, value in list(values.items()):
            if key not in length_keys(part) and re.fullmatch(_POSITIONS, key) and type(value) is int:
                values[key] = min(value, 128)
            if re.fullmatch(r"\w+_token_id|\w+_idx", key) and type(value) is int and value >= VOCAB:
                values[key] = VOCAB - 1
        if of_layers:
            part.per_layer_config = _tiny_layers(  # pyright: ignore[reportAttributeAccessIssue]  # its setter takes a mapping
                of_layers, values, is_large
            )
    return config


def tiny_model(
    kind: type[PreTrainedModel], config: PreTrainedConfig, passed: frozenset[str], seed: int = 0
) -> PreTrainedModel:
    """Build a random float32 model of `kind` on the CPU with eager attention. All parameters are perturbed
    from special values (0, 1), so that each has an effect."""
    config = tiny_config(config, passed)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(deepcopy(config), **options).parameters())
    if size > _MOST_PARAMETERS:
        raise ValueError(
            f"its config uses unknown names for sizes, so a small copy would have {size:,} parameters"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind._from_config(config, **options)
        for tensor in (parameter.data for parameter in model.parameters()):
            if tensor.ndim > 1:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    use_step_limits(model)
    return model.eval()


def _tiny_layers(
    of_layers: dict[str, dict[str, Any]], values: dict[str, Any], is_large: bool
) -> dict[int, dict[str, Any]]:
    """Settings of single layers (transformers' per_layer_config) for the layers that are left. A size that
    differed from that of the other layers still does."""
    num_layers = next(v for k, v in values.items() if re.fullmatch(_LAYERS, k) and type(v) is int)
    kept = {int(number): dict(layer) for number, layer in of_layers.items() if int(number) < num_layers}
    for layer in kept.values() if is_large else ():
        _shrink_sizes(layer)
        layer |= {k: 2 * v for k, v in layer.items() if type(v) is int and v == values.get(k)}
    return kept


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)


def _ropes(config: PreTrainedConfig) -> Iterator[dict[str, Any]]:
    """The rotary embedding settings, one per layer type if these differ."""
    settings = vars(config).get("rope_parameters")
    if isinstance(settings, dict):
        nested = [value for value in settings.values() if isinstance(value, dict)]
        yield from nested or [settings]


def _width(values: dict[str, Any]) -> int:
    return max((v for k, v in values.items() if re.fullmatch(_SIZES[-1][0], k) and type(v) is int), default=0)


def _shrink_sizes(values: dict[str, Any]) -> None:
    heads = next(
        (v for k, v in values.items() if re.fullmatch(r"num_attention_heads|n_heads?|num_heads", k)), None
    )
    for key, value in list(values.items()):
        if isinstance(value, list) and all(type(n) is int for n in value):  # one entry per layer
            most = next((n for name, n in _SIZES if re.fullmatch(name, key)), None)
            values[key] = value if most is None else [min(n, most) for n in value]
        if type(value) is not int:
            continue
        if re.fullmatch(r"(.*_)?num_(key_value|kv)_heads|num_kv_heads", key):
            values[key] = _HEADS if value == heads else min(value, 2)
        elif (most := next((n for name, n in _SIZES if re.fullmatch(name, key)), None)) is not None:
            values[key] = min(value, most)
    _fit_mamba_heads(values)
    if values.get("qk_head_dim") is not None and "qk_nope_head_dim" in values:
        values["qk_head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]


def _fit_mamba_heads(values: dict[str, Any]) -> None:
    """Make the heads of state-space layers add up to their inner width, which most configs need not say."""
    names = (("mamba_d_head", "mamba_n_heads"), ("mamba_headdim", "n_mamba_heads"), ("head_dim", "num_heads"))
    for size, heads in names:
        expand = values.get("mamba_expand") or values.get("expand")
        if type(values.get(size)) is int and type(values.get(heads)) is int and expand:
            width = values.get("mamba_d_ssm") or int(expand * values["hidden_size"])
            values[size] = width // values[heads]


def _shrink_layers(values: dict[str, Any], layer_types: list[str] | None) -> None:
    """Reduce the number of layers to the fewest that include every kind of layer, and at least two.
    `layer_types` may follow from other values."""
    for key, old in list(values.items()):
        if not re.fullmatch(_LAYERS, key) or type(old) is not int:
            continue
        lists = {k: v for k, v in values.items() if isinstance(v, list | tuple) and len(v) == old}
        of_layers = {k: v for k, v in lists.items() if len(set(map(str, v))) < old}
        if layer_types and len(layer_types) == old:
            of_layers["layer_types"] = layer_types
        kinds = list(zip(*(map(str, v) for v in of_layers.values()), strict=True)) or [()]
        num = max(2, max(kinds.index(kind) for kind in set(kinds)) + 1)
        if values.get("num_kv_shared_layers"):
            values["num_kv_shared_layers"] = num
            num *= 2
        if num < old:
            values[key] = num
            values |= {k: v[:num] for k, v in lists.items()}
