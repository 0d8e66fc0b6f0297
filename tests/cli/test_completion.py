"""`braid completion`: bash completes with its script; those of the others name the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from braid.cli.main import main


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", "bash"]) == 0
    (tmp_path / "braid.bash").write_text(capsys.readouterr().out)
    return tmp_path / "braid.bash"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sam"], ["samples"]),
        (["co"], ["convert", "compare", "completion"]),
        (["train", "mine.yaml", "run.see"], ["run.seed="]),
        (["show", "mine.yaml", "run.seed=1", "data.train.0.limi"], ["data.train.0.limit="]),
        (["train", "mine.yaml", "--bac"], ["--backend"]),
        (["export", "runs/mine", "--re"], ["--report"]),
        (["export", "runs/mine", "run.see"], []),
        (["train", "mi"], []),  # a file, which bash completes
    ],
)
def test_bash_completes(script: Path, words: list[str], expected: list[str]) -> None:
    line = " ".join(f"'{word}'" for word in ["braid", *words])
    code = f'source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _braid; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_other_shells_get_the_same_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X compinit bashcompinit\n")
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("complete -c braid -n ") for line in lines)
    assert "complete -c braid -n '__fish_seen_subcommand_from export' -l report" in lines
    assert " run.seed= " in lines[-1]
