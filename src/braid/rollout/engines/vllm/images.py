"""Images in vLLM's requests: token ids and pixels are those of braid, and vLLM processes neither again.

vLLM's own processors need torchvision, expand prompts by themselves, and round differently. What remains of
them is how a model's inputs are split by image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import BatchFeature
from vllm.config import VllmConfig  # noqa: TID251
from vllm.inputs.engine import MultiModalInput, mm_input  # noqa: TID251
from vllm.model_executor.model_loader import get_model_architecture  # noqa: TID251
from vllm.multimodal import MULTIMODAL_REGISTRY  # noqa: TID251
from vllm.multimodal.inputs import (  # noqa: TID251
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseMultiModalProcessor  # noqa: TID251

from braid.models.vision import Vision
from braid.types import Image, Placed


class _Limits:
    """Mixin of vLLM's description of a model's inputs: images only, of any number, at most as long as a
    sequence."""

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(mm_counts, seq_len)


class ImageInputs:
    """Makes requests with images for the model of a config of vLLM. Before the engine is created, since
    vLLM asks for the model's limits then."""

    def __init__(self, vision: Vision, config: VllmConfig) -> None:
        self._vision = vision
        model: Any = get_model_architecture(config.model_config)[0]
        factories = vars(model)["_processor_factory"]
        if not issubclass(factories.info, _Limits):
            info = type(factories.info.__name__, (_Limits, factories.info), {})
            MULTIMODAL_REGISTRY.register_processor(
                factories.processor, info=info, dummy_inputs=factories.dummy_inputs
            )(model)
        self._processor: BaseMultiModalProcessor[Any] = MULTIMODAL_REGISTRY.create_processor(
            config.model_config
        )

    def request(self, prompt_ids: Sequence[int], images: Sequence[Placed]) -> MultiModalInput:
        """A prompt whose images are at the places of `images`. vLLM keeps features, keys and values by the
        images' keys."""
        return mm_input(
            list(prompt_ids),
            MultiModalKwargsItems({"image": [self._item(placed.image) for placed in images]}),
            {"image": [placed.image.key for placed in images]},
            {"image": [self._range(prompt_ids, placed) for placed in images]},
        )

    def _item(self, image: Image) -> MultiModalKwargsItem:
        inputs = BatchFeature(self._vision.read(image).inputs)
        fields = self._processor._get_mm_fields_config(inputs, {})
        (item,) = MultiModalKwargsItems.from_hf_inputs(inputs, fields)["image"]
        return item

    def _range(self, prompt_ids: Sequence[int], placed: Placed) -> PlaceholderRange:
        ids = torch.tensor(prompt_ids[placed.start : placed.start + placed.num])
        is_feature: Tensor = ids == self._vision.token_id
        return PlaceholderRange(placed.start, placed.num, None if is_feature.all() else is_feature)
