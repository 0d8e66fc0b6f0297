"""benchmarks/learned.py, which trains the configs of benchmarks/learned."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "learned.py"


@pytest.mark.slow
def test_runs_that_end_without_a_summary_are_reported_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = runpy.run_path(str(SCRIPT))
    main = script["main"]
    monkeypatch.setitem(main.__globals__, "CONFIGS", tmp_path)
    target = "eval: {target: {min_final: 0.5}}"
    (tmp_path / "broken.yaml").write_text(f"# Optimum 1.00\nno_such_key: 1\n{target}\n")
    (tmp_path / "missing.yaml").write_text(f"# Optimum 0.50\nmodel: {{path: no_such_folder}}\n{target}\n")
    monkeypatch.setattr(sys, "argv", ["learned.py", "--seeds", "3"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    table, log = capfd.readouterr()
    assert table.splitlines()[2:] == [
        "| broken | 1.00 | 0.5 | failed | - |",
        "| missing | 0.50 | 0.5 | failed | - |",
    ]
    assert "broken_3: failed without a summary" in log
    assert "missing_3: failed without a summary" in log
