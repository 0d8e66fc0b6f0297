"""Vision-language-action policies, which may predict values too, as training and the simulators' engine need
them."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedTokenizerBase

from braid.config.model import VlaConfig
from braid.errors import ModelError
from braid.models.base import Acted, Output, TrainableModel, at_level, choose, unique_weights
from braid.models.batch import PackedBatch
from braid.models.flops import Flops, flops_of_linear
from braid.models.lora import has_adapters, named_adapters
from braid.models.transfer import to_device
from braid.models.value_head import VALUES, Detaching, ValueHead, detached, taken_name
from braid.types import DecisionLevel, Spaces

from .actions import Range, values_of
from .openvla import OpenVla, openvla_prompt


def pi0_prompt(tokenizer: PreTrainedTokenizerBase, instruction: str) -> list[int]:
    """Token ids of the prompt of pi0."""
    ids: Any = tokenizer(instruction + "\n", add_special_tokens=False)["input_ids"]
    return [tokenizer.bos_token_id, *ids]  # pyright: ignore[reportReturnType]


Tensors = Mapping[str, Tensor]
T = TypeVar("T", bound=nn.Module)
_RECOMPUTED = 8
"""Observations per forward pass under gradient checkpointing."""
_HIDDEN = (512, 128)
"""Hidden sizes of the value head, as in RLinf."""


class Processor:
    """Turns a simulator's observations and actions into what a policy's module reads, and back.

    `actions` and `state` are the ranges of normalized numbers; `state` is None for a model that reads none.
    `num_bins` is the number of OpenVLA's action tokens.
    """

    def __init__(
        self,
        config: VlaConfig,
        spaces: Spaces,
        tokenizer: PreTrainedTokenizerBase,
        actions: Range,
        state: Range | None,
        num_bins: int = 256,
    ) -> None:
        if spaces.actions.kind != "continuous" or spaces.actions.size != config.action_dim:
            has = f"{spaces.actions.size} {spaces.actions.kind}"
            raise ModelError(
                f"model.vla.action_dim={config.action_dim}, but the environment has {has} action "
                "dimensions; set it to the environment's, and use one with continuous actions"
            )
        if len(spaces.images) < config.num_images:
            raise ModelError(
                f"model.vla.num_images={config.num_images}, but the environment's observations have "
                f"{len(spaces.images)} images ({', '.join(spaces.images) or 'none'}); lower it, or choose "
                "another environment"
            )
        if state is not None and len(state.low) != spaces.state_size:
            without = "" if config.kind == "pi0" else ", or set model.vla.use_proprio=false"
            raise ModelError(
                f"the checkpoint's statistics are those of a state of {len(state.low)} numbers, but the "
                f"environment's has {spaces.state_size}; choose another model.vla.unnorm_key or "
                f"environment{without}"
            )
        self.config, self.actions, self.num_bins = config, actions, num_bins
        self.images = list(spaces.images)[: config.num_images]
        self._tokenizer, self._state = tokenizer, state
        self._prompts: dict[str, NDArray[np.int64]] = {}

    def observe(self, observations: Mapping[str, Any], instructions: Sequence[str]) -> dict[str, Any]:
        """See ActingPolicy: the images, `prompt_ids`, and the normalized `state`."""
        for instruction in {*instructions}.difference(self._prompts):
            self._prompts[instruction] = np.array(self.prompt(instruction), np.int64)
        out = {name: observations[name] for name in self.images}
        out["prompt_ids"] = np.stack([self._prompts[instruction] for instruction in instructions])
        if self._state is not None:
            state = torch.as_tensor(observations["state"]).cpu().numpy()
            out["state"] = self._state.normalize(state).astype(np.float32)
        return out

    def prompt(self, instruction: str) -> list[int]:
        """Token ids, padded with -1 to model.vla.max_prompt_tokens."""
        make = pi0_prompt if self.config.kind == "pi0" else openvla_prompt
        ids, size = make(self._tokenizer, instruction), self.config.max_prompt_tokens
        if len(ids) > size:
            raise ModelError(
                f"the prompt of the instruction {instruction!r} has {len(ids)} tokens, more than "
                f"model.vla.max_prompt_tokens={size}; raise it"
            )
        padding = [-1] * (size - len(ids))
        return [*ids, *padding] if self.config.kind == "pi0" else [*padding, *ids]


def num_positions(config: VlaConfig, level: DecisionLevel) -> int:
    """Positions of a decision of OpenVLA in a row."""
    chunk = config.num_action_chunks
    return {"token": chunk * config.action_dim, "action": chunk, "chunk": 1}[level]


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of torch from `seed`, without an effect on later ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class VlaPolicy(TrainableModel):
    """A distribution over chunks of `num_action_chunks` actions, given images, an instruction, and for some
    models a state. A decision is `width` positions of a row; entropies are those of `entropy_level` (see
    base.at_level)."""

    width: int
    num_uniforms: int

    def __init__(
        self, module: nn.Module, processor: Processor, entropy_level: DecisionLevel | None = None
    ) -> None:
        self.module, self.processor = module.eval(), processor
        self.config, self.observe = processor.config, processor.observe
        self._recomputes = False
        self._entropy_level: DecisionLevel | None = entropy_level
        self._added: dict[str, nn.Module] = {}

    def add_value_head(
        self,
        name: str,
        *,
        seed: int,
        num_values: int = 1,
        normalizes: bool = False,
        detaches: Detaching = "never",
    ) -> None:
        """Add a perceptron that predicts values from `features`. `seed` is that of the weights, `num_values`
        and `normalizes` as in ValueHead."""
        if name == "value_layers" or hasattr(self.module, name):
            raise taken_name(name)
        like = next(self.module.parameters())
        sizes = (self.hidden_size, *_HIDDEN)
        with seeded(seed):
            layers = [nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in itertools.pairwise(sizes)]
        self._value_layers = self._add("value_layers", nn.Sequential(*layers).to(like.device, like.dtype))
        head = ValueHead(sizes[-1], num_values=num_values, normalizes=normalizes)
        self.value_head = self._add(name, head.to(like.device, like.dtype))
        self._detaches: Detaching = detaches

    def _add(self, name: str, layer: T) -> T:
        """Add a part that checkpoint folders of the model don't have; it is trained beside adapters too."""
        self.module.add_module(name, layer)
        self._added[name] = layer
        return layer

    @abstractmethod
    def features(self, observations: Tensors) -> Tensor:
        """Hidden states [K, D] from which a critic predicts the values of observations."""

    @property
    @abstractmethod
    def hidden_size(self) -> int: ...

    @abstractmethod
    def draw(
        self, observations: Tensors, uniforms: Tensor | None, temperature: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """Normalized actions [E, H, A], inputs [E, P, ...] and log-probs [E, P] (see ActingPolicy)."""

    @abstractmethod
    def evaluate(self, observations: Tensors, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies [K, P] of decisions from their observations [K, ...] and `inputs` [K, P,
        ...], and their `features`."""

    def _entropies(self, of_numbers: Tensor) -> Tensor:
        """[K, H * A] -> [K, P]"""
        return at_level(of_numbers, self.width, self._entropy_level, self.config.num_action_chunks)

    @torch.no_grad()
    def act(
        self,
        observations: Mapping[str, Any],
        uniforms: NDArray[np.float64] | None,
        temperature: float | None = None,
    ) -> Acted:
        """See ActingPolicy. Greedy actions are computed for `eval_batch_rows` observations at a time."""
        size = self.config.eval_batch_rows
        if uniforms is None and len(observations["prompt_ids"]) > size:
            count = len(observations["prompt_ids"])
            pieces = [
                {name: array[n : n + size] for name, array in observations.items()}
                for n in range(0, count, size)
            ]
            parts = [self.act(piece, None) for piece in pieces]
            inputs = {name: np.concatenate([part.inputs[name] for part in parts]) for name in parts[0].inputs}
            actions, logprobs = (
                np.concatenate(arrays)
                for arrays in zip(*[(p.actions, p.logprobs) for p in parts], strict=True)
            )
            return Acted(actions, inputs, logprobs)
        device = next(self.module.parameters()).device
        tensors = {name: torch.as_tensor(values, device=device) for name, values in observations.items()}
        drawn = None if uniforms is None else torch.from_numpy(uniforms).to(device)
        actions, inputs, logprobs = self.draw(tensors, drawn, temperature)
        unnormalized = self.processor.actions.unnormalize(actions.cpu().numpy()).astype(np.float32)
        named = {name: values.cpu().numpy() for name, values in inputs.items()}
        return Acted(unnormalized, named, logprobs.float().cpu().numpy())

    def forward(self, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """`logprobs` [T] and `entropy` [T], 0 where the mask is False; `values` and `value_deviation` [T] of
        each position's observation, of the final ones only without log-probs and entropies."""
        assert batch.observed is not None, "batches of simulators have observations"
        if outputs <= VALUES:
            (features,) = self._in_parts(lambda part: (self.features(part),), batch.observations)
            return self._values(features, batch, outputs)
        places = batch.host("mask").nonzero().squeeze(1)
        used = batch.host("observed")[places].unique(return_inverse=True)
        written, used, which = (to_device(x, batch.device) for x in (places, *used))
        unit = batch.unit[written]
        inputs = {
            name: values.new_zeros(len(used), self.width, *values.shape[1:]).index_put(
                (which, unit), values[written]
            )
            for name, values in batch.inputs.items()
        }
        observations = {name: values[used] for name, values in batch.observations.items()}
        *computed, features = self._in_parts(self.evaluate, observations, inputs)
        named = zip(("logprobs", "entropy"), computed, strict=True)
        zeros = torch.zeros(batch.num_positions, device=batch.device)
        of_actions = {
            name: zeros.index_put((written,), values[which, unit].float())
            for name, values in named
            if name in outputs
        }
        if not outputs & VALUES:
            return of_actions
        num = len(next(iter(batch.observations.values())))
        of_all = features.new_zeros(num, features.shape[1]).index_put((used,), features)
        return of_actions | self._values(of_all, batch, outputs)

    def _values(self, features: Tensor, batch: PackedBatch, outputs: frozenset[Output]) -> dict[str, Tensor]:
        """From the features [K, D] of the batch's observations."""
        assert self.value_head is not None, "values are those of a value head"
        hidden = self._value_layers(detached(features, self._detaches, outputs))
        return self.value_head.of_observations(self.value_head(hidden), batch, outputs)

    def _in_parts(self, function: Any, *named: Tensors) -> tuple[Tensor, ...]:
        """Call the function; with gradient checkpointing for a few observations at a time, each part computed
        again in the backward pass."""
        if not (self._recomputes and torch.is_grad_enabled()):
            return function(*named)
        count, size = len(next(iter(named[0].values()))), _RECOMPUTED
        parts = []
        for start in range(0, count, size):
            part = [
                {name: values[start : start + size] for name, values in tensors.items()} for tensors in named
            ]
            parts.append(checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False))
        return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Set whether the backward pass computes activations again, for a few observations at a time."""
        self._recomputes = enabled

    def flops(self, lengths: Sequence[int], num_outputs: int) -> Flops:  # noqa: ARG002
        return self.flops_of(num_outputs // self.width)

    def flops_of(self, num_decisions: int) -> Flops:
        """Of the language model's linear layers alone, at all positions of these decisions' sequences."""
        return flops_of_linear(self.module, num_decisions * self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """Positions of a decision in the language model, about."""
        return self.config.max_prompt_tokens + self.width

    @property
    def has_adapters(self) -> bool:
        return has_adapters(self.module)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """See TrainableModel. With adapters: only these, and the parts beside the model."""
        if not self.has_adapters:
            yield from super().named_weights()
            return
        yield from named_adapters(self.module)
        for part, layer in self._added.items():
            yield from ((f"{part}.{name}", tensor) for name, tensor in unique_weights(layer))


class OpenVlaPolicy(VlaPolicy):
    """OpenVLA or OpenVLA-OFT. `inputs` has the `bins` of the actions' components."""

    module: OpenVla

    def __init__(
        self,
        module: OpenVla,
        processor: Processor,
        *,
        level: DecisionLevel,
        entropy_level: DecisionLevel | None = None,
        temperature: float,
    ) -> None:
        config = processor.config
        if config.kind == "openvla_oft" and config.form is None:
            raise ModelError(
                "model.vla.form is not set, and the files of an OpenVLA-OFT checkpoint don't say which "
                "code fine-tuned it; set it to official (moojink/openvla-oft) or rlinf: with the wrong "
                "one, success drops without an error"
            )
        super().__init__(module, processor, entropy_level)
        self.num_uniforms = config.num_action_chunks * config.action_dim
        self.width = num_positions(config, level)
        self._temperature = temperature

    @property
    def hidden_size(self) -> int:
        return self.module.checkpoint.text.hidden_size

    @property
    def num_tokens(self) -> int:
        sizes = self.module.checkpoint
        patches = (sizes.image_size // sizes.towers[0].patch) ** 2 * len(self.processor.images)
        return self.config.max_prompt_tokens + patches + self.num_uniforms

    def features(self, observations: Tensors) -> Tensor:
        """The state from which the first action token is predicted."""
        return self._states(observations, None)[:, 0]

    def draw(
        self, observations: Tensors, uniforms: Tensor | None, temperature: float | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        if self.config.kind == "openvla_oft":
            logits = self._logits(self._states(observations, None), temperature)
            bins = choose(logits, uniforms)
        else:
            bins, logits = self._write(observations, uniforms, temperature)
        logprobs = logits.log_softmax(-1).gather(-1, bins.unsqueeze(-1)).squeeze(-1)
        values = values_of(bins.cpu().numpy(), self.processor.num_bins)
        actions = torch.from_numpy(values).unflatten(1, (-1, self.config.action_dim))
        return actions, {"bins": bins.unflatten(1, (self.width, -1))}, self._per_position(logprobs)

    def _write(
        self, observations: Tensors, uniforms: Tensor | None, temperature: float | None
    ) -> tuple[Tensor, Tensor]:
        """Action tokens one after the other."""
        prefix, mask = self._prefix(observations)
        bins, cache, all_logits = prefix.new_zeros(len(prefix), 0, dtype=torch.long), DynamicCache(), []
        for number in range(self.num_uniforms):
            logits = self._logits(self.module.next_state(prefix, mask, bins, cache), temperature)
            drawn = choose(logits, None if uniforms is None else uniforms[:, number])
            bins = torch.cat([bins, drawn.unsqueeze(1)], dim=1)
            all_logits.append(logits)
        return bins, torch.stack(all_logits, dim=1)

    def evaluate(self, observations: Tensors, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        bins = inputs["bins"].flatten(1)
        states = self._states(observations, bins)
        logprobs = self._logits(states).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        chosen = logprobs.gather(-1, bins.unsqueeze(-1)).squeeze(-1)
        return self._per_position(chosen), self._entropies(entropy), states[:, 0]

    def _prefix(self, observations: Tensors) -> tuple[Tensor, Tensor]:
        images, crops = [observations[name] for name in self.processor.images], self.config.center_crop
        return self.module.prefix(
            images, observations["prompt_ids"], observations.get("state"), center_crop=crops
        )

    def _states(self, observations: Tensors, bins: Tensor | None) -> Tensor:
        """Hidden states that predict the action tokens; those of OpenVLA depend on `bins`, the first one's
        aside."""
        prefix, mask = self._prefix(observations)
        if self.config.kind == "openvla":
            written = prefix.new_zeros(len(prefix), 1, dtype=torch.long) if bins is None else bins
            return self.module.causal_states(prefix, mask, written)
        return self.module.parallel_states(
            prefix, mask, self.num_uniforms, has_stop=self.config.form == "official"
        )

    def _logits(self, states: Tensor, temperature: float | None = None) -> Tensor:
        return self.module.action_logits(states) / (temperature or self._temperature)

    def _per_position(self, of_tokens: Tensor) -> Tensor:
        return of_tokens.unflatten(1, (self.width, -1)).sum(-1)
