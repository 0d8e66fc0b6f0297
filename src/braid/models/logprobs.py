"""Log-probs, entropies and KL divergences from hidden states, computed in tiles of tokens x vocabulary: the
full logits of 8,192 tokens and a vocabulary of 151,936 would take 5 GB."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from braid.types import TiledDivergence

from .compiling import compiled
from .linear import compute_dtype, linear, uses_onednn

DIVERGENCES: frozenset[TiledDivergence] = frozenset({"kl", "forward_kl", "jensen_shannon"})
DEFAULT_CHUNK_BYTES = 64 * 2**20
_MIN_COLUMNS = 256
"""Minimum tile width: narrower tiles make matrix products slow, so tokens are split first."""
_ALIGNED_COLUMNS = 128
"""On GPUs the width of tiles is a multiple: products with rows of other lengths take kernels of a fraction of
the rate."""
_LEAST_BIAS = -1e30
_CPU_TILE_BYTES = 8 * 2**20
"""Maximum tile size on CPUs: larger tiles do not fit the caches, and their memory is returned to the kernel
after each use (1.4 times slower at 64 MiB)."""


@dataclass(frozen=True, slots=True)
class Head:
    """Output head: logits = `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`.

    `weight` [V, D], `bias` [V] or None; no tanh if `softcap` is None. With `accumulates`, the backward pass
    adds the gradient of `weight` directly to `weight.grad`, tile by tile, and returns none to autograd: this
    avoids a second [V, D] tensor, but torch.autograd.grad sees no gradient.

    The vocabulary may be sharded over the ranks of `group`: `weight` then holds the tokens from `first`,
    log-probs and entropies are those over the whole vocabulary on every rank, and the gradient of `hidden` is
    this rank's partial sum.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    accumulates: bool = False
    first: int = 0
    group: dist.ProcessGroup | None = None

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, V] in float32 (float64 for float64 weights); factors of the matrix product have the
        type of `hidden` or autocast's. Not differentiable, because the logits are modified in place."""
        return self.tile(hidden.to(compute_dtype(hidden)), self.weight, slice(None))

    def tile(self, states: Tensor, weight: Tensor, columns: slice, temperature: float = 1.0) -> Tensor:
        """Logits of `states` for a part of the vocabulary, divided by the temperature. `weight` are the rows
        of the weight for these `columns`."""
        bias = None
        if self.bias is not None:
            # -inf excludes the padding of a vocabulary; times a probability of 0 it would be nan.
            bias = self.bias[columns].clamp(min=max(_LEAST_BIAS, torch.finfo(states.dtype).min / 2))
        return self.scaled(_product(states, weight.to(states.dtype).t(), bias), temperature)

    def scaled(self, raw: Tensor, temperature: float = 1.0) -> Tensor:
        """Logits from the product with the weight and bias, which may be changed in place."""
        logits = raw if raw.dtype == torch.float64 else raw.float()
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if temperature == 1.0 else logits.div_(temperature)


class TiledLogits:
    """Logits of hidden states [N, D], divided by the temperature: computed in tiles, without gradients."""

    def __init__(self, hidden: Tensor, head: Head, temperature: float) -> None:
        """Under autocast, products run in its type."""
        self._states = hidden.detach().to(compute_dtype(hidden))
        self._head, self._temperature = head, temperature

    @property
    def vocab_size(self) -> int:
        return len(self._head.weight)

    def tile(self, tokens: slice, columns: slice) -> Tensor:
        """Logits of `tokens` for the part `columns` of the vocabulary."""
        part = self._head.weight[columns]
        return self._head.tile(self._states[tokens], part, columns, self._temperature)


def token_logprobs(  # noqa: PLR0913
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    reference: TiledLogits | None = None,
    divergence: TiledDivergence = "kl",
    mixture: float = 0.5,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    compiles: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-prob of each of `targets` [N] or [N, M] under softmax(logits / temperature), in their shape, and
    optionally the entropy [N] of that distribution p, and its `divergence` [N] from the `reference` q, one of
    `DIVERGENCES`. All are in nats, float32 (float64 for float64 hidden states) and differentiable. With w =
    `mixture`:

        kl              KL(p | q) = sum_x p (log p - log q)
        forward_kl      KL(q | p) = sum_x q (log q - log p)
        jensen_shannon  w KL(q | m) + (1 - w) KL(p | m)      m = w q + (1 - w) p; see algorithms.distillation

    `hidden` is [N, D]. No [tokens, vocabulary] tensor exceeds `chunk_bytes` (or one element, if that is
    larger). With logits z of p and r of q, and entropy H, the gradients are d log p_t / dz_j = [j = t] - p_j,
    dH / dz_j = -p_j (log p_j + H), dKL(p | q) / dz_j = p_j (z_j - r_j - E_p[z - r]), dKL(q | p) / dz_j =
    p_j - q_j and dJS / dz_j = (1 - w) p_j (log(p_j / m_j) - E_p[log(p / m)]). Logits that fit
    `chunk_bytes` all together are kept for the backward pass; otherwise, and always for the reference, each
    tile is recomputed there. With `compiles`, torch.compile fuses the elementwise work on each tile.
    """
    assert head.group is None or (reference is None and targets.dim() == 1), (
        "a rank has part of the vocabulary"
    )
    if divergence == "jensen_shannon" and mixture in (0.0, 1.0):
        divergence = "kl" if mixture else "forward_kl"
    rule = _Rule(head, temperature, with_entropy, chunk_bytes, compiles, reference, divergence, mixture)
    return _TokenLogprobs.apply(hidden, head.weight, head.bias, targets - head.first, rule)


@torch.no_grad()
def top_k(
    hidden: Tensor, head: Head, k: int, *, temperature: float = 1.0, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens [N, k] under softmax(logits / temperature) and their log-probs, in the types of
    token_logprobs, from the likeliest. Logits exist for as many of the N states at a time as fit
    `chunk_bytes`, and for at least one."""
    assert head.group is None, "the k likeliest tokens need the whole vocabulary on every rank"
    states = hidden.to(compute_dtype(hidden))
    num_states = max(1, chunk_bytes // (len(head.weight) * max(4, states.dtype.itemsize)))
    tokens, logprobs = [], []
    with torch.autocast(hidden.device.type, enabled=False):
        for part in states.split(num_states):
            logits = head.tile(part, head.weight, slice(None), temperature)
            values, indices = logits.topk(k, dim=-1)
            tokens.append(indices)
            logprobs.append(values - logits.logsumexp(-1, keepdim=True))
    return torch.cat(tokens), torch.cat(logprobs)


@dataclass(frozen=True, slots=True)
class _Rule:
    head: Head
    temperature: float
    with_entropy: bool
    chunk_bytes: int
    compiles: bool
    reference: TiledLogits | None
    divergence: TiledDivergence
    mixture: float

    def grad_raw(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Convert the gradient of a tile's logits to that of hidden @ weight.T + bias, in place."""
        if self.head.softcap is not None:
            squashed = logits * (self.temperature / self.head.softcap)
            grad.mul_(squashed.square_().neg_().add_(1.0))
        factor = self.head.scale / self.temperature
        return grad if factor == 1.0 else grad.mul_(factor)

    def tiles(self, states: Tensor, vocab: int, item_bytes: int) -> tuple[list[slice], list[slice]]:
        """Slices of the tokens of `states` [N, D] and of the vocabulary. Tiles have as many tokens as
        possible because the gradient of `weight` is read and written once per slice of tokens."""
        most = self.chunk_bytes if states.is_cuda else min(self.chunk_bytes, _CPU_TILE_BYTES)
        room, num_tokens = max(1, most // item_bytes), len(states)
        width = max(_MIN_COLUMNS, room // max(1, num_tokens))
        if states.is_cuda:
            width -= width % _ALIGNED_COLUMNS
        width = min(vocab, room, width)
        return _slices(num_tokens, room // width), _slices(vocab, width)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,  # noqa: ARG004  # for its gradient
        targets: Tensor,
        rule: _Rule,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        device = hidden.device.type
        ctx.dtype = compute_dtype(hidden)
        exact = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        states = hidden.to(ctx.dtype)
        target_logits = hidden.new_zeros(targets.shape, dtype=exact)
        log_total = hidden.new_zeros(len(targets), dtype=exact)
        entropy = torch.zeros_like(log_total) if rule.with_entropy else None
        kl, gap, ref_total = (
            None if rule.reference is None else torch.zeros_like(log_total) for _ in range(3)
        )
        head, vocab, kept = rule.head, len(weight), []
        is_kept = len(targets) * vocab * exact.itemsize <= rule.chunk_bytes
        all_tokens, all_columns = rule.tiles(states, vocab, exact.itemsize)
        with torch.autocast(device, enabled=False):
            for tokens in all_tokens:
                running = _RunningSoftmax(targets[tokens], exact, rule)
                for columns in all_columns:
                    logits = head.tile(states[tokens], weight[columns], columns, rule.temperature)
                    running.add(logits, columns, rule.reference and rule.reference.tile(tokens, columns))
                    if is_kept:
                        kept.append(logits)
                target_logits[tokens], log_total[tokens] = running.target, running.log_total()
                if entropy is not None:
                    entropy[tokens] = running.entropy()
                if kl is None or gap is None or ref_total is None or rule.reference is None:
                    continue
                ref_total[tokens] = running.ref_log_total()
                if rule.divergence != "jensen_shannon":
                    kl[tokens], gap[tokens] = running.kl()
                    continue
                for index, columns in enumerate(all_columns):  # the mixture needs both totals
                    if is_kept:
                        logits = kept[index - len(all_columns)]
                    else:
                        logits = head.tile(states[tokens], weight[columns], columns, rule.temperature)
                    logp = logits - log_total[tokens].unsqueeze(1)
                    logq = rule.reference.tile(tokens, columns).sub_(ref_total[tokens].unsqueeze(1))
                    w = rule.mixture
                    gap[tokens] += torch.linalg.vecdot(logp.exp(), _above_mixture(logp, logq, 1 - w))
                    kl[tokens] += torch.linalg.vecdot(logq.exp(), _above_mixture(logq, logp, w))
                kl[tokens] = rule.mixture * kl[tokens] + (1 - rule.mixture) * gap[tokens]
        if head.group is not None:
            target_logits, log_total, entropy = _over_ranks(target_logits, log_total, entropy, head.group)
        ctx.rule, ctx.hidden_dtype = rule, hidden.dtype
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, weight, targets, log_total, entropy, gap, ref_total, *kept)
        totals = log_total if targets.dim() == 1 else log_total.unsqueeze(1)
        return target_logits - totals, entropy, kl

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_kl: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        states, weight, targets, log_total, entropy, gap, ref_total, *kept = ctx.saved_tensors
        rule: _Rule = ctx.rule
        if grad_logprobs is None and grad_entropy is None and grad_kl is None:
            return (None,) * 5
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(states, dtype=log_total.dtype) if wants_hidden else None
        accumulates = rule.head.accumulates
        grad_weight = _weight_gradient(weight, accumulates) if wants_weight else None
        grad_bias = log_total.new_zeros(len(weight)) if wants_bias else None
        if grad_logprobs is None:
            grad_targets = _matrix(log_total.new_zeros(targets.shape))
        else:
            grad_targets = _matrix(grad_logprobs)
        grad_logprobs = grad_targets.sum(1)  # of the log-total, which all targets of a state share
        all_tokens, all_columns = rule.tiles(states, len(weight), log_total.itemsize)
        # On CPUs oneDNN would copy a transposed first factor in each product.
        copies = wants_weight and states.device.type == "cpu"
        parts = [
            (part_tokens, states[part_tokens].t().contiguous() if copies else None)
            for part_tokens in all_tokens
        ]
        grad_logits = compiled(_grad_logits) if rule.compiles else _grad_logits
        with torch.autocast(states.device.type, enabled=False):
            for index, ((tokens, state_t), columns) in enumerate(product(parts, all_columns)):
                state, part = states[tokens], weight[columns].to(ctx.dtype)
                logits = kept[index] if kept else rule.head.tile(state, part, columns, rule.temperature)
                of_entropy = (
                    None if grad_entropy is None else (grad_entropy[tokens], entropy.detach()[tokens])
                )
                grad = grad_logits(logits, log_total[tokens], grad_logprobs[tokens], of_entropy)
                if grad_kl is not None and rule.reference is not None:
                    ref_logits = rule.reference.tile(tokens, columns)
                    totals = (log_total[tokens], ref_total[tokens], gap[tokens])
                    grad += _grad_divergence(rule, logits, ref_logits, *totals, grad_kl[tokens])
                inside, column = _place(targets[tokens], columns)
                grad.scatter_add_(1, column, torch.where(inside, grad_targets[tokens], 0.0))
                grad = rule.grad_raw(grad, logits)
                if grad_bias is not None:
                    grad_bias[columns] += grad.sum(0)
                grad = grad.to(ctx.dtype)
                if grad_hidden is not None:
                    _add_product(grad_hidden[tokens], grad, part)
                if grad_weight is not None:
                    if state_t is None:
                        _add_product(grad_weight[columns], grad.t(), state)
                    else:
                        _add_product(grad_weight[columns].t(), state_t, grad)
        return (
            None if grad_hidden is None else grad_hidden.to(ctx.hidden_dtype),
            None if accumulates else grad_weight,
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
        )


def _over_ranks(
    target: Tensor, log_total: Tensor, entropy: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combine the ranks' results over their vocabulary shards into those over the whole vocabulary. With the
    log-total L_r and entropy H_r of rank r: L = log sum_r exp L_r, p_r = exp(L_r - L), H = sum_r p_r (H_r -
    log p_r)."""
    largest = log_total.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    sums = torch.stack((target, (log_total - largest).exp()))
    dist.all_reduce(sums, group=group)
    target, whole = sums[0], largest + sums[1].log()
    if entropy is not None:
        log_share = log_total - whole
        entropy = log_share.exp() * (entropy - log_share)
        dist.all_reduce(entropy, group=group)
    return target, whole, entropy


def _weight_gradient(weight: Tensor, accumulates: bool) -> Tensor:
    """Tensor in which the gradient of `weight` is accumulated."""
    if not accumulates:
        return torch.zeros_like(weight)
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    return weight.grad


class _RunningSoftmax:
    """Online softmax of N tokens over successive vocabulary tiles: with m the largest logit so far, the
    running sums of exp(z - m), for the entropy of exp(z - m) (z - m), and for KL from the softmax of the
    reference's logits r of exp(z - m) (z - r); for the forward KL the reference's running sums have that."""

    def __init__(self, targets: Tensor, dtype: torch.dtype, rule: _Rule) -> None:
        self._targets = targets
        self._fold = compiled(_fold) if rule.compiles else _fold
        self._largest = targets.new_full((len(targets),), torch.finfo(dtype).min, dtype=dtype)
        self._total = torch.zeros_like(self._largest)
        self._moment = torch.zeros_like(self._largest) if rule.with_entropy else None
        self._gap = torch.zeros_like(self._largest)
        self._ref: _RunningSoftmax | None = None
        self._is_forward = rule.divergence == "forward_kl"
        if rule.reference is not None:
            self._ref = _RunningSoftmax(targets, dtype, replace(rule, with_entropy=False, reference=None))
        self.target = torch.zeros_like(targets, dtype=dtype)

    def add(self, logits: Tensor, columns: slice, ref_logits: Tensor | None = None) -> None:
        inside, column = _place(self._targets, columns)
        chosen = torch.where(inside, logits.gather(1, column), self.target.view_as(column))
        self.target = chosen.view_as(self.target)
        self._largest, self._total, self._moment, self._gap = self._fold(
            logits, ref_logits, self._largest, self._total, self._moment, self._gap
        )
        if self._ref is not None and ref_logits is not None:
            self._ref.add(ref_logits, columns, logits if self._is_forward else None)

    def log_total(self) -> Tensor:
        """log sum exp(z)."""
        return self._largest + self._total.log()

    def ref_log_total(self) -> Tensor:
        """log sum exp(r)."""
        assert self._ref is not None, "built without a reference"
        return self._ref.log_total()

    def entropy(self) -> Tensor:
        """H = log sum exp(z - m) - sum p (z - m)."""
        assert self._moment is not None, "built without entropy"
        return self._total.log() - self._moment / self._total

    def kl(self) -> tuple[Tensor, Tensor]:
        """KL = E[z - r] + log sum exp(r) - log sum exp(z), and E[z - r]; for the forward KL the same with z
        and r exchanged."""
        assert self._ref is not None, "built without KL"
        mine, other = (self._ref, self) if self._is_forward else (self, self._ref)
        gap = mine._gap / mine._total
        # Not from the two log-totals, whose rounding can exceed a small KL.
        return gap + (other._largest - mine._largest) + (other._total / mine._total).log(), gap


def _fold(
    logits: Tensor,
    ref_logits: Tensor | None,
    before: Tensor,
    total: Tensor,
    moment: Tensor | None,
    gap: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Update the running (largest, total, moment, gap) with one tile."""
    largest = torch.maximum(before, logits.amax(1))
    drop = before - largest
    decay = drop.exp()
    shifted = logits - largest.unsqueeze(1)
    weights = shifted.exp_() if moment is None else shifted.exp()
    if moment is not None:
        moment = (moment + total * drop) * decay + torch.linalg.vecdot(weights, shifted)
    if ref_logits is not None:
        gap = gap * decay + torch.linalg.vecdot(weights, logits - ref_logits)
    return largest, total * decay + weights.sum(1), moment, gap


def _grad_logits(
    logits: Tensor, log_total: Tensor, grad_logprobs: Tensor, entropy: tuple[Tensor, Tensor] | None
) -> Tensor:
    """Target-independent part of the gradient of a tile's logits: -p_j g for log-probs with gradient g, plus
    -p_j (log p_j + H) h for entropies H with gradient h. Returns a new tensor."""
    logp = logits - log_total.unsqueeze(1)
    if entropy is None:
        return logp.exp_().mul_(-grad_logprobs.unsqueeze(1))
    grad_entropy, value = entropy
    probs = logp.exp()
    logp.mul_(-grad_entropy.unsqueeze(1)).add_(-(grad_logprobs + grad_entropy * value).unsqueeze(1))
    return probs.mul_(logp)


def _grad_divergence(
    rule: _Rule,
    logits: Tensor,
    ref_logits: Tensor,
    log_total: Tensor,
    ref_total: Tensor,
    gap: Tensor,
    grad: Tensor,
) -> Tensor:
    """Gradient of a tile's logits for divergences with gradient `grad`, by the formulas of token_logprobs;
    `gap` is the mean that they subtract. Overwrites `ref_logits`."""
    logp = logits - log_total.unsqueeze(1)
    if rule.divergence == "kl":
        difference = (logits - ref_logits).sub_(gap.unsqueeze(1)).mul_(grad.unsqueeze(1))
        return logp.exp_().mul_(difference)
    logq = ref_logits.sub_(ref_total.unsqueeze(1))
    if rule.divergence == "forward_kl":
        moved = logp.exp_().sub_(logq.exp_())
    else:
        above = _above_mixture(logp, logq, 1 - rule.mixture).sub_(gap.unsqueeze(1))
        moved = logp.exp_().mul_(above).mul_(1 - rule.mixture)
    return moved.mul_(grad.unsqueeze(1))


def _above_mixture(logp: Tensor, logq: Tensor, share: float) -> Tensor:
    """log p - log m, with m = share p + (1 - share) q."""
    odds = math.log1p(-share) - math.log(share)
    return -math.log(share) - torch.nn.functional.softplus(logq - logp + odds)


def _place(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(is_inside [N, M], column [N, M]) of each target in the slice, M of 1 for targets [N]; the column of
    targets outside is arbitrary."""
    targets = _matrix(targets)
    inside = (targets >= columns.start) & (targets < columns.stop)
    return inside, (targets - columns.start).clamp(0, columns.stop - columns.start - 1)


def _matrix(values: Tensor) -> Tensor:
    """[N] -> [N, 1]; [N, M] as it is."""
    return values.unsqueeze(1) if values.dim() == 1 else values


def _product(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """left @ right + bias. Products of half-precision matrices are float32, because rounding logits to bf16
    would change log-probs by up to 0.06; except on CPUs, which lack such a product and multiply several times
    slower in float32."""
    if left.device.type != "cpu" and left.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(left, right, out_dtype=torch.float32)
        return product if bias is None else product.add_(bias)
    return linear(left, right.t(), None if bias is None else bias.to(left.dtype))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in the type of `total`."""
    if total.dtype == left.dtype and not uses_onednn(left, right):
        total.addmm_(left, right)
    else:
        total.add_(_product(left, right))
