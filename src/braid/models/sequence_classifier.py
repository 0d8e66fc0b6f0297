"""Reward models: Hugging Face sequence classifiers of any architecture that score conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jinja2
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from braid.config.reward import ModelReward
from braid.errors import ModelError, RewardError
from braid.types import Message
from braid.users import encodable

from .folders import local_path, read_chat_template, read_model, read_tokenizer
from .loading import TORCH_DTYPES

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
    classifier = SequenceClassifier(model.to(place), tokenizer, config, key=key)  # pyright: ignore[reportArgumentType]
    classifier.check_padding()
    return classifier


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
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: ModelReward, *, key: str
    ) -> None:
        self._model, self._tokenizer, self._config, self._key = model, tokenizer, config, key
        self._max_tokens = config.max_tokens or _longest(model, tokenizer)

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], bool]:
        """Tokens of the templated conversation, and whether they were truncated to the maximum input length.
        Raises RewardError if the template rejects the conversation, or if it is too long and `overlong` is
        error."""
        try:
            conversation: Any = [dict(message) for message in messages]
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
        limit = self._max_tokens
        if limit is None or len(ids) <= limit:
            return ids, False
        match self._config.overlong:
            case "left":
                return ids[-limit:], True
            case "right":
                return ids[:limit], True
            case "error":
                raise RewardError(
                    f"{len(ids)} tokens, but the reward model accepts {limit}; set {self._key}.overlong to "
                    "left or right to cut them"
                )

    def batches(self, rows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split rows into batches (lists of row indices, longest row first) of at most `batch_tokens`
        including padding. The batches do not depend on the order of the rows."""
        order = sorted(range(len(rows)), key=lambda i: (-len(rows[i]), rows[i]))
        out: list[list[int]] = []
        for i in order:
            if not out or (len(out[-1]) + 1) * len(rows[out[-1][0]]) > self._config.batch_tokens:
                out.append([])
            out[-1].append(i)
        return out

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Score each row of token ids, in one forward pass."""
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

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, labels] in float32. transformers' decoders read the last position that is not
        `config.pad_token_id`; for a model without a padding token an id that no row contains is used."""
        config = self._model.config.get_text_config()
        pad_before: int | None = config.pad_token_id
        unused = set(range(len(self._tokenizer))).difference(*rows) if pad_before is None else {pad_before}
        if not unused and len(rows) > 1:
            return torch.cat([self._logits([row]) for row in rows])
        pad = min(unused, default=None)
        ids = torch.full((len(rows), max(map(len, rows))), 0 if pad is None else pad)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        device = self._model.device
        config.pad_token_id = pad
        try:
            return self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
        finally:
            config.pad_token_id = pad_before

    @torch.inference_mode()
    def check_padding(self) -> None:
        """Compare random rows in a padded batch with the same rows alone. Raises ModelError if their scores
        differ."""
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randint(len(self._tokenizer), (n,), generator=generator).tolist() for n in _LENGTHS]
        alone = torch.cat([self._logits([row]) for row in rows])
        difference = (self._logits(rows) - alone).abs().max().item()
        allowed = _TOLERANCE[self._model.dtype] * (1 + alone.abs().max().item())
        if not difference <= allowed:
            raise ModelError(
                f"{self._key}: {type(self._model).__name__} gives different scores with padding (by up to "
                f"{difference:.2g}, allowed {allowed:.2g}); choose another architecture"
            )


def _longest(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Maximum input length that the model and its tokenizer declare; None if neither does."""
    declared = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    limits = (declared or 0, tokenizer.model_max_length)
    return min((limit for limit in limits if 0 < limit < _UNLIMITED), default=None)
