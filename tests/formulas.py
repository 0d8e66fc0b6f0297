"""Policy losses as functions of the tensors that each reads, for tests of single formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from braid.algorithms.advantages import ADVANTAGES, Advantage
from braid.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from braid.algorithms.surrogate import Surrogate, Tokens

_FIELDS = ("logprobs", "old_logprobs", "advantages", "ratio", "is_chosen")


def loss_of(kind: str, **settings: Any) -> PolicyLoss:
    """A kind with those of `settings` that it has."""
    loss = POLICY_LOSSES[kind]
    return loss(**{name: value for name, value in settings.items() if name in loss.model_fields})


def _formula(kind: str, *names: str) -> Callable[..., Surrogate]:
    def compute(*tensors: Any, **settings: Any) -> Surrogate:
        by_name = dict(zip(names, tensors, strict=True))
        unread = torch.full_like(tensors[0], torch.nan)
        sequences = by_name.pop("sequences", None)
        tokens = Tokens(**{name: by_name.get(name, unread) for name in _FIELDS}, sequences=sequences)
        settings = {name: "off" if value is None else value for name, value in settings.items()}
        return POLICY_LOSSES[kind](**settings).per_token(tokens)

    return compute


ppo_clip = _formula("ppo_clip", "ratio", "advantages")
policy_gradient = _formula("policy_gradient", "logprobs", "advantages")
importance_sampling = _formula("importance_sampling", "ratio", "advantages")
masked_is = _formula("masked_is", "ratio", "logprobs", "advantages")
cispo = _formula("cispo", "ratio", "logprobs", "advantages")
sapo = _formula("sapo", "ratio", "advantages")
gmpo = _formula("gmpo", "logprobs", "old_logprobs", "advantages", "sequences")
vespo = _formula("vespo", "ratio", "logprobs", "advantages")
topr = _formula("topr", "ratio", "logprobs", "advantages")
sequence_mask = _formula("sequence_mask", "ratio", "logprobs", "old_logprobs", "advantages", "sequences")
kimi = _formula("kimi", "logprobs", "old_logprobs", "advantages")
clip_cov = _formula("clip_cov", "ratio", "advantages", "is_chosen")
kl_cov = _formula("kl_cov", "ratio", "logprobs", "old_logprobs", "advantages", "is_chosen")
dppo = _formula("dppo", "ratio", "logprobs", "old_logprobs", "advantages")
cross_entropy = _formula("cross_entropy", "logprobs")


def advantage_of(kind: str, **settings: Any) -> Advantage:
    """A kind with those of `settings` that it has, and without discount unless it is set."""
    advantage = ADVANTAGES[kind]
    settings = {"gamma": 1.0} | settings
    if settings.get("level") == "action":  # no setting of a config
        return advantage_of(kind, **settings | {"level": "turn"}).of_simulator("action")
    return advantage(**{name: value for name, value in settings.items() if name in advantage.model_fields})


def changed(advantage: Advantage, **settings: Any) -> Advantage:
    """The same kind with those of the other settings that it has."""
    known = {name: value for name, value in settings.items() if name in type(advantage).model_fields}
    return type(advantage)(**advantage.model_dump() | known)
