"""What is remembered of data that have passed their checks, and bounds that spare tokenizing them."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from braid.config.data import DataConfig, FileSource
from braid.data import checked, prompts
from braid.data.prompts import PromptSet, load_prompts
from braid.data.token_bounds import token_bound
from braid.data.worked import ExampleRules, load_examples
from braid.errors import DataError
from braid.models.tokenizer import character_tokenizer
from braid.types import Prompt

TEXTS = ["What is 12 + 7? ", "naïve café ﷺ ½ ", "\n\t  ", "日本語のテキスト", "x" * 40]


def _byte_level(normalizer: Any = None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def _sentence_piece() -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<s>", fuse_unk=False, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
        ),
    )
    return made


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "characters": lambda: character_tokenizer("0123456789 +=?"),
    "byte level": lambda: PreTrainedTokenizerFast(tokenizer_object=_byte_level(), eos_token="</s>"),
    "NFC": lambda: PreTrainedTokenizerFast(tokenizer_object=_byte_level(normalizers.NFC()), eos_token="</s>"),
    "NFKC": lambda: PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(normalizers.NFKC()), eos_token="</s>"
    ),
    "SentencePiece": lambda: PreTrainedTokenizerFast(tokenizer_object=_sentence_piece(), eos_token="</s>"),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def fast(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@given(text=st.text(min_size=1) | st.sampled_from(TEXTS) | st.sampled_from(["ﷺ" * 9, "▁ " * 9, "½" * 9, " "]))
def test_no_text_has_more_tokens_than_the_bound_or_none(fast: PreTrainedTokenizerFast, text: str) -> None:
    bound = token_bound(fast)
    assert bound is not None
    text = text.encode(errors="replace").decode()
    for special in (True, False):
        ids = fast(text, add_special_tokens=special)["input_ids"]
        assert 1 <= len(ids) <= bound.most(text)  # pyright: ignore[reportArgumentType]


def test_there_is_no_bound_where_text_may_vanish_or_grow() -> None:
    odd = {
        "removes": lambda made: setattr(made, "pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        "replaces": lambda made: setattr(made, "normalizer", normalizers.Replace("x", "y" * 99)),
        "strips": lambda made: setattr(made, "normalizer", normalizers.Strip()),
    }
    for change in odd.values():
        made = _byte_level()
        change(made)
        assert token_bound(PreTrainedTokenizerFast(tokenizer_object=made)) is None
    for make in (_byte_level, _sentence_piece):  # the text after each "@" gets a prefix
        made = make()
        made.add_special_tokens([AddedToken("@", normalized=False)])
        assert token_bound(PreTrainedTokenizerFast(tokenizer_object=made)) is None
    unknown = Tokenizer(models.BPE({"a": 0}, []))
    assert token_bound(PreTrainedTokenizerFast(tokenizer_object=unknown)) is None


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
ROWS = [
    {"prompt": f"What is {i} + {i % 7}?" + " and then" * (i % 5), "answer": str(i), "from": "ab"[i % 2]}
    for i in range(60)
]


def _load(folder: Path, tokenizer: Any, **settings: Any) -> PromptSet:
    source = FileSource(path="a.jsonl", source_key="from")
    return load_prompts([source], DataConfig(**settings), tokenizer, base_dir=folder, role="train")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(checked, "MIN_ROWS", 10)
    return tmp_path


@pytest.mark.parametrize("overlong", ["drop", "truncate_left", "truncate_right"])
@pytest.mark.parametrize(
    "template", [None, TEMPLATE, "{% for m in messages %}{{ m.content | upper }}{% endfor %}"]
)
def test_prompts_are_the_same_with_and_without_bounds_and_when_remembered(
    folder: Path,
    fast: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    overlong: str,
    template: str | None,
) -> None:
    fast.chat_template = template
    settings = {"max_prompt_tokens": 40, "overlong": overlong}
    if overlong == "truncate_right" and "upper" in (template or ""):
        settings["max_prompt_tokens"] = (
            400  # where the message ends in such a text is unknown, so none may be cut
        )
    bounded, remembered = (_load(folder, fast, **settings) for _ in range(2))
    monkeypatch.setattr(prompts, "token_bound", lambda _: None)
    monkeypatch.setattr(checked, "MIN_ROWS", 1000)
    measured = _load(folder, fast, **settings)
    assert len(measured.prompts) > 0
    assert list(bounded.prompts) == list(remembered.prompts) == list(measured.prompts)
    assert bounded.counts == remembered.counts == measured.counts
    assert list(bounded.prompts.sources) == [prompt.source for prompt in measured.prompts]
    bare = [(p.uid, p.source, p.messages, p.fields) for p in measured.prompts]
    untokenized = bounded.prompts.untokenized(messages=True)
    assert [(p.uid, p.source, p.messages, p.fields) for p in untokenized] == bare


def test_prompts_are_grouped_by_source_without_being_made(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = _load(folder, character_tokenizer("0123456789"))
    expected: dict[str, list[Prompt]] = {}
    for prompt in loaded.prompts:
        expected.setdefault(prompt.source, []).append(prompt)
    made, item = list[int](), prompts.SourcePrompts.item
    monkeypatch.setattr(
        prompts.SourcePrompts, "item", lambda self, index: (made.append(index), item(self, index))[1]
    )
    of_sources = loaded.by_source()
    places = np.concatenate(list(loaded.prompts.places_by_source().values()))
    in_order = loaded.prompts.chosen(places)
    assert not made
    assert list(of_sources) == list(expected) == ["a", "b"]
    assert {name: list(source_prompts) for name, source_prompts in of_sources.items()} == expected
    assert list(in_order) == [prompt for source_prompts in expected.values() for prompt in source_prompts]
    assert load_prompts([], DataConfig(), loaded.prompts, base_dir=folder, role="eval").by_source() == {}  # pyright: ignore[reportArgumentType]


def _reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that are checked from now on."""
    indices, most_tokens = [], prompts.Encoder.most_tokens

    def counted(self: prompts.Encoder, index: int, row: Any) -> int | None:
        indices.append(index)
        return most_tokens(self, index, row)

    monkeypatch.setattr(prompts.Encoder, "most_tokens", counted)
    return indices


def test_rows_are_checked_again_when_anything_changes_that_matters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, other = character_tokenizer("0123456789"), character_tokenizer("9876543210")
    _load(folder, tokenizer)
    read = _reads(monkeypatch)
    _load(folder, tokenizer)
    assert not read
    os.utime(folder / "a.jsonl", ns=(1, 1))  # the same content
    _load(folder, tokenizer)
    assert not read
    changes: list[Callable[[], object]] = [
        lambda: _load(folder, other),
        lambda: _load(folder, tokenizer, max_prompt_tokens=60),
        lambda: _load(folder, tokenizer, overlong="truncate_left"),
        lambda: (setattr(tokenizer, "chat_template", TEMPLATE), _load(folder, tokenizer)),
        lambda: (
            (folder / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + "\n".join(map(json.dumps, ROWS))),
            _load(folder, tokenizer),
        ),
    ]
    for change in changes:
        before = len(read)
        change()
        assert len(read) > before


def _array(save: Callable[..., None], *args: Any, **arrays: Any) -> bytes:
    content = io.BytesIO()
    save(content, *args, **arrays)
    return content.getvalue()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut": lambda content: content[:-1],
    "cut to its hash": lambda content: content[:16],
    "longer": lambda content: content + b"x",
    "text": lambda _: b"x" * 500,
    "an array": lambda _: _array(np.save, np.arange(3)),
    "other arrays": lambda _: _array(np.savez, kept=np.arange(900)),
}


def _flipped(position: float, bit: int) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        damaged = bytearray(content)
        damaged[int(position * len(content))] ^= 1 << bit
        return bytes(damaged)

    return flip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_foreign_file_of_the_cache_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    tokenizer = character_tokenizer("0123456789")
    expected = list(_load(folder, tokenizer).prompts)
    (file,) = (folder / "cache" / "braid" / "data").iterdir()
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    read = _reads(monkeypatch)
    assert list(_load(folder, tokenizer).prompts) == expected
    assert len(read) == len(ROWS)
    assert list(_load(folder, tokenizer).prompts) == expected
    assert len(read) == len(ROWS)


@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_flipped_bit_of_a_file_of_the_cache_is_read(folder: Path, position: float, bit: int) -> None:
    key = checked.key_of(99, "a")
    checked.keep(key, {"kept": np.arange(5)})
    file = folder / "cache" / "braid" / "data" / f"{key}.checked"
    file.write_bytes(_flipped(position, bit)(file.read_bytes()))
    assert checked.recall(key) is None


def test_a_file_of_another_result_is_not_read(folder: Path) -> None:
    one, other = checked.key_of(99, "one"), checked.key_of(99, "other")
    checked.keep(one, {"kept": np.arange(5)})
    file = folder / "cache" / "braid" / "data" / f"{one}.checked"
    file.rename(file.with_stem(other))
    assert checked.recall(other) is None


def _unwritable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cache").write_text("a file")


def _without_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", raises_runtime_error)


def raises_runtime_error() -> Path:
    raise RuntimeError("Could not determine home directory.")


def _full(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)


@pytest.mark.parametrize("spoil", [_unwritable, _without_home, _full])
def test_without_a_place_for_the_cache_rows_are_checked_each_time(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    spoil(folder, monkeypatch)
    caplog.set_level("INFO")
    expected = list(_load(folder, character_tokenizer("0123456789")).prompts)
    assert list(_load(folder, character_tokenizer("0123456789")).prompts) == expected
    said = caplog.text.count("the checks of the data are not kept for the next start")
    assert said == (0 if spoil is _without_home else 1)
    assert not list(folder.glob("cache/**/*.new"))


def test_a_folder_that_may_not_be_written_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    key, user = checked.key_of(10**6, "a"), os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        (place := Path(name) / "braid" / "data").mkdir(parents=True)
        for folder in (Path(name), place.parent, place):
            folder.chmod(0o555)
        os.seteuid(user or 65534)  # root may write anywhere
        try:
            checked.keep(key, {})
            assert checked.recall(key) is None
            assert not list(place.iterdir())
        finally:
            os.seteuid(user)
            place.parent.chmod(0o755)
            place.chmod(0o755)
            Path(name).chmod(0o755)


@pytest.mark.parametrize("limit", ["files", "bytes"])
def test_results_used_longest_ago_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    place = folder / "cache" / "braid" / "data"
    arrays = {"kept": np.arange(1000)}
    for number in range(5):
        checked.keep(key := checked.key_of(99, f"{number}"), arrays)
        os.utime(place / f"{key}.checked", (number, number))
    (size,) = {file.stat().st_size for file in place.iterdir()}
    left = place / "killed.new"
    left.write_text("")
    os.utime(left, (0, 0))
    (place / "running.new").write_text("")
    monkeypatch.setattr(checked, *{"files": ("MAX_FILES", 3), "bytes": ("MAX_BYTES", 3 * size)}[limit])
    checked.keep(checked.key_of(99, "new"), arrays)
    kept = [number for number in range(5) if checked.recall(checked.key_of(99, f"{number}")) is not None]
    assert kept == [3, 4]
    assert [file.name for file in place.glob("*.new")] == ["running.new"]


PROCESS = """
import sys
import numpy as np
from braid.data import checked
checked.MAX_FILES = 2
for number in range(200):
    key = checked.key_of(10**6, str(number % 3))
    kept = checked.recall(key)
    assert kept is None or (kept["kept"] == number % 3).all(), kept
    checked.keep(key, {"kept": np.full(1000, number % 3)})
"""


def test_several_processes_keep_and_remove_results_at_once(folder: Path) -> None:
    command = [sys.executable, "-c", PROCESS]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert "not kept" not in errors
    assert {file.suffix for file in (folder / "cache" / "braid" / "data").iterdir()} == {".checked"}


def test_data_that_fail_are_not_remembered(folder: Path) -> None:
    tokenizer = character_tokenizer("0123456789")
    for _ in range(2):
        with pytest.raises(DataError, match="prompts are too long"):
            _load(folder, tokenizer, max_prompt_tokens=20, overlong="error")


def test_examples_are_the_same_when_remembered(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_byte_level(), eos_token="</s>")
    source = FileSource(path="a.jsonl", response_key="answer")
    for limit in (None, 30, 500):
        example_sets = [
            load_examples(
                [source], DataConfig(), tokenizer, base_dir=folder, rules=ExampleRules(max_tokens=limit)
            )
            for _ in range(2)
        ]
        assert list(example_sets[0].examples) == list(example_sets[1].examples)
        assert example_sets[0].counts == example_sets[1].counts
        lengths = [len(e.prompt_ids) + len(e.response_ids) for e in example_sets[0].examples]
        assert all(limit is None or length <= limit for length in lengths)
