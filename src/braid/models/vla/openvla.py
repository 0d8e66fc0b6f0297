"""OpenVLA and OpenVLA-OFT with discrete actions (Kim et al., arXiv 2406.09246 and 2502.19645): vision towers,
projector and Llama, in the folder layout of the published checkpoints.

A decision is H chunks of A action tokens. The sequence is BOS, patches, proprioception if it is used, prompt,
action tokens. OpenVLA writes them one after the other under causal attention. OFT predicts them in one pass:
their embeddings are zero, and attention is bidirectional, over the whole sequence. `official` checkpoints
were trained with an end token after the actions, `rlinf` ones without.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights

from braid.errors import ModelError
from braid.models.folders import local_folder, read, read_json
from braid.models.lora import outputs_of

from .vision import TOWERS, TowerSizes, VisionBackbone, prepared

_SPACE = "▁"
"""The prompt must end with this token, 29871 in Llama's vocabulary."""
_STOP_ID = 2
_PROPRIO_FILES = "proprio_projector--*.pt"
_UNSUPPORTED = {
    "action_head--*.pt": "computes actions with a separate head, by L1 regression or diffusion; choose one "
    "with action tokens",
    "vision_backbone--*.pt": "has a vision backbone with FiLM; choose one without",
}
"""Further weights of OpenVLA-OFT checkpoints -> what they mean."""
_KEYS = frozenset({"timm_model_ids", "image_sizes", "text_config", "n_action_bins"})


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Architecture of a checkpoint, from its config.json, which `raw` is. `proprio_size` is None without a
    projector of the robot's state."""

    towers: tuple[TowerSizes, ...]
    image_size: int
    text: PreTrainedConfig
    num_bins: int
    num_padding: int
    statistics: Mapping[str, Any]
    raw: Mapping[str, Any]
    proprio_size: int | None = None

    @classmethod
    def parse(cls, raw: Mapping[str, Any], key: str) -> Checkpoint:
        """Raises ModelError, naming config key `key`, if it is of another kind of model."""
        if raw.get("model_type") != "openvla":
            raise ModelError(
                f"{key} is a model of type {raw.get('model_type')!r}, not openvla; choose an OpenVLA "
                "folder, or set model.vla.kind to the folder's kind"
            )
        if missing := sorted(_KEYS - raw.keys()):
            raise ModelError(
                f"{key}: config.json lacks {missing[0]}; choose a folder in the published layout"
            )
        names = raw["timm_model_ids"]
        tower_sizes = raw.get("vision_sizes")  # of models that are not published
        if not tower_sizes and (unknown := [name for name in names if name not in TOWERS]):
            raise ModelError(f"{key}: unknown vision tower {unknown[0]}; supported: {', '.join(TOWERS)}")
        towers = (
            tuple(TowerSizes(**sizes) for sizes in tower_sizes)
            if tower_sizes
            else tuple(TOWERS[name] for name in names)
        )
        if raw.get("use_fused_vision_backbone", len(towers) == 2) != (len(towers) == 2):
            raise ModelError(
                f"{key}: use_fused_vision_backbone does not fit {len(towers)} vision towers; correct "
                "config.json"
            )
        text = dict(raw["text_config"])
        return cls(
            towers,
            raw["image_sizes"][0],
            AutoConfig.for_model(text.pop("model_type"), **text),
            raw["n_action_bins"],
            raw.get("pad_to_multiple_of", 0),
            raw.get("norm_stats") or {},
            raw,
        )


def read_checkpoint(path: str, key: str = "model.path") -> tuple[Path, Checkpoint]:
    """The folder of a checkpoint and its config. dataset_statistics.json beside it adds to its statistics.
    Raises ModelError."""
    folder, where = local_folder(path, key), f"{key}={path}"
    checkpoint = Checkpoint.parse(read_json(folder / "config.json", where), where)
    for pattern, why in _UNSUPPORTED.items():
        if file := next(folder.glob(pattern), None):
            raise ModelError(f"{where} has {file.name}: the checkpoint {why}")
    statistics = folder / "dataset_statistics.json"
    if statistics.is_file():
        added = read_json(statistics, where)
        checkpoint = replace(checkpoint, statistics={**checkpoint.statistics, **added})
    return folder, checkpoint


class OpenVla(nn.Module):
    """The module; its weights have the names of a published checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        llm, vision = checkpoint.text.hidden_size, sum(tower.width for tower in checkpoint.towers)
        self.vision_backbone = VisionBackbone(checkpoint.towers, checkpoint.image_size)
        self.projector = _projector(
            [vision, 4 * vision, llm, llm] if len(checkpoint.towers) == 2 else [vision, llm, llm]
        )
        self.language_model: Any = AutoModelForCausalLM.from_config(
            checkpoint.text, attn_implementation="sdpa"
        )
        if checkpoint.proprio_size is not None:
            self.proprio_projector = _projector([checkpoint.proprio_size, llm, llm])

    def get_output_embeddings(self) -> nn.Linear:
        return self.language_model.lm_head

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.dtype

    @property
    def action_ids(self) -> range:
        """The ids of action tokens: those at the end of the tokenizer's vocabulary."""
        end = self.language_model.config.vocab_size - self.checkpoint.num_padding
        return range(end - self.checkpoint.num_bins, end)

    def prefix(
        self, images: Sequence[Tensor], prompt_ids: Tensor, proprio: Tensor | None, *, center_crop: bool
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, N, D] before the action tokens, and their mask [B, N].

        `images` are uint8 [B, h, w, 3], `prompt_ids` [B, L] the prompt without BOS, padded at the left with
        -1.
        """
        dtype = self.language_model.lm_head.weight.dtype
        sized = [
            prepared(image.unsqueeze(1), self.checkpoint.image_size, center_crop=center_crop)
            for image in images
        ]
        patches = _project(self.projector, self.vision_backbone(torch.cat(sized, dim=1).to(dtype)))
        bos = torch.full_like(prompt_ids[:, :1], self.checkpoint.text.bos_token_id)
        parts = [self._embed(bos), patches]
        if proprio is not None:
            parts.append(_project(self.proprio_projector, proprio.to(dtype)).unsqueeze(1))
        is_prompt = prompt_ids >= 0
        first = int(is_prompt.any(0).int().argmax())
        num_always = sum(part.shape[1] for part in parts)
        parts.append(self._embed(prompt_ids[:, first:].clamp(min=0)))
        return torch.cat(parts, dim=1), F.pad(is_prompt[:, first:], (num_always, 0), value=True)

    def _embed(self, ids: Tensor) -> Tensor:
        return self.language_model.get_input_embeddings()(ids)

    def parallel_states(self, prefix: Tensor, mask: Tensor, num_slots: int, *, has_stop: bool) -> Tensor:
        """OFT: hidden states [B, S, D] that predict the `num_slots` action tokens, in one pass."""
        slots = prefix.new_zeros(len(prefix), num_slots, prefix.shape[-1])
        parts = [prefix, slots]
        if has_stop:
            parts.append(self._embed(torch.full((len(prefix), 1), _STOP_ID, device=prefix.device)))
        embeddings = torch.cat(parts, dim=1)
        mask = F.pad(mask, (0, embeddings.shape[1] - mask.shape[1]), value=True)
        before = prefix.shape[1] - 1
        return self._states(embeddings, mask, is_causal=False)[:, before : before + num_slots]

    def causal_states(self, prefix: Tensor, mask: Tensor, bins: Tensor) -> Tensor:
        """OpenVLA: hidden states [B, S, D] that predict the action tokens `bins` [B, S] (indices into
        action_ids), each from those before it."""
        written = self._embed(bins[:, :-1] + self.action_ids.start)
        mask = F.pad(mask, (0, written.shape[1]), value=True)
        embeddings = torch.cat([prefix, written], dim=1)
        return self._states(embeddings, mask, is_causal=True)[:, prefix.shape[1] - 1 :]

    def next_state(self, prefix: Tensor, mask: Tensor, bins: Tensor, cache: DynamicCache) -> Tensor:
        """OpenVLA: hidden state [B, D] that predicts the action token after `bins` [B, s]. `cache` holds what
        earlier calls computed: the keys and values of everything but the last token."""
        mask = F.pad(mask, (0, bins.shape[1]), value=True)
        newest = self._embed(bins[:, -1:] + self.action_ids.start) if bins.shape[1] else prefix
        return self._states(newest, mask, is_causal=True, cache=cache)[:, -1]

    def action_logits(self, states: Tensor) -> Tensor:
        """[..., D] -> float32 [..., bins]: no other token is ever chosen."""
        ids = self.action_ids
        return outputs_of(self.language_model.lm_head, states, slice(ids.start, ids.stop)).float()

    def _states(
        self, embeddings: Tensor, mask: Tensor, *, is_causal: bool, cache: DynamicCache | None = None
    ) -> Tensor:
        """Last hidden states of the last positions, which `embeddings` are, of sequences with this mask."""
        num = embeddings.shape[1]
        positions = mask.cumsum(1) - 1
        out = self.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=visible_keys(mask, is_causal=is_causal)[:, :, -num:],
            position_ids=positions.clamp(min=0)[:, -num:],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state


def visible_keys(mask: Tensor, *, is_causal: bool) -> Tensor:
    """[B, N] -> bool [B, 1, N, N]: which positions (last axis) each one sees."""
    visible = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    return visible.tril() if is_causal else visible.contiguous()


def _projector(widths: Sequence[int]) -> nn.ModuleDict:
    layers = itertools.pairwise(widths)
    return nn.ModuleDict({f"fc{n}": nn.Linear(wide, narrow) for n, (wide, narrow) in enumerate(layers, 1)})


def _project(layers: nn.ModuleDict, x: Tensor) -> Tensor:
    """Linear layers with GELU between them."""
    for number, layer in enumerate(layers.values()):
        x = layer(F.gelu(x) if number else x)
    return x


def load_openvla(
    path: str, *, dtype: torch.dtype, device: torch.device, use_proprio: bool = False, is_hollow: bool = False
) -> OpenVla:
    """Load a checkpoint tensor by tensor to `device`; `is_hollow` as in build.load_module. Raises ModelError
    if a weight is missing or has another shape."""
    folder, checkpoint = read_checkpoint(path)
    projector = None
    if use_proprio:
        projector = _read_projector(folder)
        checkpoint = replace(checkpoint, proprio_size=projector["fc1.weight"].shape[1])
    with no_init_weights():  # memory that is never written takes none
        model = OpenVla(checkpoint)
    if is_hollow:
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.data = torch.empty_like(tensor, dtype=dtype)
        return model.to(device).eval()
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model.path={path} has no *.safetensors files; convert its weights to safetensors")
    loaded: set[str] = set()
    for file in files:
        tensors = read(str(file), "model.path", "part of OpenVLA", load_file, device=str(device))
        _assign(model, tensors, expected, dtype, f"model.path={path}", loaded)
    if projector is not None:
        named = {f"proprio_projector.{name}": tensor for name, tensor in projector.items()}
        _assign(model, named, expected, dtype, f"model.path={path}", loaded)
    if missing := sorted(expected.keys() - loaded):
        raise ModelError(
            f"model.path={path} is not a complete OpenVLA checkpoint: it lacks {len(missing)} of its "
            f"weights, among them {missing[0]}"
        )
    return model.to(device).eval()  # buffers of the language model


def _assign(
    model: OpenVla,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, torch.Size],
    dtype: torch.dtype,
    where: str,
    loaded: set[str],
) -> None:
    wrong = [name for name in tensors if tensors[name].shape != expected.get(name)]
    if wrong:
        name, shape = wrong[0], tuple(tensors[wrong[0]].shape)
        needs = tuple(expected[name]) if name in expected else "no such weight"
        raise ModelError(
            f"{where}: {len(wrong)} weights do not fit its config.json, among them {name} of shape {shape} "
            f"(expected: {needs})"
        )
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    model.load_state_dict({n: t.to(dtype) for n, t in tensors.items()}, strict=False, assign=True)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    loaded.update(tensors)


def _read_projector(folder: Path) -> dict[str, Tensor]:
    """The weights of the proprio projector, which has its own file."""
    files = sorted(folder.glob(_PROPRIO_FILES))
    if not files:
        raise ModelError(
            f"model.vla.use_proprio=true, but {folder} has no {_PROPRIO_FILES}; set it to false, or choose "
            "another checkpoint"
        )
    load = partial(torch.load, map_location="cpu", weights_only=True)
    tensors = read(str(files[-1]), "model.path", "proprio projector", load)
    return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def save_openvla(
    weights: Mapping[str, Tensor], checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write a folder that load_openvla reads, in the published layout."""
    from huggingface_hub import save_torch_state_dict

    folder.mkdir(parents=True, exist_ok=True)
    prefix = "proprio_projector."
    proprio = {n.removeprefix(prefix): t.detach().cpu() for n, t in weights.items() if n.startswith(prefix)}
    rest = {n: t.detach().cpu().contiguous() for n, t in weights.items() if not n.startswith(prefix)}
    save_torch_state_dict(rest, folder)
    if proprio:
        torch.save(proprio, folder / "proprio_projector--0_checkpoint.pt")
    raw = {**checkpoint.raw, "norm_stats": checkpoint.statistics}
    (folder / "config.json").write_text(json.dumps(raw, indent=2))
    tokenizer.save_pretrained(folder)


def openvla_prompt(tokenizer: PreTrainedTokenizerBase, instruction: str) -> list[int]:
    """Token ids of the prompt without BOS. Raises ModelError if the tokenizer lacks the token that prompts
    end with."""
    space: Any = tokenizer.convert_tokens_to_ids(_SPACE)
    if space is None or space == tokenizer.unk_token_id:
        raise ModelError(
            f"the tokenizer of the policy lacks the token {_SPACE!r}, with which prompts end; use Llama's"
        )
    text = f"In: What action should the robot take to {instruction.lower()}?\nOut:"
    ids: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
    return [*ids] if ids[-1] == space else [*ids, space]
