"""A shell script that launches SkyRL is read for its overrides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from braid.cli.main import main
from braid.errors import ConfigError
from braid_dialects.load import Read, read_config

SCRIPT = r"""set -x
# bash examples/run.sh trainer.seed=1

: "${DATA_DIR:="$HOME/data/gsm8k"}"
: "${NUM_GPUS:=4}"
export MODEL="Qwen/Qwen2.5-1.5B-Instruct"
CLIP=0.28

uv run --isolated --extra vllm -m skyrl_train.entrypoints.main_base \
  data.train_data="['$DATA_DIR/train.parquet']" \
  trainer.policy.model.path=$MODEL \
  trainer.placement.policy_num_gpus_per_node=$NUM_GPUS \
  trainer.placement.ref_num_gpus_per_node="${NUM_GPUS}" \
  # engines
  generator.inference_engine.num_engines=$NUM_GPUS \
  trainer.algorithm.eps_clip_high=$CLIP \
  trainer.run_name="run of ${USER_OF_RUN:-nobody}" \
  +trainer.logger=console \
  $@
"""


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    for name in ("DATA_DIR", "NUM_GPUS", "USER_OF_RUN"):
        monkeypatch.delenv(name, raising=False)


def read(folder: Path, script: str, *overrides: str) -> Read:
    path = folder / "run.sh"
    path.write_text(script)
    return read_config(path, overrides)


def test_the_overrides_of_a_script_are_the_config(tmp_path: Path) -> None:
    converted = read(tmp_path, SCRIPT)
    config = converted.loaded.config
    assert converted.title == "SkyRL 0.5"
    assert config.data.train[0].path == ("/home/x/data/gsm8k/train.parquet",)  # pyright: ignore[reportAttributeAccessIssue]
    assert (config.model.path, config.algorithm.policy_loss.clip_high) == ("Qwen/Qwen2.5-1.5B-Instruct", 0.28)
    assert (config.cluster.devices_per_node, config.rollout.engine.replicas) == (4, 4)
    assert config.run.name == "run-of-nobody"
    assert (
        converted.loaded.origins["algorithm.policy_loss.clip_high"]
        == "run.sh:16 trainer.algorithm.eps_clip_high"
    )
    assert [entry.path for entry in converted.ledger if entry.disposition == "applied"] == [
        entry.path for entry in converted.ledger
    ]
    assert set(converted.loaded.kept) == {"source.sh", "ledger.json"}


def test_the_environment_and_the_command_line_take_precedence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER_OF_RUN", "me")
    config = read(tmp_path, SCRIPT, "trainer.algorithm.eps_clip_high=0.4", "trainer.seed=5").loaded.config
    assert (config.run.name, config.algorithm.policy_loss.clip_high, config.run.seed) == ("run-of-me", 0.4, 5)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("CLIP=0.28", "if [ $X ]; then\n  CLIP=0.28\nfi"), r"eps_clip_high: \$CLIP depends on what the script does.* \[run\.sh:18\]"),
        (("CLIP=0.28", "CLIP=0.28\nCLIP=0.3"), r"eps_clip_high: \$CLIP depends on what the script does"),
        (("CLIP=0.28", "CLIP=$(nproc)"), r"eps_clip_high: it depends on what the script does"),
        (("=$CLIP", "=$CLIPS"), r"eps_clip_high: .*environment variable CLIPS is not set"),
        (("-m skyrl_train", "--config-name=x -m skyrl_train"), r"config: the script launches a config file .* \[run\.sh:9\]"),
        (("eps_clip_high", "eps_clip_hi"), r"eps_clip_hi: unknown key of SkyRL, did you mean .* \[run\.sh:16\]"),
        ((SCRIPT, "echo hello\n"), r"config: the script has no command with key=value arguments"),
        (('"run of', "'run of"), r"config: cannot read the script: a quotation is not closed"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, change: tuple[str, str], why: str
) -> None:
    assert change[0] in SCRIPT
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, SCRIPT.replace(*change))


def test_commands_take_scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT)
    assert main(["explain", str(path), "--json"]) == 0
    out = capsys.readouterr().out
    assert {"path": "trainer.algorithm.eps_clip_high", "value": 0.28}.items() <= next(
        row for row in json.loads(out) if row["path"].endswith("eps_clip_high")
    ).items()
    native = tmp_path / "native.yaml"
    assert main(["convert", str(path), "--output", str(native)]) == 0
    assert read_config(native).loaded.config.algorithm == read_config(path).loaded.config.algorithm
