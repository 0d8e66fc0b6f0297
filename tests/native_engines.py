"""Native engines for models of tests."""

from __future__ import annotations

from typing import Any

from braid.models.causal_lm import CausalLM
from braid.rollout.engines.base import InProcess
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.kind import Native

PLAIN, COPY = InProcess(decode=str), InProcess(decode=str, owns_weights=True)


def make_engine(lm: CausalLM, run: InProcess = PLAIN, **settings: Any) -> NativeEngine:
    """An engine with these settings of rollout.engine."""
    return NativeEngine(lm, Native(**settings), run)
