"""Whether an engine samples with the weights that the trainer has."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from braid.errors import TrainingError

Weights = Iterable[tuple[str, Tensor]]
"""Tensors under their names."""


def fingerprint(tensor: Tensor) -> str:
    """SHA-256 of the type, the shape and every bit of a tensor."""
    plain = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)}".encode())
    digest.update(plain.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_published(trainer: Weights, engine: Weights, *, version: int, folder: Path) -> None:
    """Compare what the engine took over as `version` with what the trainer gave, tensor by tensor, in the engine's type.

    Raises TrainingError when they differ, after writing both sets as `folder`/version_N_{trainer,engine}.safetensors.
    """
    ours, theirs = dict(trainer), dict(engine)
    wrong = sorted(ours.keys() ^ theirs.keys())
    wrong += [
        name
        for name, tensor in ours.items()
        if name in theirs and fingerprint(tensor.to(theirs[name].dtype)) != fingerprint(theirs[name])
    ]
    if not wrong:
        return
    files = [
        _store(folder / f"version_{version}_{who}.safetensors", of)
        for who, of in (("trainer", ours), ("engine", theirs))
    ]
    shown = ", ".join(wrong[:3]) + (", ..." if len(wrong) > 3 else "")
    raise TrainingError(
        f"after the publication of version {version} the engine's weights are not the trainer's: {len(wrong)} of "
        f"{len(ours | theirs)} tensors differ ({shown}). Both sets are in {files[0]} and {files[1]}. The engine or its "
        "transport is at fault; report it with these files (rollout.check_weights=false leaves the comparison out)"
    )


def _store(path: Path, weights: Mapping[str, Tensor]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}, path)
    return path
