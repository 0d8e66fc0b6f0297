"""Whole runs of a pretrained model, SmolLM2-135M-Instruct in a GGUF file (`make smollm2`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.needs import WITH_VLLM, needs
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from braid.config.load import load_config
from braid.config.model import ModelConfig
from braid.models.batch import PackedBatch
from braid.models.loading import load_policy, load_tokenizer
from braid.trainer import commands

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    needs("gguf"),
    pytest.mark.skipif(not MODEL.is_file(), reason=f"{MODEL.name} is not there: make smollm2"),
    pytest.mark.xdist_group("smollm2"),
]
CPU = torch.device("cpu")
CONVERSATION = [
    {"role": "user", "content": "What is the largest of 27, 82, 11 and 49?"},
    {"role": "assistant", "content": "The largest number is 82."},
]
REWARD = """
def even(text):
    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)
"""


def _run(folder: Path, name: str, rounds: int, **settings: Any) -> Path:
    """A run with few and short answers and steps large enough to show; `settings` replace whole sections."""
    (folder / "even.py").write_text(REWARD)
    (folder / "talk.jsonl").write_text(json.dumps({"messages": CONVERSATION}) + "\n")
    numbers = {"kind": "procedural", "generator": "gcd", "size": 8}
    config: dict[str, Any] = {
        "run": {"name": name, "output_dir": str(folder), "max_rounds": rounds, "device": "cpu", "num_threads": 2},
        "model": {"path": str(MODEL)},
        "data": {"train": [numbers], "max_prompt_tokens": 128},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {"prompts_per_round": 2, "group_size": 4, "sampling": {"max_new_tokens": 8}},
        "train": {"optimizer": {"lr": 1e-4, "eps": 1e-5}},
        "eval": {"before": False, "at_end": False},
        "report": {"console": "none", "tensorboard": False, "samples_every_rounds": 0},
    }  # fmt: skip
    for section, values in settings.items():
        config[section] = {**config.get(section, {}), **values}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    commands.train(load_config(path))
    return folder / name


def _metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["round"] > 0]


def _exported(run: Path) -> dict[str, Tensor]:
    return load_file(commands.export(run) / "model.safetensors")


@pytest.fixture(scope="module")
def run_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _run(tmp_path_factory.mktemp("single"), "single", 2)


def test_log_probs_are_those_of_plain_transformers() -> None:
    config = ModelConfig(path=str(MODEL))
    lm, tokenizer = load_policy(config, temperature=1.0, seed=0, device=CPU), load_tokenizer(config)
    plain = AutoModelForCausalLM.from_pretrained(MODEL.parent, gguf_file=MODEL.name, dtype=torch.float32)
    ids: Any = tokenizer.apply_chat_template(CONVERSATION, return_dict=False)
    rows = [torch.tensor(ids), torch.tensor(ids[:20])]
    mask = torch.ones(sum(map(len, rows)), dtype=torch.bool)
    mask[[0, len(ids)]] = False
    batch = PackedBatch({"input_ids": torch.cat(rows)}, mask, tuple(map(len, rows)))
    with torch.no_grad():
        packed = lm.forward(batch, frozenset({"logprobs"}))["logprobs"]
        expected = []
        for row in rows:
            logprobs = plain(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None])[:, 0]
            expected += [torch.zeros(1), logprobs]
    # 30 layers of products that sum up to 1,536 numbers, whose orders differ: float32 has 6e-8
    torch.testing.assert_close(packed, torch.cat(expected), rtol=1e-4, atol=1e-4)


def test_an_export_loads_in_plain_transformers_as_the_policy_that_was_trained(run_of_two: Path) -> None:
    folder = commands.export(run_of_two)
    plain, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template(CONVERSATION, tokenize=False).endswith("82.<|im_end|>\n")
    loaded = load_config(run_of_two / "config.yaml", [f"model.path={folder}"]).config.model
    lm = load_policy(loaded, temperature=1.0, seed=0, device=CPU)
    weights = dict(lm.named_weights())
    assert all(
        torch.equal(weights[name], tensor) for name, tensor in plain.state_dict().items() if name in weights
    )
    start = AutoModelForCausalLM.from_pretrained(MODEL.parent, gguf_file=MODEL.name)
    moved = [not torch.equal(a, b) for a, b in zip(plain.parameters(), start.parameters(), strict=True)]
    assert all(moved)


def test_a_resume_has_the_weights_of_the_unbroken_run(run_of_two: Path, tmp_path: Path) -> None:
    run = _run(tmp_path, "resumed", 1)
    loaded = load_config(run / "config.yaml", ["run.max_rounds=2", "run.resume=latest"])
    commands.train(loaded)
    resumed, unbroken = _exported(run), _exported(run_of_two)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in unbroken.items())


def test_sharded_training_has_the_weights_of_one_process(run_of_two: Path, tmp_path: Path) -> None:
    run = _run(
        tmp_path, "sharded", 2, train={"backend": "fsdp2", "optimizer": {"lr": 1e-4, "eps": 1e-5}},
        cluster={"placement": {"policy,rollout": "0-1"}},
    )  # fmt: skip
    sharded, single = _exported(run), _exported(run_of_two)
    for name, tensor in single.items():
        # two steps of AdamW move a weight by up to 2e-4
        torch.testing.assert_close(sharded[name], tensor, rtol=1e-4, atol=2e-5)


@WITH_VLLM
def test_vllm_samples_with_the_weights_of_each_round(tmp_path: Path) -> None:
    run = _run(tmp_path, "vllm", 2, rollout={"engine": "vllm", "prompts_per_round": 2, "group_size": 4,
                                             "sampling": {"max_new_tokens": 8}})  # fmt: skip
    for line in _metrics(run):
        assert line["status/invalid"] == 0
        # a difference of the engines' rounding; weights of a round before differ by hundredths
        assert line["policy/logprob_mismatch_kl"] < 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"model": {"lora": {"rank": 4}}},
        {"sft": {"data": [{"kind": "file", "path": "talk.jsonl", "messages_key": "messages"}], "steps": 2}},
        {"pipeline": {}},
        {"model": {"dtype": "bf16"}},
    ],
    ids=["adapters", "warm-up", "pipelined", "bf16"],
)
def test_other_forms_of_training_finish_and_export(settings: dict[str, Any], tmp_path: Path) -> None:
    run = _run(tmp_path, "run", 2, **settings)
    assert [line["status/invalid"] for line in _metrics(run)] == [0, 0]
    plain, info = AutoModelForCausalLM.from_pretrained(commands.export(run), output_loading_info=True)
    assert not any(info.values())
    start = AutoModelForCausalLM.from_pretrained(MODEL.parent, gguf_file=MODEL.name, dtype=plain.dtype)
    weight = "model.layers.3.mlp.up_proj.weight"
    assert not torch.equal(plain.get_parameter(weight), start.get_parameter(weight))
