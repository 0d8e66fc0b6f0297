"""Models: a Hugging Face folder, or a small model built from sizes; also the critic and the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, model_validator

from braid.models.kinds import BuildSpec, LanguageModel, MlpSpec, PolicyKind, VisionConfig, VlaConfig
from braid.sections import Section, Unused

from .backends import DType, LoraConfig
from .train import TrainConfig

if TYPE_CHECKING:
    from braid.plan.plan import Plan

    from .schema import RunConfig

__all__ = [
    "BuildSpec",
    "CriticConfig",
    "MlpSpec",
    "ModelConfig",
    "ReferenceConfig",
    "TeacherConfig",
    "VisionConfig",
    "VlaConfig",
]


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
    vision: VisionConfig | None = None
    """Read images in prompts with a vision-language model's tower; null: read only text, with the language
    model alone where transformers has it."""
    vla: VlaConfig | None = None
    """Settings of the vision-language-action policy in `path`."""

    @property
    def source(self) -> str | None:
        """`path`, or the path of the file `gguf` in it."""
        return self.path if self.path is None or self.gguf is None else str(Path(self.path, self.gguf))

    @property
    def kind(self) -> PolicyKind:
        """What the policy is, which its other keys decide."""
        return self.vla or self.mlp or LanguageModel()

    @property
    def settings_of_vla(self) -> VlaConfig:
        """`vla` of a run with such a policy."""
        assert self.vla is not None, "the plan checks that it is there"
        return self.vla

    @property
    def num_action_chunks(self) -> int:
        """Actions that a robot policy decides on at a time."""
        return self.kind.chunk_length

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if config.data.use_chat_template == "never":
            yield "data.use_chat_template is never", "model.chat_template"
        if self.path is None and self.tokenizer is None:
            yield "neither the model nor the tokenizer comes from a folder", "model.trust_remote_code"
        if self.lora is not None and self.lora.path is not None:
            yield "the adapters in model.lora.path determine it", "model.lora.{rank,alpha,targets}"
        if self.path is None:
            yield "a model built from sizes has no files", "model.low_memory_load"

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        sources = [k for k in ("path", "build", "mlp") if getattr(self, k) is not None]
        if len(sources) != 1:
            what = " and ".join(sources) if sources else "none"
            raise ValueError(f"set exactly one of path, build and mlp, not {what}")
        if self.vision is not None and self.kind.is_robot:
            raise ValueError("vision is how a language model reads images; remove it")
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

    only_for_training: ClassVar[str] = "critic.{path,train.*,warmup_rounds,normalize_values}"

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if not plan.learns_values:
            yield (
                "the advantage uses no critic",
                "critic.{network,path,train,warmup_rounds,normalize_values,head_name}",
            )
        elif not plan.needs_critic:
            yield "the policy computes the values", "critic.{path,train}"
        if config.env.is_simulator:
            yield "a simulator has no text", "critic.path"
        yield "a critic computes no log-probs", "critic.train.{compile,logprob_chunk_bytes}"
        yield "train.record_memory records all roles", "critic.train.record_memory"


class TeacherConfig(Section):
    """One of several references, each for the rows of some sources."""

    path: str
    """Model folder."""
    sources: tuple[str, ...] = Field(min_length=1)
    """Names of the sources whose rows it is the reference of."""
    kl_weight: NonNegativeFloat = 1.0
    """Factor of algorithm.kl_coef for these rows."""


class ReferenceConfig(Section):
    """The frozen reference model of the KL terms, used when a KL coefficient is not 0."""

    unused_while = (("path", None, "train.liger_kernels"),)

    path: str | None = None
    """Model folder; when null, a copy of the policy at the start of reinforcement learning."""
    teachers: tuple[TeacherConfig, ...] = ()
    """Several references in place of `path`: the KL of a row is that from the one for its source. Every
    training source needs one. All are placed where the reference is."""
    update_every_epochs: int = Field(default=0, ge=0)
    """Copy the policy's weights into the reference after this many passes over the training prompts, at the
    end of a round; 0 for never."""
    train: TrainConfig | None = None
    """Backend and batch settings of the reference; the policy's when null."""

    only_for_training: ClassVar[str] = "reference.*"

    @model_validator(mode="after")
    def _one_for_each_source(self) -> ReferenceConfig:
        if self.teachers and self.path is not None:
            raise ValueError("set path for one reference or teachers for several, not both; remove one")
        if self.teachers and self.update_every_epochs:
            raise ValueError("update_every_epochs is for one reference, not for teachers; set it to 0")
        sources = [source for teacher in self.teachers for source in teacher.sources]
        if twice := next((source for source in sources if sources.count(source) > 1), None):
            raise ValueError(f"teachers names the source {twice!r} twice; keep it for one teacher")
        return self

    @property
    def folders(self) -> dict[str, str]:
        """Key -> model folder of each reference that has its own."""
        if self.path is not None:
            return {"reference.path": self.path}
        return {f"reference.teachers[{i}].path": teacher.path for i, teacher in enumerate(self.teachers)}

    def of_teacher(self, teacher: TeacherConfig) -> ReferenceConfig:
        """The settings of one reference alone."""
        return self.model_copy(update={"path": teacher.path, "teachers": ()})

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        if plan.needs_reference:
            yield (
                "the reference model is not trained",
                "reference.train.{optimizer,steps_per_pass,passes_per_round,shuffle,max_grad_norm,"
                "max_skipped_steps,gradient_checkpointing,grad_scaler,micro_batch_rows,offload.gradients,"
                "offload.optimizer}",
            )
        if not self.folders and config.model.lora is not None and plan.layout.mode == "in_process":
            keys = "reference.train.{compile,logprob_chunk_bytes}"
            yield "the reference is the policy's model with the initial adapters", keys
        if self.train is not None and self.train.infer_batch_tokens is not None:
            why = "reference.train.infer_batch_tokens is used instead"
            yield why, "reference.train.micro_batch_tokens"
        if plan.needs_reference and plan.verb != "train":
            yield "only braid train moves the reference", "reference.update_every_epochs"
        if not plan.needs_reference and (plan.recipe.kl_coef == 0 or plan.verb != "sft"):
            yield "algorithm.kl_coef is 0", "reference.{path,teachers,train,update_every_epochs}"
        yield "train.record_memory records all roles", "reference.train.record_memory"
