"""What a test cannot run without."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest

from braid.envs.simulators.adapters.metaworld import MetaWorld
from braid.errors import ConfigError
from braid.isolation.sandbox import find_isolation
from braid.rollout.engines.vllm.kind import missing_system_library

_WITHOUT_VLLM = "vLLM is not installed: make vllm" if find_spec("vllm") is None else missing_system_library()
WITH_VLLM = pytest.mark.skipif(_WITHOUT_VLLM is not None, reason=_WITHOUT_VLLM or "")


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


def need_sandbox(isolation: str = "auto") -> None:
    """Skip the test, with the reason, where no sandbox of this kind works."""
    try:
        find_isolation(isolation)
    except ConfigError as error:
        pytest.skip(f"no sandbox here: {error}")


def need_images_of_metaworld() -> None:
    """Skip the test, with the reason, where OpenGL does not work."""
    if (problem := _opengl_problem()) is not None:
        pytest.skip(problem)


@cache
def _opengl_problem() -> str | None:
    try:
        MetaWorld("reach-v3", cameras={"image": "corner4"}, image_size=32).close()
    except ConfigError as error:
        if "no images" not in str(error):
            raise
        return str(error)
    return None
