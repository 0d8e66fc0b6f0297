"""The wheel that `make wheel` builds, installed into a new environment."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = """
run: {max_rounds: 1}
model: {build: {architecture: qwen3, hidden_size: 32, intermediate_size: 64, num_layers: 1, num_heads: 2,
  num_kv_heads: 2, head_dim: 16, max_positions: 64, characters: " 0123456789+-=A:"}}
data: {train: [{kind: procedural, generator: chain_sum, template: "{metadata[expression]} =", size: 8}], max_prompt_tokens: 32}
reward: {parts: [{kind: reasoning_gym}]}
rollout: {prompts_per_round: 2, group_size: 2, sampling: {max_new_tokens: 4}}
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_wheel_trains_in_a_new_environment_without_the_clone(tmp_path: Path) -> None:
    build = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w")
    run(*build, tmp_path / "dist", ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("braid_rl-*.whl")
    venv.create(tmp_path / "env", with_pip=False)
    env = tmp_path / "env" / "bin" / "python"
    packages = Path(
        run(env, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip()
    )
    # Dependencies come from the environment of the tests, whose own editable braid a plain path leaves out.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])
    install = (sys.executable, "-m", "pip", "--python", env, "install", "-q", "--no-deps", "--no-index")
    run(*install, wheel, cwd=tmp_path)

    where = run(env, "-c", "import braid; print(braid.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path)
    (tmp_path / "run.yaml").write_text(CONFIG)
    braid = env.with_name("braid")
    assert '"$schema"' in run(braid, "schema", cwd=tmp_path)
    assert "ROLL" in run(braid, "explain", "--key", "pg_clip", cwd=tmp_path)
    run(braid, "train", "run.yaml", cwd=tmp_path)
    assert '"finished"' in (tmp_path / "runs" / "run" / "summary.json").read_text()
