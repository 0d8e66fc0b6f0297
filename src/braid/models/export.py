"""Atomic export of trained models to Hugging Face folders."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from braid.errors import CheckpointError, disk_fix

from .causal_lm import CausalLM
from .loading import save_pretrained

logger = logging.getLogger(__name__)


def export_model(lm: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer to `folder`, loadable by AutoModelForCausalLM and AutoTokenizer. See
    export_with."""
    export_with(partial(save_pretrained, lm, tokenizer), folder)


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
