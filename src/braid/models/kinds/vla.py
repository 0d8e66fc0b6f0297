"""Vision-language-action policies for simulators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from braid.sections import Unused
from braid.types import DecisionLevel, Spaces

from .base import TRAIN, PolicyKind

if TYPE_CHECKING:
    import torch

    from braid.config.roles import TrainingRole
    from braid.config.schema import RunConfig
    from braid.models.base import TrainableModel
    from braid.plan.plan import Plan


class VlaConfig(PolicyKind):
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

    key: ClassVar[str] = "model.vla"
    imitates: ClassVar[Literal["examples", "demonstrations"] | None] = "demonstrations"
    sampled_by: ClassVar[frozenset[str]] = frozenset({"greedy", "temperature"})
    adapts_critic: ClassVar[bool] = True

    @property
    def chunk_length(self) -> int:
        return self.num_action_chunks

    @property
    def decision_level(self) -> DecisionLevel:
        return "chunk" if self.kind == "pi0" else "token"

    def problems(self, config: RunConfig) -> Iterator[tuple[str, str]]:
        yield from super().problems(config)
        if config.env.is_simulator and config.model.path is None:
            why = "a vision-language-action policy has a folder"
            yield "model.vla", f"{why}; set model.path to it, or remove model.vla"

    def make(
        self,
        role: TrainingRole,
        config: RunConfig,
        spaces: Spaces,
        device: torch.device,
        policy: TrainableModel | None = None,
        rank: int | None = None,
    ) -> TrainableModel:
        from braid.models.vla.build import make_vla_role

        return make_vla_role(role, config, spaces, device, policy, rank)

    def export(self, config: RunConfig, weights: Mapping[str, torch.Tensor], folder: Path) -> None:
        from braid.models.vla.build import export_vla

        export_vla(config, weights, folder)

    def unused(self, config: RunConfig, plan: Plan) -> Unused:
        yield (
            "the checkpoint determines it",
            "model.vla.{extra_vocab_size,hidden_size,qkv_bias} model.architecture",
        )
        yield "a robot policy does not write text", "model.{chat_template,eos_token_id,pad_token_id}"
        yield (
            "its modules compute attention and log-probs themselves",
            f"model.attention {TRAIN}.{{compile,liger_kernels,logprob_chunk_bytes}}",
        )
        if self.kind == "pi0":
            yield "only OpenVLA reads it", "model.vla.{form,center_crop,use_proprio,image_size,vocab_size}"
            yield "denoising has no temperature", "{rollout,eval}.sampling.temperature"
        else:
            yield "only pi0 denoises actions", "model.vla.{denoise_steps,noise,noise_level,train_expert_only}"
            if self.kind == "openvla":
                yield "only OpenVLA-OFT has several forms", "model.vla.form"
        if self.evaluates_greedily is not None:
            yield "model.vla.greedy decides it, which is true for pi0 by default", "eval.sampling.greedy"
        if config.eval_sampling.greedy:
            yield "evaluation takes the likeliest actions", "eval.sampling.temperature"
        elif not plan.needs_greedy:
            yield "evaluation samples", "model.vla.eval_batch_rows"
        if self.noise == "flow_noise":
            yield "a network predicts the noise", "model.vla.noise_level"
