"""Reward models: Hugging Face sequence classifiers of any architecture that score conversations."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jinja2
import numpy as np
import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from braid.config.reward import ModelReward
from braid.errors import ModelError, RewardError
from braid.images import image_of, shown_content
from braid.types import Encoded, Image, Message, identity, images_in, text_of
from braid.users import encodable

from .folders import local_path, read, read_chat_template, read_model, read_tokenizer
from .loading import TORCH_DTYPES
from .vision import Vision

_LENGTHS = (7, 4)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Tolerance for scores with padding, relative to 1 + the largest score: a few hundred rounding errors of each
type."""
_UNLIMITED = 10**9
"""Tokenizers without a length limit report a number larger than this."""


def load_classifier(config: ModelReward, *, device: torch.device, key: str) -> SequenceClassifier:
    """Load and check the reward model that the config has at `key`, on `device` unless the config names one.
    Raises ModelError."""
    path = local_path(config.path, f"{key}.path")
    options = {"dtype": TORCH_DTYPES[config.dtype], "trust_remote_code": config.trust_remote_code}
    load = AutoModelForSequenceClassification.from_pretrained
    model = (
        read_model(path, f"{key}.path", "sequence classifier", load, **options).eval().requires_grad_(False)
    )
    model.config.get_text_config().use_cache = False
    _check_label(config, model.config, key)
    where = (path, f"{key}.path")
    if config.tokenizer is not None:
        where = (local_path(config.tokenizer, f"{key}.tokenizer"), f"{key}.tokenizer")
    tokenizer = read_tokenizer(*where, config.trust_remote_code)
    if config.template is not None:
        tokenizer.chat_template = read_chat_template(config.template, f"{key}.template")
    if not tokenizer.chat_template:
        raise ModelError(
            f"{key}: the tokenizer of {where[0]} has no chat template; set {key}.template to a Jinja "
            "template or the path of a .jinja file"
        )
    size = cast("Tensor", model.get_input_embeddings().weight).shape[0]
    if len(tokenizer) > size:
        raise ModelError(
            f"{key}: the tokenizer of {where[0]} has {len(tokenizer)} tokens, but the reward model has "
            f"{size}; use the tokenizer of the reward model"
        )
    place = device if config.device == "auto" else torch.device(config.device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"{key}.device=cuda, but torch finds no GPU; set it to cpu or auto")
    vision = _vision_of(config, model, tokenizer, path, key) if config.images else None
    classifier = SequenceClassifier(model.to(place), tokenizer, config, key=key, vision=vision)  # pyright: ignore[reportArgumentType]
    classifier.check_padding()
    if vision is not None:
        classifier.check_images(vision)
    return classifier


def _vision_of(
    config: ModelReward, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: str, key: str
) -> Vision:
    """How the reward model reads images. Raises ModelError if it, or braid, does not."""
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        raise ModelError(
            f"{key}.images: {type(model).__name__} reads only text; set it to false, or use a judge with "
            "images"
        )
    remote = {"trust_remote_code": config.trust_remote_code}
    load = AutoImageProcessor.from_pretrained
    processor = read(path, f"{key}.path", "image processor", load, backend="pil", **remote)
    return Vision(model.config, processor, tokenizer)


def _check_label(config: ModelReward, settings: PreTrainedConfig, key: str) -> None:
    """Raise ModelError if the config asks for a score that a model with these settings does not have."""
    num_labels = settings.num_labels or 1
    mean, std = getattr(settings, "mean", None), getattr(settings, "std", None)
    if config.label is None and num_labels > 1:
        raise ModelError(
            f"{key}.path={config.path} has {num_labels} outputs; set {key}.label to the index of the score, "
            f"0 to {num_labels - 1}"
        )
    if config.normalize and not (isinstance(mean, int | float) and isinstance(std, int | float) and std > 0):
        raise ModelError(
            f"{key}.normalize=true, but the config.json of {config.path} has no numbers mean and std "
            f"(above 0) of its scores; set {key}.normalize=false"
        )
    if (config.label or 0) >= num_labels:
        raise ModelError(
            f"{key}.label={config.label}, but {config.path} has {num_labels} outputs, numbered from 0"
        )
    if config.activation == "softmax" and num_labels == 1:
        raise ModelError(
            f"{key}.activation=softmax of a single output is always 1; set {key}.activation to none or "
            "sigmoid"
        )


class SequenceClassifier:
    """Scores conversations with the classifier's own forward pass over right-padded batches. In float32 a
    score does not depend on the other rows of its batch, up to rounding."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: ModelReward,
        *,
        key: str,
        vision: Vision | None = None,
    ) -> None:
        self._model, self._tokenizer, self._config, self._key = model, tokenizer, config, key
        self._vision = vision
        self._max_tokens = config.max_tokens or _longest(model, tokenizer)

    def encode(self, messages: Sequence[Message]) -> tuple[Encoded, bool]:
        """Tokens of the templated conversation, and whether they were truncated to the maximum input length.
        Raises RewardError if the template rejects the conversation or does not show its images, or if it is
        too long and `overlong` is error or it has images."""
        content = text_of if self._vision is None else shown_content
        try:
            conversation: Any = [{**message, "content": content(message["content"])} for message in messages]
            text = str(self._tokenizer.apply_chat_template(conversation, tokenize=False))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise RewardError(
                f"the reward model's chat template rejects the roles {roles}: {error}"
            ) from error
        ids: list[int] = self._tokenizer(encodable(text), add_special_tokens=False, verbose=False)[
            "input_ids"
        ]  # pyright: ignore[reportAssignmentType]
        if not ids:
            raise RewardError("the reward model's chat template gives no tokens for the conversation")
        images = ()
        if self._vision is not None:
            try:
                ids, images = self._vision.expand(ids, images_in(messages))
            except (ModelError, ValueError) as error:
                raise RewardError(f"the reward model: {error}") from error
        limit = self._max_tokens
        if limit is None or len(ids) <= limit:
            return Encoded(ids, images), False
        if images:
            raise RewardError(
                f"{len(ids)} tokens with images, which are not cut, but the reward model accepts {limit}"
            )
        match self._config.overlong:
            case "left":
                return Encoded(ids[-limit:]), True
            case "right":
                return Encoded(ids[:limit]), True
            case "error":
                raise RewardError(
                    f"{len(ids)} tokens, but the reward model accepts {limit}; set {self._key}.overlong to "
                    "left or right to cut them"
                )

    def batches(self, rows: Sequence[Encoded]) -> list[list[int]]:
        """Split rows into batches (lists of row indices, longest row first) of at most `batch_tokens`
        including padding. The batches do not depend on the order of the rows."""
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i].ids), identity(*rows[i])))
        out: list[list[int]] = []
        for i in order:
            if not out or (len(out[-1]) + 1) * len(rows[out[-1][0]].ids) > self._config.batch_tokens:
                out.append([])
            out[-1].append(i)
        return out

    @torch.inference_mode()
    def scores(self, rows: Sequence[Encoded]) -> list[float]:
        """Score each row, in one forward pass."""
        logits = self._logits(rows)
        if self._config.normalize:
            settings = self._model.config
            logits = (logits - settings.mean) / settings.std
        match self._config.activation:
            case "sigmoid":
                logits = logits.sigmoid()
            case "softmax":
                logits = logits.softmax(-1)
        return logits[:, self._config.label or 0].tolist()

    def _logits(self, rows: Sequence[Encoded]) -> Tensor:
        """Logits [B, labels] in float32. transformers' decoders read the last position that is not
        `config.pad_token_id`; for a model without a padding token an id that no row contains is used."""
        config = self._model.config.get_text_config()
        pad_before: int | None = config.pad_token_id
        unused = {pad_before} if pad_before is not None else set(range(len(self._tokenizer)))
        if pad_before is None:
            unused = unused.difference(*(row.ids for row in rows))
        if not unused and len(rows) > 1:
            return torch.cat([self._logits([row]) for row in rows])
        pad = min(unused, default=None)
        ids = torch.full((len(rows), max(len(row.ids) for row in rows)), 0 if pad is None else pad)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            mask[number, : len(row.ids)] = 1
        ids, mask = ids.to(self._model.device), mask.to(self._model.device)
        pixels: dict[str, Tensor] = {}
        if self._vision is not None:
            pixels = self._vision.plain_inputs(ids, [image for row in rows for image in row.images])
            # transformers' own are wrong for images next to each other, and kept for calls without images
            lines = [self._vision.coordinates(ids.shape[1], row.images) for row in rows]
            grids = [line[:, :-1] for line in lines if line is not None]
            if grids:
                pixels["position_ids"] = torch.from_numpy(np.stack(grids, 1)).to(ids.device)
        config.pad_token_id = pad
        try:
            return self._model(input_ids=ids, attention_mask=mask, **pixels).logits.float()
        finally:
            config.pad_token_id = pad_before

    @torch.inference_mode()
    def check_padding(self) -> None:
        """Compare random rows in a padded batch with the same rows alone. Raises ModelError if their scores
        differ."""
        generator = torch.Generator().manual_seed(0)
        rows = [
            Encoded(torch.randint(len(self._tokenizer), (n,), generator=generator).tolist()) for n in _LENGTHS
        ]
        if self._vision is not None:
            reserved = self._vision.reserved
            rows = [Encoded([i for i in row.ids if i not in reserved] or [0]) for row in rows]
            rows.append(self._with_image(self._vision, 0))
        alone = torch.cat([self._logits([row]) for row in rows])
        difference = (self._logits(rows) - alone).abs().max().item()
        allowed = _TOLERANCE[self._model.dtype] * (1 + alone.abs().max().item())
        if not difference <= allowed:
            raise ModelError(
                f"{self._key}: {type(self._model).__name__} gives different scores with padding (by up to "
                f"{difference:.2g}, allowed {allowed:.2g}); choose another architecture"
            )

    @torch.inference_mode()
    def check_images(self, vision: Vision) -> None:
        """Raise ModelError if another image gives the same score."""
        first, second = (self._logits([self._with_image(vision, level)]) for level in (0, 255))
        if torch.equal(first, second):
            raise ModelError(
                f"{self._key}.images: {type(self._model).__name__} gives two images the same score; set it "
                "to false, or choose another model"
            )

    def _with_image(self, vision: Vision, level: int) -> Encoded:
        """A row that ends after an image with pixels of this level on its left."""
        pixels = np.full((64, 64, 3), 128, np.uint8)
        pixels[:, :32] = level
        image: Image = image_of(pixels, Path())
        text = next(i for i in range(len(self._tokenizer)) if i not in vision.reserved)
        return Encoded(*vision.expand([text, vision.placeholder, text], [image]))


def _longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Maximum input length that the model and its tokenizer declare; None if neither does."""
    declared = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = (declared or 0, tokenizer.model_max_length)
    return min((limit for limit in limits if 0 < limit < _UNLIMITED), default=None)
