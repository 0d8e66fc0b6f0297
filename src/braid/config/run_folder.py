"""The config that a run folder stores, wherever the folder has been copied or moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .source import Written, map_values

_ORIGIN = "run folder"


def file_of(path: Path) -> Path:
    """The config file that `path` names: itself, or that of the folder of a run."""
    return path / "config.yaml" if (path / "config.yaml").is_file() else path


def is_of_run(file: Path) -> bool:
    """Whether a file is the config of a run folder, where braid wrote plan.json beside it."""
    return file.name == "config.yaml" and (file.resolve().parent / "plan.json").is_file()


def relocate(written: Written, file: Path) -> None:
    """If `file` is the config of a run folder, make run.output_dir and
    run.name those of the folder, and move the paths below it along: they name the folder that the run was
    started in."""
    folder, run = file.resolve().parent, written.tree.get("run")
    if not is_of_run(file) or not isinstance(run, dict):
        return
    before = f"{run.get('output_dir')}/{run.get('name')}"
    if Path(before).resolve() == folder:
        return

    def moved(_: str, value: Any) -> Any:
        is_inside = isinstance(value, str) and (value == before or value.startswith(f"{before}/"))
        return f"{folder}{value.removeprefix(before)}" if is_inside else value

    written.tree = map_values(written.tree, moved)
    written.tree["run"] |= {"output_dir": str(folder.parent), "name": folder.name}
    written.origins |= {"run.output_dir": _ORIGIN, "run.name": _ORIGIN}
