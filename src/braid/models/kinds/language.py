"""Language models: from a folder, or built from sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from braid.sections import Section

from .base import PolicyKind

if TYPE_CHECKING:
    import torch

    from braid.config.schema import RunConfig


class LanguageModel(PolicyKind):
    """A language model. Its settings are those of `model` itself."""

    key: ClassVar[str] = "model.path"
    is_robot: ClassVar[bool] = False
    imitates: ClassVar[Literal["examples", "demonstrations"] | None] = "examples"

    def problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        if config.model.vision is not None:
            yield from _problems_of_images(config)
        elif config.model.build is not None and config.model.build.vision_tower is not None:
            yield "model.build.architecture", "it reads images; set model.vision={}, or another architecture"
        if not config.env.is_simulator:
            return
        built = "path" if config.model.path else "build"
        why = (
            f"a language model cannot act in a simulator; use model.mlp instead of model.{built}, or "
            "set model.vla if it is a vision-language-action policy"
        )
        yield "env.kind", why

    def export(self, config: RunConfig, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        from braid.models.export import export_language_model

        export_language_model(config, weights, folder)


_SEE = "; docs/models.md#images says what does, or remove model.vision"


def _problems_of_images(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, message) of what cannot be combined with images in prompts."""
    build, vision, engine = config.model.build, config.model.vision, config.rollout.engine
    assert vision is not None, "the model reads images"
    if build is not None and build.architecture != "qwen3_vl":
        why = f"{build.architecture} has no vision tower; set it to qwen3_vl, or remove model.vision"
        yield "model.build.architecture", why
    if not engine.reads_images:
        yield "rollout.engine.kind", f"{engine.kind} does not get the images of prompts{_SEE}"
    yield from engine.image_problems(config)
    sections = {
        "train": config.train,
        "critic.train": config.critic.train,
        "reference.train": config.reference.train,
    }
    for key, train in sections.items():
        if train is None:
            continue
        if not train.backend.reads_images:
            why = f"{train.backend.kind} has no vision towers; set it to single, fsdp2, fsdp or deepspeed"
            yield f"{key}.backend.kind", f"{why}, or remove model.vision"
        if (size := train.sequence_parallel) > 1:
            why = f"{size} devices would share a sequence, but the tokens of an image stay together"
            yield f"{key}.sequence_parallel", f"{why}; set it to 1, or remove model.vision"
    if config.model.lora is not None and vision.train != "none":
        yield "model.vision.train", "model.lora freezes all but its adapters; set it to none"
    if config.env.kind == "program":
        yield "env.kind", "programs cannot send images; use another environment, or remove model.vision"


IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""Special tokens of Qwen's models that read images."""


class VisionConfig(Section):
    """How a vision-language model reads images."""

    unused_while = (("train", "none", "lr"),)

    train: Literal["all", "projector", "none"] = "none"
    """What of it is trained beside the language model: the vision tower and the layers that project its
    features, only these layers, or neither."""
    lr: PositiveFloat | None = None
    """Peak learning rate of what is trained of it, also in supervised fine-tuning and in the critic; that of
    the language model when null. Schedules scale both alike."""


class TowerSpec(Section):
    """Sizes of a vision tower built from scratch, in the form of Qwen3-VL's."""

    image_size: PositiveInt = 32
    """Side of the largest square image, in pixels; larger ones are scaled down."""
    patch_size: PositiveInt = 4
    """Side of a patch, in pixels; a token stands for 2 x 2 patches."""
    depth: PositiveInt = 3
    """Number of layers."""
    hidden_size: PositiveInt = 96
    """Hidden size; must be a multiple of 4 x num_heads."""
    intermediate_size: PositiveInt = 192
    """Hidden size of the feed-forward layers."""
    num_heads: PositiveInt = 4
    """Number of attention heads."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> TowerSpec:
        if self.image_size % (2 * self.patch_size):
            raise ValueError(
                f"image_size={self.image_size} is not a multiple of 2 x patch_size={self.patch_size}; a "
                "token stands for 2 x 2 patches"
            )
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of 4 x num_heads={self.num_heads}"
            )
        return self

    def num_parameters(self, text_size: int) -> int:
        """Parameters of the tower, for a language model of that hidden size."""
        size, wide = self.hidden_size, self.intermediate_size
        patches = (self.image_size // self.patch_size) ** 2 * size + (3 * self.patch_size**2 + 1) * size
        layer = 4 * size + 4 * (size * size + size) + 2 * size * wide + wide + size
        merged = 4 * size
        projector = merged * merged + merged + merged * text_size + text_size
        return patches + self.depth * layer + 2 * projector + 2 * size + 2 * merged


class BuildSpec(Section):
    """A language model with random weights and a character-level tokenizer."""

    architecture: Literal[
        "llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "qwen3_vl"
    ] = "qwen3"
    """Transformers architecture to build; qwen3_vl reads images (model.vision)."""
    tower: TowerSpec | None = None
    """Sizes of the vision tower of qwen3_vl; the defaults when null."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embeddings' wavelengths."""
    hidden_size: PositiveInt = 256
    """Hidden size."""
    intermediate_size: PositiveInt = 704
    """Hidden size of the feed-forward layers."""
    num_layers: PositiveInt = 4
    """Number of decoder layers."""
    num_heads: PositiveInt = 4
    """Number of attention heads."""
    num_kv_heads: PositiveInt = 2
    """Number of key/value heads; must divide num_heads."""
    head_dim: PositiveInt = 64
    """Dimension of one attention head; must be even."""
    max_positions: PositiveInt = 2048
    """Maximum sequence length, in tokens."""
    characters: str = " 0123456789+-*/=().,:;?!'\"\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>_"
    """Alphabet of the character tokenizer; other characters map to the unknown token."""
    words: tuple[str, ...] = ()
    """Strings that are one token each, wherever they occur in a text."""
    special_tokens: tuple[str, ...] = ()
    """Control tokens, such as the markers of a chat template. In messages these strings are ordinary text,
    character by character."""
    tie_embeddings: bool = True
    """Tie the output head to the input embedding."""

    @property
    def vision_tower(self) -> TowerSpec | None:
        """The tower of a model that reads images."""
        return (self.tower or TowerSpec()) if self.architecture == "qwen3_vl" else None

    @property
    def all_special_tokens(self) -> tuple[str, ...]:
        """`special_tokens`, and those that stand for images."""
        return (*self.special_tokens, *(IMAGE_TOKENS if self.vision_tower is not None else ()))

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_heads"
            )
        if self.tower is not None and self.architecture != "qwen3_vl":
            raise ValueError(
                f"{self.architecture} reads no images; set architecture=qwen3_vl, or remove tower"
            )
        if self.architecture == "qwen3_vl" and self.head_dim % 8:
            raise ValueError(
                f"head_dim={self.head_dim} is not a multiple of 8, in which qwen3_vl's positions divide it"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even number")
        return self
