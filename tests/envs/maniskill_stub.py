"""ManiSkill's physics without a renderer: its tasks make a material for every shape, which needs a Vulkan
device."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


class Material:
    """Takes the place of sapien.render.RenderMaterial, and draws nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_"):
            return lambda *_, **__: None
        raise AttributeError(name)


def has_vulkan() -> bool:
    try:
        import_module("sapien").render.RenderMaterial()
    except RuntimeError:
        return False
    return True


def without_renderer(patch: pytest.MonkeyPatch) -> None:
    for module in ("sapien.render", "sapien.pysapien.render"):
        patch.setattr(import_module(module), "RenderMaterial", Material)
