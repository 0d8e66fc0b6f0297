"""Model sizes, from a build spec, the headers of a folder's safetensors files or that of a GGUF file, without
loading the model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from braid.config.backends import LoraConfig
from braid.config.model import BuildSpec
from braid.config.schema import RunConfig
from braid.gguf_file import is_gguf, read_header
from braid.json_text import read_json

SPECIAL_TOKENS = 3
"""Special tokens of the character tokenizer: padding, end, unknown."""
VOCAB_MULTIPLE = 16
"""The vocabulary of a built model is padded to a multiple of this."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts per layer in transformers configs."""
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Names of the number of experts that a token is routed to."""
_EXPERT = re.compile(r"(?P<layer>.+)\.experts\.\d+\.(?P<kind>gate_proj|up_proj|down_proj|w1|w2|w3)")
"""A layer of one expert in a folder's files."""
_KEYS = re.compile(r".+\.(k_proj|kv_a_proj_with_mqa|kv_a_proj)\.weight")
_STATE_SIZES = ("mamba_d_state", "ssm_state_size", "state_size")
_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""Names in transformers configs of Mamba 2's state size, and of groups of heads that share B and C."""
_GGUF_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Linear layers by the names of llama.cpp -> those of transformers; others have no common ones."""
_LEAST_COMPILED = 4e10
"""Tokens of a round, at most, times parameters: two seconds of sampling, of which compiled steps save half.
To compile them takes five seconds once, and as much for attention in training."""
_TRAJECTORY_BYTES, _TOKEN_BYTES = 5700, 64
"""Host memory of a trajectory until its round ends, and of each token that it samples (its id and log-prob as
Python numbers). Measured as the growth of a run in one process: rounds of 12,800 and 64,000 trajectories of
one token, and 12,800 of 64."""
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per number of each dtype."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Sizes of a language model. `num_experts` is per layer (0 without experts), and each token is routed to
    `num_chosen_experts`. `head_parameters` counts an output head that is not tied to the embedding.
    `linear` maps the dotted name of each linear layer, and of each parameter that holds a weight of all
    experts, to the parameters of its rank-1 adapter: inputs plus outputs, of every expert. `is_latent`: keys
    and values are compressed (multi-head latent attention), so that `head_dim` is not the size that engines
    store. `num_kv_layers`: layers with keys and values, None if all have them. `state_numbers`: numbers in
    the states of linear attention and state-space layers of one sequence. `intermediate_size` is the width of
    the feed-forward layers that a token passes, all its experts together; `has_head_norms`: queries and keys
    are normalized."""

    parameters: int
    head_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    num_experts: int
    head_dim: int
    max_positions: int | None
    linear: Mapping[str, int]
    is_latent: bool = False
    num_chosen_experts: int = 0
    num_kv_layers: int | None = None
    state_numbers: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    has_head_norms: bool = False

    @property
    def choice_bytes(self) -> int:
        """Bytes of the experts that all layers choose for a token, as rows have them (at most: some layers
        may have none)."""
        return self.num_layers * self.num_chosen_experts * (1 if self.num_experts <= 128 else 2)

    def adapter_parameters(self, lora: LoraConfig) -> int:
        """Number of parameters of the adapters that `lora` describes, or of those in its folder."""
        if lora.path is not None:
            try:
                shapes = _tensor_shapes(Path(lora.path).expanduser())
            except (OSError, ValueError, SafetensorError):
                return 0  # reported when the folder is loaded
            return sum(math.prod(shape) for name, shape in shapes.items() if ".base_layer." not in name)
        ends = ("",) if lora.targets == ("all-linear",) else tuple(f".{target}" for target in lora.targets)
        return lora.rank * sum(n for name, n in self.linear.items() if f".{name}".endswith(ends))

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers in the keys and values of one token, over all layers."""
        num_layers = self.num_layers if self.num_kv_layers is None else self.num_kv_layers
        return 2 * num_layers * self.num_kv_heads * self.head_dim


def policy_size(config: RunConfig) -> ModelSize | None:
    """Size of the policy; None if its files do not contain it or are not in a local folder."""
    build = config.model.build
    return size_of_folder(config.model.source) if build is None else size_of_spec(build)


def size_of_spec(spec: BuildSpec) -> ModelSize:
    """Size of the model that a build spec describes."""
    tokens = {*spec.characters, *spec.words, *spec.all_special_tokens}
    vocab = math.ceil((len(tokens) + SPECIAL_TOKENS) / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    hidden, wide = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
    num_norms = 4 if spec.architecture in ("gemma2", "gemma3_text") else 2
    layer = sum(map(math.prod, matrices.values())) + num_norms * hidden
    if spec.architecture == "qwen2":
        layer += queries + 2 * keys  # biases
    has_head_norms = spec.architecture in ("qwen3", "gemma3_text", "qwen3_vl")
    layer += 2 * spec.head_dim if has_head_norms else 0
    head = 0 if spec.tie_embeddings else vocab * hidden
    tower = spec.vision_tower.num_parameters(hidden) if spec.vision_tower is not None else 0
    return ModelSize(
        parameters=vocab * hidden + spec.num_layers * layer + hidden + head + tower,
        head_parameters=head,
        hidden_size=hidden,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        num_experts=0,
        head_dim=spec.head_dim,
        max_positions=spec.max_positions,
        linear={
            f"layers.{n}.{name}": sum(shape)
            for n in range(spec.num_layers)
            for name, shape in matrices.items()
        },
        intermediate_size=wide,
        vocab_size=vocab,
        has_head_norms=has_head_norms,
    )


def size_of_folder(folder: str | Path | None) -> ModelSize | None:
    """Size of the model in a Hugging Face folder or GGUF file; None if its files do not contain it (the
    loader reports a folder that is not a model)."""
    if folder is None:
        return None
    try:
        if is_gguf(folder):
            return _size_of_gguf(folder)
        config = read_json(Path(folder) / "config.json")
        shapes = _tensor_shapes(Path(folder))
        text: Mapping[str, Any] = config.get("text_config", config)
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        head = next((shape for name, shape in shapes.items() if name.endswith("lm_head.weight")), None)
        return ModelSize(
            parameters=sum(math.prod(shape) for shape in shapes.values()),
            head_parameters=math.prod(head) if head else 0,
            hidden_size=hidden,
            num_layers=text.get("num_hidden_layers")
            or len(text["layers_block_type"]),  # Nemotron-H has these
            num_heads=heads,
            num_kv_heads=text.get("num_key_value_heads") or heads,
            num_experts=next((text[name] for name in _EXPERTS if text.get(name)), 0),
            head_dim=text.get("head_dim") or hidden // heads,
            max_positions=text.get("max_position_embeddings"),
            linear=_linear(shapes),
            is_latent="kv_lora_rank" in text,
            num_chosen_experts=next((text[name] for name in _CHOSEN if text.get(name)), 0),
            intermediate_size=_intermediate_size(text),
            vocab_size=text.get("vocab_size") or 0,
            has_head_norms=any("q_norm" in name for name in shapes),
            **_sizes_of_states(text, shapes),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None


def _intermediate_size(text: Mapping[str, Any]) -> int:
    """ModelSize.intermediate_size: that of the chosen experts and the shared one, in a mixture of experts."""
    dense = text.get("intermediate_size") or 4 * text["hidden_size"]
    chosen = next((text[name] for name in _CHOSEN if text.get(name)), 0)
    if not chosen:
        return dense
    shared = text.get("shared_expert_intermediate_size") or 0
    return chosen * (text.get("moe_intermediate_size") or dense) + shared


def _sizes_of_states(text: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> dict[str, int]:
    """ModelSize.num_kv_layers and state_numbers of a model with stateful layers, by their convolutions and
    decay rates (A_log)."""
    convolutions: dict[str, list[list[int]]] = {}
    for name, shape in shapes.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if re.fullmatch(r"([qkv]_)?conv(1d)?", part) and len(shape) == 3:
            convolutions.setdefault(layer, []).append(shape)
    if not convolutions:
        return {}
    keys = {name.rpartition(".")[0].rpartition(".")[0] for name in shapes if _KEYS.fullmatch(name)}
    numbers = 0
    for layer, of_layer in convolutions.items():
        channels = sum(shape[0] for shape in of_layer)
        numbers += channels * of_layer[0][2]
        decay = shapes.get(f"{layer}.A_log")
        if decay is not None:
            numbers += _recurrent_numbers(text, channels, decay)
    return {
        "num_kv_layers": sum(f"{layer}.A_log" not in shapes for layer in keys),
        "state_numbers": numbers,
    }


def _recurrent_numbers(text: Mapping[str, Any], channels: int, decay: list[int]) -> int:
    """Numbers in the recurrent state of a layer, with so many channels of its convolutions."""
    if "linear_value_head_dim" in text:  # gated delta net
        per_head = text["linear_key_head_dim"] * text["linear_value_head_dim"]
        return text["linear_num_value_heads"] * per_head
    if "linear_attn_config" in text:  # Kimi's delta attention, as published
        return text["linear_attn_config"]["num_heads"] * text["linear_attn_config"]["head_dim"] ** 2
    if "linear_num_heads" in text:  # the same, saved by transformers
        return text["linear_num_heads"] * text["linear_head_dim"] ** 2
    if len(decay) == 2:  # Mamba 1
        return math.prod(decay)
    size = text[next((key for key in _STATE_SIZES if key in text), _STATE_SIZES[0])]
    groups = text[next((key for key in _GROUPS if key in text), _GROUPS[0])]
    return (channels - 2 * groups * size) * size


def _size_of_gguf(file: str | Path) -> ModelSize:
    """Size of the model in a GGUF file, read from its header."""
    header = read_header(file)
    shapes = {name: list(shape) for name, (shape, _) in header.tensors.items()}
    heads, hidden = header.setting("attention.head_count"), header.setting("embedding_length")
    layers = {
        name: name.replace("blk", "model.layers", 1).replace(layer, _GGUF_LAYERS.get(layer, layer))
        for name in shapes
        if name.startswith("blk.") and (layer := name.removesuffix(".weight").rpartition(".")[2])
    }
    return ModelSize(
        parameters=sum(math.prod(shape) for shape in shapes.values()),
        head_parameters=math.prod(shapes.get("output.weight", [0])),
        hidden_size=hidden,
        num_layers=header.setting("block_count"),
        num_heads=heads,
        num_kv_heads=header.setting("attention.head_count_kv") or heads,
        num_experts=header.setting("expert_count") or 0,
        head_dim=header.setting("attention.key_length") or hidden // heads,
        max_positions=header.setting("context_length"),
        linear=_linear({name: shapes[old] for old, name in layers.items()}),
        num_chosen_experts=header.setting("expert_used_count") or 0,
        intermediate_size=header.setting("feed_forward_length") or 4 * hidden,
        vocab_size=shapes["token_embd.weight"][0] if "token_embd.weight" in shapes else 0,
        has_head_norms=any("attn_q_norm" in name for name in shapes),
    )


def _linear(shapes: Mapping[str, list[int]]) -> dict[str, int]:
    """ModelSize.linear from the shapes of a folder's tensors: all matrices except embeddings, routers, those
    of indexers and the output head. Files may have a tensor for each expert; in the model, those of a layer
    are one parameter, and gate and up are one too."""
    out: dict[str, int] = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        above = layer.rpartition(".")[0]
        if (expert := _EXPERT.fullmatch(layer)) is not None:
            of_layer = f"{expert['layer'].replace('block_sparse_moe', 'mlp')}.experts."
            outputs, inputs = shape
            if expert["kind"] in ("down_proj", "w2"):
                of_layer, size = f"{of_layer}down_proj", inputs + outputs
            else:
                is_first = expert["kind"] in ("gate_proj", "w1")
                of_layer, size = f"{of_layer}gate_up_proj", outputs + inputs * is_first
            out[of_layer] = out.get(of_layer, 0) + size
        elif len(shape) == 3 and above.endswith("experts"):
            out[layer] = shape[0] * (shape[1] + shape[2])
        elif len(shape) == 2 and name.endswith(".weight") and not _is_other_matrix(layer, shapes):
            out[layer] = sum(shape)
    return out


_TOWERS = ("visual", "vision_tower", "vision_model", "multi_modal_projector", "connector")
"""Modules of vision-language models beside the language model."""


def _is_other_matrix(layer: str, shapes: Mapping[str, list[int]]) -> bool:
    """Whether a matrix is an embedding, a router, the output head, or of an indexer or a vision tower."""
    above, _, last = layer.rpartition(".")
    is_router = last == "gate" and any(name.startswith(f"{above}.experts.") for name in shapes)
    is_within = not {"router", "indexer", *_TOWERS}.isdisjoint(layer.split("."))
    return is_router or is_within or "embed" in last or last in ("lm_head", "wte", "wpe")


def _tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor in the folder's safetensors files. Raises ValueError if there are
    none."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    if not shapes:
        raise ValueError(f"no safetensors files in {folder}")
    return shapes


def samples_lower(config: RunConfig, *, has_gpus: bool) -> bool:
    """Whether an engine in the run's processes samples text in a lower precision than that of training."""
    engine, train = config.rollout.engine, training_dtype(config, has_gpus=has_gpus)
    if engine.is_served or config.env.is_simulator:
        return False
    return BYTES[engine.dtype_in(config, None, has_gpus=has_gpus)] < BYTES[train]


def training_dtype(config: RunConfig, *, has_gpus: bool) -> str:
    """Dtype of matrix products in training."""
    train = config.train
    if (gathered := train.backend.parameter_dtype()) is not None:
        return gathered
    if train.autocast == "none" or (train.autocast == "auto" and not has_gpus):
        return config.model.dtype
    return "fp16" if train.autocast == "fp16" else "bf16"


def is_worth_compiling(config: RunConfig, num_parameters: int) -> bool:
    """Whether a round on a CPU computes long enough to compile kernels for it. The number of rounds, which a
    resume may change, doesn't count: results differ by rounding, and a resumed run has those of an unbroken
    one."""
    rollout = config.rollout
    num_tokens = rollout.prompts_per_round * rollout.group_size * rollout.sampling.max_new_tokens
    return num_tokens * num_parameters >= _LEAST_COMPILED


def round_bytes(
    config: RunConfig,
    num_trajectories: int,
    max_output_tokens: int | None,
    max_tokens: int | None,
    size: ModelSize | None,
) -> tuple[int, int] | None:
    """Least and most host memory of a round's trajectories, if the longest has `max_output_tokens`, and
    `max_tokens` with its prompt; None for simulators, whose observations vary. Experts to replay are those of
    all its tokens, in the row and, from the engine, in the trajectory."""
    if config.env.is_simulator:
        return None
    least = num_trajectories * _TRAJECTORY_BYTES
    most = least + num_trajectories * (max_output_tokens or 0) * _TOKEN_BYTES
    num_copies = {"none": 0, "old": 1, "rollout": 2}[config.train.router_replay]
    choices = 0 if size is None else num_copies * size.choice_bytes
    return least, most + num_trajectories * (max_tokens or 0) * choices
