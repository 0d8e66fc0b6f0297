"""Keys of earlier versions and where they are now, for error messages. Old keys are not read."""

from __future__ import annotations

_LOSS = "algorithm.policy_loss"
MOVED = {
    **{
        f"algorithm.{name}": f"{_LOSS}.{name}"
        for name in (
            "ratio_level",
            "log_ratio_min",
            "log_ratio_max",
            "clip_low",
            "clip_high",
            "dual_clip",
            "cov_fraction",
            "cov_low",
            "cov_high",
            "cov_coef",
        )
    },
    "algorithm.cispo_mask": f"{_LOSS}.mask (of kind cispo)",
    "algorithm.sapo_tau_positive": f"{_LOSS}.tau_positive (of kind sapo)",
    "algorithm.sapo_tau_negative": f"{_LOSS}.tau_negative (of kind sapo)",
    "algorithm.topr_positive_weight": f"{_LOSS}.positive_weight (of kind topr)",
    "algorithm.topr_negative_weight": f"{_LOSS}.negative_weight (of kind topr)",
    "algorithm.kimi_tau": f"{_LOSS}.tau (of kind kimi)",
    "algorithm.dppo_divergence": f"{_LOSS}.divergence (of kind dppo)",
    **{
        f"algorithm.{name}": f"algorithm.advantage.{name}"
        for name in ("normalize_by_std", "gamma", "gae_lambda", "bootstrap", "episode_weight", "turn_weight")
    },
    "algorithm.advantage_level": "algorithm.advantage.level",
    **{f"rollout.{kind}": f"rollout.engine (of kind {kind})" for kind in ("native", "vllm", "sglang")},
    **{
        f"{train}.{section}": f"{train}.backend (of kind {kind})"
        for train in ("train", "critic.train", "reference.train")
        for section, kind in (
            ("fsdp", "fsdp or fsdp2"),
            ("deepspeed", "deepspeed"),
            ("megatron", "megatron"),
        )
    },
}
"""Old key -> the new one."""
