"""Advantages: from the rewards of a round to an advantage of each position, one file a kind, which has its
formula as a function of tensors.

round.py has the round that a kind reads; groups.py, discounting.py and whitening.py what formulas share.
"""

from collections.abc import Mapping

from .base import Advantage
from .gae import Gae
from .gdpo import Gdpo
from .gigpo import Gigpo
from .gpg import Gpg
from .grpo import Grpo
from .maxrl import MaxRl
from .opo import Opo
from .pass_at_k import PassAtK
from .raft import Raft
from .reinforce import Reinforce
from .remax import Remax
from .rloo import Rloo

__all__ = ["ADVANTAGES", "Advantage"]

ADVANTAGES: Mapping[str, type[Advantage]] = {
    "grpo": Grpo,
    "gae": Gae,
    "reinforce": Reinforce,
    "rloo": Rloo,
    "remax": Remax,
    "raft": Raft,
    "maxrl": MaxRl,
    "gigpo": Gigpo,
    "opo": Opo,
    "gpg": Gpg,
    "pass_at_k": PassAtK,
    "gdpo": Gdpo,
}
"""The kinds of `algorithm.advantage`."""
