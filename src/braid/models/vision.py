"""Images in prompts: the tokens that stand for each, its features, and positions around it.

The processor of the model's folder is the only source of placeholders and pixels, for engines and trainers
alike. The features of a pass's distinct images are computed once and handed to transformers' own module,
which puts them at the placeholders; so there is no code for an architecture but the table `_FAMILIES`.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from braid.config.data import ImageLimits
from braid.config.model import ModelConfig, VisionConfig
from braid.errors import ModelError
from braid.images import image_of, opened
from braid.types import Image, Placed

from .attention import ImageBlocks
from .build import config_of, processor_of, token_ids
from .folders import read
from .tokenizer import model_path
from .transfer import to_device

_CACHED_BYTES = 256 << 20
_PROJECTOR = re.compile(r"(merger|projector|connector)")
"""In the names of layers that project the tower's features to the language model's size."""


class Pixels(NamedTuple):
    """An image as the vision tower reads it: the processor's `inputs`, the text that takes the place of its
    placeholder, and the rows and columns of its tokens, (0, 0) where their positions are in one dimension."""

    inputs: dict[str, Tensor]
    text: str
    grid: tuple[int, int]


class Span(NamedTuple):
    """Positions `start` to `stop` of a sequence with these images, those before `start` among them."""

    start: int
    stop: int
    images: Sequence[Placed]


@dataclass(frozen=True, slots=True)
class Sight:
    """What a pass over T positions reads besides tokens: the tower's output for the images in the order of
    their placeholders (None if the pass begins after them), coordinates [3, T], or None where positions are
    in one dimension, and which positions are of one image where these see each other."""

    features: Any
    coordinates: Tensor | None
    blocks: ImageBlocks | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    """How the processors of some architectures write an image: `text(vision, inputs)` replaces the
    placeholder that the chat template writes. `mark` is the tokenizer's attribute with this placeholder.
    `inputs` are those of the tower, joined along `axis`; `options` are the processor's. The positions of a
    image `see` each other: never, in all layers, or in those with a window."""

    text: Callable[[Vision, Mapping[str, Any]], str]
    mark: str = "image_token"
    has_grid: bool = False
    inputs: tuple[str, ...] = ("pixel_values",)
    axis: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    see: Literal["never", "always", "in_windows"] = "never"


def _of_patches(vision: Vision, inputs: Mapping[str, Tensor]) -> str:
    return vision.token * (int(inputs["image_grid_thw"].prod()) // vision.merge**2)


def _of_crop(vision: Vision, inputs: Mapping[str, Tensor]) -> str:
    height, width = inputs["pixel_values"].shape[-2:]
    size = vision.config.vision_config.patch_size
    return vision.token * (int(height) // size * (int(width) // size))


def _of_tiles(vision: Vision, inputs: Mapping[str, Tensor]) -> str:
    tokenizer: Any = vision.tokenizer
    num = vision.config.image_seq_length * len(inputs["pixel_values"])
    return f"{tokenizer.start_image_token}{vision.token * num}{tokenizer.end_image_token}"


def _of_soft_tokens(vision: Vision, _: Mapping[str, Any]) -> str:
    tokenizer: Any = vision.tokenizer
    num = vision.config.mm_tokens_per_image
    return f"\n\n{tokenizer.boi_token}{vision.token * num}{tokenizer.eoi_token}\n\n"


def _of_pooled(vision: Vision, inputs: Mapping[str, Any]) -> str:
    tokenizer: Any = vision.tokenizer
    (num,) = inputs["num_soft_tokens_per_image"]
    return f"{tokenizer.boi_token}{vision.token * int(num)}{tokenizer.eoi_token}"


def _of_numbered_tiles(vision: Vision, inputs: Mapping[str, Any]) -> str:
    tokenizer: Any = vision.tokenizer
    around = getattr(tokenizer, "fake_image_token", "<fake_token_around_image>")
    whole = getattr(tokenizer, "global_image_token", "<global-img>")
    tower = vision.config.vision_config
    num = (tower.image_size // tower.patch_size // vision.config.scale_factor) ** 2
    [[rows]], [[columns]] = inputs["rows"], inputs["cols"]
    text = ""
    for row in range(rows):
        text += "".join(f"{around}<row_{row + 1}_col_{i + 1}>{vision.token * num}" for i in range(columns))
        text += "\n"
    return f"{text}{chr(10) if rows else ''}{around}{whole}{vision.token * num}{around}"


_PATCHES = _Family(_of_patches, has_grid=True, inputs=("pixel_values", "image_grid_thw"))
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"), _PATCHES),
    "internvl": _Family(_of_tiles, mark="context_image_token"),
    "llava": _Family(_of_crop),
    "gemma3": _Family(_of_soft_tokens, mark="boi_token", see="always"),
    "gemma4": _Family(_of_pooled, inputs=("pixel_values", "image_position_ids"), see="in_windows"),
    "smolvlm": _Family(
        _of_numbered_tiles,
        inputs=("pixel_values", "pixel_attention_mask"),
        axis=1,
        options={"return_row_col_info": True},
    ),
}


class Vision:
    """How one model reads images. `is_trained`: the tower or its projector are, with the peak learning rate
    `lr` if it is not None."""

    is_trained = False
    lr: float | None = None

    def __init__(self, config: PreTrainedConfig, processor: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """`config` is the whole model's, `processor` its image processor. Raises ModelError for an
        architecture whose images braid cannot place."""
        family = _FAMILIES.get(config.model_type)
        if family is None:
            raise ModelError(
                f"images of models of type {config.model_type} are not supported; these are: "
                f"{', '.join(_FAMILIES)}"
            )
        self.config, self.tokenizer, self.processor, self._family = config, tokenizer, processor, family
        token_id = getattr(config, "image_token_id", None)
        self.token_id: int = config.image_token_index if token_id is None else token_id
        self.token = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self.merge: int = getattr(config.vision_config, "spatial_merge_size", 1)
        self.mark: str = getattr(tokenizer, family.mark, None) or self.token
        self.placeholder = cast("int", tokenizer.convert_tokens_to_ids(self.mark))
        ids = (getattr(config, name, None) for name in ("video_token_id", "audio_token_id"))
        self.reserved = tuple({self.token_id, self.placeholder, *(i for i in ids if type(i) is int)})
        self._recent: OrderedDict[str, Pixels] = OrderedDict()
        self._bytes = 0

    def limit(self, limits: ImageLimits) -> None:
        """Scale images to these limits. Raises ModelError for a model whose images all have one size."""
        bounds = {"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels}
        chosen = {name: pixels for name, pixels in bounds.items() if pixels is not None}
        if chosen and not self._family.has_grid:
            raise ModelError(
                f"data.image: models of type {self.config.model_type} resize every image to a fixed size; "
                "remove data.image"
            )
        for name, pixels in chosen.items():  # areas, in spite of their names
            self.processor.size[name] = pixels

    def read(self, image: Image) -> Pixels:
        """The image for the tower; recent ones are kept."""
        if (pixels := self._recent.get(image.key)) is not None:
            self._recent.move_to_end(image.key)
            return pixels
        inputs = dict(self.processor([opened(image)], return_tensors="pt", **self._family.options))
        tensors = {name: inputs[name] for name in self._family.inputs}
        grid = (0, 0)
        if self._family.has_grid:
            rows, columns = (tensors["image_grid_thw"][0, 1:] // self.merge).tolist()
            grid = rows, columns
        pixels = self._recent[image.key] = Pixels(tensors, self._family.text(self, inputs), grid)
        self._bytes += _size(pixels)
        while self._bytes > _CACHED_BYTES and len(self._recent) > 1:
            self._bytes -= _size(self._recent.popitem(last=False)[1])
        return pixels

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: without the images that were read."""
        return {**vars(self), "_recent": OrderedDict(), "_bytes": 0}

    def num_tokens(self, image: Image) -> int:
        """The number of tokens that stand for an image. It is decoded, but where its size tells the number
        not prepared for the tower. Raises ValueError if it cannot be read."""
        count = getattr(self.processor, "get_number_of_image_patches", None)
        if image.key in self._recent or not self._family.has_grid or count is None:
            return len(self._tokens(image))
        width, height = opened(image).size
        return count(height, width, {}) // self.merge**2

    def scaled_size(self, image: Image) -> tuple[int, int]:
        """Width and height in pixels of an image as the tower reads it; its own for a model that resizes all
        images to one size."""
        if not self._family.has_grid:
            return opened(image).size
        rows, columns = self.read(image).grid
        pixels = self.merge * self.config.vision_config.patch_size
        return columns * pixels, rows * pixels

    def _tokens(self, image: Image) -> list[int]:
        return self.tokenizer.encode(self.read(image).text, add_special_tokens=False)

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[list[int], tuple[Placed, ...]]:
        """Token ids with the placeholders of `images`, in order, replaced by the tokens that stand for them;
        and where these are. Raises ModelError if the numbers of placeholders and images differ."""
        out, placed, end = list[int](), list[Placed](), 0
        for place, image in zip(self.places(ids, len(images)), images, strict=True):
            out += ids[end:place]
            tokens = self._tokens(image)
            placed.append(Placed(len(out), len(tokens), image))
            out += tokens
            end = place + 1
        return [*out, *ids[end:]], tuple(placed)

    def places(self, ids: Sequence[int], num_images: int) -> list[int]:
        """Where the placeholders of `num_images` images are. Raises ModelError if there are not as many."""
        places = [place for place, token in enumerate(ids) if token == self.placeholder]
        if len(places) != num_images:
            raise ModelError(
                f"the prompt has {num_images} images, but {len(places)} placeholders ({self.mark}) once it "
                "is rendered: the chat template does not show images in messages of this role, or a text "
                "has a placeholder"
            )
        return places

    def coordinates(self, length: int, images: Sequence[Placed]) -> NDArray[np.int64] | None:
        """Positions [3, length + 1] of a sequence's tokens, and of the one after it, in time, rows and
        columns (Qwen2-VL, arXiv 2409.12191): those of an image start together, and the next token follows
        its largest. None if positions are in one dimension."""
        if not self._family.has_grid:
            return None
        out, at, following = np.empty((3, length + 1), np.int64), 0, 0
        for start, num, image in images:
            out[:, at:start] = following + np.arange(start - at)
            following += start - at
            rows, columns = self.read(image).grid
            out[:, start : start + num] = following + np.indices((1, rows, columns)).reshape(3, -1)
            at, following = start + num, following + max(rows, columns)
        out[:, at:] = following + np.arange(length + 1 - at)
        return out

    def shift(self, images: Sequence[Placed]) -> int:
        """How far positions are ahead of indices after these images."""
        if not self._family.has_grid:
            return 0
        return sum(max(self.read(image).grid) - num for _, num, image in images)

    def sight(self, backbone: PreTrainedModel, spans: Sequence[Span], device: torch.device) -> Sight | None:
        """What a pass over `spans`, one after the other, reads; None if there are no images in or before
        them. Each image goes through the tower of `backbone` once."""
        if not any(span.images for span in spans):
            return None
        placed = [one.image for span in spans for one in span.images if one.start >= span.start]
        features = self._features(backbone, placed, device) if placed else None
        blocks = self._blocks(spans, device) if placed else None
        lines = [(span, self.coordinates(span.stop, span.images)) for span in spans]
        if lines[0][1] is None:
            return Sight(features, None, blocks)
        parts = [line[:, span.start : span.stop] for span, line in lines if line is not None]
        return Sight(features, to_device(torch.from_numpy(np.concatenate(parts, axis=1)), device))

    def unseen(self, backbone: PreTrainedModel, device: torch.device) -> Tensor:
        """0, computed by the tower of `backbone` from a blank image: its gradient by every weight is that of
        an image which no row has, 0. For ranks that share the tower's shards with one whose rows have
        images."""
        inputs = dict(self.read(_blank()).inputs)
        if not self._family.has_grid:  # one tile of it is enough
            inputs = {name: value.narrow(self._family.axis, 0, 1) for name, value in inputs.items()}
        out = self._tower(backbone, inputs, device)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        parts = [part for layer in layers for part in (layer if isinstance(layer, tuple | list) else [layer])]
        return torch.stack([(part * 0.0).sum() for part in parts]).sum()

    def _blocks(self, spans: Sequence[Span], device: torch.device) -> ImageBlocks | None:
        """Which positions are of one image, where these see each other."""
        rule = self._family.see
        if rule == "in_windows":
            config = self.config.get_text_config(decoder=True)
            rule = "in_windows" if config.use_bidirectional_attention == "vision" else "never"
        if rule == "never":
            return None
        lines: list[NDArray[np.int64]] = []
        for span in spans:
            line = np.full(span.stop, -1)
            for number, (start, num, image) in enumerate(span.images):
                tokens = np.array(self._tokens(image)) == self.token_id
                line[start : start + num][tokens] = number
            lines.append(line[span.start :])
        numbers = to_device(torch.from_numpy(np.concatenate(lines)), device)
        return ImageBlocks(numbers, only_in_windows=rule == "in_windows")

    def plain_inputs(self, ids: Tensor, images: Sequence[Placed]) -> dict[str, Tensor]:
        """What transformers' own forward pass of a row [1, L] takes beside its tokens."""
        if not images:
            return {}
        inputs = self._joined([self.read(one.image).inputs for one in images])
        if self._family.has_grid or self._family.see != "never":
            name = "token_type_ids" if self._family.see == "always" else "mm_token_type_ids"
            inputs[name] = (ids == self.token_id).int()
        return {name: to_device(value, ids.device) for name, value in inputs.items()}

    def _joined(self, inputs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([one[name] for one in inputs], self._family.axis) for name in inputs[0]}

    def _features(self, backbone: Any, images: Sequence[Image], device: torch.device) -> Any:
        """The tower's output as if it had read `images`, which may repeat some."""
        distinct = list(dict.fromkeys(images))
        pixels = [self.read(image).inputs for image in distinct]
        joined = self._joined(pixels)
        tiles = [one["pixel_values"].shape[self._family.axis] for one in pixels]
        out = self._tower(backbone, joined, device)
        order = [distinct.index(image) for image in images]
        if order == list(range(len(distinct))):
            return out
        out, pooled = copy.copy(out), out.pooler_output
        if isinstance(pooled, Tensor):
            parts = pooled.split(tiles)
            out.pooler_output = torch.cat([parts[i] for i in order])
        else:
            out.pooler_output = tuple(pooled[i] for i in order)
        if getattr(out, "deepstack_features", None):
            out.deepstack_features = [tuple(layer[i] for i in order) for layer in out.deepstack_features]
        return out

    def _tower(self, backbone: Any, inputs: Mapping[str, Tensor], device: torch.device) -> Any:
        return backbone.get_image_features(
            **{name: to_device(value, device) for name, value in inputs.items()}, return_dict=True
        )


def load_vision(
    config: ModelConfig, limits: ImageLimits, tokenizer: PreTrainedTokenizerBase
) -> Vision | None:
    """How the model of a config reads images; None if it reads only text. Raises ModelError."""
    if config.vision is None:
        return None
    if config.build is not None:
        model_config = config_of(config.build, **token_ids(tokenizer))
        assert config.build.vision_tower is not None, "the plan refuses images for models without a tower"
        processor = processor_of(config.build.vision_tower)
    else:
        path, remote = model_path(config), {"trust_remote_code": config.trust_remote_code}
        model_config = read(path, "model.path", "vision-language model", AutoConfig.from_pretrained, **remote)
        load = AutoImageProcessor.from_pretrained
        processor = read(path, "model.path", "image processor", load, backend="pil", **remote)
    vision = Vision(model_config, processor, tokenizer)
    vision.limit(limits)
    vision.is_trained, vision.lr = config.vision.train != "none", config.vision.lr
    return vision


def modules_of_tower(model: PreTrainedModel) -> set[str]:
    """Names of the modules of a vision-language model that are not of its language model; none for others."""
    if not hasattr(getattr(model, "config", None), "vision_config"):  # a robot's policy has no such config
        return set()
    modules = {id(module) for module in (*model.get_decoder().modules(), model.get_output_embeddings())}
    return {name for name, module in model.named_modules() if id(module) not in modules}


def tower_parameters(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """Parameters of the vision tower and its projector, by name."""
    tower = modules_of_tower(model)
    return {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] in tower}


def freeze(model: PreTrainedModel, config: VisionConfig) -> None:
    """Freeze what `config` does not train of the vision tower and its projector."""
    for name, parameter in tower_parameters(model).items():
        is_projector = _PROJECTOR.search(name) is not None
        parameter.requires_grad_(config.train == "all" or (config.train == "projector" and is_projector))


@cache
def _blank() -> Image:
    return image_of(np.zeros((32, 32, 3), np.uint8), Path())


def _size(pixels: Pixels) -> int:
    return sum(value.nbytes for value in pixels.inputs.values())
