"""Kinds of policies, one file each. They import nothing heavy: the config is made of them."""

from .base import PolicyKind
from .language import BuildSpec, LanguageModel, VisionConfig
from .mlp import MlpSpec
from .vla import VlaConfig

__all__ = ["BuildSpec", "LanguageModel", "MlpSpec", "PolicyKind", "VisionConfig", "VlaConfig"]
