"""Keys that have no effect: what the rules name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.config.load import load_config
from braid.config.schema import RunConfig
from braid.config.shape import fields_of, sections_of
from braid.plan import derive, unused_keys

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
OVERRIDES = (
    (),
    ("rollout.engine=vllm", "train.backend=megatron"),
    ("rollout.engine=sglang", "train.backend=deepspeed"),
    ("train.backend=fsdp2", "run.device=cpu"),
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_keys_without_effect_are_keys(example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(example.parent)
    fields = dict(fields_of(RunConfig))
    is_section = {path for path, field in fields.items() if sections_of(field)}
    for overrides in OVERRIDES:
        config = load_config(example, overrides).config
        for verb in ("train", "eval"):
            for key, why in unused_keys(config, derive(config, None, verb)).items():
                below = key.startswith("env.mix.")  # names of the user's
                assert key in fields or key in is_section or below, f"{key}: {why}"
