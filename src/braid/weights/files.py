"""Weight sync through a folder, for servers that read weights from disk and for machines that share only a
file system.

    <folder>/version_000007/bucket_00000.safetensors ...
                            model.safetensors.index.json   file of each tensor, in Hugging Face's format
                            weights.json               fingerprints, and the identity of the sender
                            config.json, tokenizer...      copied from the model's folder, on request

A version is written under a temporary name and renamed, so that a folder with the final name is complete.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from braid.errors import EngineError, disk_fix
from braid.json_text import read_json

from .fingerprint import Weights, fingerprints, save_tensors
from .receiver import Receiver
from .sending import Bucket, SendOptions, buckets_of
from .wire import Receipt, TensorSpec, Ticket

_RECORD = "weights.json"
_KEPT = 2
"""Versions in the folder."""
_POLL_S = 0.05
_WEIGHTS = ("*.safetensors", "*.bin", "*.index.json", "*.pt", "*.pth", "*.gguf")


class FileSender:
    """See sending.Sender. Engines do not reply: confirming that each has loaded a version is up to its own
    protocol."""

    def __init__(self, options: SendOptions) -> None:
        assert options.folder is not None, "the transport files needs a folder"
        self._folder, self._options = Path(options.folder).absolute(), options
        self._secret = secrets.token_hex(16)

    @property
    def ticket(self) -> Ticket:
        return Ticket("files", secret=self._secret, folder=str(self._folder))

    def send(self, version: int, weights: Weights) -> Receipt:
        rest = iter(weights)
        final = folder_of(self._folder, version)
        partial = final.with_name(f"{final.name}.partial")
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            receipt = self._write(partial, version, rest)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            self._remove_older(version)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise EngineError(
                f"cannot write version {version} of the weights to {partial} ({error.strerror or error}); "
                f"{disk_fix(error)}"
            ) from error
        finally:
            for _ in rest:  # gathering them may be a collective that other ranks are in
                pass
        return receipt

    def close(self) -> None:
        """See Sender. The last versions stay on disk, since servers may still read them."""

    def _write(self, folder: Path, version: int, weights: Iterator[tuple[str, Tensor]]) -> Receipt:
        if self._options.beside is not None:
            shutil.copytree(
                self._options.beside, folder, ignore=shutil.ignore_patterns(*_WEIGHTS), dirs_exist_ok=True
            )
        receipt, buckets, places = Receipt(version), list[list[Any]](), dict[str, str]()
        for number, bucket in enumerate(buckets_of(weights, self._options.bucket_bytes, self._options.dtype)):
            file = f"bucket_{number:05d}.safetensors"
            stored = _store(folder / file, bucket)
            for spec, value in stored:
                receipt.add(spec, value)
                places[spec.name] = file
            buckets.append([[s.name, s.dtype, s.shape, value] for s, value in stored])
        index = {"metadata": {"total_size": receipt.num_bytes}, "weight_map": places}
        record = {"sender": self._secret, "version": version, "buckets": buckets}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / _RECORD).write_text(json.dumps(record))
        return receipt

    def _remove_older(self, version: int) -> None:
        newest = folder_of(self._folder, version)
        versions = (path for path in self._folder.glob("version_*") if path.name[8:].isdigit())
        for path in sorted(path for path in versions if path != newest)[: -(_KEPT - 1)]:
            shutil.rmtree(path, ignore_errors=True)


class FileReceiver(Receiver):
    """Reads weights from the folder that the sender writes."""

    def __init__(self, ticket: Ticket, *, engine: str, timeout_s: float) -> None:
        super().__init__(engine)
        self._folder, self._sender, self._timeout_s = Path(ticket.folder), ticket.secret, timeout_s

    def receive(self, version: int) -> Iterator[tuple[str, Tensor]]:
        folder, record = self._await(version)
        for index, entries in enumerate(record["buckets"]):
            tensors = self._read(folder / f"bucket_{index:05d}.safetensors")
            self._verify(
                {name: value for name, *_, value in entries},
                tensors,
                f"bucket {index} of the weights",
                f"wrote to {folder} for engine {self._engine}: the disk is faulty, or another process "
                "writes there",
            )
            for name, *_ in entries:
                yield name, tensors.pop(name)

    def _drop(self, why: str) -> None:
        """Nothing is connected."""

    def _await(self, version: int) -> tuple[Path, dict[str, Any]]:
        """Wait until this sender has written the version; return its folder and record."""
        folder = folder_of(self._folder, version)
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                record: dict[str, Any] = read_json(folder / _RECORD)
                if record["sender"] == self._sender:
                    break
            except (OSError, ValueError, KeyError):
                pass
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the trainer of this run did not write {folder} within {self._timeout_s:g} s for "
                    f"engine {self._engine}; check that both see the same folder"
                )
            time.sleep(_POLL_S)
        if record["version"] != version:
            raise EngineError(f"{folder} contains version {record['version']} of the weights, not {version}")
        return folder, record

    def _read(self, file: Path) -> dict[str, Tensor]:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"engine {self._engine} cannot read {file} ({error})") from error


def folder_of(folder: Path, version: int) -> Path:
    """Subfolder of a version in a sender's `folder`."""
    return folder / f"version_{version:06d}"


def _store(file: Path, bucket: Bucket) -> list[tuple[TensorSpec, str]]:
    """Write a bucket to `file` and return its tensors' fingerprints."""
    save_tensors(file, {spec.name: tensor for spec, tensor in bucket})
    with file.open("rb") as written:
        os.fsync(written.fileno())
    values = fingerprints(tensor for _, tensor in bucket)
    return [(spec, value) for (spec, _), value in zip(bucket, values, strict=True)]
