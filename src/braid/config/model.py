"""Models: a Hugging Face folder, or a small model built from sizes; also the critic and the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from braid.sections import Section

from .backends import DType, LoraConfig
from .train import TrainConfig


class BuildSpec(Section):
    """A language model with random weights and a character-level tokenizer."""

    architecture: Literal["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral"] = "qwen3"
    """Transformers architecture to build."""
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

    @model_validator(mode="after")
    def _sizes_fit(self) -> BuildSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                "set num_kv_heads to a divisor of num_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary embeddings need an even number")
        return self


class MlpSpec(Section):
    """A perceptron on a simulator's state and images."""

    hidden_sizes: tuple[PositiveInt, ...] = (64, 64)
    """Sizes of the hidden layers."""
    activation: Literal["tanh", "relu", "silu"] = "tanh"
    """Activation of the hidden layers."""
    channels: tuple[PositiveInt, ...] = ()
    """Output channels of the convolutions (3 x 3, stride 2) over the images of the observations; empty if
    there are none."""
    num_action_chunks: PositiveInt = 1
    """Actions per chunk: the policy decides on this many at a time."""
    num_bins: Annotated[int, Field(ge=2)] | None = None
    """Continuous actions as a choice among this many values for each component, evenly spaced from -1 to 1;
    other bounds need env.rescale_actions. null: a Gaussian."""
    initial_std: PositiveFloat = 1.0
    """Standard deviation of Gaussian actions at the start of training; it is learned, and the same in all
    states. Where actions are between -1 and 1, values of 0.2 to 0.6 often learn faster."""

    @model_validator(mode="after")
    def _check(self) -> MlpSpec:
        if self.num_bins and self.initial_std != 1.0:
            raise ValueError(
                "initial_std is that of Gaussian actions, and num_bins makes them discrete; remove one"
            )
        return self


class VlaConfig(Section):
    """Settings of a vision-language-action policy."""

    kind: Literal["openvla", "openvla_oft", "pi0"] = "openvla_oft"
    """Model architecture."""
    form: Literal["rlinf", "official"] | None = None
    """Which code fine-tuned an OpenVLA-OFT checkpoint; its files don't say. official: moojink/openvla-oft,
    with an end token after the actions. rlinf: RLinf, without one."""
    action_dim: PositiveInt = 7
    """Dimensions of one action."""
    num_action_chunks: PositiveInt = 8
    """Actions per chunk, the output of one forward pass of the policy."""
    unnorm_key: str | None = None
    """Data set whose statistics are used to unnormalize actions; the checkpoint's only one when null."""
    normalization: Literal["quantiles", "bounds", "mean_std"] | None = None
    """Statistics of actions and states that correspond to -1 and 1: the quantiles of 1 and 99 %, the bounds
    (ALOHA), or one standard deviation from the mean. null: mean_std for pi0, else quantiles."""
    image_size: tuple[PositiveInt, PositiveInt] | None = None
    """Image height and width, in pixels; if set, checked against the checkpoint."""
    num_images: PositiveInt = 1
    """Number of camera images per observation."""
    center_crop: bool = True
    """Crop images to the central 90 % of their area."""
    use_proprio: bool = False
    """Include the robot's proprioceptive state in the input."""
    greedy: bool | None = None
    """Whether evaluation takes the likeliest actions, those of pi0 without noise (ODE steps); training always
    samples. null: true for pi0, else as eval.sampling.greedy says."""
    max_prompt_tokens: PositiveInt = 30
    """Length to which instructions are padded, in tokens."""
    vocab_size: PositiveInt | None = None
    """Vocabulary size from which action token ids count down; the model's when null."""
    extra_vocab_size: int = Field(default=0, ge=0)
    """Number of tokens added to the tokenizer's vocabulary."""
    hidden_size: PositiveInt | None = None
    """Input size of the value head; the model's hidden size when null."""
    qkv_bias: bool | None = None
    """Whether the attention projections have biases; if set, checked against the model."""
    eval_batch_rows: PositiveInt = 8
    """Observations per forward pass in greedy evaluation."""
    denoise_steps: PositiveInt = 4
    """pi0: steps from noise to actions."""
    noise: Literal["flow_sde", "flow_noise"] = "flow_sde"
    """pi0: how sampling is stochastic. flow_sde: one random step of a decision is that of a stochastic
    differential equation. flow_noise: every step adds noise, whose deviation a small network predicts.
    Evaluation has none, unless `greedy` is false."""
    noise_level: PositiveFloat = 0.5
    """pi0: noise of flow_sde relative to that of the reverse diffusion."""
    train_expert_only: bool = True
    """pi0: train the action expert alone, and freeze the vision-language model."""

    @property
    def evaluates_greedily(self) -> bool | None:
        """`greedy`; None: as eval.sampling.greedy says."""
        return True if self.greedy is None and self.kind == "pi0" else self.greedy


class ModelConfig(Section):
    """The policy. Set exactly one of `path`, `build` (language models) and `mlp` (simulators)."""

    path: str | None = None
    """Hugging Face model folder or hub name, or a .gguf file (extra `gguf`)."""
    gguf: str | None = None
    """Name of the GGUF file in the folder `path`. Its numbers are trained without quantization."""
    build: BuildSpec | None = None
    """Sizes of a language model built from scratch."""
    mlp: MlpSpec | None = None
    """Sizes of a perceptron policy for a simulator."""
    tokenizer: str | None = None
    """Tokenizer folder or hub name; the model's own tokenizer when null."""
    chat_template: str | None = None
    """Chat template as Jinja text, or the path of a .jinja file; the tokenizer's own when null."""
    eos_token_id: NonNegativeInt | None = None
    """Token id that ends a response; when null, the tokenizer's EOS token and those of the folder's
    generation_config.json, or of its config.json if there is no such file."""
    pad_token_id: NonNegativeInt | None = None
    """Padding token id, for engines with rectangular batches and for exports; the tokenizer's when null."""
    dtype: DType = "fp32"
    """Dtype of the model weights in computation. bf16 and fp16 are trained with fp32 master weights."""
    trust_remote_code: bool = False
    """Allow the model folder to run its own Python code."""
    architecture: str | None = None
    """Required transformers architecture (qwen2, also for qwen2.5, llama, ...); null accepts any."""
    attention: Literal["auto", "sdpa", "flash_attention_2", "compiled", "eager"] = "auto"
    """Attention implementation for packed rows in training. sdpa: torch's scaled_dot_product_attention. auto:
    torch's variable-length FlashAttention on CUDA in bf16 or fp16 where it applies, compiled on CPUs under
    Linux if a round has enough tokens to be worth it, else sdpa. compiled: kernels for CPUs, compiled by
    Numba, also for the gradients of linear layers where oneDNN computes these. eager: plain matrix
    multiplications. flash_attention_2: the flash-attn package, on CUDA in bf16 or fp16. Engines use their own
    kernels."""
    low_memory_load: bool = True
    """Load weights directly to the device; of a role with several ranks, only the first reads them and sends
    the others their shards. false: every rank first loads the whole model into host memory."""
    lora: LoraConfig | None = None
    """Train low-rank adapters instead of all weights of the policy. A reference without a path is the base
    model with the initial adapters; a critic has none. Checkpoints store adapters, exports merged weights."""
    vla: VlaConfig | None = None
    """Settings of the vision-language-action policy in `path`."""

    @property
    def source(self) -> str | None:
        """`path`, or the path of the file `gguf` in it."""
        return self.path if self.path is None or self.gguf is None else str(Path(self.path, self.gguf))

    @property
    def num_action_chunks(self) -> int:
        """Actions that a robot policy decides on at a time."""
        of = self.vla or self.mlp
        return 1 if of is None else of.num_action_chunks

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        given = [k for k in ("path", "build", "mlp") if getattr(self, k) is not None]
        if len(given) != 1:
            what = " and ".join(given) if given else "none"
            raise ValueError(f"set exactly one of path, build and mlp, not {what}")
        if self.gguf is not None and (self.path is None or self.vla is not None):
            raise ValueError(
                "gguf is the name of a language model's file in the folder path; remove it"
                + (", or set path" if self.path is None else ", or vla")
            )
        return self


class CriticConfig(Section):
    """The value model, used when the advantage estimator needs values (gae)."""

    unused_while = (("path", None, "train.liger_kernels"),)

    network: Literal["own", "shared", "shared_detached"] = "own"
    """own: a separate model. shared, for robots: a value head on the policy's features, trained together with
    the policy by the sum of both losses. shared_detached: the same, but the value loss trains only the
    head."""
    path: str | None = None
    """Model folder of the backbone; a copy of the policy's initial weights when null."""
    train: TrainConfig | None = None
    """Optimizer and batch settings of the critic; the policy's when null."""
    warmup_rounds: int = Field(default=0, ge=0)
    """Number of initial rounds in which only the critic is trained; of a shared network, only its value
    head."""
    normalize_values: bool = False
    """Normalize value targets by a running mean and standard deviation of the returns (PopArt, arXiv
    1602.07714)."""
    head_name: str = Field(default="value_head", pattern=r"^[A-Za-z_]\w*$")
    """Name of the value head's weights in checkpoints (`score` in transformers' token classifiers)."""


class ReferenceConfig(Section):
    """The frozen reference model of the KL terms, used when a KL coefficient is not 0."""

    unused_while = (("path", None, "train.liger_kernels"),)

    path: str | None = None
    """Model folder; when null, a copy of the policy at the start of reinforcement learning."""
    update_every_epochs: int = Field(default=0, ge=0)
    """Copy the policy's weights into the reference after this many passes over the training prompts, at the
    end of a round; 0 for never."""
    train: TrainConfig | None = None
    """Backend and batch settings of the reference; the policy's when null."""
