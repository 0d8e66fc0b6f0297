"""Reward models that were trained on pairs, as folders that transformers and the reward part `model` load."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from braid.config.schema import RunConfig
from braid.errors import ModelError, listed

from .causal_lm import CausalLM
from .export import export_with
from .loading import load_policy
from .tokenizer import load_tokenizer

HEAD_NAME = "score"
"""Name of the head of transformers' sequence classifiers."""


def check_classifies(lm: CausalLM) -> None:
    """Raise ModelError if transformers has no sequence classifier of the model's architecture."""
    if type(lm.config) not in AutoModelForSequenceClassification._model_mapping:  # pyright: ignore[reportAttributeAccessIssue]
        raise ModelError(
            f"transformers has no sequence classifier for models of type {lm.config.model_type}, so the "
            "reward model could not be loaded; choose another architecture (model.path or model.build)"
        )


def export_reward_model(
    config: RunConfig,
    weights: Mapping[str, Tensor],
    scores: Mapping[str, float],
    folder: Path,
    *,
    plain_template: str,
) -> None:
    """Write trained `weights` of the run of `config` to `folder`, loadable by
    AutoModelForSequenceClassification, with the `mean` and `std` of its `scores` in its config, where they
    have been measured. `plain_template` is the chat template that training without one amounts to. Raises
    CheckpointError and ModelError."""
    lm = load_policy(config.model, temperature=1.0, seed=config.run.seed, device=torch.device("cpu"))
    tokenizer = load_tokenizer(config.model)
    if config.data.use_chat_template == "never" or not tokenizer.chat_template:
        tokenizer.chat_template = plain_template
    settings = deepcopy(lm.config)
    settings._attn_implementation = "eager"
    settings.num_labels, settings.pad_token_id = 1, tokenizer.pad_token_id
    for name, value in scores.items():
        setattr(settings, name, value)
    model = AutoModelForSequenceClassification.from_config(settings, dtype=lm.model.dtype)
    loaded = model.load_state_dict(dict(weights), strict=False)
    faults = {"missing": loaded.missing_keys, "unknown": loaded.unexpected_keys}
    if faults := {what: names for what, names in faults.items() if names}:
        raise ModelError(
            f"the weights are not those of {type(model).__name__}: {listed(faults)}; export them with the "
            "model (model.path or model.build) that they were trained with"
        )
    export_with(partial(_save, model, tokenizer), folder)


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
