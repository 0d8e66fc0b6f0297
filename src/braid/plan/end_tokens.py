"""End tokens of a run and where each is defined, read from a model's files without loading the model.

Chat models often end a turn with a token that only generation_config.json (or config.json) lists, such as
Gemma's <end_of_turn> or Llama 3's <|eot_id|>, in addition to the tokenizer's EOS token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os.path import isdir, isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from braid.config.model import ModelConfig
from braid.config.rollout import SamplingConfig
from braid.gguf_file import is_gguf, read_header
from braid.json_text import read_json


def tokens_of_files(find: Callable[[str], Path | None]) -> tuple[str, tuple[int, ...]]:
    """The file of a model that defines its end tokens, and their ids: generation_config.json, or, as in
    transformers, config.json if there is no such file.

    `find` returns the path of a file by name, None if there is none. Raises ValueError if the file contains
    anything other than token ids.
    """
    for name in ("generation_config.json", "config.json"):
        if (file := find(name)) is None:
            continue
        try:
            values = read_json(file)
            named, text = values.get("eos_token_id"), values.get("text_config")
            if named is None and name == "config.json" and isinstance(text, dict):
                named = text.get("eos_token_id")
            ids = [] if named is None else named if isinstance(named, list) else [named]
            if any(type(number) is not int or number < 0 for number in ids):
                raise ValueError(f"eos_token_id is {named!r}, but must be a token id or a list of them")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return name, tuple(dict.fromkeys(ids))
    return "", ()


def end_tokens(model: ModelConfig, sampling: SamplingConfig) -> dict[str, str] | None:
    """Each end token of a run as text and id, as far as the files contain both, with the files or keys that
    define it. None if the model is not in a local folder."""
    if not model.kind.has_tokenizer:
        return {}
    folder = None if model.source is None else Path(model.source).expanduser()
    tokenizer = folder if model.tokenizer is None else Path(model.tokenizer).expanduser()
    if any(path is not None and not isdir(path) and not is_gguf(path) for path in (folder, tokenizer)):
        return None
    named: list[tuple[int | str, str]] = []
    texts = {1: "<eos>"} if tokenizer is None else _special_tokens(tokenizer)
    if model.eos_token_id is not None:
        named.append((model.eos_token_id, "model.eos_token_id"))
    elif tokenizer is None:
        named.append((1, "model.build"))
    elif is_gguf(tokenizer):
        named += _token_of_gguf(tokenizer)
    else:
        eos = _content(_read(tokenizer / "tokenizer_config.json").get("eos_token"))
        ids = {text: number for number, text in texts.items()}
        named += [] if eos is None else [(ids.get(eos, eos), "tokenizer_config.json")]
    if model.eos_token_id is None and folder is not None and is_gguf(folder):
        named += _token_of_gguf(folder)
    elif model.eos_token_id is None and folder is not None:
        try:
            file, more = tokens_of_files(lambda name: path if isfile(path := folder / name) else None)
        except ValueError:
            file, more = "", ()  # reported when the tokenizer is loaded
        named += [(number, file) for number in more]
    named += [(number, "rollout.sampling.stop_token_ids") for number in sampling.stop_token_ids]
    origins: dict[int | str, list[str]] = {}
    for token, origin in named:
        origins.setdefault(token, []).append(origin)
    return {_shown(token, texts): " and ".join(dict.fromkeys(places)) for token, places in origins.items()}


def _shown(token: int | str, texts: Mapping[int, str]) -> str:
    return f"{texts[token]} ({token})" if isinstance(token, int) and token in texts else str(token)


def _special_tokens(folder: Path) -> dict[int, str]:
    """Id -> text of the tokens added to the tokenizer's vocabulary, including special tokens; of a GGUF file,
    of all tokens."""
    if is_gguf(folder):
        return dict(enumerate(_gguf_settings(folder).get("tokenizer.ggml.tokens", ())))
    texts: dict[int, str] = {}
    for entry in _read(folder / "tokenizer.json").get("added_tokens", []):
        texts[int(entry["id"])] = entry["content"]
    for number, entry in _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {}).items():
        texts[int(number)] = entry["content"]
    return texts


def _token_of_gguf(file: Path) -> list[tuple[int | str, str]]:
    """The end token that a GGUF file names, and its setting."""
    name = "tokenizer.ggml.eos_token_id"
    number = _gguf_settings(file).get(name)
    return [] if number is None else [(number, name)]


def _gguf_settings(file: Path) -> Mapping[str, Any]:
    try:
        return read_header(file).settings
    except (OSError, ValueError):
        return {}  # reported when the model is loaded


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_json(file)
    except (OSError, ValueError):
        return {}
