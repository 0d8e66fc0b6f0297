"""Arguments, exit codes and messages."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from tests.leftovers import LIMIT_S

from braid.cli.main import guarded, main
from braid.config.json_schema import schema_text
from braid.config.load import load_config
from braid.config.reference import reference_text
from braid.errors import BraidError, ConfigError, Problem, RunInterrupted, TrainingError

QUICKSTART = str(Path(__file__).parents[2] / "examples/quickstart.yaml")
CONFIG = """\
run: {max_rounds: 3}
model: {build: {}}
data: {train: [{kind: procedural, generator: chain_sum, size: 64}]}
reward: {parts: [{kind: exact}]}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG)
    return str(path)


def args(**values: object) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "debug": False,
            "verb_name": "train",
            "config": "c.yaml",
            "overrides": [],
            "language": "native",
            "dialect": None,
            "backend": None,
            "engine": None,
            "allow_unsupported": [],
            **values,
        }
    )


def raising(error: BaseException) -> Callable[[argparse.Namespace], NoReturn]:
    def action(_: argparse.Namespace) -> NoReturn:
        raise error

    return action


def test_help_lists_commands_a_first_example_and_the_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in ("train", "sft", "prefer", "eval", "show", "explain", "convert", "export", "schema"):
        assert f"\n  {verb} " in text
    assert "braid train examples/quickstart.yaml" in text
    assert "docs/config.md" in text
    assert "exit codes: 0 finished, 1 the run failed, 2" in text


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "getting started:" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("braid 0.")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "braid: unknown command 'trian', did you mean 'train'?\ntry: braid --help\n"),
        (
            ["zzz"],
            "braid: unknown command 'zzz'; the commands are train, sft, prefer, eval, show, plan, explain, "
            "convert, init, export, ls, samples, compare, diagnose, view, doctor, schema, completion\ntry: braid --help\n",
        ),
        (
            ["c.yaml"],
            "braid: unknown command 'c.yaml', did you mean 'braid train c.yaml'?\ntry: braid --help\n",
        ),
        (["train"], "braid: missing argument CONFIG.yaml\ntry: braid train --help\n"),
        (["export"], "braid: missing argument RUN\ntry: braid export --help\n"),
        (
            ["train", "c.yaml", "--run.seed=1"],
            "braid: unknown option '--run.seed=1'; overrides have no dashes: run.seed=1\ntry: braid train --help\n",
        ),
        (["show", "c.yaml", "--al"], "braid: unknown option '--al'\ntry: braid show --help\n"),
        (["schema", "x"], "braid: unknown option 'x'\ntry: braid schema --help\n"),
    ],
)
def test_a_wrong_command_says_what_to_type(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr().err == message


def test_config_problems_exit_with_2_before_anything_runs(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    assert main(["train", config, "run.sed=1"]) == 2
    assert capsys.readouterr().err == "braid: run.sed: unknown key, did you mean 'seed'? [override]\n"


def test_cross_key_problems_exit_with_2(capsys: pytest.CaptureFixture[str], config: str) -> None:
    assert main(["train", config, "run.max_rounds=null"]) == 2
    assert capsys.readouterr().err == (
        "braid: run.max_rounds: the run never ends; set run.max_rounds or run.max_epochs [override]\n"
    )


def test_overrides_may_follow_options(capsys: pytest.CaptureFixture[str], config: str) -> None:
    assert main(["show", config, "run.seed=1", "--json", "run.max_rounds=9"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["config"]["run"]["seed"], shown["plan"]["planned_rounds"]) == (1, 9)


def test_a_failed_run_exits_with_1_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(TrainingError("no valid rows")), args()) == 1
    assert capsys.readouterr().err == "braid: TrainingError: no valid rows\n"


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(BraidError("broken")), args(debug=True)) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_config_errors_during_a_run_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(ConfigError([Problem("run.name", "is taken")])), args()) == 2
    assert capsys.readouterr().err == "braid: run.name: is taken\n"


def test_config_errors_of_a_run_have_the_origin_of_the_key(
    capsys: pytest.CaptureFixture[str], config: str
) -> None:
    arguments = args(loaded=load_config(config, ["run.name=a"]))
    problems = [Problem("reward.parts[0].path", "no such file", "reward"), Problem("run.name", "is taken")]
    assert guarded(raising(ConfigError([*problems, Problem("train", "odd")])), arguments) == 2
    assert capsys.readouterr().err == (
        "braid: 3 problems in the config:\n"
        "  - reward.parts[0].path: no such file [c.yaml:4]\n"
        "  - run.name: is taken [override]\n"
        "  - train: odd\n"
    )


def test_a_bug_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        guarded(raising(ZeroDivisionError()), args())


def test_ctrl_c_before_a_run_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyboardInterrupt()), args()) == 130
    assert capsys.readouterr().err == "braid: interrupted before the run began; nothing was written\n"


def test_ctrl_c_during_class_creation_exits_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    wrapped = RuntimeError("Error calling __set_name__")  # as Python 3.11 has it
    wrapped.__cause__ = KeyboardInterrupt()
    assert guarded(raising(wrapped), args()) == 130
    assert "interrupted before the run began" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a bug"):
        guarded(raising(RuntimeError("a bug")), args())


def test_an_interrupted_run_prints_its_folder_and_the_resume_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = RunInterrupted(Path("runs/a-2"), Path("runs/a-2/checkpoints/step_40"))
    assert guarded(raising(stop), args(overrides=["run.seed=1", "run.name=a", "data.train=[ ]"])) == 130
    assert capsys.readouterr().err == (
        "braid: interrupted; the run is in runs/a-2, the newest checkpoint is runs/a-2/checkpoints/step_40\n"
        "to resume: braid train c.yaml run.seed=1 'data.train=[ ]' run.name=a-2 run.resume=latest\n"
    )


def test_the_resume_command_of_a_foreign_config_has_its_options_and_native_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    stop = RunInterrupted(Path("runs/a"), Path("runs/a/checkpoints/step_4"))
    arguments = args(
        language="skyrl",
        overrides=["trainer.seed=1", "braid.run.name=b"],
        backend="single",
        engine="native",
        allow_unsupported=["trainer.mtp"],
    )
    assert guarded(raising(stop), arguments) == 130
    assert capsys.readouterr().err.endswith(
        "to resume: braid train c.yaml trainer.seed=1 braid.run.name=a braid.run.resume=latest --backend "
        "single --engine native --allow-unsupported trainer.mtp\n"
    )


def test_an_interrupted_run_without_a_checkpoint_restarts_in_its_folder(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert guarded(raising(RunInterrupted(Path("runs/a"), None)), args()) == 130
    assert capsys.readouterr().err == (
        "braid: interrupted; the run is in runs/a, no checkpoint was saved\n"
        "to resume: braid train c.yaml run.name=a run.resume=latest\n"
    )


def test_sigterm_counts_as_ctrl_c() -> None:
    code = (
        "import argparse, sys, time\n"
        "from braid.cli.main import guarded\n"
        "def wait(_):\n"
        "    print('waiting', flush=True)\n"
        "    while True: time.sleep(0.1)\n"  # a signal before a sleep begins does not end it
        "sys.exit(guarded(wait, argparse.Namespace(debug=False)))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "waiting\n"
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130
    assert err == "braid: interrupted before the run began; nothing was written\n"


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    guarded(lambda _: 0, args())
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_run_folders_can_be_exported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "has no config.yaml, so it is not a run; pass the folder of a run" in capsys.readouterr().err
    assert main(["export", str(tmp_path / "nope")]) == 2
    assert "is not a folder; pass the folder of a run" in capsys.readouterr().err


def test_the_schema_and_the_reference_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()
    assert main(["schema", "--markdown"]) == 0
    assert capsys.readouterr().out == reference_text()


@pytest.mark.parametrize(
    "argv", [["--help"], ["show", QUICKSTART], ["schema"]], ids=["help", "show", "schema"]
)
def test_inspection_commands_do_not_import_torch(argv: list[str]) -> None:
    code = (
        "import sys; from braid.cli.main import main; main(sys.argv[1:]); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
    )
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_closed_pipe_is_not_an_error(config: str) -> None:
    command = f"{sys.executable} -m braid.cli.main show {config} --all | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("config")
    assert done.stderr == ""
