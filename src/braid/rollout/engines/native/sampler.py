"""Samples tokens from logits, with separate settings per row.

In order: repetition penalty, masking of end tokens, temperature, top-k, top-p, min-p; then inverse-transform
sampling with one uniform per row. Truncations are thresholds on the value and keep ties whole, so that no
result depends on how a sort orders equal values. Steps that no row needs are skipped.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from braid.rollout.engine import Sampling
from braid.rollout.random import absorb, stream, unit_interval

_CHUNK_ELEMENTS = 1 << 24
"""Largest number of elements of a [rows, V] block of float64 sums in memory."""


class Sampler:
    """Holds the settings, random stream and number of sampled tokens of each slot."""

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._settings = np.zeros(
            slots,
            dtype=[
                ("temperature", "f4"),
                ("is_greedy", "?"),
                ("top_p", "f8"),
                ("top_k", "i8"),
                ("min_p", "f4"),
                ("penalty", "f4"),
                ("min_tokens", "i8"),
                ("num_tokens", "i8"),
                ("stream", "u8"),
            ],
        )
        self._end_tokens: list[tuple[int, ...]] = [()] * slots
        self._seen: Tensor | None = None

    def put(
        self,
        slot: int,
        sampling: Sampling,
        key: tuple[int, ...],
        prefix_ids: tuple[int, ...],
        num_tokens: int = 0,
    ) -> None:
        """Begin a sequence in `slot`, or continue one that has `num_tokens` sampled tokens at the end of
        `prefix_ids`."""
        row = self._settings[slot]
        row["temperature"], row["is_greedy"] = sampling.temperature, sampling.greedy
        row["top_p"] = 1.0 if sampling.greedy else sampling.top_p
        row["top_k"] = 0 if sampling.greedy or sampling.top_k >= self._vocab_size else sampling.top_k
        row["min_p"] = 0.0 if sampling.greedy else sampling.min_p
        row["penalty"], row["min_tokens"] = sampling.repetition_penalty, sampling.min_new_tokens
        row["num_tokens"], row["stream"] = num_tokens, stream(key)
        self._end_tokens[slot] = sampling.stop_token_ids
        if sampling.repetition_penalty != 1.0:
            if self._seen is None:
                shape = (len(self._settings), self._vocab_size)
                self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
            self._seen[slot] = False
            self._seen[slot, list(prefix_ids)] = True

    def move(self, source: int, target: int) -> None:
        """Copy the state of slot `source` to slot `target`."""
        self._settings[target] = self._settings[source]
        self._end_tokens[target] = self._end_tokens[source]
        if self._seen is not None:
            self._seen[target] = self._seen[source]

    def sample(self, logits: Tensor, first: int) -> tuple[list[int], list[float]]:
        """Sample a token for each of the slots first, first + 1, ... from raw logits [N, V].

        Returns tokens [N] and the natural logs of the probabilities that they were sampled with. A greedy row
        takes the most probable token and reports its log-prob at the row's temperature. A row with NaN logits
        gives a NaN log-prob and no meaningful token.
        """
        rows = slice(first, first + logits.shape[0])
        settings = self._settings[rows]
        logits = self._shaped(logits.float(), settings, rows)
        choices = logits.argmax(-1) if settings["is_greedy"].any() else None
        if (settings["temperature"] != 1.0).any():
            logits = logits / self._column(settings["temperature"])
        uniforms = unit_interval(absorb(settings["stream"], settings["num_tokens"]))
        settings["num_tokens"] += 1
        tokens, probs = self._draw(logits, settings, uniforms, choices)
        if self._seen is not None:
            self._seen[rows].scatter_(1, tokens, True)
        # One at a time: a vectorised log has different rounding at the end of a tensor than in its middle.
        logprobs = [math.log(p) if p > 0 else math.nan for p in probs.squeeze(1).tolist()]
        return tokens.squeeze(1).tolist(), logprobs

    def _shaped(self, logits: Tensor, settings: NDArray[np.void], rows: slice) -> Tensor:
        """Apply the repetition penalty, and mask end tokens of rows with fewer than min_new_tokens tokens."""
        if self._seen is not None and (settings["penalty"] != 1.0).any():
            penalty = self._column(settings["penalty"])
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            is_penalised = self._seen[rows] & (penalty != 1.0)
            logits = torch.where(is_penalised, penalised, logits)
        early = np.flatnonzero(settings["num_tokens"] < settings["min_tokens"]).tolist()
        pairs = [(row, token) for row in early for token in self._end_tokens[rows.start + row]]
        if pairs:
            row_ids, token_ids = torch.tensor(pairs, device=self._device).T
            logits = logits.index_put((row_ids, token_ids), logits.new_tensor(float("-inf")))
        return logits

    def _draw(
        self,
        logits: Tensor,
        settings: NDArray[np.void],
        uniforms: NDArray[np.float64],
        choices: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Tokens and their probabilities, each [N, 1], from logits at temperature 1, in chunks of rows."""
        size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
        drawn = [
            self._draw_chunk(
                logits[at : at + size],
                settings[at : at + size],
                self._column(uniforms[at : at + size]),
                None if choices is None else choices[at : at + size, None],
            )
            for at in range(0, len(logits), size)
        ]
        if len(drawn) == 1:
            return drawn[0]
        tokens, probs = zip(*drawn, strict=True)
        return torch.cat(tokens), torch.cat(probs)

    def _draw_chunk(
        self, logits: Tensor, settings: NDArray[np.void], uniforms: Tensor, choices: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if (top_k := settings["top_k"]).any():
            logits = _keep_top_k(logits, self._column(top_k))
        probs = logits.softmax(-1)
        if ((top_p := settings["top_p"]) < 1.0).any():
            probs = _keep_top_p(probs, self._column(top_p))
        if (min_p := settings["min_p"]).any():
            probs = probs.masked_fill(probs < self._column(min_p) * probs.amax(-1, keepdim=True), 0.0)
        mass = probs.cumsum(-1, dtype=torch.float64)
        total = mass[:, -1:]
        # u < 1 in steps of 2**-53, so u * total < total after rounding: a token of probability 0 is never
        # taken.
        tokens = torch.searchsorted(mass, uniforms * total, right=True).clamp_(max=self._vocab_size - 1)
        if choices is not None:
            tokens = torch.where(self._column(settings["is_greedy"]), choices, tokens)
        return tokens, probs.gather(1, tokens) / total

    def _column(self, values: NDArray[np.generic]) -> Tensor:
        """[N] on the host -> [N, 1] on the device."""
        return torch.from_numpy(values.copy()).to(self._device)[:, None]


def _keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """-inf below the k-th largest value; 0 keeps all. [N, V], [N, 1] -> [N, V]."""
    best = logits.topk(int(top_k.max()), dim=-1).values
    floor = best.gather(1, (top_k - 1).clamp_(min=0))
    return logits.masked_fill((logits < floor) & (top_k > 0), float("-inf"))


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    """0 outside the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al. 2019,
    nucleus sampling).

    [N, V], [N, 1] -> [N, V], not normalised. Extends a top-k of probabilities until its mass suffices, since
    sorting a large vocabulary would cost more than the model.
    """
    vocab_size, num_best = probs.shape[1], 64
    while True:
        num_best = min(num_best, vocab_size)
        best = probs.topk(num_best, dim=-1).values
        mass = best.cumsum(-1, dtype=torch.float64)
        if num_best == vocab_size or bool((mass[:, -1:] >= top_p).all()):
            break
        num_best *= 8
    floor = best.gather(1, torch.searchsorted(mass, top_p).clamp_(max=num_best - 1))
    return probs.masked_fill((probs < floor) & (top_p < 1.0), 0.0)
