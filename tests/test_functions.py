from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from braid.errors import ConfigError
from braid.functions import load_function
from braid.users import message_of, shown

SOURCE = """
COUNT = []
COUNT.append(1)
VALUE = 3

def score(text):
    return len(text)

class Judge:
    @staticmethod
    def score(text):
        return 2

judge = Judge()

def fail():
    raise LookupError(judge)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "raising.py").write_text("1 / 0\n")
    (tmp_path / "ending.py").write_text("raise SystemExit(0)\n")
    return tmp_path


def test_a_dotted_path_names_a_function_or_a_method(folder: Path) -> None:
    assert load_function("math.sqrt", base_dir=folder, key="k") is math.sqrt
    assert load_function("pathlib.Path.cwd", base_dir=folder, key="k")() == Path.cwd()


def test_a_file_path_is_relative_to_the_config_and_runs_once(folder: Path) -> None:
    score = load_function("mine.py:score", base_dir=folder, key="k")
    method = load_function(f"{folder}/mine.py:Judge.score", base_dir=Path("/"), key="k")
    assert (score("abc"), method("abc")) == (3, 2)
    assert score.__globals__ is method.__globals__
    assert score.__globals__["COUNT"] == [1]


def test_a_module_of_a_file_has_the_files_name_in_messages(folder: Path) -> None:
    fail = load_function("mine.py:fail", base_dir=folder, key="k")
    judge = fail.__globals__["judge"]
    assert shown(judge).startswith("<mine.Judge object at ")
    with pytest.raises(LookupError) as caught:
        fail()
    assert message_of(caught.value).startswith("<mine.Judge object at ")


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("score", "is not a path to Python code; write package.module.name or file.py:name"),
        ("mine.txt:score", "is not a path to Python code"),
        ("mine.py:", "is not a path to Python code"),
        ("mien.py:score", "mien.py, did you mean 'mine.py'?"),
        ("mine.py:scroe", "'mine.py' has no 'scroe', did you mean 'score'?"),
        ("mine.py:VALUE", "'mine.py:VALUE' is a int, not a function"),
        ("math.sqroot", "'math' has no 'sqroot', did you mean 'sqrt'?"),
        ("mine.score", "no module named 'mine'; for a file next to the config write 'mine.py:score'"),
        ("broken.py:f", "broken.py raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("raising.py:f", "raising.py raised ZeroDivisionError: division by zero (raising.py:1)"),
        ("ending.py:f", "ending.py raised SystemExit: 0 (ending.py:1)"),
    ],
)  # fmt: skip
def test_an_invalid_path_is_reported_with_its_key(folder: Path, path: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_function(path, base_dir=folder, key="reward.parts[0].path")
    assert str(caught.value).startswith("reward.parts[0].path: ")
    assert fault in str(caught.value)


def test_a_class_is_loaded_where_one_is_allowed(folder: Path) -> None:
    judge: Any = load_function("mine.py:Judge", base_dir=folder, key="k", allows_class=True)
    assert judge.score("") == 2
    with pytest.raises(ConfigError, match="is a class, not a function"):
        load_function("mine.py:Judge", base_dir=folder, key="k")
