"""Engines and training backends of a user's own: the examples of docs/engines.md and docs/backends.md, and
what is refused."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.config.load import load_config
from braid.errors import ConfigError
from braid.plan import resolve
from braid.trainer import commands

from .conftest import LoadTiny

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"rollout.engine": "engines.md", "train.backend": "backends.md"}


def example(key: str) -> tuple[str, str]:
    """The file of a page's example, and its overrides."""
    text = (DOCS / PAGES[key]).read_text().partition("## Your own")[2]
    code, config = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("python", "yaml"))
    section, _, name = key.partition(".")
    return code, f"{key}={json.dumps(yaml.safe_load(config)[section][name])}"


def lines(run: Path) -> list[dict[str, Any]]:
    rounds = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in rounds]


@pytest.mark.parametrize("key", PAGES)
def test_the_example_of_the_documentation_trains_as_the_kind_that_it_derives_from(
    load_tiny: LoadTiny, tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    code, override = example(key)
    (tmp_path / "mine.py").write_text(code)
    rewards = "def early(response):\n    return sum(letter < 'e' for letter in response)\n"
    part = "reward.parts=[{kind: function, path: 'rewards.py:early'}]"
    with caplog.at_level("INFO"):
        custom = commands.train(load_tiny(override, part, "run.name=own", rewards=rewards)).run_dir
    assert [record.message for record in caplog.records if record.name.endswith("_mine")]
    plain = commands.train(load_tiny(part, "run.name=plain", rewards=rewards)).run_dir
    names = ("policy/loss", "policy/grad_norm", "reward/mean")
    first, second = ([{n: line.get(n) for n in names} for line in lines(run)] for run in (custom, plain))
    assert first == second
    assert any(line["policy/grad_norm"] for line in first)
    section, name = key.split(".")
    stored = getattr(
        getattr(load_config(custom / "config.yaml").config, section), name
    )  # from another folder
    assert stored.is_own
    assert pickle.loads(pickle.dumps(stored)) == stored


def test_an_engine_derives_from_one_with_a_place(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from braid.rollout.engines import Engine\nclass Bare(Engine):\n    pass\n"
    )
    (tmp_path / "run.yaml").write_text("model: {build: {}}\n")
    with pytest.raises(ConfigError, match=r"rollout\.engine: 'mine\.py:Bare' derives from Engine alone; an"):
        load_config(tmp_path / "run.yaml", ["rollout.engine=mine.py:Bare"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "class Own(Native):\n    def model_post_init(self, _):\n        1 / 0",
            r"ZeroDivisionError: .*mine\.py:7",
        ),
        ("class Own(Native):\n    x: 'Undefined' = 1", "`Own` is not fully defined"),
        ("class Own(Native):\n    x: int", "missing required key 'x'"),
        ("class Own(ServedEngine): ...", "'mine.py:Own' does not define start"),
        ("class Own(Backend): ...", "'mine.py:Own' does not define build"),
        ("Own = Native()", "is a Native, not a class or a function"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_with_its_reason(
    tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "mine.py").write_text(
        "from braid.rollout.engines.base import ServedEngine\n"
        "from braid.rollout.engines.native.kind import Native\n"
        "from braid.training.backends import Backend\n\n" + code
    )
    (tmp_path / "run.yaml").write_text("model: {build: {}}\n")
    key = "train.backend" if "Backend" in code else "rollout.engine"
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: .*{message}"):
        load_config(tmp_path / "run.yaml", [f"{key}=mine.py:Own"])


def test_all_problems_of_a_kind_of_the_users_own_are_told_with_their_values(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("model: {build: {}}\n")
    value = "{kind: braid.rollout.engines.native.kind.Native, max_running: -3, dtype: half}"
    with pytest.raises(ConfigError, match=r"max_running is -3 .*greater than 0; dtype is 'half'"):
        load_config(tmp_path / "run.yaml", [f"rollout.engine={value}"])


@pytest.mark.parametrize("key", PAGES)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("mine.py:Missing", r"'mine\.py' has no 'Missing'"),
        ("pathlib.Path", r"is not a class of braid\.\w+\.\w+\.\w+; derive it from that"),
        ("math.exp", r"name a class of braid\.\w+\.\w+\.\w+, not a function"),
        ("{kind: mine.py:KIND, evry: 2}", r"unknown key 'evry', did you mean 'every'\?"),
    ],
)
def test_what_is_no_engine_or_backend_is_refused_with_its_key(
    tmp_path: Path, key: str, value: str, message: str
) -> None:
    code, override = example(key)
    (tmp_path / "mine.py").write_text(code)
    name = re.findall(r"mine\.py:(\w+)", override)[0]
    file = tmp_path / "run.yaml"
    file.write_text("model: {build: {}}\n")
    with pytest.raises(ConfigError, match=rf"{re.escape(key)}: .*{message}"):
        load_config(file, [f"{key}={value.replace('KIND', name)}"])


@pytest.mark.parametrize(
    ("base", "key", "method"),
    [
        ("braid.rollout.engines.native.kind.Native", "rollout.engine", "dtype_in"),
        ("braid.training.backends.single.kind.Single", "train.backend", "problems"),
    ],
)
def test_what_an_own_kind_raises_while_the_run_is_planned_is_an_error_with_its_line(
    tmp_path: Path, base: str, key: str, method: str
) -> None:
    module, _, name = base.rpartition(".")
    (tmp_path / "mine.py").write_text(
        f"from {module} import {name}\n\nclass Own({name}):\n    def {method}(self, *_, **__):\n        return 1 / 0\n"
    )
    (tmp_path / "run.yaml").write_text("model: {build: {}}\n")
    loaded = load_config(tmp_path / "run.yaml", [f"{key}=mine.py:Own"])
    with pytest.raises(
        ConfigError, match=rf"{re.escape(key)}: 'mine\.py:Own' raised Zero\w+: .*\(mine\.py:5\)"
    ):
        resolve(loaded.config)
