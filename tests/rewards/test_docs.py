"""docs/rewards.md is correct: its configs build, its code runs, its table has every kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.config.load import load_config
from braid.config.reward import CodeConfig
from braid.rewards.base import Services
from braid.rewards.kinds import REWARDS, ModelReward
from braid.rewards.scorer import build_scorer

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
CONFIGS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


class _Classifier:
    """Stand-in for a reward model; these tests score nothing."""

    def encode(self, messages: Sequence[Any]) -> tuple[list[int], bool]:
        raise NotImplementedError

    batches = scores = encode


async def _generate(messages: Sequence[Any], **settings: Any) -> str:
    raise NotImplementedError


@pytest.mark.parametrize("text", CONFIGS)
def test_configs_build(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolation: str) -> None:
    monkeypatch.setenv("JUDGE_KEY", "key")
    (tmp_path / "my_rewards.py").write_text(PROGRAMS[0])
    (tmp_path / "run.yaml").write_text("model: {build: {}}\n" + text)
    config = load_config(tmp_path / "run.yaml").config.reward
    models = {i: _Classifier() for i, part in enumerate(config.parts) if isinstance(part, ModelReward)}
    config = config.model_copy(update={"code": CodeConfig.model_validate({"isolation": isolation})})
    judges = {i: _generate for i, _ in config.judges()}
    build_scorer(config, base_dir=tmp_path, services=Services(models, _generate, judges=judges)).close()


@pytest.mark.parametrize("text", PROGRAMS)
def test_programs_run(text: str) -> None:
    exec(compile(text, "docs/rewards.md", "exec"), {})


def test_the_table_has_every_kind_and_so_has_an_example() -> None:
    kinds = set(REWARDS)
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) >= kinds
    shown = {part["kind"] for text in CONFIGS for part in yaml.safe_load(text)["reward"]["parts"]}
    assert shown == kinds
