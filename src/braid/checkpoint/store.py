"""Checkpoints of a run (docs/run_directory.md): written atomically, verified before loading, and pruned to
the newest and the best.

A folder named step_N is complete: it is written as .saving_step_N, synced to disk with all of its files, then
renamed. If the process is killed at any moment, each step_N is either the old or the new checkpoint. Names
with a leading dot are leftovers, which the next writer cleans up.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from braid.errors import CheckpointError, ConfigError, Problem, disk_fix
from braid.json_text import read_json
from braid.report.files import human_bytes, lock

from .tensors import read_tensors, write_tensors
from .tree import pack, unpack

logger = logging.getLogger(__name__)

STATE, TENSORS, MANIFEST = "state.json", "tensors.safetensors", "manifest.json"
FORMAT = 1
"""Version of the folder layout."""
_SAVING, _REPLACED, _REMOVING = ".saving_", ".replaced_", ".removing_"
Files = Mapping[str, Mapping[str, Any]]
"""File in a checkpoint -> its manifest entry, {bytes, sha256}."""
Fill = Callable[[Path], tuple[Mapping[str, Any], Files]]
"""Makes workers write their files into a folder; returns the rest of the state, and the manifest entries of
these files."""


class CheckpointStore:
    """The checkpoints in `folder`. Keeps the newest `keep` (None: all). One process writes; any process may
    read."""

    def __init__(self, folder: Path, keep: int | None = None) -> None:
        assert keep is None or keep >= 1, f"keep={keep} would keep no checkpoint"
        self.folder = folder
        self.keep = keep

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other writers within the block. Raises ConfigError when another run holds
        the lock, or the folder cannot be created."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            held = lock(self.folder / ".lock")
        except BlockingIOError:
            message = (
                f"another run is writing checkpoints to {self.folder}; wait for it to finish, or choose "
                "another folder"
            )
            raise ConfigError([Problem("checkpoint.dir", message, "file system")]) from None
        except OSError as error:
            message = f"cannot use the folder {self.folder} for checkpoints: {error.strerror}"
            raise ConfigError([Problem("checkpoint.dir", message, "file system")]) from error
        try:
            yield
        finally:
            os.close(held)

    def steps(self) -> list[int]:
        """Steps with a checkpoint, damaged ones included, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (
            re.fullmatch(rf"({re.escape(_REPLACED)})?step_(\d+)", path.name) for path in self.folder.iterdir()
        )
        return sorted({int(match[2]) for match in matches if match})

    def path(self, step: int) -> Path:
        """Folder of a step's checkpoint; the old one's if the process was killed between the two renames of a
        replacement."""
        home = self.folder / f"step_{step}"
        replaced = self.folder / f"{_REPLACED}step_{step}"
        return replaced if replaced.exists() and not home.exists() else home

    def save(self, step: int, state: Mapping[str, Any] | Fill, *, best: int | None = None) -> Path:
        """Write `state` as the checkpoint of `step`, replacing an earlier one of that step, and return its
        folder.

        If workers write a part of it, `state` is a function that takes the folder for their files; see Fill.

        Afterwards removes the oldest checkpoints beyond `keep`, except that of the step `best`, and those of
        later steps, which the resumed run has discarded. Raises CheckpointError when the checkpoint cannot be
        written; all others are then unchanged.
        """
        saving = self.folder / f"{_SAVING}step_{step}"
        needed: int | None = None
        try:
            self.clean()
            saving.mkdir(parents=True)
            state, files = state(saving) if callable(state) else (state, {})
            _check_written(saving, files)
            data, tensors = pack(state)
            text = json.dumps({"step": step, "state": data}, allow_nan=False).encode()
            needed = len(text) + sum(tensor.nbytes for tensor in tensors.values())
            files = {
                STATE: _write(saving / STATE, lambda write: write(text)),
                TENSORS: _write(saving / TENSORS, lambda write: write_tensors(write, tensors)),
                **files,
            }
            manifest = json.dumps({"format": FORMAT, "files": files}, indent=2).encode()
            _write(saving / MANIFEST, lambda write: write(manifest))
            for folder in {saving, *((saving / name).parent for name in files)}:
                _sync(folder)
            self._put_in_place(saving, step)
        except OSError as error:
            raise self._cannot_save(step, needed, error) from error
        finally:
            shutil.rmtree(saving, ignore_errors=True)
        self.forget_after(step)
        if self.keep is not None:
            for old in self.steps()[: -self.keep]:
                if old != best:
                    self._remove(old)
        return self.path(step)

    def locate(self, which: str | Path = "latest") -> tuple[Path, int, dict[str, Any]]:
        """Return (folder, step, state) of the newest complete checkpoint, or of the one in the folder
        `which`. Files written by workers are not read.

        Raises CheckpointError when there is none. `latest` skips a damaged checkpoint with a warning; a
        damaged one given by path is an error.
        """
        if which != "latest":
            return Path(which), *read_checkpoint(Path(which))
        problems: list[str] = []
        for path in map(self.path, reversed(self.steps())):
            try:
                step, state = read_checkpoint(path)
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                logger.warning("%s; using the previous one, %s", problem, path)
            return path, step, state
        if problems:
            listed = "\n  - ".join(["all checkpoints are damaged:", *problems])
            raise CheckpointError(f"{listed}\nStart a new run with run.resume=none")
        raise CheckpointError(
            f"no checkpoint in {self.folder}; start a new run with run.resume=none, or set run.resume to "
            "the path of a checkpoint"
        )

    def about(self, which: str | Path = "latest") -> tuple[Path, dict[str, str]] | None:
        """Return the folder that `locate` probably returns and the `about` entry of its state, without
        reading tensors; None if no state can be read."""
        for path in map(self.path, reversed(self.steps())) if which == "latest" else [Path(which)]:
            with suppress(CheckpointError):
                manifest = _manifest_of(path)
                _check(path, STATE, manifest["files"][STATE])
                return path, _state_of(path)[1].get("about", {})
        return None

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of later steps when a run resumes from `step`."""
        for later in self.steps():
            if later > step:
                self._remove(later)

    def clean(self) -> None:
        """Remove leftovers of interrupted saves. Only for the process that writes."""
        if not self.folder.is_dir():
            return
        for path in self.folder.iterdir():
            if path.name.startswith((_SAVING, _REMOVING)):
                shutil.rmtree(path)
            elif path.name.startswith(_REPLACED):
                home = self.folder / path.name.removeprefix(_REPLACED)
                if home.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(home)

    def _put_in_place(self, saving: Path, step: int) -> None:
        home = self.path(step)
        replaced = self.folder / f"{_REPLACED}{home.name}"
        if home.exists():
            home.rename(replaced)
        saving.rename(home)
        _sync(self.folder)
        _sync(self.folder.parent)
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint: rename it first, then delete its files. Leftovers of errors are removed by the
        next `clean`."""
        removing = self.folder / f"{_REMOVING}step_{step}"
        try:
            self.path(step).rename(removing)
            shutil.rmtree(removing)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", self.path(step), error)

    def _cannot_save(self, step: int, needed: int | None, error: OSError) -> CheckpointError:
        with suppress(OSError):
            self.clean()
        steps = self.steps()
        newest = (
            f"the newest checkpoint is still {self.path(steps[-1])}"
            if steps
            else "there is no earlier checkpoint"
        )
        sizes = "" if needed is None else f"it needs {human_bytes(needed)}, "
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        keep = " (checkpoint.keep limits the number of checkpoints)" if is_full else ""
        fix = disk_fix(error)
        return CheckpointError(
            f"cannot write the checkpoint of step {step} to {self.folder}: {error.strerror or error}; "
            f"{sizes}{human_bytes(_free(self.folder))} are free. Temporary "
            f"files were removed; {newest}. {fix[0].upper()}{fix[1:]}{keep}, then resume with "
            "run.resume=latest"
        )


def read_checkpoint(path: Path) -> tuple[int, dict[str, Any]]:
    """Return (step, state) of the checkpoint in the folder `path`. Raises CheckpointError when it is missing
    or damaged."""
    manifest = _manifest_of(path)
    with ThreadPoolExecutor() as threads:  # hashing releases the GIL
        for _ in threads.map(lambda item: _check(path, *item), manifest["files"].items()):
            pass
    step, state = _state_of(path)
    try:
        return step, unpack(state, read_tensors(path / TENSORS))
    except (OSError, RecursionError) as error:
        raise _damaged(path, f"cannot read it ({error})") from error


def _state_of(path: Path) -> tuple[int, dict[str, Any]]:
    """Step and packed state. Raises CheckpointError."""
    try:
        data = json.loads((path / STATE).read_bytes())  # the run's own, as deep as its environments' states
        step, state = data["step"], data["state"]
        if isinstance(state, dict):
            return step, state
        error: object = "its state is not an object"
    except (OSError, RecursionError, ValueError, TypeError, KeyError) as caught:
        error = caught
    raise _damaged(path, f"cannot read {STATE} ({error})")


def _manifest_of(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"no such checkpoint folder: {path}")
    try:
        manifest = read_json(path / MANIFEST)
        version, _ = manifest["format"], [manifest["files"][name] for name in (STATE, TENSORS)]
    except FileNotFoundError:
        inside = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        if steps := inside.steps():
            raise CheckpointError(
                f"{path} is a folder of checkpoints, not a checkpoint; choose one, for example "
                f"{inside.path(steps[-1])}"
            ) from None
        raise _damaged(path, f"{MANIFEST} is missing") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise _damaged(path, f"cannot read {MANIFEST} ({error})") from error
    if not isinstance(version, int) or not all(map(_is_line, manifest["files"].values())):
        raise _damaged(path, f"{MANIFEST} has invalid entries")
    if version != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {version}, but this version of braid reads {FORMAT}; use the "
            "version that wrote it"
        )
    return manifest


def _is_line(line: object) -> bool:
    """Whether `line` has the form of a manifest entry."""
    kinds = {key: type(value) for key, value in line.items()} if isinstance(line, dict) else {}
    return kinds == {"bytes": int, "sha256": str}


def _check(path: Path, name: str, expected: Mapping[str, Any]) -> None:
    try:
        size = (path / name).stat().st_size
        if size != expected["bytes"]:
            raise _damaged(path, f"{name} has {size} bytes instead of {expected['bytes']}")
        with (path / name).open("rb", buffering=0) as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
    except FileNotFoundError:
        raise _damaged(path, f"{name} is missing") from None
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        raise _damaged(path, f"cannot read {name!r} ({error})") from error
    if digest != expected["sha256"]:
        raise _damaged(path, f"{name}: SHA-256 mismatch with {MANIFEST}")


def _check_written(saving: Path, files: Files) -> None:
    """Raise CheckpointError if this process does not see the files that workers have written."""
    for name, line in files.items():
        if not (saving / name).is_file() or (saving / name).stat().st_size != line["bytes"]:
            raise CheckpointError(
                f"the driver does not find {name}, which workers wrote, in {saving}; set checkpoint.dir (or "
                "run.output_dir) to a folder that all machines share"
            )


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint {path} is damaged: {what}")


def _write(path: Path, fill: Callable[[Callable[[bytes | memoryview], object]], object]) -> dict[str, Any]:
    """Write a file with the data that `fill` passes to its argument, and sync it to disk. Returns its
    manifest entry."""
    digest = hashlib.sha256()
    with path.open("wb") as file:

        def write(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        fill(write)
        file.flush()
        os.fsync(file.fileno())
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def _sync(folder: Path) -> None:
    """Sync the folder's directory entries to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
