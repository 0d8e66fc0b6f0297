"""The same settings in the three dialects give the same run: one plan, one native config, the same bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from braid.cli.convert import native_text
from braid.config.load import Loaded, load_config, plain_data
from braid.plan import Plan, default_verb, merge_recipe, resolve
from braid.trainer import commands
from braid_dialects.load import DIALECTS, Read, read_config

from .conftest import IN_ONE_PROCESS, TEXT_SEEDS, Reader, Seed, laid_over

TINY_MODEL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_layers": 2,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "characters": "abcdefgh",
}

COMMON: dict[str, Any] = {
    "run": {"max_epochs": 100, "max_rounds": 2, "device": "cpu"},
    "data": {
        "overlong": "drop",
        "use_chat_template": "auto",
        "seed": 7,
        "train": [{"kind": "file", "path": "rows.jsonl"}],
    },
    "reward": {"parts": [{"kind": "exact"}], "scale": 1.0, "shift": 0.0},
    "rollout": {"max_sequence_tokens": 40, "engine": {"dtype": "auto", "max_running": 128}},
    "train": {"shuffle": True, "offload": {"optimizer": False}},
    "eval": {"before": False, "at_end": False},
    "report": {"console": "none", "tensorboard": False},
}
"""Native settings for which one of the three has no key, or none with this meaning."""

RLINF: dict[str, Any] = {
    "runner": {
        "task_type": "math", "max_epochs": 100, "max_steps": 2, "save_interval": 5, "val_check_interval": -1,
        "seq_length": 40, "experiment_name": "same", "output_dir": "runs",
    },
    "algorithm": {
        "adv_type": "grpo", "loss_type": "actor", "group_size": 4, "n_minibatches": 2, "training_batch_size_per_gpu": 4,
        "logprob_forward_micro_batch_size": 16, "loss_agg_func": "token-mean", "kl_beta": 0.0, "ratio_clip_eps": 0.2,
        "clip_ratio_c": None, "entropy_bonus": 0.0, "normalize_advantages": False,
        "sampling_params": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 8},
    },
    "rollout": {"model": {"model_path": "model"}},
    "actor": {
        "training_backend": "fsdp",
        "seed": 7,
        "model": {"precision": "fp32"},
        "optim": {
            "lr": 1e-3, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0,
            "lr_warmup_steps": 0, "lr_scheduler": "constant",
        },
    },
    "data": {"type": "math", "max_prompt_length": 32, "rollout_batch_size": 8, "train_data_paths": ["rows.jsonl"]},
}  # fmt: skip

ROLL: dict[str, Any] = {
    "exp_name": "same", "output_dir": "runs", "seed": 7, "max_steps": 2, "save_steps": 5,
    "pretrain": "model", "rollout_batch_size": 8, "num_return_sequences_in_group": 4, "prompt_length": 32,
    "response_length": 8, "adv_estimator": "grpo", "loss_agg_mode": "token-mean", "pg_clip": 0.2,
    "actor_train": {
        "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
        "training_args": {
            "learning_rate": 1e-3, "lr_scheduler_type": "constant", "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
        },
        "data_args": {"file_name": "rows.jsonl", "prompt": "prompt"},
        "device_mapping": "[0]",
    },
    "actor_infer": {"generating_args": {"temperature": 1.0, "top_p": 1.0, "top_k": 0}, "device_mapping": "[0]"},
}  # fmt: skip

SKYRL: dict[str, Any] = {
    "data": {"train_data": ["rows.jsonl"]},
    "trainer": {
        "run_name": "same", "strategy": "fsdp", "seed": 7, "epochs": 100, "resume_mode": None, "bf16": False,
        "gradient_checkpointing": False, "train_batch_size": 8, "policy_mini_batch_size": 4,
        "micro_train_batch_size_per_gpu": 4, "micro_forward_batch_size_per_gpu": 16, "max_prompt_length": 32,
        "ckpt_interval": 5, "eval_before_train": False, "eval_interval": -1, "logger": "tensorboard",
        "policy": {
            "model": {"path": "model"},
            "optimizer_config": {
                "lr": 1e-3, "weight_decay": 0.0, "scheduler": "constant_with_warmup", "num_warmup_steps": 0,
                "max_grad_norm": 1.0,
            },
        },
        "algorithm": {
            "advantage_estimator": "grpo", "use_kl_loss": False, "eps_clip_low": 0.2, "eps_clip_high": 0.2,
            "loss_reduction": "token_mean",
        },
    },
    "generator": {
        "n_samples_per_prompt": 4,
        "sampling_params": {"max_generate_length": 8, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
    },
}  # fmt: skip
VERL: dict[str, Any] = {
    "data": {
        "train_files": ["rows.jsonl"], "val_files": None, "train_batch_size": 8, "max_prompt_length": 32, "max_response_length": 8,
    },
    "algorithm": {"adv_estimator": "grpo"},
    "actor_rollout_ref": {
        "model": {"path": "model", "enable_gradient_checkpointing": False},
        "actor": {
            "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 4, "clip_ratio_c": 3.0,
            "optim": {"lr": 1e-3, "weight_decay": 0.0},
        },
        "rollout": {"n": 4, "tensor_model_parallel_size": 1},
    },
    "trainer": {
        "experiment_name": "same", "total_epochs": 100, "save_freq": 5, "val_before_train": False, "resume_mode": "disable",
        "logger": "console", "n_gpus_per_node": 1,
    },
}  # fmt: skip

TRL: dict[str, Any] = {
    "trainer": "grpo", "model_name_or_path": "model", "dataset_name": "rows.jsonl", "output_dir": "runs/same", "seed": 7,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 8, "num_generations": 4,
    "max_prompt_length": 32, "max_completion_length": 8, "learning_rate": 1e-3, "lr_scheduler_type": "constant",
    "num_train_epochs": 100, "save_steps": 10, "gradient_checkpointing": False,
}  # fmt: skip
FILES = {"rlinf": RLINF, "roll": ROLL, "skyrl": SKYRL, "verl": VERL, "trl": TRL}

ReadSame = Callable[..., Read]


@pytest.fixture
def read_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReadSame:
    """`read_same("roll")` reads the settings in one of the languages, from a folder with their model and
    data."""
    monkeypatch.chdir(tmp_path)
    rows = [
        f'{{"prompt": "{letter}{other}", "answer": "{letter}"}}\n' for letter in "abcd" for other in "efgh"
    ]
    (tmp_path / "rows.jsonl").write_text("".join(rows))

    def read(name: str, **sections: Any) -> Read:
        tree = FILES[name] | {"braid": laid_over(COMMON, sections)}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
        return read_config(Path(f"{name}.yaml"), dialect=name, **IN_ONE_PROCESS)  # pyright: ignore[reportArgumentType]

    return read


def meaning(loaded: Loaded) -> dict[str, Any]:
    """A config without the place of its file, and its algorithm as the parts that count."""
    data = plain_data(loaded.config)
    data["run"].pop("base_dir")
    recipe = merge_recipe(loaded.config, has_gpus=False)
    data["algorithm"] = {name: getattr(recipe, name) for name in recipe.__slots__}
    return data


def plan_of(loaded: Loaded) -> Plan:
    return resolve(loaded.config, num_prompts=16)


@pytest.mark.parametrize("name", ["roll", "skyrl"])
def test_equal_settings_are_the_same_plan_and_config(read_same: ReadSame, name: str) -> None:
    first, other = (read_same(language).loaded for language in ("rlinf", name))
    assert plan_of(first) == plan_of(other)
    assert meaning(first) == meaning(other)


@pytest.mark.slow
def test_equal_settings_are_the_same_weights_to_the_bit(read_same: ReadSame, tmp_path: Path) -> None:
    outcomes = {}
    for name in FILES:
        loaded = read_same(
            name, model={"path": None, "build": TINY_MODEL}, run={"name": name, "seed": 7}
        ).loaded
        outcome = commands.train(loaded)
        summary = json.loads((outcome.run_dir / "summary.json").read_text())
        assert summary["steps"] == 4  # two rounds of two steps
        outcomes[name] = commands.export(outcome.run_dir)
    weights = {name: (folder / "model.safetensors").read_bytes() for name, folder in outcomes.items()}
    assert {name for name in FILES if weights[name] == weights["rlinf"]} == set(FILES)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_the_converted_file_is_the_same_plan(read_same: ReadSame, tmp_path: Path, name: str) -> None:
    read = read_same(name)
    (tmp_path / "native.yaml").write_text(native_text(read, tmp_path))
    converted = load_config(tmp_path / "native.yaml")
    assert plan_of(converted) == plan_of(read.loaded)
    assert meaning(converted) == meaning(read.loaded)


@pytest.mark.parametrize("seed", TEXT_SEEDS, ids=lambda seed: seed.name)
def test_a_page_s_file_converted_is_the_same_config(reader: Reader, tmp_path: Path, seed: Seed) -> None:
    read = reader.read(seed, **IN_ONE_PROCESS)
    (tmp_path / "native.yaml").write_text(native_text(read, tmp_path))
    converted = load_config(tmp_path / "native.yaml")
    assert meaning(converted) == meaning(read.loaded)
    verb = default_verb(read.loaded.config)
    plans = [resolve(one.config, num_prompts=100, verb=verb) for one in (converted, read.loaded)]
    assert plans[0] == plans[1]
