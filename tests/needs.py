"""What a test cannot run without."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from braid.errors import ConfigError
from braid.isolation.sandbox import find_isolation

WITH_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def need_sandbox(isolation: str = "auto") -> None:
    """Skip the test, with the reason, where no sandbox of this kind works."""
    try:
        find_isolation(isolation)
    except ConfigError as error:
        pytest.skip(f"no sandbox here: {error}")
