"""Loading and exporting model folders, and errors of unusable ones."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from braid.config.model import MlpSpec, ModelConfig
from braid.config.train import TrainConfig
from braid.errors import ModelError
from braid.models.base import copy_weights
from braid.models.causal_lm import CausalLM
from braid.models.export import export_with
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.models.tokenizer import character_tokenizer, end_token_ids
from braid.plan import rotary_problem

Make = Callable[..., PreTrainedModel]
CPU = torch.device("cpu")
CHARACTERS = "".join(map(chr, range(33, 117)))


def _load(path: Path | str, longest: int | None = None, **settings: Any) -> CausalLM:
    config = ModelConfig(path=str(path), **settings)
    return load_policy(config, temperature=1.0, seed=0, device=CPU, longest=longest)


def _edit(file: Path, **changes: Any) -> None:
    values = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Make) -> Path:
    """A whole model folder: Qwen3 and a tokenizer of 87 tokens."""
    save_pretrained(CausalLM(tiny_model("qwen3")), character_tokenizer(CHARACTERS), tmp_path / "model")
    return tmp_path / "model"


def test_an_exported_folder_loads_in_transformers_with_equal_logits(
    architecture: str, tmp_path: Path, tiny_model: Make
) -> None:
    lm = CausalLM(tiny_model(architecture))
    plain = tiny_model(architecture)
    save_pretrained(lm, character_tokenizer("abc"), tmp_path)
    assert "braid" not in (tmp_path / "config.json").read_text()
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), "missing, unknown or of another shape"
    ids = torch.arange(12)[None]
    torch.testing.assert_close(loaded(ids).logits, plain(ids).logits, rtol=0, atol=0)
    default = "eager" if architecture == "gpt_oss" else "sdpa"  # transformers has no other for sinks on a CPU
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == default
    assert AutoTokenizer.from_pretrained(tmp_path).encode("cab") == [5, 3, 4]


def test_an_exported_folder_loads_again_with_equal_log_probs(
    architecture: str, tmp_path: Path, tiny_model: Make, packed: Any
) -> None:
    lm, batch = CausalLM(tiny_model(architecture)), packed()
    save_pretrained(lm, character_tokenizer("abc"), tmp_path)
    outputs = frozenset({"logprobs"})
    torch.testing.assert_close(
        _load(tmp_path).forward(batch, outputs), lm.forward(batch, outputs), rtol=0, atol=0
    )


def test_layer_types_that_do_not_match_the_number_of_layers_are_reported(folder: Path) -> None:
    _edit(folder / "config.json", layer_types=["full_attention"] * 7)
    for load in (_load, lambda path: load_tokenizer(ModelConfig(path=str(path)))):
        with pytest.raises(
            ModelError, match=r"model\.path=.*`num_hidden_layers` .* must be equal .* `layer_types` \(7\)"
        ):
            load(folder)


def test_the_type_asked_for_overrides_the_one_saved(folder: Path) -> None:
    assert _load(folder, dtype="bf16").model.dtype == torch.bfloat16


def test_dropout_in_the_folder_is_left_off_and_noted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _edit(folder / "config.json", attention_dropout=0.1)
    with caplog.at_level(logging.INFO, "braid"):
        lm = _load(folder)
    assert (
        "disabled dropout of the model (attention_dropout=0.1): log-probs must be deterministic"
        in caplog.text
    )
    assert not lm.module.training


def test_rotary_positions_that_depend_on_the_longest_row_are_refused_where_rows_can_be_longer(
    tmp_path: Path, tiny_model: Make
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    save_pretrained(CausalLM(tiny_model("llama", rope_parameters=rope)), character_tokenizer("abc"), tmp_path)
    _load(tmp_path, longest=64)
    with pytest.raises(ModelError, match="longer than its max_position_embeddings of 64 tokens") as caught:
        _load(tmp_path, longest=65)
    in_file = json.loads((tmp_path / "config.json").read_text())
    assert str(caught.value) == rotary_problem(in_file, 65), "as `braid show` says without loading it"


def test_a_missing_folder_is_named_with_its_nearest_neighbour(folder: Path) -> None:
    wrong = folder.with_name("modle")
    with pytest.raises(ModelError) as caught:
        _load(wrong)
    assert str(caught.value) == f"model.path={wrong}: no such folder, did you mean 'model'?"


def test_a_hub_name_that_cannot_be_fetched_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="is neither a folder nor available from the Hugging Face hub"):
        _load("nobody/no-such-model")


def test_a_file_in_place_of_a_folder(folder: Path) -> None:
    with pytest.raises(
        ModelError, match=r"config\.json is a file; set it to the folder that contains it, or to a .gguf file"
    ):
        _load(folder / "config.json")


def test_a_folder_that_is_not_a_model_lists_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError) as caught:
        _load(tmp_path)
    assert str(caught.value) == (
        f"model.path={tmp_path} is not a Hugging Face model folder: it lacks config.json and weights "
        "(model.safetensors); it contains notes.txt"
    )


def test_a_folder_without_weights_lists_them(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"it lacks weights \(model\.safetensors\); it contains config\.json"
    ):
        _load(folder)


def test_a_folder_of_another_kind_of_model(folder: Path) -> None:
    _edit(folder / "config.json", model_type="vit", architectures=["ViTModel"])
    with pytest.raises(ModelError, match="as a causal language model: Unrecognized configuration class"):
        _load(folder)


def test_a_damaged_weights_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="as a causal language model"):
        _load(folder)


def test_a_weights_file_that_lacks_some(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        _load(folder)
    assert str(caught.value) == (
        f"model.path={folder} is not a complete causal language model: it lacks 1 of the weights of "
        "Qwen3ForCausalLM, among them model.layers.1.mlp.up_proj.weight, which would be initialized "
        "randomly; choose a folder that has them"
    )


@pytest.mark.parametrize(
    ("name", "shape", "fault"),
    [
        ("model.layers.7.mlp.up_proj.weight", (48, 32), r"1 unknown to the model \(model\.layers\.7\.mlp"),
        (
            "model.norm.weight",
            (31,),
            r"1 of another shape \(model\.norm\.weight \(31,\) instead of \(32,\)\)",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_named(
    folder: Path, name: str, shape: tuple[int, ...], fault: str
) -> None:
    weights = load_file(folder / "model.safetensors") | {name: torch.zeros(shape)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=rf"its weights do not fit its config\.json, of a Qwen3ForCausalLM: {fault}"
    ):
        _load(folder)


def test_heads_for_other_tasks_are_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = load_file(folder / "model.safetensors") | {"v_head.summary.weight": torch.zeros(1, 32)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO, "braid"):
        _load(folder)
    assert "left out weights that a causal language model does not use: v_head.summary.weight" in caplog.text


def test_weights_are_copied_only_into_the_model_that_they_are_of(tiny_model: Make) -> None:
    one, other = (CausalLM(tiny_model("qwen3")) for _ in range(2))
    weights = {name: tensor.detach() + 1 for name, tensor in one.named_weights()}
    before = {name: tensor.detach().clone() for name, tensor in other.named_weights()}
    name = "model.norm.weight"
    faults = {
        f"1 missing ({name})": {n: t for n, t in weights.items() if n != name},
        "2 unknown to the model (a, b)": weights | {"a": weights[name], "b": weights[name]},
        f"1 of another shape ({name} (1,) instead of (32,))": weights | {name: torch.ones(1)},
    }
    for fault, wrong_weights in faults.items():
        with pytest.raises(ModelError) as caught:
            copy_weights(wrong_weights, other.named_weights())
        assert fault in str(caught.value)
        assert all(torch.equal(tensor, before[n]) for n, tensor in other.named_weights())
    copy_weights(weights, other.named_weights())
    assert all(torch.equal(tensor, weights[n]) for n, tensor in other.named_weights())


def test_errors_name_the_config_section(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^critic\.path=.*: no such folder"):
        load_policy(
            ModelConfig(path=str(tmp_path / "gone")), temperature=1.0, seed=0, device=CPU, key="critic"
        )


def test_an_mlp_is_not_a_language_model() -> None:
    config = ModelConfig(mlp=MlpSpec())
    with pytest.raises(ModelError, match=r"set model\.path or model\.build instead of model\.mlp"):
        load_policy(config, temperature=1.0, seed=0, device=CPU)
    with pytest.raises(ModelError, match=r"set model\.path or model\.build instead of model\.mlp"):
        load_tokenizer(config)


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelConfig(path=str(folder)))
    assert str(caught.value) == (
        f"model.path={folder} has no tokenizer (none of tokenizer.json, tokenizer.model, vocab.json, "
        "tokenizer_config.json); set model.tokenizer to a folder or hub name"
    )


def test_a_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="as a tokenizer"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_tokenizer_without_an_end_token(folder: Path) -> None:
    _edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="has no end token; set eos_token in its"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_end_tokens_are_the_tokenizers_and_those_of_the_generation_config_or_config(folder: Path) -> None:
    def ends(**settings: Any) -> tuple[int, ...]:
        config = ModelConfig(path=str(folder), **settings)
        return end_token_ids(config, load_tokenizer(config))

    (folder / "generation_config.json").unlink(missing_ok=True)
    for named, merged in ((None, (1,)), (7, (1, 7)), ([9, 1], (1, 9))):
        _edit(folder / "config.json", eos_token_id=named)
        assert ends() == merged, "as transformers, which has nothing else to derive end tokens from"
    for named, merged in (([1, 7, 9], (1, 7, 9)), (7, (1, 7)), (None, (1,))):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
        assert ends() == merged
    assert ends(eos_token_id=5) == (5,), "the config has the last word"


@pytest.mark.parametrize(
    ("content", "wrong"),
    [('{"eos_token_id": 900}', "900"), ('{"eos_token_id": "</s>"}', "'</s>'"), ("{", "")],
)
def test_a_generation_config_that_names_no_token_is_refused(folder: Path, content: str, wrong: str) -> None:
    (folder / "generation_config.json").write_text(content)
    config = ModelConfig(path=str(folder))
    with pytest.raises(ModelError, match=rf"generation_config.json: .*{wrong}.*model.eos_token_id"):
        end_token_ids(config, load_tokenizer(config))


def test_a_config_whose_end_token_the_tokenizer_lacks_is_refused(folder: Path) -> None:
    (folder / "generation_config.json").unlink(missing_ok=True)
    _edit(folder / "config.json", eos_token_id=90)
    config = ModelConfig(path=str(folder))
    with pytest.raises(
        ModelError, match=r": config.json: eos_token_id 90 is outside the tokenizer's vocabulary of 87"
    ):
        end_token_ids(config, load_tokenizer(config))


def test_a_tokenizer_larger_than_the_model(folder: Path, tmp_path: Path) -> None:
    character_tokenizer("".join(map(chr, range(200, 300)))).save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError) as caught:
        load_tokenizer(ModelConfig(path=str(folder), tokenizer=str(tmp_path / "other")))
    assert str(caught.value) == (
        f"the tokenizer of {tmp_path / 'other'} has 103 tokens (ids up to 102), but the model has 96; "
        "use the model's tokenizer, or resize its embeddings"
    )


def test_special_tokens_beyond_the_model_are_allowed_unless_they_start_or_end_texts(
    tmp_path: Path, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<image_{i}>" for i in range(12)]})
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer(ModelConfig(path=str(folder)))) == 99
    tokenizer.bos_token = "<image_11>"
    tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"has 99 tokens \(ids up to 98\), but the model has 96"):
        load_tokenizer(ModelConfig(path=str(folder)))


def test_a_chat_template_is_text_or_a_file(folder: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    for chat_template in (template, str(tmp_path / "chat.jinja")):
        tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=chat_template))
        messages = [{"role": "user", "content": "hi"}]
        assert tokenizer.apply_chat_template(messages, tokenize=False) == "[hi]"
    with pytest.raises(
        ModelError,
        match=r"none\.jinja: no such file; set it to a Jinja template or the path of a \.jinja file",
    ):
        load_tokenizer(ModelConfig(path=str(folder), chat_template="none.jinja"))


def test_the_architecture_asked_for_must_be_the_folders(folder: Path) -> None:
    assert _load(folder, architecture="qwen3").config.model_type == "qwen3"
    with pytest.raises(ModelError, match=r"model\.architecture=llama, but model is a model of type qwen3"):
        _load(folder, architecture="llama")


def test_a_minor_version_in_the_name_of_an_architecture_is_of_the_same_type(
    tmp_path: Path, tiny_model: Make
) -> None:
    save_pretrained(CausalLM(tiny_model("qwen2")), character_tokenizer(CHARACTERS), tmp_path)
    assert _load(tmp_path, architecture="Qwen2.5").config.model_type == "qwen2"


@pytest.mark.parametrize("low_memory_load", [True, False])
def test_either_way_of_loading_reads_the_same_bits(folder: Path, low_memory_load: bool) -> None:
    saved = load_file(folder / "model.safetensors")
    lm = _load(folder, low_memory_load=low_memory_load)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in lm.named_weights())
    assert not any(hasattr(module, "_hf_hook") for module in lm.module.modules())


_TAKEN = """
import sys, torch
from pathlib import Path
from braid.config.model import ModelConfig
from braid.models.loading import load_policy

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def load(folder, rank):
    return load_policy(ModelConfig(path=folder), temperature=1.0, seed=0, device=torch.device("cpu"), rank=rank)

load(sys.argv[1], 1)  # what is imported and kept by any first load
load(sys.argv[1], 0)
for rank in (1, 0):
    before = resident()
    lm = load(sys.argv[2], rank)
    print((resident() - before) / sum(p.nbytes for p in lm.module.parameters()))
"""


@pytest.mark.slow
def test_a_rank_that_receives_its_shard_allocates_no_weights(
    tmp_path: Path, tiny_model: Make, folder: Path
) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_layers": 4, "num_heads": 8, "head_dim": 128}
    build = ModelConfig.model_validate({"build": sizes})
    lm = load_policy(build, temperature=1.0, seed=0, device=CPU)
    save_pretrained(lm, load_tokenizer(build), tmp_path / "large")
    command = [sys.executable, "-c", _TAKEN, str(folder), str(tmp_path / "large")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    later, first = map(float, done.stdout.split())
    assert later < 0.1
    assert first > 0.9


def test_liger_kernels_name_what_they_need(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"train\.liger_kernels=true needs .*a CUDA device instead of cpu"):
        load_policy(
            ModelConfig(path=str(folder)),
            temperature=1.0,
            seed=0,
            device=CPU,
            train=TrainConfig(liger_kernels=True),
        )


def test_a_kernel_that_cannot_run_here_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="flash_attention_2 needs CUDA devices"):
        _load(tmp_path / "nowhere", attention="flash_attention_2")


def test_an_export_prints_nothing_of_an_installed_deepspeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logging.getLogger("DeepSpeed")
    shown = logging.StreamHandler(sys.stdout)  # as its import does
    log.addHandler(shown)
    try:
        export_with(
            lambda _: log.warning("Setting accelerator to CPU. If you have GPU ..."), tmp_path / "model"
        )
        export_with(lambda _: log.warning("something else"), tmp_path / "model")
    finally:
        log.removeHandler(shown)
    assert capsys.readouterr().out == "something else\n"
