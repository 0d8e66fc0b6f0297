"""Checks of Hugging Face folders and hub names, and reading their tokenizers. Errors are ModelErrors that
name the config key."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from os.path import exists, isdir, isfile  # False for names that no file can have
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub import model_info, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError

from braid import json_text
from braid.errors import ModelError, listed, suggest
from braid.gguf_file import is_gguf

from .gguf import convert

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
_HUB_TIMEOUT_S = 10.0
_JSON_FILES = (
    "config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "adapter_config.json",
)
"""Files of a model folder that must be JSON objects."""
_OTHER_HEADS = re.compile(r"(^|\.)(v_head|value_head|score|classifier|lm_head|mtp|(un)?normalize_\w+)\.")
"""Weights that a folder may have beside those of the model that is read from it: heads of a critic, a reward
model or a language model, layers that predict further tokens, and LeRobot's statistics."""


def local_path(path: str, key: str) -> str:
    """The folder or hub name `path`, the value of config key `key`, with a leading `~` replaced by the home
    folder; of a GGUF file, the folder with its converted model. Raises ModelError for a GGUF file that cannot
    be read."""
    path = str(Path(path).expanduser()) if path.startswith("~") else path
    return convert(path, key) if is_gguf(path) else path


def check_folder(path: str, key: str, *, needs_weights: bool) -> None:
    """Raise ModelError if the folder is missing or is not a model folder. For a hub name, raise if the model
    does not exist."""
    folder = Path(path)
    if isfile(folder):
        raise ModelError(f"{key}={path} is a file; set it to the folder that contains it, or to a .gguf file")
    if not isdir(folder):
        if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path):
            _check_hub_name(path, key)
            return
        beside = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise ModelError(f"{key}={path}: no such folder{suggest(folder.name, beside)}")
    for name in _JSON_FILES:
        if (folder / name).is_file():
            read_json(folder / name, f"{key}={path}")
    if not needs_weights:
        return
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if files and not (folder / "config.json").is_file():
        instead = f"{key}={folder / files[0]}"
        instead += f", or model.gguf={files[0]}" if key == "model.path" else ""
        raise ModelError(f"{key}={path} is a folder with {', '.join(files[:8])}; set {instead}")
    missing = [] if (folder / "config.json").is_file() else ["config.json"]
    if not any(file for pattern in _WEIGHTS for file in folder.glob(pattern)):
        missing.append("weights (model.safetensors)")
    if missing:
        has = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"{key}={path} is not a Hugging Face model folder: it lacks {' and '.join(missing)}; it "
            f"contains {has}"
        )


def local_folder(path: str, key: str) -> Path:
    """A model folder, downloaded if `path` is a hub name. Raises ModelError if it lacks config.json or
    weights."""
    path = local_path(path, key)
    check_folder(path, key, needs_weights=True)
    return Path(path) if isdir(path) else Path(snapshot_download(path))


def read_json(file: Path, key: str) -> dict[str, Any]:
    """A JSON object. Raises ModelError, naming config key `key`."""
    try:
        return json_text.read_json(file)
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}: {file} cannot be read: {error}") from error


def _check_hub_name(name: str, key: str) -> None:
    """Raise ModelError if the name is neither in the local hub cache nor on the hub. Fails at once, where the
    hub's clients would retry for a minute."""
    files = ("config.json", "tokenizer_config.json", "tokenizer.json")
    if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
        return
    try:
        model_info(name, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # errors of the hub client and of its HTTP library
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelError(
            f"{key}={name} is neither a folder nor available from the Hugging Face hub ({reason}); set it "
            "to an existing folder (paths are relative to the config's folder), or to a hub name while "
            "online"
        ) from error


def read(path: str, key: str, kind: str, load: Callable[..., _T], **options: Any) -> _T:
    """Call transformers' `load` for a folder or hub name. Raises ModelError if it is not a readable
    `kind`."""
    try:
        return load(path, **options)
    except Exception as error:  # transformers and its libraries raise many types for unusable folders
        lines = str(error).strip().split("\n")
        reason = lines[-1 if isinstance(error, StrictDataclassError) else 0].strip() or type(error).__name__
        hint = (
            ""
            if exists(path)
            else "; this is not a local folder: set it to one, or to a hub name while online"
        )
        raise ModelError(f"cannot load {key}={path} as a {kind}: {reason}{hint}") from error


def read_model(path: str, key: str, kind: str, load: Callable[..., Any], **options: Any) -> PreTrainedModel:
    """Read a model with all of its weights. Raises ModelError, also if some are missing, of another shape, or
    unknown to the model; heads for other tasks are left out."""
    check_folder(path, key, needs_weights=True)
    model, info = read(
        path, key, kind, load, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )
    name = type(model).__name__
    if missing := sorted(info["missing_keys"]):
        raise ModelError(
            f"{key}={path} is not a complete {kind}: it lacks {len(missing)} of the weights of {name}, among "
            f"them {missing[0]}, which would be initialized randomly; choose a folder that has them"
        )
    surplus = sorted(info["unexpected_keys"])
    if heads := [weight for weight in surplus if _OTHER_HEADS.search(weight)]:
        _log.info("%s=%s: left out weights that a %s does not use: %s", key, path, kind, ", ".join(heads[:8]))
    faults = {
        "unknown to the model": [weight for weight in surplus if weight not in heads],
        "of another shape": [
            f"{weight} {tuple(saved)} instead of {tuple(expected)}"
            for weight, saved, expected in sorted(info["mismatched_keys"])
        ],
    }
    if any(faults.values()):
        raise ModelError(
            f"{key}={path}: its weights do not fit its config.json, of a {name}: {listed(faults)}; choose a "
            "folder whose config.json describes its weights"
        )
    return model


def read_tokenizer(path: str, key: str, trust_remote_code: bool, **options: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the folder or hub name `path`, which is the value of config key `key`; `options`
    are those of transformers."""
    check_folder(path, key, needs_weights=False)
    folder = Path(path)
    if isdir(folder) and not any(isfile(folder / name) for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{key}={path} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)}); "
            f"set {key.rpartition('.')[0]}.tokenizer to a folder or hub name"
        )
    from transformers import (
        AutoTokenizer,
    )  # imports much that processes which receive a tokenizer do not need

    options["trust_remote_code"] = trust_remote_code
    return read(path, key, "tokenizer", AutoTokenizer.from_pretrained, **options)


def read_chat_template(text: str, key: str) -> str:
    """The Jinja template: `text` itself, or the content of the .jinja file that it names."""
    if not text.endswith(".jinja"):
        return text
    file = Path(text).expanduser()
    if not file.is_file():
        raise ModelError(
            f"{key}={text}: no such file; set it to a Jinja template or the path of a .jinja file"
        )
    return file.read_text(encoding="utf-8")
