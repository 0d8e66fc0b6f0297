"""The mathematics of reinforcement learning as functions on tensors: advantages, losses, KL estimates,
weights.

They can be imported from here, but for three that are named like their module: aggregate.aggregate,
segments.segments and value_loss.value_loss. torch is imported with the first function that needs it.
"""

from importlib import import_module
from typing import Any

_MODULES = {
    "advantages": ("ADVANTAGES", "Advantage"),
    "advantages.gae": ("gae",),
    "advantages.grpo": ("group_advantages",),
    "advantages.maxrl": ("likelihood_advantages",),
    "advantages.raft": ("best_of_group",),
    "advantages.reinforce": ("discounted_returns",),
    "advantages.remax": ("baseline_advantages",),
    "advantages.rloo": ("leave_one_out_advantages",),
    "advantages.whitening": ("whiten",),
    "aggregate": ("row_weights",),
    "corrections": ("correction_factor", "proximal_logprobs", "sampling_weight"),
    "kl": ("clamped", "kl_estimate", "steered_coefficient"),
    "pairs": ("Pairs",),
    "policy_losses": ("POLICY_LOSSES", "PolicyLoss"),
    "preference_losses": ("PREFERENCE_LOSSES", "PreferenceLoss", "ReferenceLoss"),
    "recipes": ("RECIPES", "Correction", "Recipe"),
    "rewards": ("RunningMoments", "reward_statistics"),
    "segments": ("Segments",),
    "surrogate": ("Tokens", "importance_ratio"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = list(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"braid.algorithms has no {name!r}; it has {', '.join(sorted(_HOME))}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
