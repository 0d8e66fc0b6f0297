"""Names in backticks exist, in docstrings and in documents."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tests.docstrings import docstrings
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

pytestmark = pytest.mark.xdist_group("names")  # which are collected once a process
ROOT = Path(__file__).parents[2]
CODE = ("src", "tests", "examples", "benchmarks")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
KEYS = (
    "docs/schema.json",
    "docs/config.md",
    "pyproject.toml",
    "Makefile",
    "examples/*.yaml",
    "requirements/*",
)
ELSEWHERE = {
    *("lscpu", "nohup", "cc", "CC", "pivot_root", "gcs_server"),  # of the system
    *("_Checkpointable", "postprocessed_action", "deepspeed_train"),  # of torch and of peers
    *("time_mlp_in", "time_mlp_out", "no_noops"),  # of checkpoints
    *("Point", "num_x", "behavior_", "old_", "ref_"),  # examples and parts of names
    *("mu", "v_mu", "n_turn", "cov"),  # of formulas
}
SYMBOL = re.compile(r"[A-Za-z]_\w")
"""Of a formula, such as A_t."""
COMMENT = re.compile(r"(^|\s)# .*")
PLACEHOLDER = re.compile(r"_N(?![A-Za-z])|NAME_|version_\d+_")


def test_names_in_docstrings_exist() -> None:
    unknown = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
        for path in sorted((ROOT / "src").rglob("*.py"))
        for node in docstrings(ast.parse(path.read_text()))
        for name in unknown_names(node.value)
    ]
    assert unknown == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_names_in_a_document_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        pytest.skip("names what was, too")
    assert list(unknown_names(path.read_text())) == []


def unknown_names(text: str) -> Iterator[str]:
    """The names in backticks, such as `a_name`, `a.key` or `a_function()`, with a word that occurs
    nowhere."""
    for name in re.findall(r"`([\w.]+)(?:\(\))?`", text):
        words = re.findall(r"[^\W\d]\w*", PLACEHOLDER.sub("", name))
        if not all(word in known() or SYMBOL.fullmatch(word) for word in words):
            yield name


@cache
def known() -> frozenset[str]:
    """The words of code without its docstrings and comments, of files with keys, and of paths."""
    texts = [path.read_text() for pattern in KEYS for path in ROOT.glob(pattern)]
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        lines = path.read_text().splitlines()
        for text in docstrings(ast.parse("\n".join(lines))):
            lines[text.lineno - 1 : text.end_lineno] = [""] * ((text.end_lineno or 0) - text.lineno + 1)
        texts += [*path.relative_to(ROOT).parts, *(COMMENT.sub("", line) for line in lines)]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    return frozenset(words | set(CONFIG_MAPPING_NAMES) | ELSEWHERE)
