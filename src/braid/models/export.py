"""Atomic export of trained models to Hugging Face folders."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braid.config.schema import RunConfig
from braid.errors import CheckpointError, disk_fix
from braid.plan import longest_row

from .base import copy_weights
from .causal_lm import CausalLM
from .loading import load_policy, save_pretrained
from .tokenizer import load_tokenizer

logger = logging.getLogger(__name__)


def export_model(lm: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer to `folder`, loadable by AutoModelForCausalLM and AutoTokenizer. See
    export_with."""
    export_with(partial(save_pretrained, lm, tokenizer), folder)


def export_language_model(config: RunConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the policy of a run with trained `weights`, merged with its adapters. Raises CheckpointError and
    ModelError."""
    lm = load_policy(
        config.model,
        temperature=1.0,
        seed=config.run.seed,
        device=torch.device("cpu"),
        longest=longest_row(config),
        images=config.data.image,
    )
    copy_weights(weights, lm.named_weights())
    export_model(lm, load_tokenizer(config.model), folder)


def export_with(save: Callable[[Path], None], folder: Path) -> None:
    """Write `folder` with `save`.

    A new folder is created by a single rename. In an existing folder, files are replaced one by one, and
    other files stay. Raises CheckpointError when the folder cannot be written.
    """
    # saving with transformers imports an installed DeepSpeed, which tells standard output of its accelerator
    logging.getLogger("DeepSpeed").addFilter(_is_no_note)
    beside = folder.with_name(f".saving_{folder.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save(beside)
        if folder.exists():
            for file in sorted(beside.iterdir()):
                os.replace(file, folder / file.name)
        else:
            beside.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model folder {folder}: {error.strerror or error}; {disk_fix(error)}, or "
            "choose another folder"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _is_no_note(record: logging.LogRecord) -> bool:
    return "accelerator to" not in record.getMessage()
