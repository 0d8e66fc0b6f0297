"""Reward models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from braid.config.backends import DType

from .base import RewardPart

if TYPE_CHECKING:
    from braid.rewards.base import Making
    from braid.rewards.classifier import ModelPart


class ModelReward(RewardPart):
    """Score of a sequence classifier for the conversation that ends with the response."""

    kind: Literal["model"]
    """A reward model, loaded with transformers' AutoModelForSequenceClassification."""
    path: str
    """Model folder or hub name."""
    label: NonNegativeInt | None = None
    """Index of the output that is the score; required if the classifier has more than one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Transformation of the output: none, its sigmoid, or its softmax probability over all labels."""
    normalize: bool = False
    """Subtract the mean from the output and divide it by the standard deviation, as the model's config has
    them (`mean`, `std`): those of its scores after training, from `braid prefer` and OpenRLHF."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own when null."""
    template: str | None = None
    """Chat template as Jinja text, or the path of a .jinja file; the tokenizer's own when null."""
    max_tokens: PositiveInt | None = None
    """Maximum input length in tokens; the limit of model and tokenizer when null."""
    overlong: Literal["error", "left", "right"] = "error"
    """Longer inputs: mark the trajectory invalid, or cut off the left or right end (counted in metrics)."""
    batch_tokens: PositiveInt = 16_384
    """Tokens per forward pass, including padding; a longer input is processed alone."""
    dtype: DType = "fp32"
    """Dtype of the weights."""
    images: bool = False
    """Read the images of the prompt's messages, with a vision-language classifier whose architecture
    model.vision reads too (Gemma 3, Qwen3.5); false: their text alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device; auto for run.device."""
    trust_remote_code: bool = False
    """Allow the model folder to run its own Python code."""

    has_model: ClassVar[bool] = True

    @property
    def shows_images(self) -> bool:
        return self.images

    def build(self, making: Making) -> ModelPart:
        from braid.rewards.classifier import ModelPart

        if making.number not in making.services.classifiers:
            raise making.without_service(making.key, "a reward model")
        return ModelPart(making.services.classifiers[making.number])
