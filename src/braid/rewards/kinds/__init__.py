"""Kinds of rewards, one file each. They import nothing heavy: the config is made of them."""

from collections.abc import Mapping

from .base import RewardPart
from .choice import ChoiceReward
from .code import CodeReward
from .detection import DetectionReward
from .exact import ExactReward
from .function import FunctionReward
from .ifeval import IfevalReward
from .judge import JudgeReward
from .length import LengthReward
from .math import MathReward
from .model import ModelReward
from .pattern import PatternReward
from .reasoning_gym import ReasoningGymReward
from .repetition import RepetitionReward

__all__ = [
    "REWARDS",
    "ChoiceReward",
    "CodeReward",
    "DetectionReward",
    "ExactReward",
    "FunctionReward",
    "IfevalReward",
    "JudgeReward",
    "LengthReward",
    "MathReward",
    "ModelReward",
    "PatternReward",
    "ReasoningGymReward",
    "RepetitionReward",
    "RewardPart",
]

REWARDS: Mapping[str, type[RewardPart]] = {
    "math": MathReward,
    "reasoning_gym": ReasoningGymReward,
    "exact": ExactReward,
    "pattern": PatternReward,
    "choice": ChoiceReward,
    "length": LengthReward,
    "repetition": RepetitionReward,
    "ifeval": IfevalReward,
    "detection": DetectionReward,
    "code": CodeReward,
    "model": ModelReward,
    "judge": JudgeReward,
    "function": FunctionReward,
}
"""The kinds of `reward.parts`."""
