"""Makes the paths of a config absolute: those in a file relative to its folder (or run.base_dir), those given
on the command line relative to the working directory. Hub names without a folder of that name are
unchanged."""

from __future__ import annotations

import re
from dataclasses import replace
from os.path import exists, isdir  # False for names that no file can have
from pathlib import Path
from typing import Any

from .load import Loaded, plain_data
from .schema import RunConfig
from .source import OVERRIDE, KeyPath, leaves, path_text, place

_FOLDERS = re.compile(
    r"run\.output_dir|checkpoint\.(export_)?dir|report\.dir|rollout\.check_weights_dir"
    r"|model\.lora\.path|(sft|sac)\.demonstrations|env\.video\.dir"
)
_CHECKPOINT = re.compile(r"run\.resume")
_HUB_NAMES = re.compile(
    r"model\.path|model\.tokenizer|critic\.path|reference\.(path|teachers\[\d+\]\.path)|reward\.parts\[\d+\]\.(path|tokenizer)"
)
_FILES_OR_TEXT = re.compile(r"model\.chat_template|reward\.parts\[\d+\]\.template")
_DATA = re.compile(r"(data\.(train|eval)|(sft|prefer)\.(eval_)?data)\[\d+\]\.path(\[\d+\])?")
_FUNCTIONS = re.compile(
    r"env\.(program|name|tools\[\d+\])|reward\.parts\[\d+\]\.path|(data\.(train|eval)|sft\.(eval_)?data)\[\d+\]\.response_function"
    r"|prefer\.(eval_)?data\[\d+\]\.pair_function"
)


def with_absolute_paths(loaded: Loaded) -> Loaded:
    """Make all paths of the config absolute, so that it is independent of the working directory."""
    data = plain_data(loaded.config)
    for path, value in list(leaves(data)):
        name = path_text(path)
        start = Path.cwd() if loaded.origins.get(name) == OVERRIDE else loaded.base_dir
        if isinstance(value, str) and value:
            place(data, path, _absolute(name, value, start, _kind_at(data, path)))
    context = {"functions": loaded.functions, "base_dir": loaded.base_dir}  # of the user's own kinds
    return replace(loaded, config=RunConfig.model_validate(data, context=context))


def _absolute(name: str, value: str, start: Path, kind: object) -> str:
    path = start / Path(value).expanduser()
    if _FOLDERS.fullmatch(name) or (_CHECKPOINT.fullmatch(name) and value not in ("none", "latest")):
        return str(path)
    if _FUNCTIONS.fullmatch(name) and kind not in ("model", "judge"):
        file, colon, names = value.rpartition(":")
        return f"{start / Path(file).expanduser()}:{names}" if colon else value
    if _FILES_OR_TEXT.fullmatch(name):
        return str(path) if value.endswith(".jinja") else value
    if _DATA.fullmatch(name) and kind == "file":
        return str(path)
    if _HUB_NAMES.fullmatch(name) or _DATA.fullmatch(name):
        return str(path) if exists(path) or _is_surely_local(value, start) else value
    return value


def _is_surely_local(value: str, start: Path) -> bool:
    """Whether a missing path cannot be a hub name: it is not of the form NAME or OWNER/NAME, it ends with
    .gguf, or a folder OWNER exists."""
    if value.endswith(".gguf") or not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", value):
        return True
    owner, slash, _ = value.partition("/")
    return bool(slash) and isdir(start / owner)


def _kind_at(node: Any, path: KeyPath) -> str | None:
    """The `kind` of the innermost section around a key; None if none has one."""
    kind = None
    for key in path[:-1]:
        node = node[key]
        kind = node.get("kind", kind) if isinstance(node, dict) else kind
    return kind
