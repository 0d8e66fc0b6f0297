"""Policy losses: per-token surrogate objectives, one file a kind.

Aggregation, off-policy corrections, the KL term and the entropy bonus are left to training/losses.py.
"""

from collections.abc import Mapping

from .base import PolicyLoss
from .cispo import Cispo
from .clip_cov import ClipCov
from .cross_entropy import CrossEntropy
from .dppo import Dppo
from .gmpo import Gmpo
from .gspo import Gspo
from .importance_sampling import ImportanceSampling
from .kimi import Kimi
from .kl_cov import KlCov
from .masked_is import MaskedIs
from .policy_gradient import PolicyGradient
from .ppo_clip import PpoClip
from .sapo import Sapo
from .sequence_mask import SequenceMask
from .topr import Topr
from .vespo import Vespo

__all__ = ["POLICY_LOSSES", "PolicyLoss"]

POLICY_LOSSES: Mapping[str, type[PolicyLoss]] = {
    "ppo_clip": PpoClip,
    "gspo": Gspo,
    "gmpo": Gmpo,
    "policy_gradient": PolicyGradient,
    "importance_sampling": ImportanceSampling,
    "masked_is": MaskedIs,
    "cispo": Cispo,
    "sapo": Sapo,
    "topr": Topr,
    "vespo": Vespo,
    "sequence_mask": SequenceMask,
    "kimi": Kimi,
    "clip_cov": ClipCov,
    "kl_cov": KlCov,
    "dppo": Dppo,
    "cross_entropy": CrossEntropy,
}
"""The kinds of `algorithm.policy_loss`."""
