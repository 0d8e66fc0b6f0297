"""The documentation is correct: examples resolve, blocks parse, named files exist."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
import yaml

from braid.config.load import load_config
from braid.plan import default_verb, resolve

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_an_example_resolves_without_warnings(path: Path) -> None:
    loaded = load_config(path)
    plan = resolve(loaded.config, verb=default_verb(loaded.config), origin_of=loaded.origin)
    assert plan.last_round
    assert not plan.warnings


def test_the_config_of_the_readme_resolves(tmp_path: Path) -> None:
    (block,) = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "mine.yaml").write_text(block)
    resolve(load_config(tmp_path / "mine.yaml").config, 100)


@pytest.mark.parametrize("path", [d for d in DOCUMENTS if blocks(d, "yaml")], ids=lambda p: p.name)
def test_the_configs_of_a_document_load(path: Path, tmp_path: Path) -> None:
    """Each is a part of a config, or has alternatives, one a line."""
    code = blocks(path, "python")
    for block in blocks(path, "yaml"):
        for file, name in re.findall(r"(\w+\.py):(\w+)", block):
            defining = (text for text in code if re.search(rf"^(class|def) {name}\b", text, re.MULTILINE))
            (tmp_path / file).write_text(next(defining, ""))
        keys = [line.partition(":")[0] for line in block.splitlines() if line[:1].isalpha()]
        for text in block.splitlines() if len(set(keys)) < len(keys) else [block]:
            config = {"model": {"path": "model"}} | yaml.safe_load(text)
            (tmp_path / "mine.yaml").write_text(yaml.safe_dump(config))
            load_config(tmp_path / "mine.yaml")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_blocks_compile(path: Path) -> None:
    for block in blocks(path, "python"):
        compile(block, str(path), "exec")


@pytest.mark.parametrize("is_in_notebook", [False, True])
def test_grpo_from_parts_learns(capsys: pytest.CaptureFixture[str], is_in_notebook: bool) -> None:
    code = blocks(ROOT / "docs" / "api.md", "python")[1]

    async def cell() -> None:
        exec(code, {})

    asyncio.run(cell()) if is_in_notebook else exec(code, {})
    first, *_, last = capsys.readouterr().out.splitlines()
    assert float(first.split()[1]) < 0.4  # one token in some sixteen is right by chance
    assert float(last.split()[1]) > 0.95


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\((?!http|#)([^)#]+)", path.read_text())
    missing = [t for t in targets if not (path.parent / t).exists()]
    assert not missing


def native_keys() -> set[str]:
    """Every key of the generated reference, with the sections that hold them."""
    keys: set[str] = set()
    section = with_kinds = "none"
    for line in (ROOT / "docs" / "config.md").read_text().splitlines():
        if line.startswith("## "):
            section = line[3:].split()[0].replace("[]", "")
            keys.add(section)
        elif line.startswith("### kind"):  # after the sections of the kind before
            section = with_kinds = with_kinds if section.startswith(f"{with_kinds}.") else section
        elif match := re.match(r"\| `([\w.]+)` \|", line):
            keys.add(f"{section}.{match[1]}")
    return keys


# Pages with keys of other systems, or of JSON files, in the same form.
OTHER_KEYS = {"config.md", "dialects.md", "placement.md", "run_directory.md", "algorithms.md"}


@pytest.mark.parametrize("path", [d for d in DOCUMENTS if d.name not in OTHER_KEYS], ids=lambda p: p.name)
def test_keys_that_a_document_names_exist(path: Path) -> None:
    keys = native_keys()
    sections = {key.split(".")[0] for key in keys if "." in key}
    named = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[=:][^`]*)?`", path.read_text())
    assert [key for key in named if key.split(".")[0] in sections and key not in keys] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_dependency_has_a_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    wanted = [
        *project["dependencies"],
        *(d for extra in project["optional-dependencies"].values() for d in extra),
    ]
    names = [re.split(r"[<>=!\[ ]", dependency)[0] for dependency in wanted]
    assert [name for name in names if name not in reasons] == []
