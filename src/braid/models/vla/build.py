"""Construction of vision-language-action policies and critics from the config of a new run."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from braid.config.model import ModelConfig
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.errors import ModelError
from braid.models.base import TrainableModel, copy_weights, unique_weights
from braid.models.export import export_with
from braid.models.folders import local_folder, local_path, read_json, read_tokenizer
from braid.models.loading import TORCH_DTYPES
from braid.models.lora import add_adapters, merged_weights, named_adapters
from braid.models.value_head import add_head_of_robot
from braid.types import Spaces

from .actions import range_of
from .openvla import OpenVla, load_openvla, read_checkpoint, save_openvla
from .pi0 import Pi0Policy, load_pi0, read_config
from .policy import OpenVlaPolicy, Processor, VlaPolicy

_STATISTICS = ("dataset_statistics.json", "norm_stats.json")
_OPENPI_NAMES = {"actions": "action", "state": "proprio"}


def make_processor(model: ModelConfig, spaces: Spaces) -> Processor:
    """The processor of the policy in `model.path`; its weights are not read. Raises ModelError."""
    vla, path = model.settings_of_vla, model.path
    assert path is not None, "the plan checks that it is there"
    num_bins = 0
    if vla.kind == "pi0":
        folder, _ = read_config(path)
        path, statistics = str(folder), _statistics(folder)
    else:
        folder, checkpoint = read_checkpoint(path)
        size = (checkpoint.image_size, checkpoint.image_size)
        if vla.image_size not in (None, size):
            raise ModelError(
                f"model.vla.image_size={vla.image_size}, but the checkpoint's images are {size}; remove it"
            )
        tokens = checkpoint.text.vocab_size - checkpoint.num_padding
        if vla.vocab_size not in (None, tokens):
            raise ModelError(
                f"model.vla.vocab_size={vla.vocab_size}, but the checkpoint's action tokens end at "
                f"{tokens}; remove it"
            )
        path, statistics, num_bins = str(folder), checkpoint.statistics, checkpoint.num_bins
    tokenizer = _tokenizer(model, path)
    reads_state = vla.use_proprio or vla.kind == "pi0"
    state = range_of(statistics, vla, "proprio") if reads_state else None
    return Processor(vla, spaces, tokenizer, range_of(statistics, vla, size=vla.action_dim), state, num_bins)


def make_vla_role(
    role: TrainingRole,
    config: RunConfig,
    spaces: Spaces,
    device: torch.device,
    policy: TrainableModel | None = None,
    rank: int | None = None,
) -> VlaPolicy:
    """The model of a role; the critic is a copy of `policy`, or of the policy in the folder without it."""
    model = make_vla(config, spaces, device, rank) if policy is None else cast("VlaPolicy", deepcopy(policy))
    add_head_of_robot(model, role, config, seed=config.run.seed)
    return model


def make_vla(config: RunConfig, spaces: Spaces, device: torch.device, rank: int | None = None) -> VlaPolicy:
    """The policy of a run; `rank` as in models.loading.load_policy. Raises ModelError."""
    processor, seed = make_processor(config.model, spaces), config.run.seed
    levels = {"level": config.robot_logprob_level, "entropy_level": config.algorithm.entropy_level}
    is_hollow = bool(rank) and config.model.low_memory_load
    module: Any = load_module(config.model, seed, device, is_hollow=is_hollow)
    if processor.config.kind == "pi0":
        policy: VlaPolicy = Pi0Policy(module, processor, seed=seed, **levels)
    else:
        policy = OpenVlaPolicy(module, processor, temperature=config.rollout.sampling.temperature, **levels)
    policy.set_gradient_checkpointing(config.train.gradient_checkpointing)
    return policy


def load_module(model: ModelConfig, seed: int, device: torch.device, *, is_hollow: bool = False) -> nn.Module:
    """The module in `model.path`, with adapters if configured. With `is_hollow` its weights are not read, and
    take no memory until they are written to. Raises ModelError."""
    vla, dtype = model.settings_of_vla, TORCH_DTYPES[model.dtype]
    assert model.path is not None, "the plan checks that it is there"
    if vla.kind == "pi0":
        module: Any = load_pi0(model.path, dtype=dtype, device=device, is_hollow=is_hollow)
    else:
        module = load_openvla(
            model.path, dtype=dtype, device=device, use_proprio=vla.use_proprio, is_hollow=is_hollow
        )
    if model.lora is not None:
        add_adapters(module, model.lora, seed=seed)
        module.to(device)
    return module


def export_vla(config: RunConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder in the layout of `model.path`, with trained `weights` (VlaPolicy.named_weights) and
    adapters merged. Raises CheckpointError and ModelError."""
    model = config.model
    module: Any = load_module(model, config.run.seed, torch.device("cpu"))
    named = named_adapters(module) if model.lora is not None else unique_weights(module)
    # Folders of the model have no such parts.
    beside = ("value_layers.", "noise_net.", f"{config.critic.head_name}.")
    copy_weights({name: tensor for name, tensor in weights.items() if not name.startswith(beside)}, named)
    export_with(partial(_save, module, model), folder)


def _save(module: Any, model: ModelConfig, folder: Path) -> None:
    assert model.path is not None, "load_module checks it"
    source = local_folder(model.path, "model.path")
    tokenizer = _tokenizer(model, str(source))
    if isinstance(module, OpenVla):
        save_openvla(dict(merged_weights(module)), module.checkpoint, tokenizer, folder)
        return
    module.save_pretrained(folder, state_dict=dict(merged_weights(module)))
    tokenizer.save_pretrained(folder)
    for file in (source / name for name in _STATISTICS):
        if file.is_file():
            shutil.copy(file, folder)


def _tokenizer(model: ModelConfig, folder: str) -> PreTrainedTokenizerBase:
    key = "model.path" if model.tokenizer is None else "model.tokenizer"
    # transformers would look for the class of an OpenVLA config, which it does not know, and warn
    options = {} if model.settings_of_vla.kind == "pi0" else {"config": PreTrainedConfig()}
    path = local_path(model.tokenizer or folder, key)
    return read_tokenizer(path, key, model.trust_remote_code, **options)


def _statistics(folder: Path) -> Mapping[str, Any]:
    """Statistics by data set, beside pi0's weights: as of OpenVLA, or openpi's of a single one."""
    for name in _STATISTICS:
        if (file := folder / name).is_file():
            statistics = read_json(file, f"model.path={folder}")
            if "norm_stats" in statistics:
                return {
                    "norm_stats": {
                        _OPENPI_NAMES.get(part, part): entry
                        for part, entry in statistics["norm_stats"].items()
                    }
                }
            return statistics
    raise ModelError(
        f"model.path={folder} has no statistics of actions and states ({' or '.join(_STATISTICS)}); copy "
        "them from the data that the checkpoint was fine-tuned on"
    )
