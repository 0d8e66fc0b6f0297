"""Saving, loading, damage, full disks and killed writers, on real files."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from braid.checkpoint.store import CheckpointStore, read_checkpoint
from braid.errors import CheckpointError, ConfigError


def state(step: int, num: int = 1000) -> dict[str, Any]:
    weights = torch.full((num,), float(step))
    return {"progress": {"round": step}, "policy": {"w": weights, "tied": weights}, "rng": (1 << 100, b"\0x")}


def value_of(loaded: dict[str, Any]) -> float:
    return float(loaded["policy"]["w"].unique())


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_the_newest_checkpoint_is_loaded(store: CheckpointStore) -> None:
    for step in (2, 10):
        assert store.save(step, state(step)) == store.folder / f"step_{step}"
    _, step, back = store.locate()
    assert step == 10
    assert back["rng"] == (1 << 100, b"\0x")
    assert back["policy"]["w"] is back["policy"]["tied"]
    assert value_of(back) == 10
    assert store.locate(store.path(2))[1] == 2


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    keeps_two, keeps_all = CheckpointStore(tmp_path / "two", keep=2), CheckpointStore(tmp_path / "all")
    for step in (1, 2, 9, 10):
        keeps_two.save(step, state(step))
        keeps_all.save(step, state(step))
    assert keeps_two.steps() == [9, 10]
    assert keeps_all.steps() == [1, 2, 9, 10]
    assert sorted(os.listdir(keeps_two.folder)) == ["step_10", "step_9"]


def test_saving_a_step_again_replaces_it(store: CheckpointStore) -> None:
    store.save(3, state(1))
    store.save(3, state(2))
    assert value_of(store.locate()[2]) == 2
    assert os.listdir(store.folder) == ["step_3"]


def test_a_save_removes_checkpoints_of_later_steps(store: CheckpointStore) -> None:
    for step in (10, 20):
        store.save(step, state(step))
    store.save(12, state(12))
    assert store.steps() == [10, 12]


def test_resuming_from_a_step_can_remove_later_checkpoints(store: CheckpointStore) -> None:
    for step in (10, 20):
        store.save(step, state(step))
    store.forget_after(10)
    assert store.steps() == [10]


def test_nothing_to_load_is_an_error_that_says_what_to_do(store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*run\.resume=none"):
        store.locate()
    with pytest.raises(CheckpointError, match="no such checkpoint folder: nowhere/step_1"):
        store.locate("nowhere/step_1")


def test_a_run_folder_given_for_a_checkpoint_leads_to_the_newest_in_it(store: CheckpointStore) -> None:
    store.save(7, state(7))
    for folder in (store.folder, store.folder.parent):
        with pytest.raises(CheckpointError, match=r"is a folder of checkpoints, not a checkpoint; .*step_7"):
            store.locate(folder)


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [flip_byte, cut, Path.unlink])
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_it_used(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, name: str, damage: Any
) -> None:
    for step in (10, 20):
        store.save(step, state(step))
    damage(store.path(20) / name)
    with caplog.at_level(logging.WARNING):
        _, step, back = store.locate()
    assert (step, value_of(back)) == (10, 10)
    assert f"checkpoint {store.path(20)} is damaged: " in caplog.text
    assert name in caplog.text
    assert f"using the previous one, {store.path(10)}" in caplog.text
    with pytest.raises(CheckpointError, match="is damaged"):
        store.locate(store.path(20))


def test_every_byte_counts(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save(1, state(1, num=4))
    original = {file.name: file.read_bytes() for file in path.iterdir()}
    rng = random.Random(0)
    for name in ("state.json", "tensors.safetensors"):
        for place in rng.sample(range(len(original[name])), 40):
            changed = bytearray(original[name])
            changed[place] ^= 1 << rng.randrange(8)
            (path / name).write_bytes(changed)
            with pytest.raises(CheckpointError, match=f"{name}: SHA-256 mismatch with manifest.json"):
                read_checkpoint(path)
        (path / name).write_bytes(original[name])
    assert read_checkpoint(path)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.nightly)])
def test_any_flipped_bit_of_a_manifest_is_found_and_the_checkpoint_before_is_used(
    store: CheckpointStore, stride: int
) -> None:
    for step in (10, 20):
        store.save(step, {"count": step})
    manifest = store.path(20) / "manifest.json"
    original = manifest.read_bytes()
    for bit in range(0, 8 * len(original), stride):
        changed = bytearray(original)
        changed[bit // 8] ^= 1 << bit % 8
        manifest.write_bytes(changed)
        with pytest.raises(CheckpointError, match=r"is damaged|has format"):
            read_checkpoint(store.path(20))
        _, step, back = store.locate()
        assert (step, back["count"]) == (10, 10), bit


def test_two_runs_cannot_write_to_one_folder_at_the_same_time(store: CheckpointStore) -> None:
    with store.held():
        with (
            pytest.raises(ConfigError, match=r"checkpoint\.dir: another run is writing checkpoints to"),
            CheckpointStore(store.folder).held(),
        ):
            pass
        store.save(1, state(1))
    with store.held():
        assert store.steps() == [1]


def test_if_all_are_damaged_each_is_reported(store: CheckpointStore) -> None:
    for step in (10, 20):
        store.save(step, state(step))
    cut(store.path(20) / "tensors.safetensors")
    (store.path(10) / "manifest.json").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"(?s)all checkpoints are damaged:.*step_20.*bytes.*step_10.*manifest.json is missing",
    ):
        store.locate()


def test_a_checkpoint_of_another_format_is_told_apart_from_a_damaged_one(store: CheckpointStore) -> None:
    manifest = store.save(1, state(1)) / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(CheckpointError, match="has format 99, but this version of braid reads 1"):
        store.locate(store.path(1))


def test_a_state_that_cannot_be_saved_changes_nothing(store: CheckpointStore) -> None:
    store.save(1, state(1))
    with pytest.raises(CheckpointError, match="policy contains a set"):
        store.save(2, {"policy": {1}})
    with pytest.raises(CheckpointError, match=r"has type torch\.complex128"):
        store.save(2, {"policy": torch.ones(1, dtype=torch.complex128)})
    assert os.listdir(store.folder) == ["step_1"]


def test_leftovers_of_killed_saves_are_removed_and_a_replaced_checkpoint_is_restored(
    store: CheckpointStore,
) -> None:
    store.save(1, state(1))
    store.save(2, state(2))
    (store.folder / ".saving_step_3").mkdir()
    (store.folder / ".saving_step_3" / "state.json").write_text("{")
    (store.folder / ".removing_step_0").mkdir()
    store.path(2).rename(store.folder / ".replaced_step_2")  # killed between the two renames of a replacement
    assert store.steps() == [1, 2]
    assert store.locate()[1] == 2
    store.clean()
    assert sorted(os.listdir(store.folder)) == ["step_1", "step_2"]
    store.path(2).rename(store.folder / ".replaced_step_2")
    store.save(2, state(5))
    assert value_of(store.locate()[2]) == 5
    assert sorted(os.listdir(store.folder)) == ["step_1", "step_2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a tmpfs")
def test_a_full_disk_keeps_the_checkpoint_before_and_says_what_is_missing(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep=1)
    store.save(1, state(1, num=250_000))  # 1 MB of 2 MiB
    for _ in range(2):  # the second shows that the first left nothing behind
        with pytest.raises(CheckpointError) as caught:
            store.save(2, state(2, num=400_000))
        text = str(caught.value)
        assert f"cannot write the checkpoint of step 2 to {store.folder}: No space left on device" in text
        assert "it needs 1.5 MiB, 1.0 MiB are free" in text
        assert "Free disk space (checkpoint.keep limits" in text
        assert f"the newest checkpoint is still {store.path(1)}" in text
        assert "run.resume=latest" in text
        assert os.listdir(store.folder) == ["step_1"]
    assert value_of(store.locate()[2]) == 1
    store.save(2, state(2, num=200_000))
    assert store.steps() == [2]


@pytest.mark.slow
def test_a_limit_on_file_sizes_is_named_instead_of_the_disk(tmp_path: Path) -> None:
    program = textwrap.dedent(
        """
        import resource, sys, torch
        from pathlib import Path
        from safetensors.torch import save_file
        from braid.checkpoint.store import CheckpointStore
        from braid.errors import BraidError
        from braid.models.export import export_with
        from braid.report.sinks.jsonl import JsonlSink

        folder = Path(sys.argv[1])
        writes = [
            lambda: CheckpointStore(folder / "checkpoints").save(1, {"w": torch.zeros(100_000)}),
            lambda: export_with(lambda to: (to / "a").write_bytes(bytes(100_000)), folder / "model"),
            lambda: [JsonlSink(folder / "metrics.jsonl").log(i, i, {"a": 1.0}) for i in range(2_000)],
        ]
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        for write in writes:
            try:
                write()
            except BraidError as error:
                sys.stdout.write(f"{error}\\n")
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    lines = ended.stdout.splitlines()
    assert len(lines) == 3, ended
    for line in lines:
        assert "File too large" in line
        assert "aise the limit on file sizes (ulimit -f unlimited" in line
        assert "disk space" not in line


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot write the checkpoint of step 1 to .*file/checkpoints: Not a directory"
    ):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, state(1))


KILLS = textwrap.dedent(
    """
    import os, random, signal, sys, time, torch
    from pathlib import Path
    from braid.checkpoint.store import CheckpointStore

    folder, stride = Path(sys.argv[1]), int(sys.argv[2])

    def write(pipe):
        store = CheckpointStore(folder, keep=2)
        step = store.locate()[1] if store.steps() else 1
        for count in range(10**6):
            step += stride
            weights = {str(i): torch.full((20_000,), float(count)) for i in range(8)}
            store.save(step, {"count": count, "weights": weights})
            os.write(pipe, f"{step}\\n".encode())

    rng, leftovers = random.Random(0), 0
    for _ in range(40):
        ours, theirs = os.pipe()
        writer = os.fork()
        if writer == 0:
            write(theirs)
        os.close(theirs)
        with open(ours) as pipe:
            assert pipe.readline(), "the writer saves once before it is killed"
            time.sleep(rng.uniform(0.0, 0.02))
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            reported = [int(line) for line in pipe if line.endswith("\\n")]
        leftovers += any(name.startswith(".") for name in os.listdir(folder))
        _, step, back = CheckpointStore(folder).locate()
        assert {float(w.unique()) for w in back["weights"].values()} == {float(back["count"])}
        assert not reported or step in (reported[-1], reported[-1] + stride), (step, reported)
        assert len(CheckpointStore(folder).steps()) <= 3
    print(leftovers)
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 0], ids=["next_steps", "the_same_step_again"])
def test_a_writer_killed_at_any_moment_leaves_a_whole_newest_checkpoint(tmp_path: Path, stride: int) -> None:
    """The last step that the writer reported as saved is loaded, or the one after it. In a separate process,
    which forks the writers, so that the libraries are imported once."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(folder), str(stride)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10, "so few kills fell into a save that this test has shown little"
    CheckpointStore(folder).clean()
    assert all(name.startswith("step_") for name in os.listdir(folder))


def test_the_manifest_lists_size_and_hash_of_each_file(store: CheckpointStore) -> None:
    path = store.save(4, state(4))
    manifest = json.loads((path / "manifest.json").read_text())
    assert {name: entry["bytes"] for name, entry in manifest["files"].items()} == {
        name: (path / name).stat().st_size for name in ("state.json", "tensors.safetensors")
    }
