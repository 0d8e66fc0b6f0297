"""Models: a Hugging Face folder, or a small one built from sizes; critics and references beside the policy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from .backends import DType, LoraConfig
from .base import Section
from .train import TrainConfig


class BuildSpec(Section):
    """A language model made from scratch with random weights; its tokenizer knows single characters."""

    architecture: Literal["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral"] = "qwen3"
    """Transformers architecture that the sizes below are given to."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream."""
    intermediate_size: PositiveInt = 704
    """Width of the feed-forward layers."""
    num_layers: PositiveInt = 4
    """Decoder layers."""
    num_heads: PositiveInt = 4
    """Attention heads."""
    num_kv_heads: PositiveInt = 2
    """Key/value heads; divides num_heads."""
    head_dim: PositiveInt = 64
    """Width of one head."""
    max_positions: PositiveInt = 2048
    """Longest sequence the model accepts, in tokens."""
    characters: str = " 0123456789+-*/=().,:;?!'\"\nABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz<>_"
    """Alphabet of the character tokenizer; other characters become the unknown token."""
    tie_embeddings: bool = True
    """Share the input embedding with the output head."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions turn pairs, so make it even")
        return self


class MlpSpec(Section):
    """A multilayer perceptron over flat observations, for simulators."""

    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Widths of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Nonlinearity between them."""


class VlaConfig(Section):
    """What makes a folder a vision-language-action policy."""

    kind: Literal["openvla", "openvla_oft"] = "openvla_oft"
    """Architecture."""
    action_dim: PositiveInt = 7
    """Numbers of one action."""
    num_action_chunks: PositiveInt = 8
    """Actions of one answer of the policy."""
    value_level: Literal["chunk", "action"] = "chunk"
    """The value head gives one value per chunk, or one per action."""
    unnorm_key: str | None = None
    """Data set whose statistics turn the model's numbers into actions."""
    policy_setup: str = "widowx_bridge"
    """Control mode of the robot."""
    image_size: tuple[PositiveInt, PositiveInt] = (224, 224)
    """Height and width of images, in pixels."""
    num_images: PositiveInt = 1
    """Cameras."""
    center_crop: bool = True
    """Crop images to the middle 90 % of their area."""
    use_proprio: bool = False
    """The robot's own state is an input."""
    greedy: bool = False
    """Decode actions by the likeliest token in evaluation; training samples."""
    max_prompt_tokens: PositiveInt = 30
    """Instructions are padded to this length."""
    vocab_size: PositiveInt | None = None
    """Where the action tokens begin to count back from; the model's when null."""
    extra_vocab_size: int = Field(default=0, ge=0)
    """Tokens added to the tokenizer's vocabulary."""
    hidden_size: PositiveInt | None = None
    """Input width of the value head; the model's when null."""
    qkv_bias: bool | None = None
    """Attention has biases; as in the model when null, and checked against it otherwise."""
    eval_batch_rows: PositiveInt = 8
    """Observations of one forward pass in evaluation."""


class ModelConfig(Section):
    """The policy. Give one of `path`, `build` (language models) or `mlp` (simulators)."""

    path: str | None = None
    """A Hugging Face model folder or hub name."""
    build: BuildSpec | None = None
    """Sizes of a language model made from scratch."""
    mlp: MlpSpec | None = None
    """Sizes of a perceptron policy for a simulator."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own when absent."""
    chat_template: str | None = None
    """Jinja text, or path to a .jinja file, in place of the tokenizer's own template."""
    eos_token_id: NonNegativeInt | None = None
    """The token that ends an answer; when null, the tokenizer's end token and those of the folder's generation_config.json."""
    pad_token_id: NonNegativeInt | None = None
    """Token that fills up rows where an engine wants rectangles, and in exports; the tokenizer's when null."""
    dtype: DType = "fp32"
    """Type of the weights that the model computes with. bf16 and fp16 are trained through float32 master weights."""
    trust_remote_code: bool = False
    """Allow a model folder to bring its own Python code."""
    architecture: str | None = None
    """Architecture that the model must have, by transformers' name (qwen2, qwen3, llama, ...; qwen2.5 counts as qwen2); any
    when null."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"
    """Kernel of the attention over packed rows. auto, sdpa: torch's scaled_dot_product_attention. eager: plain matrix
    products. flash_attention_2: the package flash-attn, on CUDA in bf16 or fp16. Sampling has kernels of its own."""
    low_memory_load: bool = True
    """Read weights straight into the memory of the device, and of a role on several ranks by the first alone, which hands
    the others their parts; false: every rank reads the whole model into host memory first."""
    lora: LoraConfig | None = None
    """Train low-rank adapters in place of all the policy's weights. A reference without a path is the same base with the
    adapters as they were; a critic has none. Checkpoints hold adapters, exports merged weights."""
    vla: VlaConfig | None = None
    """Settings of a vision-language-action policy, in the folder `path`."""

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        given = [k for k in ("path", "build", "mlp") if getattr(self, k) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of path, build and mlp, not {what}")
        return self


class CriticConfig(Section):
    """The value model, used when the algorithm's advantage needs values (gae)."""

    path: str | None = None
    """Folder of its backbone; a copy of the policy's initial weights when absent."""
    train: TrainConfig | None = None
    """Its own optimizer and batch settings; those of the policy when absent."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Rounds at the start in which only the critic learns."""
    normalize_values: bool = False
    """Learn the mean and deviation of returns while training, and predict in their units (PopArt, arXiv 1602.07714)."""
    head_name: str = Field(default="value_head", pattern=r"^[A-Za-z_]\w*$")
    """Name of the value head's weights in checkpoints (`score` is what transformers' token classifiers have)."""


class ReferenceConfig(Section):
    """The frozen model of the KL terms, used when a KL coefficient is not 0."""

    path: str | None = None
    """Its folder; a copy of the policy as it is when reinforcement starts, when absent."""
    update_every_epochs: int = Field(default=0, ge=0)
    """Take over the policy's weights after so many passes over the training prompts, at the end of a round; 0 for never."""
    train: TrainConfig | None = None
    """Its own backend and batch settings; those of the policy when absent."""
