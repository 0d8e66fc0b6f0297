"""Sparse attention of DeepSeek-V3.2 (arXiv 2512.02556) and its successors: an indexer chooses the keys that
each query sees, by scores of all keys before it. Packed rows must not see each other's keys, so the context
of the forward pass lays the rows out in rectangles for the indexer, and applies its choice in the attention.

The choice has no gradient, so an indexer is not trained: it stays as it was loaded. (DeepSeek trains it with
an additional loss to imitate the attention.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from braid.errors import ModelError

LAYER_TYPE = "indexed_attention"
"""transformers' type of layers that have an indexer, or share the choice of the layer before."""
_INPUTS = ("hidden_states", "q_resid", "position_embeddings", "attention_mask")
"""Arguments of indexers that choose single keys."""


@dataclass(frozen=True, slots=True)
class IndexerCall:
    """An indexer of transformers, for rows of equal width, padded at the right."""

    module: nn.Module

    def __call__(self, hidden: Tensor, queries: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states [B, L, D], latent queries [B, L, Q], and rotations [B, L, d] of each position ->
        [B, L, L]: whether the query of a row of the matrix sees the key of a column."""
        rows, width = hidden.shape[:2]
        mask = torch.full((width, width), float("-inf"), device=hidden.device).triu(1)
        forward = type(self.module).forward
        places = forward(self.module, hidden, queries, (cos, sin), mask.expand(rows, -1, -1), None)
        chosen = torch.zeros(rows, width, width, dtype=torch.bool, device=hidden.device)
        return chosen.scatter_(-1, places.long(), value=True).tril()


def indexers(model: nn.Module) -> Iterator[nn.Module]:
    """The indexers of a model."""
    for module in model.modules():
        parameters = signature(type(module).forward).parameters
        if type(module).__name__.endswith("Indexer") and all(name in parameters for name in _INPUTS):
            yield module


def use_indexers(model: PreTrainedModel, current: Callable[[], Any]) -> bool:
    """Make indexers use `current()`, the context of the forward pass, if there is one, and freeze them;
    returns whether there are some."""
    choosing = list(indexers(model))
    for module in choosing:
        module.requires_grad_(False)
        module.forward = partial(_choose, module, current)
    layers = [module for module in model.modules() if hasattr(module, "indexer")] if choosing else []
    for module in layers:
        module.forward = partial(_attend, module, current)
    return bool(choosing)


def _attend(module: nn.Module, current: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
    """An attention layer. It slices its mask for the indexer, so it is given one, which nothing reads."""
    if current() is not None:
        kwargs["attention_mask"] = kwargs["hidden_states"].new_zeros(1, 1, 1, 1)
    return type(module).forward(module, *args, **kwargs)


@torch.no_grad()
def _choose(
    module: nn.Module,
    current: Callable[[], Any],
    hidden: Tensor,
    queries: Tensor,
    rotary: tuple[Tensor, Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """An indexer. Returns what its context chose, which the attention layer passes on as it is."""
    if (context := current()) is None:
        return type(module).forward(module, hidden, queries, rotary, *args, **kwargs)
    if not hasattr(context, "choose"):
        raise ModelError(
            f"{type(module).__name__} chooses the keys that a query sees, and the native engine has no cache "
            "for what it compares; sample with rollout.engine=vllm"
        )
    return context.choose(IndexerCall(module), *(x[0] for x in (hidden, queries, *rotary)))
