"""Values that keys accept, for tests that change a key and expect an effect."""

from __future__ import annotations

from typing import Any

from braid_dialects.table import Rule

CANDIDATES = (
    True, False, 2, 3, 1, 0.25, 0.5, 1.5, -1, "one", "two", ["one"], ["two", "three"], [0.5, 0.75], [2, 3], {"one": "1"}, {"one": 1.0}
)  # fmt: skip
OWN: dict[str, tuple[Any, ...]] = {
    "component_placement": ({"actor,rollout": "0"}, {"actor": "0-1", "rollout": "2-3"}),
    "device_mapping": ("list(range(0,8))", "list(range(0,16))", [0, 1, 2, 3]),
    "domain_interleave_probs": ({"math_rule": 1.0}, None),
    "env_class": ("gsm8k", "aime"),
    "filter_args": ({"threshold_down": 0.1, "threshold_up": 0.9}, {"threshold_down": 0.2}, {"std_threshold": 0.0}),
    "filters": ([{"enabled": True}], [{"enabled": True, "ratio_high": 1.5}], [{"enabled": False}]),
    "policy_setup": ("widowx_bridge", "panda-ee-dpos"),
    "precision": ("fp16", "bf16", "fp32"),
    "resume_path": ("a/global_step_10", "b/step_20", None),
    "sequence_length": (4096, 8192, None),
    "strategy": ("fsdp", "fsdp2", "FSDP2"),
}  # fmt: skip
"""Last name of a key -> its samples, where an arbitrary value of the right type is invalid."""


def samples(rule: Rule) -> tuple[Any, ...]:
    """Distinct values that the key accepts."""
    name = rule.path.rpartition(".")[2]
    listed = tuple(value for value in OWN.get(name, ()) if rule.takes.accepts(value))
    values = listed or rule.takes.choices or tuple(filter(rule.takes.accepts, CANDIDATES))[:3]
    return (*values, None) if rule.takes.accepts(None) and None not in values else values
