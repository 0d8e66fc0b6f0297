"""The tokenizer of a model: from its folder, or a character tokenizer for models built from scratch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from os.path import isfile  # False for names that no file can have
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from braid.config.model import ModelConfig
from braid.errors import ModelError, suggest
from braid.plan.end_tokens import tokens_of_files

from .folders import check_folder, local_path, read, read_chat_template, read_tokenizer

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(
    characters: str, special_tokens: Sequence[str] = (), words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character of `characters` and per word, in order, after `<pad>`
    (0), `<eos>` (1) and `<unk>` (2), which other characters become, and one for each of `special_tokens`. No
    special tokens are added around a text."""
    vocab = {token: i for i, token in enumerate(dict.fromkeys([PAD, EOS, UNKNOWN, *characters, *words]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    parts = "|".join([*map(re.escape, sorted(words, key=len, reverse=True)), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(parts), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    built = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    built.add_tokens(list(special_tokens), special_tokens=True)
    return built


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer, or that of `model.tokenizer`, with the template of `model.chat_template` if
    set. Raises ModelError."""
    if config.tokenizer is not None:
        tokenizer = read_tokenizer(
            local_path(config.tokenizer, "model.tokenizer"), "model.tokenizer", config.trust_remote_code
        )
    elif config.build is not None:
        build = config.build
        tokenizer = character_tokenizer(build.characters, build.all_special_tokens, build.words)
    else:
        tokenizer = read_tokenizer(model_path(config), "model.path", config.trust_remote_code)
    if config.chat_template is not None:
        tokenizer.chat_template = read_chat_template(config.chat_template, "model.chat_template")
    name = config.tokenizer or config.source or "model.build"
    _set_tokens(tokenizer, config, name)
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {name} has no end token; set eos_token in its tokenizer_config.json, "
            "model.eos_token_id, or model.tokenizer to another tokenizer"
        )
    _check_fits(tokenizer, name, _vocab_size(config))
    return tokenizer


def whole_text(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Decode token ids with special tokens and without clean-up of spaces."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The special tokens that the tokenizer adds before a text."""
    with_special: list[int] = tokenizer("1")["input_ids"]  # pyright: ignore[reportAssignmentType]
    bare: list[int] = tokenizer("1", add_special_tokens=False)["input_ids"]  # pyright: ignore[reportAssignmentType]
    return with_special[: with_special.index(bare[0])]


def end_token_ids(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All tokens that end an answer: model.eos_token_id if set, else the tokenizer's end token and those of
    the model's generation_config.json or config.json. Raises ModelError if that file is invalid."""
    end_id: Any = tokenizer.eos_token_id
    if config.eos_token_id is not None or config.path is None:
        return (end_id,)
    path = model_path(config)

    find = partial(cached_file, path, _raise_exceptions_for_missing_entries=False)
    try:
        file, ids = tokens_of_files(lambda name: Path(file) if (file := find(name)) else None)
        if outside := [number for number in ids if number >= len(tokenizer)]:
            raise ValueError(
                f"{file}: eos_token_id {outside[0]} is outside the tokenizer's vocabulary of "
                f"{len(tokenizer)} tokens"
            )
    except ValueError as error:
        raise ModelError(
            f"model.path={path}: {error}; correct the file, or set model.eos_token_id"
        ) from error
    return tuple(dict.fromkeys([end_id, *ids]))


def _set_tokens(tokenizer: PreTrainedTokenizerBase, config: ModelConfig, name: str) -> None:
    """Set the tokenizer's end and padding tokens to those of the config."""
    for key, number in (("eos_token", config.eos_token_id), ("pad_token", config.pad_token_id)):
        if number is None:
            continue
        if number >= len(tokenizer):
            raise ModelError(
                f"model.{key}_id={number}, but the tokenizer of {name} has {len(tokenizer)} tokens; choose "
                "an id below that"
            )
        setattr(tokenizer, key, tokenizer.convert_ids_to_tokens(number))


def model_path(config: ModelConfig) -> str:
    """Folder or hub name of the language model; of a GGUF file, the folder with its converted model. Raises
    ModelError if the config has none, or the file cannot be read."""
    if config.source is None:
        raise ModelError(
            "this run needs a language model; set model.path or model.build instead of model.mlp"
        )
    if config.gguf is not None and not isfile(config.source):
        folder = Path(config.source).parent
        names = sorted(file.name for file in folder.glob("*.gguf"))
        raise ModelError(
            f"model.gguf={config.gguf}: no such file in model.path={config.path}{suggest(config.gguf, names)}"
        )
    return local_path(config.source, "model.path")


def _vocab_size(config: ModelConfig) -> int | None:
    """Vocabulary size of the model; None if the model is built for its tokenizer."""
    if config.build is not None:
        return None
    path = model_path(config)
    check_folder(path, "model.path", needs_weights=True)
    load, remote = AutoConfig.from_pretrained, config.trust_remote_code
    model_config = read(path, "model.path", "causal language model", load, trust_remote_code=remote)
    return model_config.get_text_config(decoder=True).vocab_size


def _check_fits(tokenizer: PreTrainedTokenizerBase, name: str, vocab_size: int | None) -> None:
    """Raise ModelError if a token has no row in the model's embedding. Special tokens past its end that
    language models do not use (Gemma's image token) are allowed."""
    if vocab_size is None:
        return
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    outside = sorted(i for i in tokenizer.get_vocab().values() if i >= vocab_size)
    used: tuple[Any, ...] = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    if all(i in added and added[i].special and i not in used for i in outside):
        return
    raise ModelError(
        f"the tokenizer of {name} has {len(tokenizer)} tokens (ids up to {outside[-1]}), but the model has "
        f"{vocab_size}; use the model's tokenizer, or resize its embeddings"
    )
