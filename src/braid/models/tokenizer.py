"""A tokenizer of single characters, for models made from scratch."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token for each of `characters`, in order, after `<pad>` (0), `<eos>` (1) and `<unk>` (2).

    Decoding gives back any text over the alphabet; other characters become `<unk>`. Nothing is put before or after a text.
    """
    vocab = {token: i for i, token in enumerate(dict.fromkeys([PAD, EOS, UNKNOWN, *characters]))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
