"""Models that DeepSpeed cannot train. Does not import DeepSpeed."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from braid.errors import ModelError
from braid.models.base import TrainableModel
from braid.models.indexed import indexers
from braid.models.stateful import stateful_layers

_WITHOUT_IMAGES = ("llava", "gemma4")
"""Types of models that differ on two ranks from one process: ranks with and without images record different
orders of LLaVA's modules, and log-probs of Gemma 4 change by more than rounding."""


def check_images(model: TrainableModel) -> None:
    """Raise ModelError for a model that reads images, of a type that does not match one process."""
    vision = model.vision
    if vision is not None and (kind := vision.config.model_type) in _WITHOUT_IMAGES:
        raise ModelError(
            f"train.backend=deepspeed cannot train a model of type {kind} with images: on several ranks it "
            "differs from one process; set it to fsdp2 or fsdp, or remove model.vision"
        )


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise ModelError for an architecture of transformers whose layers carry a state or have an indexer.
    Others, of code that comes with a model, are checked when they are loaded."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        check_layers(model)


def check_layers(model: nn.Module) -> None:
    """Raise ModelError for a model whose layers carry a state or have an indexer."""
    if any(stateful_layers(model)) or any(indexers(model)):
        raise ModelError(
            "train.backend=deepspeed cannot train models with layers that carry a state or have an indexer: "
            "ZeRO-3 gathers weights at every call within them, and ranks call them a different number of "
            "times; use fsdp2 or fsdp"
        )
