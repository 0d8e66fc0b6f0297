"""What CI prints last."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKEFILE = """
test:
\t@printf -- '--- Captured stdout ---\\n12 failed, 5000 passed in 12.69s\\n1 failed, 8 passed, 2 skipped in 9.2s\\n'
\t@exit 1
slow:
\t@printf -- '3 failed in 2.0s\\n20 passed, 1 skipped, 2 warnings, 1 error in 396.20s (0:06:36)\\n'
"""


def test_the_last_line_counts_the_two_suites_and_no_pytest_that_their_tests_have_run(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    done = subprocess.run(
        [tmp_path / ".ci/run"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 2  # that of the first, which failed
    assert done.stdout.splitlines()[-1] == "28 passed, 2 failed, 3 skipped"
