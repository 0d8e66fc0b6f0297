"""Samples tokens from logits, with separate settings per row.

In order: repetition penalty, masking of end tokens, temperature, top-k, top-p, min-p; then inverse-transform
sampling with one uniform per row. Truncations are thresholds on the value and keep ties whole, so that no
result depends on how a sort orders equal values. Steps that no row needs are skipped.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from braid.models.transfer import to_device
from braid.rollout.engine import Sampling
from braid.rollout.random import absorb, stream, unit_interval

_BLOCK = 512
"""Tokens whose probabilities are summed in float32; larger vocabularies are drawn from in two stages."""


_NUM_BEST, _NUM_BEST_ON_GPU = 64, 1024
"""Most probable tokens among which the border of top-p is searched before all are sorted. On GPUs a search
among more costs about the same, and a sort a second wait."""
_MOST_CANDIDATES = 256
"""Largest top-k whose tokens are drawn from without computing the probabilities of the whole vocabulary."""


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
        self._columns: dict[str, Tensor] = {}  # settings on the device

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
        self._columns.clear()
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
            self._seen[slot].index_fill_(0, to_device(prefix_ids, self._device), True)

    def move(self, source: int, target: int) -> None:
        """Copy the state of slot `source` to slot `target`."""
        self._columns.clear()
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
        uniforms = to_device(unit_interval(absorb(settings["stream"], settings["num_tokens"])), self._device)
        logits = self._shaped(logits.float(), settings, rows)
        choices = logits.argmax(-1, keepdim=True) if settings["is_greedy"].any() else None
        if (settings["temperature"] != 1.0).any():
            logits = logits / self._column("temperature", rows)
        settings["num_tokens"] += 1
        tokens, probs, is_short = self._drawn(logits, choices, uniforms[:, None], rows)
        columns = (
            (tokens.double(), probs) if is_short is None else (tokens.double(), probs, is_short.double())
        )
        # The only copy to the host in a step. Token ids are exact in float64.
        drawn = torch.cat(columns, dim=1).tolist()
        if short := [row for row, (_, _, *flag) in enumerate(drawn) if any(flag)]:
            chosen = to_device(on_host := torch.tensor(short), self._device)
            greedy = None if choices is None else choices[chosen]
            again = self._drawn_from(
                logits[chosen], greedy, uniforms[chosen, None], rows, on_host, sorts=True
            )
            tokens, probs = tokens.index_copy(0, chosen, again[0]), probs.index_copy(0, chosen, again[1])
            drawn = torch.cat((tokens.double(), probs), dim=1).tolist()
        if self._seen is not None:
            self._seen[rows].scatter_(1, tokens, True)
        # One at a time: a vectorised log has different rounding at the end of a tensor than in its middle.
        return [int(row[0]) for row in drawn], [math.log(row[1]) if row[1] > 0 else math.nan for row in drawn]

    def _drawn(
        self, logits: Tensor, choices: Tensor | None, uniforms: Tensor, rows: slice
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Tokens [N, 1] at `uniforms` [N, 1], or of greedy rows `choices` [N, 1], and their probabilities [N,
        1], for logits [N, V] divided by the temperature; and the rows that have to be drawn again (see
        `_keep_top_p`).

        A row with a small top-k is drawn from its candidates alone, if no tie adds to them, which on a CPU
        takes less than half of the time at 152k tokens. The choice depends on the row only.
        """
        top_k, vocab_size = self._settings["top_k"][rows], logits.shape[1]
        most = int(np.where(top_k <= _MOST_CANDIDATES, top_k, 0).max(initial=0))
        if self._device.type != "cpu" or not 0 < most < vocab_size:
            return self._drawn_from(logits, choices, uniforms, rows)
        best, ids = logits.topk(most + 1, dim=-1)
        values, row = best.numpy(), np.arange(len(top_k))
        border = np.minimum(top_k, most)
        few = (top_k > 0) & (top_k <= most) & (values[row, border] != values[row, border - 1])
        tokens, probs = torch.empty_like(uniforms, dtype=torch.long), torch.empty_like(uniforms)
        for size in np.unique(top_k[few]).tolist():  # sums over as many candidates as the row has
            chosen = torch.from_numpy(np.flatnonzero(few & (top_k == size)))
            of_row = ids[chosen, :size].sort(dim=-1).values
            candidates = logits[chosen].gather(1, of_row)
            places, probs[chosen], _ = self._drawn_from(candidates, None, uniforms[chosen], rows, chosen)
            tokens[chosen] = of_row.gather(1, places)
        if not few.all():
            others = torch.from_numpy(np.flatnonzero(~few))
            greedy = None if choices is None else choices[others]
            tokens[others], probs[others], _ = self._drawn_from(
                logits[others], greedy, uniforms[others], rows, others
            )
        return tokens, probs, None

    def _drawn_from(
        self,
        logits: Tensor,
        choices: Tensor | None,
        uniforms: Tensor,
        rows: slice,
        chosen: Tensor | None = None,
        *,
        sorts: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Places [n, 1] in `logits` [n, K] of the `chosen` [n] of the rows (None: all), and their
        probabilities [n, 1]; and those to be drawn again, with `sorts`. A greedy row takes its place in
        `choices` [n, 1]."""
        settings = self._settings[rows] if chosen is None else self._settings[rows][chosen.numpy()]
        if choices is not None and settings["is_greedy"].all():
            return choices, logits.softmax(-1).gather(1, choices).double(), None

        def column(name: str) -> Tensor:
            of_rows = self._column(name, rows)
            return of_rows if chosen is None else of_rows[to_device(chosen, self._device)]

        if (top_k := settings["top_k"]).any() and int(top_k.max()) < logits.shape[1]:
            logits = _keep_top_k(logits, column("top_k"), int(top_k.max()))
        probs, is_short = logits.softmax(-1), None
        if (settings["top_p"] < 1.0).any():
            probs, is_short = _keep_top_p(probs, column("top_p"), sorts=sorts)
        if settings["min_p"].any():
            probs = probs.masked_fill(probs < column("min_p") * probs.amax(-1, keepdim=True), 0.0)
        places, total = _draw(probs, uniforms)
        if choices is not None:
            places = torch.where(column("is_greedy"), choices, places)
            total = total.masked_fill(column("is_greedy"), 1.0)  # as in a batch of greedy rows alone
        return places, probs.gather(1, places) / total, is_short

    def _shaped(self, logits: Tensor, settings: NDArray[np.void], rows: slice) -> Tensor:
        """Apply the repetition penalty, and mask end tokens of rows with fewer than min_new_tokens tokens."""
        if self._seen is not None and (settings["penalty"] != 1.0).any():
            penalty = self._column("penalty", rows)
            penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
            logits = torch.where(self._seen[rows], penalised, logits)
        early = np.flatnonzero(settings["num_tokens"] < settings["min_tokens"]).tolist()
        pairs = [(row, token) for row in early for token in self._end_tokens[rows.start + row]]
        if pairs:
            row_ids, token_ids = to_device(np.array(pairs), self._device).T
            logits = logits.index_put((row_ids, token_ids), logits.new_full((), float("-inf")))
        return logits

    def _column(self, name: str, rows: slice) -> Tensor:
        """A setting of `rows` [N, 1], kept on the device while the slots stay the same."""
        if name not in self._columns:
            self._columns[name] = to_device(self._settings[name].copy(), self._device)[:, None]
        return self._columns[name][rows]


def _draw(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [N, 1] at `uniforms` [N, 1] of the cumulative distributions of `probs` [N, V], which need not be
    normalised, and the sums of `probs` [N, 1].

    A large vocabulary is divided into blocks: a search in the cumulative sums of all blocks, then in those of
    one. Sums over blocks are float32, as accurate as the probabilities; float64 needs several passes over the
    vocabulary.
    """
    vocab_size = probs.shape[1]
    whole = 0 if vocab_size <= _BLOCK else vocab_size // _BLOCK * _BLOCK
    sums = probs
    if whole:
        blocks = probs[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)
        sums = torch.cat((blocks, probs[:, whole:].sum(-1, keepdim=True)), dim=1)
    mass = sums.cumsum(-1, dtype=torch.float64)
    total = mass[:, -1:]
    # u < 1 in steps of 2**-53, so u * total < total after rounding: nothing of probability 0 is ever taken.
    border = uniforms * total
    places = torch.searchsorted(mass, border, right=True).clamp_(max=sums.shape[1] - 1)
    if not whole:
        return places, total
    tokens = places * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    inside = probs.gather(1, tokens.clamp(max=vocab_size - 1)).masked_fill_(tokens >= vocab_size, 0.0)
    within = inside.cumsum(-1, dtype=torch.float64)
    # The float32 sum of a block can exceed its float64 sum.
    most = within[:, -1:].nextafter(torch.zeros_like(total))
    border = torch.minimum(border - F.pad(mass, (1, 0)).gather(1, places), most)
    tokens = places * _BLOCK + torch.searchsorted(within, border, right=True)
    return tokens.clamp_(max=vocab_size - 1), total


def _keep_top_k(logits: Tensor, top_k: Tensor, most: int) -> Tensor:
    """-inf below the k-th largest value; 0 keeps all. [N, V], [N, 1] -> [N, V]. `most` is the largest k."""
    best = logits.topk(most, dim=-1).values
    floor = best.gather(1, (top_k - 1).clamp_(min=0)).masked_fill_(top_k == 0, float("-inf"))
    return torch.where(logits >= floor, logits, float("-inf"))


def _keep_top_p(probs: Tensor, top_p: Tensor, *, sorts: bool) -> tuple[Tensor, Tensor | None]:
    """0 outside the smallest set of most probable tokens whose mass reaches top_p (Holtzman et al. 2019,
    nucleus sampling).

    [N, V], [N, 1] -> [N, V], not normalised. Only rows whose most probable tokens do not suffice are to be
    sorted, since sorting a large vocabulary costs more than the model. On GPUs it takes a wait to know them,
    so they are returned [N, 1], for the host to read with the tokens; with `sorts` these are the given rows.
    """
    is_cpu = probs.device.type == "cpu"
    num_best, is_short = (_NUM_BEST if is_cpu else _NUM_BEST_ON_GPU), None
    if sorts:
        floor, _ = _least_kept(_sorted(probs), top_p)
    else:
        floor, is_short = _least_kept(probs.topk(min(num_best, probs.shape[1]), dim=-1).values, top_p)
        is_short = is_short & (top_p < 1.0) if probs.shape[1] > num_best else None
    if is_cpu and is_short is not None and bool(is_short.any()):
        rows = is_short.squeeze(1).nonzero().squeeze(1)
        floor[rows] = _least_kept(_sorted(probs[rows]), top_p[rows])[0]
    floor.masked_fill_(top_p >= 1.0, 0.0)
    return torch.where(probs >= floor, probs, 0.0), None if is_cpu else is_short


def _least_kept(best: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest probability to keep [N, 1] from the largest `best` [N, n] in descending order, and whether
    their mass is below top_p [N, 1]."""
    mass = best.cumsum(-1, dtype=torch.float64)
    return best.gather(1, torch.searchsorted(mass, top_p).clamp_(max=best.shape[1] - 1)), mass[:, -1:] < top_p


def _sorted(probs: Tensor) -> Tensor:
    """Each row in descending order. NumPy's sort uses AVX-512 or AVX2."""
    if probs.device.type != "cpu":
        return probs.sort(dim=-1, descending=True).values
    return torch.from_numpy(np.sort(probs.numpy(), axis=-1)).flip(-1)
