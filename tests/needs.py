"""What a test cannot run without."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

WITH_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")
