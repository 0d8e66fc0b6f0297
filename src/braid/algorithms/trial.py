"""Tries a loss or an advantage of a user's own on a few numbers, before a run that would fail in its
first round."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from braid.users import described, is_the_users, shown

from .advantages import Advantage
from .advantages.function import FunctionAdvantage
from .pairs import Pairs
from .policy_losses import PolicyLoss
from .preference_losses import PreferenceLoss
from .segments import segments
from .surrogate import Tokens

_LOGPROBS = (-0.5, -1.5, -2.0, -0.1)
_OLD = (-0.6, -1.2, -2.5, -0.1)
_ADVANTAGES = (1.0, -1.0, 0.5, 0.0)


def problem_of_advantage(advantage: Advantage) -> str:
    """Why a user's function of rewards and groups is no advantage, empty if it is one. Classes are not
    tried."""
    if not isinstance(advantage, FunctionAdvantage):
        return ""
    rewards, groups = torch.tensor(_ADVANTAGES, dtype=torch.float64), torch.tensor([0, 0, 1, 1])
    try:
        returned = advantage.of_rewards(rewards, groups)
    except BaseException as error:
        if not is_the_users(error):
            raise
        return f"it raised {described(error)}"
    if not isinstance(returned, Tensor) or returned.shape != rewards.shape:
        shape = (
            f"a tensor of shape {list(returned.shape)}" if isinstance(returned, Tensor) else shown(returned)
        )
        return f"it must return a number for each of the {len(rewards)} trajectories, not {shape}"
    return "" if returned.isfinite().all() else f"it returned {returned.tolist()}, which is not finite"


def problem_of(loss: PolicyLoss | PreferenceLoss, reserved: Collection[str] = ()) -> str:
    """Why the loss cannot train, empty if it can. `reserved` are the names of metrics that every loss of its
    family reports."""
    is_policy_loss = isinstance(loss, PolicyLoss)
    if taken := sorted(loss.metrics.keys() & set(reserved)):
        family = "policy" if is_policy_loss else "preference"
        return f"its metric {taken[0]!r} is one that every {family} loss reports; give it another name"
    try:
        return _problem_on_tokens(loss) if is_policy_loss else _problem_on_pairs(loss)
    except BaseException as error:
        if not is_the_users(error):
            raise
        return f"it raised {described(error)}"


def _problem_on_tokens(loss: PolicyLoss) -> str:
    logprobs = torch.tensor(_LOGPROBS, requires_grad=True)
    old, advantages, num = torch.tensor(_OLD), torch.tensor(_ADVANTAGES), len(_OLD)
    whole = segments(torch.ones(num, dtype=torch.bool), torch.zeros(num, dtype=torch.long))
    ratio = loss.ratio(logprobs, old, lambda level: None if level == "token" else whole)
    is_chosen = torch.zeros(num)
    if loss.selects_tokens:
        is_chosen = loss.select(advantages * old, torch.linspace(0.1, 0.9, num)).to(old.dtype)
    sequences = whole if loss.reads_sequences else None
    returned = loss.per_token(Tokens(logprobs, old, advantages, ratio, is_chosen, sequences))
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict)):
        return f"it must return the loss of each token and a dict of diagnostics, not {shown(returned)}"
    per_token, diagnostics = returned
    if fault := _fault({"the loss": per_token, **diagnostics}, "tokens", detached=diagnostics):
        return fault
    if not per_token.requires_grad:
        return "its loss has no gradient; compute it from tokens.logprobs or tokens.ratio without detach()"
    return _undeclared(loss, diagnostics)


def _problem_on_pairs(loss: PreferenceLoss) -> str:
    chosen = torch.tensor(_LOGPROBS, dtype=torch.float64, requires_grad=True)
    ref, num = torch.tensor(_OLD, dtype=torch.float64), len(_OLD)
    rejected, counts = ref.flip(0).clone().requires_grad_(), torch.full((num,), 3.0, dtype=torch.float64)
    pairs = Pairs(chosen, rejected, ref, ref.flip(0) - 0.1, counts, counts + 1, counts)
    if loss.matches_pairs:
        pairs = replace(pairs, matched=loss.match((chosen - rejected).detach(), ref - ref.flip(0)))
    per_pair, diagnostics = loss.per_pair(pairs), dict(loss.diagnostics(pairs))
    if fault := _fault({"the loss": per_pair, **diagnostics}, "pairs"):
        return fault
    if not per_pair.requires_grad:
        return "its loss has no gradient; compute it from pairs.chosen and pairs.rejected without detach()"
    return _undeclared(loss, diagnostics)


def _fault(values_of: Mapping[str, Any], items: str, detached: Collection[str] = ()) -> str:
    """Why values are not a finite number for each of the items, or one of `detached` has a gradient; empty if
    they are as they must be."""
    num = len(_OLD)
    for name, values in values_of.items():
        if not isinstance(values, Tensor) or values.shape != (num,):
            shape = f"a tensor of shape {list(values.shape)}" if isinstance(values, Tensor) else shown(values)
            wanted = f"must be a number for each of the {num} {items}"
            return f"{name} {wanted}, not {shape}; do not average over them"
        if not values.isfinite().all():
            return f"{name} is not finite: {values.tolist()}"
        if name in detached and values.requires_grad:
            return f"the diagnostic {name!r} has a gradient; return {name}.detach()"
    return ""


def _undeclared(loss: PolicyLoss | PreferenceLoss, diagnostics: Collection[str]) -> str:
    if undeclared := sorted(set(diagnostics) - loss.metrics.keys()):
        return (
            f"it returned the diagnostic {undeclared[0]!r}, which it does not declare; add it to `metrics`, "
            "with its meaning"
        )
    return ""
