"""Divergences of a student from its teacher, over a whole vocabulary or the k likeliest tokens.

Owns the formulas, on log-probs; models.logprobs computes some of them in tiles, without the log-probs of the
whole vocabulary in memory. Which tokens are compared, and where teachers run, is left to the caller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from braid.types import Divergence, KlRest


def divergence(
    student: Float[Tensor, "... K"],
    teacher: Float[Tensor, "... K"],
    *,
    kind: Divergence,
    weight: float = 0.5,
) -> Float[Tensor, "..."]:
    """The divergence in nats of distributions p, the student's, and q, the teacher's, from their log-probs
    of the same K events, summed over the events. With w = `weight`:

        kl                 KL(p | q) = sum p (log p - log q)
        forward_kl         KL(q | p)
        jensen_shannon     w KL(q | m) + (1 - w) KL(p | m), m = w q + (1 - w) p; for w = 0 KL(q | p) and
                           for w = 1 KL(p | q), as in TRL (Agarwal et al. 2024, arXiv 2306.13649, eq. 1)
        skewed_forward_kl  KL(q | w q + (1 - w) p)   (Ko et al. 2024, arXiv 2402.03898)
        skewed_kl          KL(p | w p + (1 - w) q)   (the same)
        adaptive_kl        (a KL(q | p) + b KL(p | q)) / (a + b), where b sums |p - q| over the teacher's
                           least likely tokens, which together have at most the probability w, and a
                           over the others (Wu et al. 2024, arXiv 2404.02657); both have no gradient
        mixed_kl           w KL(q | p) + (1 - w) KL(p | q)

    Events that cannot happen (log-prob -inf) add nothing where they weigh 0. The sums of p and q may be less
    than 1; a divergence may then be negative.
    """
    if kind == "jensen_shannon" and weight in (0.0, 1.0):
        kind = "forward_kl" if weight == 0.0 else "kl"
    match kind:
        case "kl":
            return _kl(student, teacher)
        case "forward_kl":
            return _kl(teacher, student)
        case "jensen_shannon":
            mixture = _mixture(teacher, student, weight)
            return weight * _kl(teacher, mixture) + (1 - weight) * _kl(student, mixture)
        case "skewed_forward_kl":
            return _kl(teacher, _mixture(teacher, student, weight))
        case "skewed_kl":
            return _kl(student, _mixture(student, teacher, weight))
        case "adaptive_kl":
            head, tail = _gaps(student.detach(), teacher, weight)
            share = head / (head + tail).clamp(min=torch.finfo(head.dtype).tiny)
            return share * _kl(teacher, student) + (1 - share) * _kl(student, teacher)
        case "mixed_kl":
            return weight * _kl(teacher, student) + (1 - weight) * _kl(student, teacher)


def over_top_k(
    student: Float[Tensor, "... K"], teacher: Float[Tensor, "... K"], rest: KlRest
) -> tuple[Float[Tensor, "... _"], Float[Tensor, "... _"]]:
    """Student's and teacher's log-probs of the events to compare, from those of K chosen tokens under the
    whole vocabulary.

        tail         the chosen tokens, and any other token as one event more, which gives a lower bound of
                     the divergence over the whole vocabulary (SDPO, arXiv 2601.20802)
        renormalize  the chosen tokens alone, each distribution divided by its sum over them (ROLL)
        drop         the chosen tokens alone, as they are (verl's forward_kl_topk)
    """
    match rest:
        case "tail":
            return _with_tail(student), _with_tail(teacher)
        case "renormalize":
            return student.log_softmax(-1), teacher.log_softmax(-1)
        case "drop":
            return student, teacher


def teacher_penalty(
    logprobs: Float[Tensor, "..."],
    teachers: Sequence[tuple[Float[Tensor, "..."], float, Tensor | float]],
) -> Float[Tensor, "..."]:
    """What distillation from several teachers subtracts from the advantage of each token:

        sum_i coef_i m_i (log p - log q_i)

    `teachers` are (log q_i, coef_i, m_i), where m_i is 1 where teacher i is asked and 0 elsewhere (ROLL)."""
    return sum((coef * asked * (logprobs - ref) for ref, coef, asked in teachers), torch.zeros_like(logprobs))


def bounded_ratio(
    logprobs: Float[Tensor, "..."], old_logprobs: Float[Tensor, "..."], bound: float
) -> Float[Tensor, "..."]:
    """min(exp(log p - log p_old), bound) of sampled tokens, without a gradient: the weight of a token's
    divergence after steps in which the student has moved away from what sampled it (SDPO, arXiv
    2601.20802)."""
    return (logprobs - old_logprobs).detach().clamp(max=math.log(bound)).exp()


def sorted_distance(p: Float[Tensor, "... K"], q: Float[Tensor, "... M"]) -> Float[Tensor, "..."]:
    """sum |p_(i) - q_(i)| of probabilities sorted from the greatest, the shorter list padded with zeros: a
    distance between distributions over different vocabularies (Boizard et al. 2024, arXiv 2402.12030)."""
    sizes = [probs.shape[-1] for probs in (p, q)]
    pads = [torch.nn.functional.pad(x, (0, max(sizes) - size)) for x, size in zip((p, q), sizes, strict=True)]
    first, second = (x.sort(-1, descending=True).values for x in pads)
    return (first - second).abs().sum(-1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """sum exp(p) (p - q) over the last axis; 0 where exp(p) is 0."""
    is_possible = p > -math.inf
    safe = p.where(is_possible, 0.0)
    return (safe.exp() * (safe - q.where(is_possible, 0.0))).where(is_possible, 0.0).sum(-1)


def _mixture(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """log(weight exp(a) + (1 - weight) exp(b)), for 0 < weight < 1 and at the ends."""
    if weight in (0.0, 1.0):
        return a if weight == 1.0 else b
    return torch.logaddexp(a + math.log(weight), b + math.log1p(-weight))


def _gaps(student: Tensor, teacher: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Sums of |p - q| over the teacher's likely tokens, and over the least likely ones, whose probabilities
    add up to at most `threshold`."""
    probs, order = teacher.exp().sort(-1)
    gaps = (probs - student.exp().gather(-1, order)).abs()
    is_tail = probs.cumsum(-1) <= threshold
    return gaps.where(~is_tail, 0.0).sum(-1), gaps.where(is_tail, 0.0).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    """With the log-prob of all other tokens as one more event, of at least the type's precision."""
    total = logprobs.logsumexp(-1, keepdim=True).clamp(max=-torch.finfo(logprobs.dtype).eps)
    return torch.cat((logprobs, (-total.expm1()).log()), -1)
