"""`braid doctor` says what this machine has, what a run would fail of, and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from braid.cli import doctor
from braid.cli.main import FAILED, OK, main


def lines(*looks: Iterator[doctor.Line]) -> dict[str, doctor.Line]:
    return {line.name: line for look in looks for line in look}


def test_a_machine_that_runs_braid_has_nothing_failed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == OK
    shown = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert shown["torch"]["state"] == shown["packages"]["state"] == "ok"
    assert shown["rollout.engine=native"]["text"] == "installed, not tried"
    assert {f"train.backend={kind}" for kind in ("single", "fsdp2", "megatron")} <= set(shown)


def test_what_failed_is_named_at_the_end_and_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: iter(()))  # which starts a process
    monkeypatch.setattr(doctor, "_sandbox", lambda: iter(()))
    assert main(["doctor", "--quick", "--model", str(tmp_path / "absent")]) == FAILED
    shown = capsys.readouterr().out
    assert "FAILED   model " in shown
    assert "absent: no such folder" in shown
    assert shown.endswith("1 failed: model\n")


def test_a_package_of_another_version_fails_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = doctor.version
    monkeypatch.setattr(doctor, "version", lambda name: "4.0" if name == "transformers" else there(name))
    line = lines(doctor._packages())["transformers"]
    assert line.state == "failed"
    assert line.text.startswith("4.0, but braid needs ")
    assert line.fix.startswith("pip install 'transformers")


def test_too_little_room_is_a_warning_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    little = shutil.disk_usage("/")._replace(total=64 << 20, free=64 << 20)

    def usage(_: object) -> Any:
        return little

    monkeypatch.setattr(shutil, "disk_usage", usage)
    shown = lines(doctor._shared_memory(), doctor._disk())
    assert [shown[name].state for name in ("shared memory", "this folder", "temporary files")] == [
        "warning"
    ] * 3
    assert "--shm-size" in shown["shared memory"].fix
    assert "64.0 MiB free" in shown["this folder"].text


def test_a_torch_that_cannot_be_imported_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "executable", shutil.which("false"))
    assert lines(doctor._gpus())["torch"].state == "failed"


def test_a_model_without_a_template_is_a_warning(tmp_path: Path) -> None:
    from braid.models.tokenizer import character_tokenizer

    character_tokenizer("ab").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    shown = lines(doctor._model(str(tmp_path)))
    assert shown["tokenizer"].text == "5 tokens; answers end with '<eos>'"
    assert shown["chat template"].state == "warning"


@pytest.mark.slow
def test_a_backend_is_tried_by_two_rounds() -> None:
    assert doctor._trial("train.backend", "single", has_workers=False).state == "ok"


@pytest.mark.slow
def test_a_trial_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor._TRIAL, "rollout", doctor._TRIAL["rollout"] | {"max_invalid_fraction": 0.0})
    monkeypatch.setitem(doctor._TRIAL, "reward", {"parts": [{"kind": "exact", "pattern": "("}]})
    line = doctor._trial("rollout.engine", "native", has_workers=False)
    assert line.state == "failed"
    assert "reward.parts" in line.text
    assert "rollout.engine=native" in line.fix
