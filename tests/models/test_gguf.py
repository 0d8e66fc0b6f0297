"""Models in GGUF files: read, trained and exported as transformers' own, or refused by name."""

from __future__ import annotations

import importlib.util
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.needs import needs
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from braid.config.model import ModelConfig
from braid.config.rollout import SamplingConfig
from braid.config.schema import RunConfig
from braid.errors import ModelError
from braid.gguf_file import converted_folder, read_header
from braid.models import gguf as gguf_models
from braid.models.folders import check_folder
from braid.models.gguf import convert
from braid.models.loading import TORCH_DTYPES, load_policy, save_pretrained
from braid.models.tokenizer import end_token_ids, load_tokenizer
from braid.plan import available, resolve
from braid.plan.end_tokens import end_tokens
from braid.plan.sizes import size_of_folder

pytestmark = needs("gguf")
Make = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")
IDS = torch.arange(3, 40)[None]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "braid" / "gguf"


@pytest.fixture
def write(tmp_path: Path, tiny_model: Make) -> Callable[..., Path]:
    """Writes a file of a tiny model of an architecture."""

    def write(architecture: str = "llama", /, **settings: Any) -> Path:
        from tests.gguf_files import write_gguf

        changes = _changes(architecture, tied=settings.pop("tied", True))
        return write_gguf(tmp_path / "tiny.gguf", tiny_model(architecture, **changes), **settings)

    return write


def _changes(architecture: str, *, tied: bool) -> dict[str, Any]:
    """Settings of the tiny model that a file can hold."""
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    bias = {"attention_bias": False} if architecture == "llama" else {}
    return {**tokens, **bias, "intermediate_size": 64, "tie_word_embeddings": tied}


def _load(file: Path, **settings: Any) -> Any:
    return load_policy(ModelConfig(path=str(file), **settings), temperature=1.0, seed=0, device=CPU)


def _plain(file: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=dtype, attn_implementation="eager"
    )


@pytest.mark.parametrize(
    ("architecture", "tied", "quantization"),
    [("llama", True, "Q4_1"), ("llama", False, "F32"), ("qwen2", True, "Q8_0"), ("qwen2", False, "F16")],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_export_is_an_ordinary_folder_with_the_logits_of_the_file_in_plain_transformers(
    architecture: str, tied: bool, quantization: str, dtype: Any, write: Callable[..., Path], tmp_path: Path
) -> None:
    file, folder = write(architecture, tied=tied, quantization=quantization), tmp_path / "export"
    lm, tokenizer = _load(file, dtype=dtype), load_tokenizer(ModelConfig(path=str(file)))
    save_pretrained(lm, tokenizer, folder)
    described = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in described
    assert "gguf" not in json.dumps(described).lower()
    assert described["tie_word_embeddings"] == tied
    exported = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    assert exported.dtype == TORCH_DTYPES[dtype]
    assert torch.equal(exported(IDS).logits, _plain(file, exported.dtype)(IDS).logits)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_of_unquantized_numbers_is_the_model_that_it_was_made_of(
    architecture: str, write: Callable[..., Path], tiny_model: Make
) -> None:
    original = tiny_model(architecture, **_changes(architecture, tied=True))
    read = AutoModelForCausalLM.from_pretrained(
        convert(str(write(architecture)), "model.path"), attn_implementation="eager"
    )
    assert torch.equal(read(IDS).logits, original(IDS).logits)


def test_the_tokenizer_and_its_template_are_those_of_the_file(write: Callable[..., Path]) -> None:
    file = write()
    config = ModelConfig(path=str(file))
    tokenizer = load_tokenizer(config)
    plain = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "7 and 12?"}], tokenize=False)
    assert text == "<|im_start|>user\n7 and 12?<|im_end|>\n"
    assert tokenizer.encode("7 and 12?") == plain.encode("7 and 12?")
    assert tokenizer.decode(tokenizer.encode("7 and 12?")) == "7 and 12?"
    assert end_token_ids(config, tokenizer) == (2,)


def test_a_file_is_converted_once_and_anew_when_it_changes(write: Callable[..., Path], cache: Path) -> None:
    file = write()
    folder = convert(str(file), "model.path")
    weights = Path(folder, "model.safetensors").stat()
    _load(file)
    load_tokenizer(ModelConfig(path=str(file.parent), gguf=file.name))
    assert Path(folder, "model.safetensors").stat().st_ino == weights.st_ino
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [Path(folder).name]
    os.utime(file, ns=(1, 1))
    assert convert(str(file), "model.path") != folder


def _folder_of(file: str) -> tuple[str, int]:
    folder = convert(file, "model.path")
    return folder, Path(folder, "model.safetensors").stat().st_ino


@pytest.mark.slow
@pytest.mark.nightly
def test_processes_that_want_a_file_at_the_same_time_convert_it_once(
    write: Callable[..., Path], cache: Path
) -> None:
    file = str(write())
    with ProcessPoolExecutor(3, get_context("spawn")) as pool:
        assert len(set(pool.map(_folder_of, [file] * 3))) == 1
    assert sum(path.is_dir() for path in cache.iterdir()) == 1


def test_what_is_unused_or_unfinished_is_removed(write: Callable[..., Path], cache: Path) -> None:
    ages = {"old": 40, "new": 20, "killed.new": 2, "going.new": 0}
    for name, days in ages.items():
        (cache / name).mkdir(parents=True)
        past = cache.stat().st_mtime - days * 24 * 3600
        os.utime(cache / name, (past, past))
    folder = convert(str(write()), "model.path")
    names = {path.name for path in cache.iterdir() if path.is_dir()}
    assert names == {"new", "going.new", Path(folder).name}


@pytest.mark.parametrize(("architecture", "tied"), [("llama", True), ("llama", False), ("qwen2", True)])
def test_the_plan_knows_the_size_of_a_file_without_converting_it(
    architecture: str, tied: bool, write: Callable[..., Path], cache: Path
) -> None:
    file = write(architecture, tied=tied)
    size = size_of_folder(str(file))
    tokens = end_tokens(ModelConfig(path=str(file)), SamplingConfig())
    assert not cache.exists()
    assert tokens == {"<|im_end|> (2)": "tokenizer.ggml.eos_token_id"}
    assert size == size_of_folder(convert(str(file), "model.path"))


def test_a_folder_needs_the_name_of_the_file_in_it(write: Callable[..., Path]) -> None:
    file = write()
    config = ModelConfig(path=str(file.parent), gguf="tiny.gguf")
    assert load_policy(config, temperature=1.0, seed=0, device=CPU).vocab_size == 96
    with pytest.raises(
        ModelError, match=r"is a folder with tiny\.gguf; set .*tiny\.gguf, or model\.gguf=tiny\.gguf"
    ):
        check_folder(str(file.parent), "model.path", needs_weights=True)
    with pytest.raises(ModelError, match=r"model\.gguf=tiny\.ggu: no such file .*did you mean 'tiny\.gguf'"):
        load_tokenizer(ModelConfig(path=str(file.parent), gguf="tiny.ggu"))
    with pytest.raises(ValueError, match="gguf is the name of a language model's file in the folder path"):
        ModelConfig.model_validate({"build": {"hidden_size": 16}, "gguf": "tiny.gguf"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"architecture": "rwkv7"}, "has the architecture rwkv7, which transformers .* does not read from GGUF"),
        ({"settings": {"rope.scaling.type": "yarn"}}, r"does not read llama\.rope\.scaling\.type='yarn' from GGUF"),
        ({"settings": {"logit_scale": 2.0}}, r"does not read llama\.logit_scale=2\.0 from GGUF"),
        ({"tensors": {"rope_freqs.weight": torch.ones(4)}}, r"does not read rope_freqs\.weight from GGUF"),
        ({"tensors": {"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}}, "the file has .* numbers, the model"),
        ({"without": "blk.1.ffn_up.weight"}, r"among them model\.layers\.1\.mlp\.up_proj\.weight"),
    ],
)  # fmt: skip
def test_what_transformers_would_read_as_another_model_is_refused_by_name(
    settings: dict[str, Any], message: str, write: Callable[..., Path], cache: Path
) -> None:
    file = write(**settings)
    with pytest.raises(ModelError, match=rf"model\.path=.*tiny\.gguf.*{message}"):
        convert(str(file), "model.path")
    assert not cache.exists() or not any(path.is_dir() for path in cache.iterdir())


@pytest.mark.parametrize(("kind", "name"), [(9, "Q8_1"), (99, "of number 99")])
def test_a_quantization_that_cannot_be_undone_is_refused_by_name(
    kind: int, name: str, write: Callable[..., Path]
) -> None:
    file = write()
    content = file.read_bytes()
    shape = len(read_header(file).tensors["blk.0.ffn_up.weight"][0])
    at = content.index(b"blk.0.ffn_up.weight") + len("blk.0.ffn_up.weight") + 4 + 8 * shape
    file.write_bytes(content[:at] + struct.pack("<I", kind) + content[at + 4 :])
    with pytest.raises(
        ModelError, match=rf"has the quantization {name} \(blk\.0\.ffn_up\.weight\), which gguf"
    ):
        convert(str(file), "critic.path")


@pytest.mark.parametrize("length", [4, 30, 2000])
def test_a_damaged_file_is_refused(length: int, write: Callable[..., Path]) -> None:
    file = write()
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelError, match="is damaged: its header cannot be read"):
        convert(str(file), "model.path")
    assert size_of_folder(file) is None
    file.write_bytes(b"something else")
    with pytest.raises(ModelError, match="is not a GGUF file: it does not begin with GGUF"):
        convert(str(file), "model.path")


def test_a_missing_package_is_named(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    file = write()
    find = importlib.util.find_spec
    monkeypatch.setattr(gguf_models, "find_spec", lambda name: None if name == "gguf" else find(name))
    with pytest.raises(ModelError, match=r"needs the package gguf.*pip install 'braid-rl\[gguf\]'"):
        convert(str(file), "model.path")
    monkeypatch.setattr(available, "find_spec", lambda name: None if name == "gguf" else find(name))
    config = RunConfig.model_validate(
        {
            "model": {"path": str(file)},
            "env": {"kind": "agent", "name": "guess", "max_context_tokens": 64},
            "rollout": {"sampling": {"max_new_tokens": 4}},
        }
    )
    (problem,) = available.missing_packages(config, resolve(config, verb="eval"))
    assert problem[0] == "model.path"
    assert "needs the package gguf, which is not installed" in problem[1]


def test_a_file_without_a_tokenizer_needs_that_of_a_folder(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    file = write(has_tokenizer=False)
    with pytest.raises(ModelError, match=r"has no tokenizer .* set model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(file)))


def test_a_place_that_cannot_be_written_is_named(write: Callable[..., Path], cache: Path) -> None:
    file = write()
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder should be")
    with pytest.raises(ModelError, match=r"cannot write the converted model.*set XDG_CACHE_HOME"):
        convert(str(file), "model.path")
    assert not converted_folder(file).exists()
