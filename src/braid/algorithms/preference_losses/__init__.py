"""Preference losses: objectives of pairs of a preferred and a rejected response, one file a kind.

The mean over a step's pairs and the cross-entropy of `prefer.sft_coef` are left to training/pairs.py.
"""

from collections.abc import Mapping

from .aot import Aot
from .apo import ApoDown, ApoZero
from .base import PreferenceLoss, ReferenceLoss
from .bco_pair import BcoPair
from .bradley_terry import BradleyTerry
from .discopop import Discopop
from .exo_pair import ExoPair
from .hinge import Hinge
from .ipo import Ipo
from .nca_pair import NcaPair
from .robust import Robust
from .sft import Sft
from .sigmoid import Sigmoid, SigmoidNorm
from .simpo import Simpo
from .sppo_hard import SppoHard

__all__ = ["PREFERENCE_LOSSES", "PreferenceLoss", "ReferenceLoss"]

PREFERENCE_LOSSES: Mapping[str, type[PreferenceLoss]] = {
    "sigmoid": Sigmoid,
    "sigmoid_norm": SigmoidNorm,
    "ipo": Ipo,
    "hinge": Hinge,
    "robust": Robust,
    "bco_pair": BcoPair,
    "sppo_hard": SppoHard,
    "nca_pair": NcaPair,
    "exo_pair": ExoPair,
    "apo_zero": ApoZero,
    "apo_down": ApoDown,
    "discopop": Discopop,
    "aot": Aot,
    "simpo": Simpo,
    "sft": Sft,
    "bradley_terry": BradleyTerry,
}
"""The kinds of `prefer.loss`."""
