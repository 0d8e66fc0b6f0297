"""Makes the teacher of distillation.yaml, in a few minutes:

    python examples/distillation.py examples/distillation

FOLDER/teacher: a model of 2.4M parameters in the folder layout of transformers, fine-tuned on solutions of
the student's sums, all of which show their working.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from braid.api import load_run

STUDENT = Path(__file__).parent / "distillation.yaml"
"""Its data and its characters are the teacher's too."""
TEACHER = (
    "model.build.hidden_size=320",
    "model.build.intermediate_size=832",
    "model.build.num_heads=10",
    "model.build.num_kv_heads=10",
    f"sft.data.0.response_function={STUDENT.with_name('solutions.py')}:chain_sum",
    "sft.steps=260",
    "sft.optimizer.lr=2e-3",
    "eval={every_rounds: 260, sampling: {max_new_tokens: 32, greedy: true}, target: {min_final: 0.9}}",
)
"""What differs from the student's config."""


def make_teacher(folder: Path) -> None:
    """Write the teacher to `folder`/teacher, in place of an earlier one. Exits if it does not learn."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "braid", "sft", str(STUDENT), *TEACHER]
        command += [f"run.output_dir={runs}", "run.name=teacher"]
        if code := subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            sys.exit(code)
        shutil.rmtree(folder / "teacher", ignore_errors=True)
        load_run(Path(runs, "teacher")).export(folder / "teacher")


if __name__ == "__main__":
    make_teacher(Path(sys.argv[1]))
