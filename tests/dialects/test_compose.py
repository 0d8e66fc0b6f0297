"""Hydra's defaults lists: search, mounting and precedence of presets, and every error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from braid.config.source import Written
from braid_dialects.compose import compose
from braid_dialects.load import DIALECTS, read_foreign


def write(folder: Path, **files: str) -> Path:
    """The files, `group__name` as group/name.yaml; the path of `main`."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "main.yaml"


def composed(folder: Path, *overrides: str, **files: str) -> Written:
    return compose(write(folder, **files), overrides)


def tree(folder: Path, *overrides: str, **files: str) -> dict[str, Any]:
    written = composed(folder, *overrides, **files)
    assert written.problems == []
    return {key: value for key, value in written.tree.items() if key != "defaults"}


def problems(written: Written) -> list[str]:
    return [str(problem) for problem in written.problems]


def test_a_preset_is_mounted_at_its_package(tmp_path: Path) -> None:
    merged = tree(tmp_path, main="defaults:\n  - env/libero@env.train\n", env__libero="kind: libero\n")
    assert merged == {"env": {"train": {"kind": "libero"}}}


def test_a_preset_without_a_package_is_mounted_at_its_group(tmp_path: Path) -> None:
    merged = tree(tmp_path, main="defaults: [a/b/one]\n", a__b__one="x: 1\n")
    assert merged == {"a": {"b": {"x": 1}}}


def test_global_and_here_are_packages(tmp_path: Path) -> None:
    main = "defaults: [g/one@_global_, g/one@_here_]\n"
    assert tree(tmp_path, main=main, g__one="x: 1\n") == {"x": 1}


def test_a_preset_can_name_its_own_package(tmp_path: Path) -> None:
    merged = tree(tmp_path, main="defaults: [g/one]\n", g__one="# @package _global_\nx: 1\n")
    assert merged == {"x": 1}
    merged = tree(tmp_path, main="defaults: [g/one@there]\n", g__one="# @package _global_\nx: 1\n")
    assert merged == {"there": {"x": 1}}


def test_the_file_wins_over_its_presets_unless_self_says_otherwise(tmp_path: Path) -> None:
    one, main_keys = "x: 1\ny: {a: 1, b: 1}\n", "x: 2\ny: {b: 2}\n"
    assert tree(tmp_path, main=f"defaults: [g/one@_global_]\n{main_keys}", g__one=one) == {
        "x": 2,
        "y": {"a": 1, "b": 2},
    }
    after = f"defaults: [g/one@_global_, _self_]\n{main_keys}"
    assert tree(tmp_path, main=after, g__one=one) == {"x": 2, "y": {"a": 1, "b": 2}}
    before = f"defaults: [_self_, g/one@_global_]\n{main_keys}"
    assert tree(tmp_path, main=before, g__one=one) == {"x": 1, "y": {"a": 1, "b": 1}}


def test_later_presets_win_and_lists_are_replaced(tmp_path: Path) -> None:
    main = "defaults: [g/one@_global_, g/two@_global_]\n"
    assert tree(tmp_path, main=main, g__one="x: [1, 2]\ny: 1\n", g__two="x: [3]\n") == {"x": [3], "y": 1}


def test_presets_of_presets_are_looked_for_beside_them_and_mounted_within_them(tmp_path: Path) -> None:
    merged = tree(
        tmp_path,
        main="defaults: [env/outer@env.train]\n",
        env__outer="defaults: [video/big, /shared/seed@_here_]\nx: 1\n",
        env__video__big="save: true\n",
        shared__seed="seed: 3\n",
    )
    assert merged == {"env": {"train": {"video": {"save": True}, "seed": 3, "x": 1}}}


def test_group_and_option_can_be_written_apart_and_left_out(tmp_path: Path) -> None:
    main = "defaults:\n  - g@a: one\n  - g@b: null\n  - optional g@c: none_such\n  - override hydra/job_logging: none\n"
    assert tree(tmp_path, main=main, g__one="x: 1\n") == {"a": {"x": 1}}


def test_the_command_line_chooses_another_preset(tmp_path: Path) -> None:
    files = {"main": "defaults: [g/one@a]\n", "g__one": "x: 1\n", "g__two": "x: 2\n"}
    assert tree(tmp_path, "g@a=two", "+a.y=3", **files) == {"a": {"x": 2, "y": 3}}
    assert problems(composed(tmp_path, "g@b=two", **files)) == [
        "g@b: no such entry in the defaults list of the file, did you mean 'g@a'? [override]"
    ]


def test_values_know_the_file_and_line_that_they_come_from(tmp_path: Path) -> None:
    written = composed(
        tmp_path,
        "a.z=4",
        main="defaults: [g/one@a]\na:\n  y: 3\n",
        g__one="x: 1\ny: 2\nz: {w: 1}\n",
    )
    assert written.origins["a.x"] == "one.yaml:1"
    assert written.origins["a.y"] == "main.yaml:3"
    assert written.origins["a.z"] == "override"
    assert "a.z.w" not in written.origins
    assert list(written.tree) == ["defaults", "a"]


def test_the_files_own_folder_comes_before_the_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "more", g__one="x: more\n", g__two="x: more\n")
    monkeypatch.setenv("PRESETS", str(tmp_path / "more"))
    path = "hydra: {searchpath: ['file://${oc.env:PRESETS}/']}\n"
    merged = tree(tmp_path, main=f"{path}defaults: [g/one@a, g/two@b]\n", g__one="x: own\n")
    assert (merged["a"], merged["b"]) == ({"x": "own"}, {"x": "more"})
    assert merged["hydra"] == {"searchpath": [f"file://{tmp_path}/more/"]}


def test_a_variable_of_the_search_path_is_resolved_only_when_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PRESETS", raising=False)
    path = "hydra: {searchpath: ['file://${oc.env:PRESETS}/']}\n"
    main = write(tmp_path, main=f"{path}defaults: [g/one@a]\n", g__one="x: 1\n")
    read = read_foreign(main, [], DIALECTS["rlinf"])
    assert read.problems == []
    assert read.tree["hydra"]["searchpath"] == ["file://${oc.env:PRESETS}/"]
    (tmp_path / "g" / "one.yaml").unlink()
    read = read_foreign(main, [], DIALECTS["rlinf"])
    assert [problem.key for problem in read.problems] == ["defaults", "hydra.searchpath[0]"]
    assert "the environment variable PRESETS is not set" in read.problems[1].message


def test_a_missing_preset_is_reported_with_the_searched_folders(tmp_path: Path) -> None:
    (problem,) = problems(
        composed(
            tmp_path,
            main="hydra: {searchpath: [file:///nowhere]}\ndefaults:\n  - env/libro\n",
            env__libero="x: 1\n",
            env__maniskill="x: 1\n",
        )
    )
    assert problem == (
        f"defaults: no preset env/libro.yaml, did you mean 'libero'?; looked in {tmp_path}, /nowhere; "
        "available in env: libero, maniskill [main.yaml:3]"
    )


def test_cyclic_presets_are_an_error(tmp_path: Path) -> None:
    (problem,) = problems(
        composed(tmp_path, main="defaults: [g/one]\n", g__one="defaults: [two]\n", g__two="defaults: [one]\n")
    )
    assert "presets form a cycle: g/one -> g/two -> g/one; remove one of the entries" in problem


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ("env/libero", "must be a list of presets"),
        ("[3]", "invalid entry 3; write group/preset@package"),
        ("[{a: one, b: two}]", "invalid entry"),
        ("[{a: [one, two]}]", "invalid entry"),
        ("['env/${which}']", "interpolations are not supported in preset names"),
    ],
)
def test_a_defaults_list_that_cannot_be_read_is_an_error(tmp_path: Path, defaults: str, message: str) -> None:
    reported = problems(composed(tmp_path, main=f"defaults: {defaults}\n"))
    assert len(reported) == 1
    assert message in reported[0]


def test_a_search_path_that_is_not_a_local_folder_is_an_error(tmp_path: Path) -> None:
    main = "hydra: {searchpath: ['pkg://some.package']}\ndefaults: [g/one]\n"
    reported = problems(composed(tmp_path, main=main))
    assert re.search(r"hydra.searchpath\[0\]: 'pkg://some.package' is not a local folder", reported[1])


def test_mistakes_in_a_preset_keep_its_file_and_line(tmp_path: Path) -> None:
    reported = problems(composed(tmp_path, main="defaults: [g/one]\n", g__one="x: 1\nx: 2\n"))
    assert reported == ["x: duplicate key, first set at one.yaml:1; remove one [one.yaml:2]"]


def test_references_in_presets_are_resolved_against_the_whole(tmp_path: Path) -> None:
    files = {
        "main": "defaults: [env/one@env.train]\nalgorithm: {auto_reset: true}\n",
        "env__one": "auto_reset: ${algorithm.auto_reset}\nignore_terminations: ${algorithm.ignore_terminations}\n",
    }
    read = read_foreign(write(tmp_path, **files), [], DIALECTS["rlinf"])
    assert read.tree["env"]["train"]["auto_reset"] is True
    (problem,) = problems(read)
    assert problem.startswith(
        "env.train.ignore_terminations: ${algorithm.ignore_terminations}: unknown key "
        "'algorithm.ignore_terminations'"
    )
    assert problem.endswith("[one.yaml:2]")
