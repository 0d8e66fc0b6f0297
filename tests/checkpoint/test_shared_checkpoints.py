"""Checkpoints written by several processes are complete or absent, and verified file by file."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata

from braid.checkpoint.store import CheckpointStore
from braid.errors import CheckpointError
from braid.training.shards import Boxes, _Unpickler, boxes_of_range, read_weights, stored_moments, write_state


def fill(value: float) -> Any:
    """Write a model with one weight, as the only rank."""

    def write(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        weight = torch.full((300, 7), value)
        written = write_state(
            folder / "policy", {"weights": {"w": weight}, "optimizer": None, "num_steps": 3}
        )
        assert written.error is None
        files = {f"policy/{name}": line for name, line in written.files.items()}
        return {"progress": {"round": 1}, "policy": written.state}, files

    return write


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def test_what_workers_wrote_is_in_the_folder_and_in_the_manifest(store: CheckpointStore) -> None:
    store.save(4, fill(4.0))
    folder, step, state = store.locate()
    assert (folder, step, state["policy"]) == (store.path(4), 4, {"num_steps": 3})
    assert read_weights(folder / "policy")["w"].unique().tolist() == [4.0]
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    there = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert set(listed) == there - {"manifest.json"}
    assert {"policy/.metadata", "policy/__0_0.distcp"} <= set(listed)


@pytest.mark.parametrize("name", ["policy/.metadata", "policy/__0_0.distcp"])
@pytest.mark.parametrize("is_lost", [True, False])
def test_damage_to_a_workers_file_leads_to_the_checkpoint_before(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture, name: str, is_lost: bool
) -> None:
    store.save(1, fill(1.0))
    file = store.save(2, fill(2.0)) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.unlink()
    if not is_lost:
        file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        folder, step, _ = store.locate()
    assert (folder, step) == (store.path(1), 1)
    assert f"{store.path(2)} is damaged: {name}" in caplog.text


class _Call:
    """Unpickling it calls os.mkdir."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("read", [read_weights, stored_moments])
def test_an_index_that_names_a_function_is_damaged_and_runs_nothing(tmp_path: Path, read: Any) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    folder = store.save(1, fill(1.0)) / "policy"
    (folder / ".metadata").write_bytes(pickle.dumps(_Call(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"is damaged: .metadata: unexpected global \w+.mkdir"):
        read(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", pickle.dumps({"a": 1}), b"no pickle"])
def test_an_invalid_index_counts_as_damaged(tmp_path: Path, content: bytes) -> None:
    folder = CheckpointStore(tmp_path / "checkpoints").save(1, fill(1.0)) / "policy"
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged: .metadata"):
        read_weights(folder)


def test_a_full_disk_of_a_worker_leaves_everything_as_it_was(store: CheckpointStore) -> None:
    store.save(1, fill(1.0))

    def fails(folder: Path) -> Any:
        fill(2.0)(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        CheckpointError, match=r"checkpoint of step 2 .* No space left on device; .* are free"
    ):
        store.save(2, fails)
    assert os.listdir(store.folder) == ["step_1"]


def test_files_that_the_driver_cannot_see_are_reported(store: CheckpointStore) -> None:
    def elsewhere(_: Path) -> Any:
        return {}, {"policy/__1_0.distcp": {"bytes": 10, "sha256": ""}}

    with pytest.raises(CheckpointError, match="a folder that all machines share"):
        store.save(1, elsewhere)
    assert os.listdir(store.folder) == []


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (2, 3, 4), (4, 1, 3)])
def test_any_piece_of_a_flattened_tensor_is_cut_into_boxes(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            for offsets, part in boxes_of_range(whole.view(-1)[start:stop], shape, start):
                box = zip(offsets, part.shape, strict=True)
                assert torch.equal(part, whole[tuple(slice(o, o + n) for o, n in box)])
            piece = torch.zeros(stop - start, dtype=torch.int64)
            Boxes.of_range(piece, shape, start).take(whole)
            assert piece.tolist() == list(range(start, stop))


KILLS = textwrap.dedent(
    """
    import os, random, signal, sys, time, torch
    import torch.distributed as dist
    from pathlib import Path
    from braid.checkpoint.store import CheckpointStore
    from braid.training.shards import Boxes, read_weights, write_state

    folder = Path(sys.argv[1])

    def write(rank, trial, pipe):
        torch.set_num_threads(1)
        meeting = f"file://{folder.parent}/meeting_{trial}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
        store = CheckpointStore(folder, keep=2)
        step = store.locate()[1] if store.steps() else 0
        for count in range(step + 1, 10**6):
            half = torch.full((10_001 if rank else 10_000,), float(count))
            boxes = {str(i): Boxes.of_range(half, (20_001,), rank * 10_000) for i in range(4)}
            state = {"weights": boxes, "optimizer": None}

            def fill(saving):
                dist.broadcast_object_list([str(saving)])
                written = [None, None]
                dist.gather_object(write_state(saving / "policy", state), written)
                files = {f"policy/{n}": line for part in written for n, line in part.files.items()}
                return {"count": count}, files

            if rank == 0:
                store.save(count, fill)
                os.write(pipe, f"{count}\\n".encode())
            else:
                saving = [None]
                dist.broadcast_object_list(saving)
                dist.gather_object(write_state(Path(saving[0]) / "policy", state))

    rng, leftovers = random.Random(0), 0
    for trial in range(12):
        ours, theirs = os.pipe()
        ranks = []
        for rank in range(2):
            ranks.append(os.fork())
            if ranks[-1] == 0:
                write(rank, trial, theirs)
        os.close(theirs)
        with open(ours) as pipe:
            assert pipe.readline(), "the ranks save once before they are killed"
            time.sleep(rng.uniform(0.0, 0.05))
            for pid in rng.sample(ranks, 2):  # one of them goes first
                os.kill(pid, signal.SIGKILL)
                time.sleep(rng.choice([0.0, 0.02]))
            for pid in ranks:
                os.waitpid(pid, 0)
            reported = [int(line) for line in pipe if line.endswith("\\n")]
        leftovers += any(name.startswith(".") for name in os.listdir(folder))
        path, step, back = CheckpointStore(folder).locate()
        weights = read_weights(path / "policy")
        assert back["count"] == step
        assert {float(x) for w in weights.values() for x in w.unique()} == {float(step)}
        assert {w.shape for w in weights.values()} == {torch.Size([20_001])}
        assert not reported or step in (reported[-1], reported[-1] + 1), (step, reported)
    print(leftovers)
    """
)


@pytest.mark.slow
def test_ranks_killed_at_any_moment_leave_a_whole_newest_checkpoint(tmp_path: Path) -> None:
    """Like the test of one writer in test_store; either of the two may be killed first."""
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 3, "so few kills fell into a save that this test has shown little"
    CheckpointStore(folder).clean()
    assert all(name.startswith("step_") for name in os.listdir(folder))


class _Attribute:
    """Pickled as a call of getattr, as Python 3.11.2 pickles members of enums."""

    def __init__(self, owner: object, name: str) -> None:
        self._arguments = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._arguments


def test_an_index_written_by_an_early_python_3_11_is_read_and_getattr_reaches_nothing_else() -> None:
    encoding = metadata._MEM_FORMAT_ENCODING
    member = encoding.TORCH_CONTIGUOUS_FORMAT
    index = pickle.dumps(_Attribute(encoding, member.name))
    assert _Unpickler(io.BytesIO(index)).load() is member
    for owner, name in ((encoding, "__class__"), (torch.Size, "__init_subclass__")):
        with pytest.raises(pickle.UnpicklingError, match="unexpected attribute"):
            _Unpickler(io.BytesIO(pickle.dumps(_Attribute(owner, name)))).load()
