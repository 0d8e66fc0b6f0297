"""pi0 (Black et al., arXiv 2410.24164) with the log-probs of RLinf's pi_RL (arXiv 2510.25889), on
transformers' module.

An action chunk x_0 is denoised from noise x_1 in K steps, at times t = 1, 1 - 1/K, ..., 1/K. With the
expert's velocity v, x0 = x - v t and x1 = x + v (1 - t), and d = 1/K, the next x is drawn from a normal
distribution:

            mean                                                 deviation
ODE         x0 (1 - (t - d)) + x1 (t - d)                        0
flow_sde    x0 (1 - (t - d)) + x1 (t - d - sigma^2 d / (2 t))    sigma sqrt(d), sigma = a sqrt(t / (1 - t))
flow_noise  that of the ODE                                      of a small network, in [0.08, 0.16]

Under flow_sde one step of a decision, drawn at random, is stochastic, and the decision's log-prob is that of
this step. Under flow_noise all are; the log-prob is the mean of those of all steps and of the initial noise.
Evaluation takes ODE steps from one fixed noise, unless model.vla.greedy is false. Imitation is flow matching.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PI0Config, PI0ForConditionalGeneration
from transformers.initialization import no_init_weights

from braid.config.model import VlaConfig
from braid.errors import ModelError
from braid.models.folders import local_folder, read_json, read_model
from braid.types import DecisionLevel

from .policy import Processor, Tensors, VlaPolicy, seeded
from .vision import prepared

_DEVIATIONS = (0.08, 0.16)
_NOISE_HIDDEN = 128
_LEROBOT = {r"^model\.(?=paligemma_with_expert|action_|state_proj)": ""}
"""LeRobot's names of weights, as transformers expects them."""


def read_config(path: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a checkpoint of transformers or LeRobot, and its config.json. Raises ModelError if it is
    not pi0's."""
    folder = local_folder(path, "model.path")
    raw = read_json(folder / "config.json", f"model.path={path}")
    kind = raw.get("model_type", raw.get("type"))
    if kind == "pi05":
        raise ModelError(
            f"model.path={path} is a model of type 'pi05', which is not supported: its expert is "
            "conditioned on time by its norms, and reads the state as text; choose a pi0 folder"
        )
    if kind != "pi0":
        raise ModelError(
            f"model.path={path} is a model of type {kind!r}, not pi0; choose a pi0 folder, or set "
            "model.vla.kind to the folder's kind"
        )
    return folder, raw


def read_sizes(path: str) -> tuple[int, int]:
    """Chunk size and width of actions. Raises ModelError."""
    _, raw = read_config(path)
    default = PI0Config()
    return raw.get("chunk_size", default.chunk_size), raw.get("max_action_dim", default.max_action_dim)


def load_pi0(
    path: str, *, dtype: torch.dtype, device: torch.device, is_hollow: bool = False
) -> PI0ForConditionalGeneration:
    """Load a folder of transformers or LeRobot; `is_hollow` as in build.load_module. Raises ModelError."""
    folder, raw = read_config(path)
    options: dict[str, Any] = {}
    if "model_type" not in raw:
        known = PI0Config().to_dict().keys() & raw.keys()
        options["config"] = PI0Config(**{name: raw[name] for name in known - {"dtype"}})
    if is_hollow:
        with no_init_weights():
            pi0_config = options.get("config") or PI0Config.from_pretrained(folder)
            hollow: Any = PI0ForConditionalGeneration._from_config(pi0_config, dtype=dtype)
        return hollow.to(device).eval()
    load = PI0ForConditionalGeneration.from_pretrained
    model: Any = read_model(
        str(folder),
        "model.path",
        "pi0 policy",
        load,
        dtype=dtype,
        key_mapping=_LEROBOT,
        device_map={"": device},
        **options,
    )
    return model.eval()


@dataclass(slots=True)
class _Prefix:
    """What the vision-language model computed for B observations: its keys and values."""

    cache: Any
    mask: Tensor


class Pi0Policy(VlaPolicy):
    """`inputs` has the denoised `chain` of a decision: under flow_sde [2, C, D], before and after its
    stochastic `step`; under flow_noise all [K + 1, C, D]. C and D are the chunk size and width of the
    model."""

    module: PI0ForConditionalGeneration
    width = 1

    def __init__(
        self,
        module: PI0ForConditionalGeneration,
        processor: Processor,
        *,
        level: DecisionLevel,
        entropy_level: DecisionLevel | None = None,
        seed: int,
    ) -> None:
        """`seed` is that of the noise network's weights."""
        if level != "chunk":
            raise ModelError(
                f"algorithm.logprob_level={level}, but a denoising step of pi0 has one log-prob for the "
                "whole chunk; set it to chunk"
            )
        sizes, config = module.config, processor.config
        if config.num_action_chunks > sizes.chunk_size or config.action_dim > sizes.max_action_dim:
            raise ModelError(
                f"model.vla.num_action_chunks={config.num_action_chunks} and action_dim={config.action_dim} "
                f"exceed the checkpoint's {sizes.chunk_size} and {sizes.max_action_dim}; lower them"
            )
        super().__init__(module, processor, entropy_level)
        self._chunk, self._size = sizes.chunk_size, sizes.max_action_dim
        draws = 1 + (config.denoise_steps if config.noise == "flow_noise" else 1)
        self.num_uniforms = draws * self._chunk * self._size + 1
        self._noise_net: nn.Module | None = None
        if config.train_expert_only:
            module.model.vlm.requires_grad_(False)
        if config.noise == "flow_noise":
            weight = module.action_out_proj.weight
            with seeded(seed):
                wide = module.action_out_proj.in_features
                net = nn.Sequential(
                    nn.Linear(wide, _NOISE_HIDDEN), nn.SiLU(), nn.Linear(_NOISE_HIDDEN, self._size)
                )
            self._noise_net = self._add("noise_net", net.to(weight.device, weight.dtype))

    @property
    def hidden_size(self) -> int:
        return self.module.action_out_proj.in_features

    def features(self, observations: Tensors) -> Tensor:
        """The expert's last hidden state at the robot's state, which attends to images and instruction, but
        not to actions."""
        embedded = self.module.embed_action_time.state_proj(self._state(observations))
        return self._expert(self._prefix(observations), embedded.unsqueeze(1))[:, 0]

    def draw(
        self,
        observations: Tensors,
        uniforms: Tensor | None,
        temperature: float | None = None,  # noqa: ARG002  # has none
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        prefix, count = self._prefix(observations), len(observations["prompt_ids"])
        num_steps, is_sde = self.config.denoise_steps, self.config.noise == "flow_sde"
        shape = (-1, self._chunk, self._size)
        normal = _normal(uniforms, count, self.num_uniforms - 1, prefix.mask.device).view(count, *shape)
        chosen = torch.full((count,), -1, device=normal.device)
        if uniforms is not None and is_sde:
            chosen = (uniforms[:, -1] * num_steps).long()
        x, chain = normal[:, 0], [normal[:, 0]]
        for number in range(num_steps):
            step = torch.full((count,), number, device=x.device)
            velocity, out, _ = self._velocity(prefix, observations, x, step)
            mean, deviation = self._transition(x, velocity, out, step)
            ode = x - velocity / num_steps
            noise = normal[:, 1 if is_sde else 1 + number]
            is_drawn = (
                chosen == number
                if is_sde
                else torch.full_like(chosen, uniforms is not None, dtype=torch.bool)
            )
            x = torch.where(is_drawn[:, None, None], mean + deviation * noise, ode)
            chain.append(x)
        states = torch.stack(chain, dim=1)
        if is_sde:
            step = chosen.clamp(min=0)
            index = torch.arange(count, device=x.device)
            states = torch.stack([states[index, step], states[index, step + 1]], dim=1)
        else:
            step = torch.zeros_like(chosen)
        inputs = {"chain": states.unsqueeze(1), "step": step.unsqueeze(1)}
        logprobs, *_ = self._logprobs(prefix, observations, states, step)
        if uniforms is None:
            logprobs = torch.zeros_like(logprobs)
        return x[:, : self.config.num_action_chunks, : self.config.action_dim], inputs, logprobs

    def evaluate(self, observations: Tensors, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        prefix = self._prefix(observations)
        return self._logprobs(prefix, observations, inputs["chain"][:, 0], inputs["step"][:, 0])

    def _logprobs(
        self, prefix: _Prefix, observations: Tensors, chain: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies [B, 1] of the executed part of chains [B, M, C, D], and `features`."""
        used = (..., slice(self.config.num_action_chunks), slice(self.config.action_dim))
        steps = range(chain.shape[1] - 1)
        transitions: list[tuple[Tensor, Tensor, Tensor]] = []
        features = chain.new_zeros(0)
        for n in steps:
            velocity, out, features = self._velocity(prefix, observations, chain[:, n], step + n)
            transitions.append((chain[:, n + 1], *self._transition(chain[:, n], velocity, out, step + n)))
        if self.config.noise == "flow_noise":
            transitions.append((chain[:, 0], torch.zeros_like(chain[:, 0]), torch.ones_like(chain[:, 0])))
        logprobs = [_log_density(*(part[used] for part in transition)) for transition in transitions]
        entropies = [
            (0.5 + 0.5 * math.log(2 * math.pi) + transition[2][used].log()) for transition in transitions
        ]
        means = [torch.stack(per_step).mean(0).flatten(1) for per_step in (logprobs, entropies)]
        return means[0].sum(1, keepdim=True), self._entropies(means[1]), features

    def _prefix(self, observations: Tensors) -> _Prefix:
        """Run the vision-language model over images and instruction."""
        vlm: Any = self.module.model.vlm
        sizes: Any = self.module.config.vlm_config
        vision, dtype = sizes.vision_config, self.module.action_out_proj.weight.dtype
        images = [
            prepared(observations[name].unsqueeze(1), vision.image_size, center_crop=False)
            for name in self.processor.images
        ]
        pixels = (torch.cat(images, dim=1) * 2 - 1).to(dtype)
        ids = observations["prompt_ids"]
        num_patches = (vision.image_size // vision.patch_size) ** 2 * len(images)
        mask = F.pad(ids >= 0, (num_patches, 0), value=True)
        ids = F.pad(ids.clamp(min=0), (num_patches, 0), value=sizes.image_token_id)
        trained = any(parameter.requires_grad for parameter in vlm.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            is_image = torch.ones(pixels.shape[:2], dtype=torch.bool, device=pixels.device)
            embeddings = self.module.model.embed_prefix(ids, pixels, is_image)
            out = vlm(
                inputs_embeds=embeddings,
                attention_mask=mask.long(),
                position_ids=mask.cumsum(1) - 1,
                token_type_ids=torch.zeros_like(mask, dtype=torch.long),
                use_cache=True,
            )
        return _Prefix(out.past_key_values, mask)

    def _state(self, observations: Tensors) -> Tensor:
        """Padded to the model's size."""
        state = observations["state"]
        state = F.pad(state, (0, self.module.config.max_state_dim - state.shape[1]))
        return state.to(self.module.action_out_proj.weight.dtype)

    def _velocity(
        self, prefix: _Prefix, observations: Tensors, x: Tensor, step: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Velocity [B, C, D] at `x`, before denoising step `step` [B], the expert's output [B, C, W], and
        `features`."""
        t = 1 - step.float() / self.config.denoise_steps
        state = self._state(observations)
        out = self._expert(prefix, self.module.embed_action_time(state, x.to(state.dtype), t))
        features, out = out[:, 0], out[:, 1:]
        return self.module.action_out_proj(out).float(), out, features

    def _expert(self, prefix: _Prefix, embeddings: Tensor) -> Tensor:
        """Last hidden states of the expert at `embeddings` [B, N, W], the first of which is that of the
        state."""
        mask = prefix.mask.long()
        out = self.module.model(
            action_embeds=embeddings, attention_mask=mask, past_key_values=prefix.cache
        ).last_hidden_state
        prefix.cache.crop(-embeddings.shape[1])
        return out

    def _transition(self, x: Tensor, velocity: Tensor, out: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation [B, C, D] of what follows `x`; see above."""
        mean, deviation = transition(self.config, x, velocity, step)
        if self._noise_net is not None:
            low, high = (math.log(bound) for bound in _DEVIATIONS)
            share = (torch.tanh(self._noise_net(out).float()) + 1) / 2
            deviation = (low + (high - low) * share).exp()
        return mean, deviation.expand_as(x)


def transition(config: VlaConfig, x: Tensor, velocity: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [B, C, D] of what follows `x` [B, C, D] after denoising step `step` [B], and its deviation [B, 1,
    1] under flow_sde, 0 under flow_noise; see above."""
    d = 1 / config.denoise_steps
    t = (1 - step.float() * d)[:, None, None]
    x0, x1 = x - velocity * t, x + velocity * (1 - t)
    if config.noise == "flow_noise":
        return x0 * (1 - (t - d)) + x1 * (t - d), torch.zeros_like(t)
    # 1 - t is 0 at the first step; d takes its place
    sigma = config.noise_level * (t / (1 - t).clamp(min=d)).sqrt()
    weight = t - d - sigma.square() * d / (2 * t)
    return x0 * (1 - (t - d)) + x1 * weight, sigma * math.sqrt(d)


def demonstrated(config: VlaConfig, actions: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Inputs of Pi0Policy, one per chunk of normalized actions [B, C, D], on the straight way from random
    noise to the chunk.

    The log-prob of such a chain is, up to a constant, minus the squared error of the velocity, with a weight
    for each step. Under flow_sde steps are drawn with the inverse of this weight as probability, so that the
    expected loss is that of flow matching, at the times of the steps.
    """
    count, num_steps = len(actions), config.denoise_steps
    noise = torch.randn(actions.shape, generator=generator)
    if config.noise == "flow_noise":
        t = torch.linspace(1, 0, num_steps + 1)[:, None, None]
        chains = actions.unsqueeze(1) * (1 - t) + noise.unsqueeze(1) * t
        return {"chain": chains, "step": torch.zeros(count, dtype=torch.long)}
    zero, one = torch.zeros(num_steps, 1, 1), torch.ones(num_steps, 1, 1)
    slope, deviation = transition(config, zero, one, torch.arange(num_steps))
    step = (deviation / slope).square().flatten().multinomial(count, replacement=True, generator=generator)
    t = (1 - step / num_steps)[:, None, None]
    x = actions * (1 - t) + noise * t
    mean, _ = transition(config, x, noise - actions, step)
    return {"chain": torch.stack([x, mean], dim=1), "step": step}


def _log_density(x: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
    return -0.5 * (((x - mean) / deviation).square() + math.log(2 * math.pi)) - deviation.log()


def _normal(uniforms: Tensor | None, count: int, size: int, device: torch.device) -> Tensor:
    """Normal numbers [count, size]; without uniform ones, the same in every call and row."""
    if uniforms is None:
        fixed = torch.randn(size, generator=torch.Generator().manual_seed(0))
        return fixed.to(device).expand(count, size)
    return torch.special.ndtri(uniforms[:, :size].clamp(min=torch.finfo(torch.float64).tiny)).float()
