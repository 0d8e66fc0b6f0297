"""JSON that others wrote: it is read, or the error names the file and the rule."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.models.conftest import _tiny_model
from tests.models.test_loading import CHARACTERS

from braid.checkpoint.store import MANIFEST, STATE, CheckpointStore, read_checkpoint
from braid.config.data import FileSource
from braid.config.model import ModelConfig
from braid.data.sources import read_sources
from braid.envs.agents.search import SearchIndex
from braid.errors import BraidError, CheckpointError, DataError, ModelError
from braid.json_text import MAX_DEPTH, parse_json
from braid.models.causal_lm import CausalLM
from braid.models.loading import save_pretrained
from braid.models.tokenizer import character_tokenizer, end_token_ids, load_tokenizer
from braid.plan.sizes import size_of_folder

BAD = {
    "a list": "[]",
    "a string": '"x"',
    "null": "null",
    "deep lists": "[" * 100_000,
    "closed deep lists": '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}",
    "deeper than allowed": '{"a": ' + "[" * MAX_DEPTH + "]" * MAX_DEPTH + "}",
    "deep objects": '{"a":' * 100_000,
    "digits": '{"a": ' + "9" * 5_000 + "}",
    "nothing": "",
    "half": '{"a": ',
    "no text": "\ud800\udcff",
}
bad = pytest.mark.parametrize("content", BAD.values(), ids=BAD)


def write(path: Path, content: str) -> None:
    path.write_bytes(content.encode(errors="surrogatepass"))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("is_text", [True, False])
def test_the_depth_is_limited_to_a_constant(opening: str, is_text: bool) -> None:
    def nested(depth: int) -> str | bytes:
        text = opening * depth + "1" + ("]" if opening == "[" else "}") * depth
        return text if is_text else text.encode()

    parse_json(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 1, 400, 100_000):
        with pytest.raises(ValueError, match="more than 128 levels"):
            parse_json(nested(depth))
    assert parse_json("[" + ",".join(["[1]"] * 1_000) + "]")[999] == [1]
    assert parse_json('"' + "[" * 1_000 + '"') == "[" * 1_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(CausalLM(_tiny_model("qwen3")), character_tokenizer(CHARACTERS), tmp_path / "model")
    return tmp_path / "model"


@bad
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_files_of_a_model_folder(folder: Path, name: str, content: str) -> None:
    write(folder / name, content)
    config = ModelConfig(path=str(folder))
    with pytest.raises(ModelError) as caught:
        end_token_ids(config, load_tokenizer(config))
    assert name in str(caught.value)
    assert len(str(caught.value)) < 1_000
    if name == "config.json":
        assert size_of_folder(folder) is None


@bad
def test_a_tokenizer_file(folder: Path, content: str) -> None:
    write(folder / "tokenizer.json", content)
    with pytest.raises(ModelError, match=r"model\.path="):
        load_tokenizer(ModelConfig(path=str(folder)))


@bad
@pytest.mark.parametrize("name", [MANIFEST, STATE])
def test_files_of_a_checkpoint(tmp_path: Path, name: str, content: str) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    path = store.save(1, {"a": 1})
    write(path / name, content)
    if name == STATE:  # the manifest agrees: not an accident
        manifest = json.loads((path / MANIFEST).read_text())
        data = (path / STATE).read_bytes()
        manifest["files"][STATE] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        read_checkpoint(path)
    assert name in str(caught.value)
    assert store.about() is None
    with pytest.raises(CheckpointError, match="all checkpoints are damaged"):
        store.locate()


@bad
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_rows_of_a_data_file(tmp_path: Path, suffix: str, content: str) -> None:
    file = tmp_path / f"rows{suffix}"
    content = content or "nothing"
    write(file, '{"a": 1}\n' + content if suffix == ".jsonl" else f"[{content}]")
    with pytest.raises(DataError) as caught:
        list(read_sources([FileSource(path=str(file))], base_dir=tmp_path, key="data.train")[0].rows)
    assert file.name in str(caught.value)
    assert len(str(caught.value)) < 1_000


@bad
def test_documents_of_a_search(tmp_path: Path, content: str) -> None:
    file = tmp_path / "corpus.jsonl"
    write(file, content or "x")
    with pytest.raises(BraidError) as caught:
        SearchIndex.read(file)
    assert file.name in str(caught.value)
