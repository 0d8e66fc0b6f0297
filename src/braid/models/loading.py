"""Loading of models from a folder, a hub name or given sizes, and saving to a folder."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from braid.config.data import ImageLimits
from braid.config.model import DType, ModelConfig
from braid.config.train import TrainConfig
from braid.errors import ModelError

from .build import build_model
from .causal_lm import CausalLM
from .compiling import check_compiler
from .folders import read, read_model
from .fused import fuse
from .kernels import check_attention, check_liger, use_liger_kernels
from .lora import add_adapters
from .selfcheck import check_against_plain
from .tokenizer import load_tokenizer, model_path
from .vision import freeze, load_vision

_log = logging.getLogger(__name__)

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def load_policy(  # noqa: PLR0913
    config: ModelConfig,
    *,
    temperature: float,
    seed: int,
    device: torch.device,
    train: TrainConfig | None = None,
    key: str = "model",
    rank: int | None = None,
    longest: int | None = None,
    images: ImageLimits | None = None,
) -> CausalLM:
    """Load the language model of `config` to `device` and check it.

    `seed` is used for random weights (`build`, `lora`); `key` is the config section named in errors; `train`
    selects the kernels (default: the schema's defaults); `longest` is the run's longest row in tokens (None:
    any length), beyond which the model is not checked. `images` are the limits of images.

    With `rank` the model stays in host memory, to be sharded over ranks. With `low_memory_load` only rank 0
    reads the files; the weights of the others take no memory until they are written to. Raises ModelError.
    """
    train = train or TrainConfig()
    check_attention(config.attention, device)
    if train.liger_kernels:
        check_liger(device)
    if train.compile:
        check_compiler(device)
    home = device if rank is None else torch.device("cpu")
    is_hollow = bool(rank) and config.low_memory_load
    if config.build is not None:
        model = build_model(config.build, load_tokenizer(config), dtype=TORCH_DTYPES[config.dtype], seed=seed)
    else:
        model = _pretrained(config, f"{key}.path", home, is_hollow=is_hollow)
        _set_config_tokens(model, config)
        _note_dropout(model)
    _check_architecture(model, config.architecture, key)
    vision = None
    if config.vision is not None:
        vision = load_vision(config, images or ImageLimits(), load_tokenizer(config))
        freeze(model, config.vision)
    if not train.liger_kernels:
        fuse(model, compiles=config.attention == "compiled")
    if config.lora is not None:
        add_adapters(model, config.lora, seed=seed)
    model.to(home)  # pyright: ignore[reportArgumentType]
    lm = CausalLM(
        model,
        temperature=temperature,
        chunk_bytes=train.logprob_chunk_bytes,
        attention=config.attention,
        compiles=train.compile,
    )
    lm.vision = vision
    if not is_hollow:
        check_against_plain(lm, longest)
    if train.liger_kernels:  # after the check: the weights may still be on the host, where Liger cannot run
        use_liger_kernels(model)
    return lm


def _set_config_tokens(model: PreTrainedModel, config: ModelConfig) -> None:
    """Set end and padding tokens of the config in the model's own config and generation config, which exports
    contain."""
    tokens = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    for part in (model.config, model.generation_config):
        if part is not None:
            vars(part).update({key: number for key, number in tokens.items() if number is not None})


def save_pretrained(lm: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a plain Hugging Face folder that AutoModelForCausalLM and AutoTokenizer load, with adapters
    merged into the weights."""
    lm.model.save_pretrained(folder, state_dict=dict(lm.merged_weights()))
    tokenizer.save_pretrained(folder)
    if lm.vision is not None:
        lm.vision.processor.save_pretrained(folder)


def _pretrained(config: ModelConfig, key: str, device: torch.device, *, is_hollow: bool) -> PreTrainedModel:
    """Load the model of a folder. With `is_hollow` its weights are not read; they are uninitialized host
    memory."""
    path, remote = model_path(config), {"trust_remote_code": config.trust_remote_code}
    options: dict[str, Any] = {"dtype": TORCH_DTYPES[config.dtype], "attn_implementation": "eager", **remote}
    auto = AutoModelForCausalLM if config.vision is None else AutoModelForImageTextToText
    what = "causal language model" if config.vision is None else "vision-language model"
    if not is_hollow:
        place = {"": device} if config.low_memory_load else None
        return read_model(path, key, what, auto.from_pretrained, device_map=place, **options)
    model_config = read(path, key, what, AutoConfig.from_pretrained, **remote)
    with no_init_weights():
        model = auto.from_config(model_config, **options)
    model.tie_weights()
    return model


def _check_architecture(model: PreTrainedModel, expected: str | None, key: str) -> None:
    """Raise ModelError if the model's architecture is not the one that the config expects. Names are
    transformers' model types; a minor version as in `qwen2.5` is ignored (qwen2)."""
    is_of = model.config.get_text_config(decoder=True).model_type
    name = is_of if expected is None else re.sub(r"\.\d+$", "", expected.lower())
    if name not in (is_of, model.config.model_type):
        raise ModelError(
            f"model.architecture={expected}, but {key} is a model of type {is_of}; change one of them, or "
            "remove model.architecture"
        )


def _note_dropout(model: PreTrainedModel) -> None:
    """Log that dropout stays off: the same tokens must have the same log-probs in rollout and training."""
    values = model.config.get_text_config(decoder=True).to_dict()
    rates = [f"{k}={v}" for k, v in values.items() if "drop" in k and isinstance(v, float) and v > 0]
    if rates:
        _log.info("disabled dropout of the model (%s): log-probs must be deterministic", ", ".join(rates))
