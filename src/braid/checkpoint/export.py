"""Hugging Face folders of trained models, there whole or not at all."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from braid.errors import CheckpointError
from braid.models.causal_lm import CausalLM
from braid.models.loading import save_pretrained

logger = logging.getLogger(__name__)


def export_model(lm: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write model and tokenizer to `folder`, which AutoModelForCausalLM and AutoTokenizer load.

    A new folder appears in one move. In one that is there each file takes the place of its old self, and other files stay.
    Raises CheckpointError when it cannot be written.
    """
    beside = folder.with_name(f".saving_{folder.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        save_pretrained(lm, tokenizer, beside)
        if folder.exists():
            for file in sorted(beside.iterdir()):
                os.replace(file, folder / file.name)
        else:
            beside.rename(folder)
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model folder {folder}: {error.strerror or error}; make room or give another folder"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
