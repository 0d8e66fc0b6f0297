"""Small real tokenizers: one token per character, with and without a chat template."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def character_tokenizer(
    *, bos: bool = False, eos: bool = True, appends_eos: bool = False
) -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; `bos` and `appends_eos` put special tokens around every
    text."""
    names = ["<unk>", "<s>", "</s>", *map(chr, range(32, 127))]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    inner.decoder = decoders.Fuse()
    if bos or appends_eos:
        around = f"{'<s> ' if bos else ''}$A{' </s>' if appends_eos else ''}"
        inner.post_processor = processors.TemplateProcessing(
            single=around, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>" if eos else None}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer()


@pytest.fixture
def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Has a chat template that writes the start token, as the tokenizer itself also does for plain text."""
    tokenizer = character_tokenizer(bos=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def bare_tokenizer() -> PreTrainedTokenizerFast:
    return character_tokenizer(eos=False)


@pytest.fixture
def enclosing_tokenizer() -> PreTrainedTokenizerFast:
    """Puts a start token before and an end token after every text."""
    return character_tokenizer(bos=True, appends_eos=True)
