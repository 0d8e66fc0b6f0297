"""Low-rank adapters on a policy (LoRA, Hu et al. 2021, arXiv 2106.09685), through peft: an adapted layer computes
W x + (alpha / rank) B A x; A and B are trained, W and the rest of the model are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from braid.config.backends import LoraConfig
from braid.errors import ModelError, suggest

from .base import unique_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"
_PREFIX = "base_model.model."
"""Prefix of weight names in peft's files."""
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


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
        targets = _targets(model, config.targets)
        settings = peft.LoraConfig(r=config.rank, lora_alpha=alpha, target_modules=targets)
    _check(model, settings)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model, _ADAPTER)
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
    """Whether W is stored as [in, out]."""

    @torch.no_grad()
    def weight(self, tensors: Sequence[Tensor]) -> Tensor:
        """W + scale B A from the whole tensors of `parts`, computed in float32 and returned in W's type; W
        itself without adapters."""
        base, *low_rank = tensors
        if not low_rank:
            return base
        a, b = (tensor.float().flatten(1) for tensor in low_rank)  # kernels of convolutions as matrices
        change = b @ a * self.scale
        return (base.float() + (change.T if self.is_transposed else change.view_as(base))).to(base.dtype)


def recipes(module: nn.Module) -> dict[str, Recipe]:
    """Recipes of the merged weights by name in a model folder, tied ones once."""
    adapted, out = dict(_adapted(module)), dict[str, Recipe]()
    for name, _ in unique_weights(module):
        owner, _, leaf = name.rpartition(".")
        if ".lora_A." in name or ".lora_B." in name:
            continue
        base = owner.removesuffix(".base_layer")
        is_merged = base in adapted and leaf == "weight"
        recipe = _recipe(base, adapted[base]) if is_merged else Recipe((name,))
        out[f"{base}.{leaf}".removeprefix(".")] = recipe
    return out


def merged_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of `module` with adapters merged, W + (alpha / rank) B A in place of W; tied ones once.
    Merged matrices are new tensors, created one at a time; all others are the live tensors."""
    tensors = module.state_dict(keep_vars=True)
    for name, recipe in recipes(module).items():
        yield name, recipe.weight([tensors[part] for part in recipe.parts])


def plain_copy(module: PreTrainedModel) -> PreTrainedModel:
    """Copy of the module with adapters merged and all weights trainable."""
    copy = deepcopy(module)
    for name, layer in list(_adapted(copy)):
        base: nn.Module = layer.base_layer
        recipe = _recipe(name, layer)
        base.weight.data = recipe.weight([copy.get_parameter(part) for part in recipe.parts])
        parent, _, leaf = name.rpartition(".")
        setattr(copy.get_submodule(parent), leaf, base)
    return copy.requires_grad_(True)


def _adapted(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with an adapter, by name."""
    return ((n, layer) for n, layer in module.named_modules() if hasattr(layer, "lora_A"))


def _recipe(name: str, layer: Any) -> Recipe:
    """Recipe of the weight of an adapted layer."""
    modules = ("base_layer", f"lora_A.{_ADAPTER}", f"lora_B.{_ADAPTER}")
    parts = tuple(f"{name}.{part}.weight" for part in modules)
    return Recipe(parts, layer.scaling[_ADAPTER], getattr(layer, "fan_in_fan_out", False))


def _targets(model: PreTrainedModel, names: tuple[str, ...]) -> str | list[str]:
    """Convert `names` to peft's `target_modules`. Each is a suffix of a layer's dotted name; all-linear
    selects all linear layers except the head."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    if names == ("all-linear",):
        head = model.get_output_embeddings()
        own = [name for name, layer in layers.items() if layer is not head]
        # peft knows only the heads of transformers' models
        return "all-linear" if hasattr(model, "config") else own
    head = _fixed_head(model)
    ends = sorted({name.rpartition(".")[2] for name, layer in layers.items() if layer is not head})
    for target in names:
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            raise ModelError(
                f"model.lora.targets: {type(model).__name__} has no layer {target!r}{suggest(target, ends)}; "
                f"available: {', '.join(ends)}; all-linear selects all of them"
            )
    return list(names)


def _check(model: PreTrainedModel, settings: Any) -> None:
    """Raise ModelError if a layer would get an adapter that it cannot have."""
    from peft.tuners.tuners_utils import check_target_module_exists  # see add_adapters

    head = _fixed_head(model)
    for name, layer in model.named_modules():
        is_refused = layer is head or isinstance(layer, nn.Embedding)
        if is_refused and check_target_module_exists(settings, name):
            what = "the output head" if layer is head else "an embedding"
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
            f"model.lora.path={folder} is not an adapter folder: it lacks {' and '.join(missing)}; use one that peft's "
            "save_pretrained wrote"
        )
    settings = peft.PeftConfig.from_pretrained(str(folder))
    if not isinstance(settings, peft.LoraConfig) or settings.use_dora or settings.bias != "none":
        raise ModelError(
            f"model.lora.path={folder} contains {settings.peft_type} adapters with unsupported options (DoRA, biases); "
            "use plain LoRA"
        )
    settings.inference_mode, settings.lora_dropout = False, 0.0
    return settings


def _read_weights(model: PreTrainedModel, folder: Path) -> None:
    saved, mine = load_file(folder / _WEIGHTS), dict(named_adapters(model))
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
