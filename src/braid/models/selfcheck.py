"""Proof, once per load, that a model under packed attention is the model its authors wrote.

Any decoder of transformers may be loaded; this is what stands between a silent difference (a layer that keeps a state of its
own, positions that are counted rather than given, a mask that braid does not know) and a training run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from braid.errors import ModelError

from .attention import IMPLEMENTATION, AttentionContext, LayerCall, PackedAttention
from .causal_lm import CausalLM

_LENGTHS = (19, 12)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Allowed difference of log-probs, relative to 1 + the largest logit: some hundred roundings of each type."""


@torch.no_grad()
def check_against_plain(lm: CausalLM) -> None:
    """Compare two short random segments, packed, with the model's own forward over each (eager attention).

    Raises ModelError, naming the architecture, when log-probs differ or when not every layer calls braid's attention
    with what its config says.
    """
    architecture = type(lm.model).__name__
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(lm.vocab_size, (n,), generator=generator).to(lm.device) for n in _LENGTHS]
    plain = _plain_logits(lm, rows)
    recorder = _Recorder(PackedAttention(_LENGTHS, lm.device))
    positions = torch.cat([torch.arange(n, device=lm.device) for n in _LENGTHS])
    try:
        packed = lm.logits(lm.hidden(torch.cat(rows), positions, recorder))
    except TypeError as error:
        raise ModelError(
            f"{architecture} does not take what packed rows need ({error}); braid cannot run this architecture"
        ) from error
    _check_layers(lm, architecture, recorder.calls)
    difference = (plain.log_softmax(-1) - packed.log_softmax(-1)).abs().max().item()
    allowed = _TOLERANCE.get(lm.model.dtype, 1e-4) * (1 + plain.abs().max().item())
    if not difference <= allowed:
        raise ModelError(
            f"{architecture} gives other log-probs for packed rows than by its own forward pass: they differ by up to "
            f"{difference:.2g}, allowed is {allowed:.2g}. Its layers mix tokens in a way braid does not know, and training "
            "on it would be wrong; choose another architecture (Llama, Qwen, Gemma and Mistral are known to work)"
        )


class _Recorder:
    """Notes which layers call, and with what."""

    def __init__(self, inner: AttentionContext) -> None:
        self._inner = inner
        self.calls: dict[int, LayerCall] = {}

    def attend(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls[call.layer] = call
        return self._inner.attend(call, query, key, value)


def _plain_logits(lm: CausalLM, rows: list[Tensor]) -> Tensor:
    """[T, V] in float32, each row by itself through the Hugging Face forward."""
    lm.model.set_attn_implementation("eager")
    try:
        return torch.cat(
            [lm.model(input_ids=row.unsqueeze(0), use_cache=False).logits[0].float() for row in rows]
        )
    finally:
        lm.model.set_attn_implementation(IMPLEMENTATION)


def _check_layers(lm: CausalLM, architecture: str, calls: dict[int, LayerCall]) -> None:
    num_layers: int = lm.config.num_hidden_layers
    if silent := sorted(set(range(num_layers)) - set(calls)):
        raise ModelError(
            f"{architecture}: {len(silent)} of {num_layers} layers (the first is layer {silent[0]}) do not attend through "
            "transformers' attention interface; braid cannot run this architecture"
        )
    for layer, kind in enumerate(getattr(lm.config, "layer_types", None) or ()):
        if (kind == "sliding_attention") != (calls[layer].sliding_window is not None):
            raise ModelError(
                f"{architecture}: layer {layer} is of type {kind} but attends with "
                f"sliding_window={calls[layer].sliding_window}; braid cannot run this architecture"
            )
