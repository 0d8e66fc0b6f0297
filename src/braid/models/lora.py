"""Low-rank adapters on a policy (LoRA, Hu et al. 2021, arXiv 2106.09685), through peft: an adapted layer
computes W x + (alpha / rank) B A x; A and B are trained, W and the rest of the model are frozen. The experts
of a layer, which transformers keeps in one parameter [experts, ...], have an A and a B each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from braid.config.backends import LoraConfig
from braid.errors import ModelError, suggest

from .base import unique_weights
from .experts import is_experts
from .stateful import layers_read_by_weight
from .vision import modules_of_tower

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Prefix of weight names in peft's files."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_UNSUPPORTED = (
    "bias",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
    "use_dora",
    "layer_replication",
)
"""Settings of peft that train or change more than the matrices A and B."""


def add_adapters(model: PreTrainedModel, config: LoraConfig, *, seed: int) -> None:
    """Add adapters to `model` in place, and freeze the rest. New adapters leave the model's outputs unchanged
    (B = 0, A is drawn with `seed`); with `config.path` they are read from that folder.

    Raises ModelError if the model has no such layers, or the folder does not fit the model.
    """
    import peft  # the import takes seconds, and few runs have adapters

    folder = None if config.path is None else Path(config.path).expanduser()
    if folder is not None:
        settings = _read_settings(folder)
    else:
        alpha: Any = config.rank if config.alpha is None else config.alpha
        layers, experts = _targets(model, config.targets)
        settings = peft.LoraConfig(
            r=config.rank, lora_alpha=alpha, target_modules=layers, target_parameters=experts or None
        )
    _check(model, settings)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            # In a transformers model peft would read names as those of transformers 4, where experts were
            # layers.
            place: nn.Module = model if folder is not None else nn.ModuleDict({"model": model})
            peft.inject_adapter_in_model(settings, place, _ADAPTER)
        except (ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"cannot apply model.lora to {type(model).__name__}: {error}") from error
    for _, tensor in named_adapters(model):
        tensor.data = tensor.data.to(model.dtype)
    if folder is not None:
        _read_weights(model, folder)


def has_adapters(module: nn.Module) -> bool:
    return any(True for _ in _adapted(module))


def named_adapters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The adapter matrices under their names in peft's files."""
    for name, layer in _adapted(module):
        yield f"{_PREFIX}{name}.lora_A.weight", layer.lora_A[_ADAPTER].weight
        yield f"{_PREFIX}{name}.lora_B.weight", layer.lora_B[_ADAPTER].weight


def outputs_of(layer: Any, x: Tensor, rows: slice) -> Tensor:
    """The outputs `rows` alone of a linear layer without bias, which may have an adapter."""
    out = functional.linear(x, layer.weight[rows])
    if not hasattr(layer, "lora_A"):
        return out
    low_rank = layer.lora_A[_ADAPTER](x)
    return out + layer.scaling[_ADAPTER] * functional.linear(low_rank, layer.lora_B[_ADAPTER].weight[rows])


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to compute a merged weight from tensors of the module, for backends that gather these one by one.

    `parts` are names within the module: W, or W, A and B of an adapted layer. `scale` is alpha / rank."""

    parts: tuple[str, ...]
    scale: float = 1.0
    is_transposed: bool = False
    """Whether W is stored as [in, out], or [experts, in, out]."""
    num_experts: int = 0
    """Number of experts if W is the parameter of a layer's experts: A is [experts * rank, in], and B [out,
    rank * experts]."""

    @torch.no_grad()
    def weight(self, tensors: Sequence[Tensor]) -> Tensor:
        """W + scale B A from the whole tensors of `parts`, computed in float32 and returned in W's type; W
        itself without adapters."""
        base, *low_rank = tensors
        if not low_rank:
            return base
        a, b = (tensor.float().flatten(1) for tensor in low_rank)  # kernels of convolutions as matrices
        if self.num_experts and base.ndim == 3:  # that of a router is a matrix
            a, b = a.unflatten(0, (self.num_experts, -1)), b.unflatten(1, (-1, self.num_experts))
            change = torch.einsum("ore,eri->eio" if self.is_transposed else "ore,eri->eoi", b, a)
            return (base.float() + change * self.scale).to(base.dtype)
        change = b @ a * self.scale
        return (base.float() + (change.T if self.is_transposed else change.view_as(base))).to(base.dtype)


def recipes(module: nn.Module) -> dict[str, Recipe]:
    """Recipes of the merged weights by name in a model folder, tied ones once."""
    adapted = dict(_recipe(name, layer) for name, layer in _adapted(module))
    out = dict[str, Recipe]()
    for name, _ in unique_weights(module):
        if ".lora_A." not in name and ".lora_B." not in name:
            out[_plain(name)] = adapted.get(name, Recipe((name,)))
    return out


def merged_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of `module` with adapters merged, W + (alpha / rank) B A in place of W; tied ones once.
    Merged matrices are new tensors, created one at a time; all others are the live tensors."""
    tensors = module.state_dict(keep_vars=True)
    for name, recipe in recipes(module).items():
        yield name, recipe.weight([tensors[part] for part in recipe.parts])


def merged_weight(layer: Any) -> Tensor:
    """The weight [out, in] of a linear layer, with its adapter merged if it has one."""
    if not hasattr(layer, "lora_A"):
        return layer.weight
    parts = layer.weight, layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
    return Recipe((), layer.scaling[_ADAPTER]).weight(parts)


def plain_copy(module: PreTrainedModel) -> PreTrainedModel:
    """Copy of the module with adapters merged and all weights trainable."""
    copy = deepcopy(module)
    layers = dict(_adapted(copy))
    for name, layer in layers.items():
        weight, recipe = _recipe(name, layer)
        copy.get_parameter(weight).data = recipe.weight([copy.get_parameter(part) for part in recipe.parts])
    for name, layer in layers.items():
        if _plain(name) == name:  # adapters of several parameters of a module are nested
            parent, _, leaf = name.rpartition(".")
            setattr(copy.get_submodule(parent), leaf, layer.get_base_layer())
    return copy.requires_grad_(True)


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by name."""
    return ((n, layer) for n, layer in module.named_modules() if hasattr(layer, "lora_A"))


def _plain(name: str) -> str:
    """A name without the modules that adapters put around the ones that they adapt."""
    return name.replace(".base_layer", "")


def _recipe(name: str, layer: Any) -> tuple[str, Recipe]:
    """Name in the module and recipe of the weight of an adapted layer."""
    inner, base = layer.base_layer, f"{name}.base_layer"
    while hasattr(inner, "base_layer"):
        inner, base = inner.base_layer, f"{base}.base_layer"
    of_experts = hasattr(layer, "parameter_name")
    weight = f"{base}.{layer.parameter_name if of_experts else 'weight'}"
    parts = (weight, *(f"{name}.{part}.{_ADAPTER}.weight" for part in ("lora_A", "lora_B")))
    scale = layer.scaling[_ADAPTER]
    if of_experts:
        return weight, Recipe(parts, scale, bool(getattr(inner, "is_transposed", False)), layer.num_experts)
    return weight, Recipe(parts, scale, getattr(layer, "fan_in_fan_out", False))


def _experts(model: nn.Module) -> list[str]:
    """Names of the parameters that each hold a weight of all experts of a layer."""
    return [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if is_experts(module)
        or type(module).__name__.endswith("Experts")  # Llama 4 and JetMoE have their own
        for weight, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    ]


def _targets(model: PreTrainedModel, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The linear layers and the parameters of experts that `names` select. Each is a suffix of a dotted name;
    all-linear selects all of them except the head. A vision tower has none."""
    by_weight, tower = layers_read_by_weight(model), modules_of_tower(model)
    layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
        and not ("Router" in type(layer).__name__ or {"router", "indexer"} & set(name.split(".")))
        and name not in by_weight
        and name not in tower
    ]
    experts = _experts(model)
    head = model.get_output_embeddings()
    heads = [name for name, layer in model.named_modules() if layer is head]
    if names == ("all-linear",):
        return [name for name in layers if name not in heads], experts
    fixed = heads if _fixed_head(model) is not None else []
    for target in names:
        if not any(f".{name}".endswith(f".{target}") for name in (*layers, *experts)):
            ends = sorted({name.rpartition(".")[2] for name in (*layers, *experts) if name not in fixed})
            raise ModelError(
                f"model.lora.targets: {type(model).__name__} has no layer {target!r}{suggest(target, ends)}; "
                f"available: {', '.join(ends)}; all-linear selects all of them"
            )
    chosen = tuple(f".{target}" for target in names)
    are_chosen = [name for name in layers if f".{name}".endswith(chosen)]
    named = are_chosen if tower else list(names)  # layers of the tower may have the same names
    return named if are_chosen else [], [name for name in experts if f".{name}".endswith(chosen)]


def _check(model: PreTrainedModel, settings: Any) -> None:
    """Raise ModelError if a layer would get an adapter that it cannot have."""
    from peft.tuners.tuners_utils import check_target_module_exists  # see add_adapters

    head, by_weight = _fixed_head(model), layers_read_by_weight(model)
    for name, layer in model.named_modules():
        is_refused = layer is head or isinstance(layer, nn.Embedding) or name in by_weight
        if is_refused and check_target_module_exists(settings, name):
            what = "the output head" if layer is head else "an embedding"
            what = "read by its weight, without calling it" if name in by_weight else what
            raise ModelError(
                f"model.lora: {name!r} is {what}, which cannot have an adapter; choose other "
                "model.lora.targets, or another model.lora.path"
            )


def _fixed_head(model: PreTrainedModel) -> nn.Module | None:
    """The output head, if log-probs are computed from its weight alone, as those of language models are."""
    return model.get_output_embeddings() if hasattr(model, "config") else None


def _read_settings(folder: Path) -> Any:
    import peft  # see add_adapters

    missing = [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"model.lora.path={folder} is not an adapter folder: it lacks {' and '.join(missing)}; use one "
            "that peft's save_pretrained wrote"
        )
    settings = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(settings, peft.LoraConfig):
        raise ModelError(f"model.lora.path={folder} contains {settings.peft_type} adapters; use plain LoRA")
    kinds = {key: getattr(settings, key, None) for key in _UNSUPPORTED}
    if has := [
        f"{key}={value}" for key, value in kinds.items() if value not in (None, False, "none", [], {})
    ]:
        raise ModelError(
            f"model.lora.path={folder} has trained parts or options that are not supported: "
            f"{', '.join(has)}; use plain LoRA"
        )
    settings.inference_mode, settings.lora_dropout = False, 0.0
    return settings


def _read_weights(model: PreTrainedModel, folder: Path) -> None:
    saved, mine = load_file(folder / _WEIGHTS), dict(named_adapters(model))
    if any(re.search(r"\.experts\.\d+\.", name) for name in saved):
        raise ModelError(
            f"model.lora.path={folder} has matrices of each expert by itself, as of transformers 4; this "
            "version keeps the experts of a layer in one parameter: load the folder with peft and this "
            "version of transformers, and save it again"
        )
    bases = {f"{_PREFIX}{name}": p for name, p in model.named_parameters() if ".base_layer." in name}
    mine |= {name: bases[name] for name in saved.keys() & bases.keys()}  # peft saves that of an adapted head
    wrong = sorted(saved.keys() ^ mine.keys()) or [n for n in mine if mine[n].shape != saved[n].shape]
    if wrong:
        raise ModelError(
            f"model.lora.path={folder} was made for another model: {len(wrong)} of its matrices do not fit "
            f"{type(model).__name__}, among them {wrong[0]}"
        )
    for name, tensor in mine.items():
        tensor.data.copy_(saved[name])
