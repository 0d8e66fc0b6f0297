"""The tiny runs of every feature train on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.live_runs import BROKEN, RUNS, run_all, write_files


@pytest.mark.nightly
def test_every_live_run_works(tmp_path: Path) -> None:
    write_files(tmp_path)
    assert run_all(tmp_path, "cuda").keys() == (RUNS | BROKEN).keys()
