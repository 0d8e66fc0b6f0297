"""Models from what the config names: a folder, a hub name, or sizes. And back into a folder.

Everything wrong with a folder is found here and told as a ModelError.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.initialization import no_init_weights

from braid.config.model import DType, ModelConfig
from braid.config.train import TrainConfig
from braid.errors import ModelError

from .build import build_model
from .causal_lm import CausalLM
from .compiling import check_compiler
from .folders import UNREADABLE, check_folder, unusable
from .fused import fuse
from .kernels import check_attention
from .liger import check_liger, use_liger_kernels
from .lora import add_adapters
from .selfcheck import check_against_plain
from .tokenizer import load_tokenizer, model_path

_log = logging.getLogger(__name__)

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def load_policy(
    config: ModelConfig,
    *,
    temperature: float,
    seed: int,
    device: torch.device,
    train: TrainConfig | None = None,
    key: str = "model",
    rank: int | None = None,
    longest: int | None = None,
) -> CausalLM:
    """The language model that `config` names, checked, on `device`. `seed` is that of random weights (`build`, `lora`); `key`
    is the section of the run's config that errors should name; `train` says which kernels compute what (the schema's defaults
    when None).

    `longest` is the run's longest row in tokens, any length when None: beyond it, nothing about the model is checked.

    With a `rank` the model is to be shared out among ranks, and still in host memory. With `low_memory_load` rank 0 alone
    reads the files; what the others have for weights takes no memory until it is written.

    Raises ModelError when there is none, when it cannot be read, when braid cannot run its architecture, or when this
    machine lacks what a kernel needs.
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
    if not train.liger_kernels:
        fuse(model)
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
    if not is_hollow:
        check_against_plain(lm, longest)
    if train.liger_kernels:  # which cannot run where the weights may still be
        use_liger_kernels(model)
    return lm


def _set_config_tokens(model: PreTrainedModel, config: ModelConfig) -> None:
    """Give what an export of the model says of its tokens the end and padding tokens of the config."""
    for key in ("eos_token_id", "pad_token_id"):
        if (number := getattr(config, key)) is not None:
            for part in (model.config, model.generation_config):
                if part is not None:
                    setattr(part, key, number)


def save_pretrained(lm: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a folder that AutoModelForCausalLM and AutoTokenizer load; nothing of braid is left in it, and adapters are
    merged into the weights that they belong to."""
    lm.model.save_pretrained(folder, state_dict=dict(lm.merged_weights()))
    tokenizer.save_pretrained(folder)


def _pretrained(config: ModelConfig, key: str, device: torch.device, *, is_hollow: bool) -> PreTrainedModel:
    """The model of a folder; one that `is_hollow` without the weights in it, in host memory that nothing was written to."""
    path = model_path(config)
    check_folder(path, key, needs_weights=True)
    options: dict[str, Any] = {
        "dtype": TORCH_DTYPES[config.dtype],
        "trust_remote_code": config.trust_remote_code,
        "attn_implementation": "eager",
    }
    try:
        if is_hollow:
            own = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code)
            with no_init_weights():
                hollow = AutoModelForCausalLM.from_config(own, **options)
            hollow.tie_weights()
            return hollow
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            output_loading_info=True,
            device_map={"": device} if config.low_memory_load else None,
            **options,
        )
    except UNREADABLE as error:
        raise ModelError(unusable(path, key, "causal language model", error)) from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{key}={path}: its files lack {len(missing)} of the weights of {type(model).__name__}, among them "
            f"{missing[0]}; they would start at random. Complete the folder or choose another"
        )
    return model


def _check_architecture(model: PreTrainedModel, expected: str | None, key: str) -> None:
    """Raise ModelError when the model is of another architecture than the config says. Names are transformers' model types;
    `qwen2.5` and the like stand for the type they have (qwen2)."""
    is_of = model.config.get_text_config(decoder=True).model_type
    if expected is not None and re.sub(r"\.\d+$", "", expected.lower()) not in (
        is_of,
        model.config.model_type,
    ):
        raise ModelError(
            f"model.architecture={expected}, but {key} is a model of type {is_of}; correct one of the two, or leave "
            "model.architecture out"
        )


def _note_dropout(model: PreTrainedModel) -> None:
    """Say that dropout stays off; the same tokens must have the same log-probs in rollout and in training."""
    values = model.config.get_text_config(decoder=True).to_dict()
    rates = {
        k: v for k, v in values.items() if ("dropout" in k or "pdrop" in k) and isinstance(v, float) and v > 0
    }
    if rates:
        _log.info(
            "the model's %s stays off: log-probs must not be random",
            ", ".join(f"{k}={v}" for k, v in rates.items()),
        )
