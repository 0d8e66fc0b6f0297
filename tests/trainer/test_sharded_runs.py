"""A run on workers matches a single-process run for every placement, and each can resume the other."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.needs import WITH_VLLM
from tests.pictures import picture

from braid.cluster.ray import connect, disconnect
from braid.config.cluster import ClusterConfig
from braid.config.load import Loaded, load_config
from braid.config.model import BuildSpec, ModelConfig
from braid.errors import WorkerError
from braid.models.loading import load_policy, load_tokenizer, save_pretrained
from braid.report.samples import read_samples
from braid.trainer import commands

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

_TASK = {
    "kind": "procedural",
    "generator": "chain_sum",
    "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "size": 32,
}

_REWARD = """
def even(text):
    return sum(ord(c) % 2 == 0 for c in text) / max(len(text), 1)
"""

Settings = dict[str, Any]

EVERY_ROLE: Settings = {
    "algorithm.advantage": "gae",
    "algorithm.old_logprobs": "recompute",
    "rollout.filter": {"min_std": 0.01, "then": "resample", "max_batches": 3},
}
GREEDY: Settings = {"algorithm.recipe": "remax", "report.samples_every_rounds": 1}

LIKELIEST: Settings = {
    "algorithm": {"kl_coef": 0.1, "kl_estimator": "full_forward", "kl_top_k": 3, "kl_ratio_clip": 2.0},
    "report.samples_every_rounds": 1,
}
_TWO_RANKS: Settings = {"train.backend": "fsdp2", "cluster.placement": {"policy,reference,rollout": "0-1"}}

MODES: dict[str, tuple[Settings, Settings]] = {
    "likeliest tokens of the reference": (LIKELIEST, _TWO_RANKS),
    "likeliest tokens, adapters": ({**LIKELIEST, "model.lora": {"rank": 2}}, _TWO_RANKS),
    "collocated": (
        {**GREEDY, "algorithm.kl_estimator": "full"},
        {"train.backend": "fsdp2", "cluster.placement": {"policy,reference,rollout": "0-1"}},
    ),
    "disaggregated, each with a process": (
        GREEDY,
        {"cluster.placement": {"policy": "0", "reference": "1", "rollout": "2"}},
    ),
    "hybrid, every role": (
        EVERY_ROLE,
        {
            "train.backend": "fsdp2",
            "reference.train": {"backend": "single"},
            "cluster.placement": {"policy,critic": "0-1", "reference,inference": "2", "rollout": "1-2"},
            "cluster.buffer_processes": 2,
        },
    ),
}
"""Mode -> settings of the run, and its placement."""


BUILD = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One Ray for all runs."""
    connect(ClusterConfig(), num_processes=8)
    yield
    disconnect()


def _run(
    folder: Path,
    name: str,
    settings: Settings,
    *,
    rounds: int,
    resume: str = "none",
    verb: Callable[[Loaded], object] = commands.train,
) -> Path:
    config: dict[str, Any] = {
        "run": {
            "name": name, "output_dir": str(folder), "max_rounds": rounds, "device": "cpu", "num_threads": 1,
            "resume": resume,
        },
        "model": {"build": BUILD},
        "data": {"train": [_TASK], "eval": [{**_TASK, "name": "held_out", "size": 6}], "max_prompt_tokens": 128},
        "sft": {"data": [{**_TASK, "response_key": "answer"}], "steps": 2},
        "reward": {"parts": [{"kind": "function", "path": f"{folder}/even.py:even"}]},
        "rollout": {"prompts_per_round": 4, "group_size": 4, "sampling": {"max_new_tokens": 8}},
        "algorithm": {"kl_coef": 0.01},
        "eval": {"every_rounds": 1},
        "train": {"optimizer": {"lr": 1e-3, "eps": 1e-5}, "steps_per_pass": 2},
        "checkpoint": {"every_rounds": 1, "keep": None},
        "report": {"console": "none", "tensorboard": False},
    }  # fmt: skip
    for key, value in settings.items():
        section, _, name_ = key.rpartition(".")
        target = config.setdefault(section, {}) if section else config
        target[name_] = copy.copy(value)
    (folder / "even.py").write_text(_REWARD)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    verb(load_config(path))
    return folder / name


def _lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _is_of_machine(name: str) -> bool:
    return name.startswith(("time", "memory/", "reward/time/")) or name.endswith("_per_s")


def _assert_alike(mine: list[dict[str, float]], other: list[dict[str, float]]) -> None:
    """Every metric but those of clock and machine. Sampled tokens are the same as long as weights agree to
    about float32's rounding; sums of losses and log-probs then differ by their order alone."""
    for one, two in zip(mine, other, strict=True):
        one, two = ({name: x for name, x in line.items() if not _is_of_machine(name)} for line in (one, two))
        assert one == pytest.approx(two, rel=1e-3, abs=1e-4, nan_ok=True)


def _weights(run: Path, folder: Path) -> dict[str, torch.Tensor]:
    return load_file(commands.export(run, output=folder / f"{run.name}-export") / "model.safetensors")


@pytest.mark.parametrize(
    "mode", [pytest.param(name, marks=[pytest.mark.nightly] * ("disaggregated" in name)) for name in MODES]
)
def test_a_run_on_workers_matches_one_process_which_can_resume_it(
    tmp_path: Path, mode: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings, layout = MODES[mode]
    _matches_one_process(tmp_path, settings, layout, capfd)


@pytest.mark.nightly
def test_a_run_with_images_on_workers_matches_one_process_which_can_resume_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "a?", "answer": "e"}]
    for i, letter in enumerate("abc"):
        (tmp_path / f"{i}.png").write_bytes(picture(i).data)
        rows.append({"prompt": "<image> a?", "answer": letter, "images": [f"{i}.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "file", "path": "rows.jsonl"}
    settings: Settings = {
        "model": {"vision": {"train": "all"}, "build": BUILD | OF_PICTURES},
        "data": {"train": [source], "eval": [{**source, "name": "held_out"}], "max_prompt_tokens": 64},
        "sft": {"data": [source | {"response_key": "answer"}], "steps": 2},
        "algorithm.advantage": "gae",
        "train.gradient_checkpointing": True,
    }
    roles = {"policy,critic,reference,rollout": "0-1"}
    layout = {"train.backend": "fsdp2", "cluster.placement": roles}
    _matches_one_process(tmp_path, settings, layout, capfd)
    assert (tmp_path / "group-export" / "preprocessor_config.json").exists()


OF_PICTURES = {
    "architecture": "qwen3_vl",
    "characters": "abcdefgh ?",
    "tower": {"hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "depth": 2},
}


def _matches_one_process(
    tmp_path: Path, settings: Settings, layout: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = _run(tmp_path, "alone", settings, rounds=3)
    assert "CPU threads" not in "".join(capfd.readouterr())
    _run(tmp_path, "group", {**settings, **layout}, rounds=2)
    assert "CPU threads: 1 (run.num_threads, in each process)" in "".join(capfd.readouterr())
    group = _run(tmp_path, "group", settings, rounds=3, resume="latest")
    _assert_alike(_lines(group), _lines(alone))
    for file in sorted((alone / "samples").glob("*.jsonl")):
        lines = (group / "samples" / file.name).read_text().splitlines()
        assert len(lines) == len(file.read_text().splitlines())
    mine, other = _weights(group, tmp_path), _weights(alone, tmp_path)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        # AdamW divides small gradients, and their roundings, by their own size: a tenth of one step of 1e-3.
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_episodes_have_the_same_tokens_wherever_environments_and_engines_run(tmp_path: Path) -> None:
    """Four prompts of 16 episodes, on one engine or two."""
    settings = {
        "env": {
            "kind": "agent", "name": "guess", "kwargs": {"highest": 5, "tries": 2}, "max_turns": 2,
            "max_context_tokens": 80, "cut_turns": "continue",
        },
        "model.build": {**BUILD, "characters": " 0123456789abcdefghijklmnopqrstuvwxyzGO.,"},
        "data": {}, "sft": None, "reward": {}, "eval": {"at_end": False}, "algorithm": {},
        "rollout.group_size": 16,
        "rollout.sampling": {"max_new_tokens": 6},
        "report.samples_every_rounds": 1,
    }  # fmt: skip
    places: dict[str, Settings] = {
        "inline": {"env.run_in": "inline"},
        "thread": {"env.run_in": "thread"},
        "process": {"env.run_in": "process"},
        "workers": {"cluster.placement": {"policy": "0", "rollout": "1-2"}},
    }
    played: dict[str, Any] = {}
    for name, place in places.items():
        run = _run(tmp_path, name, {**settings, **place}, rounds=1)
        samples = [s.trajectory for s in read_samples(run / "samples" / "round_000001.jsonl")]
        played[name] = {
            (s.prompt.uid, s.sample): [(t.context_ids, t.output_ids, t.logprobs, t.reward) for t in s.turns]
            for s in samples
        }
    assert {len(turns) for turns in played["inline"].values()} == {1, 2}
    for name, episodes in played.items():
        assert episodes == played["inline"], name


def test_supervised_fine_tuning_on_ranks_matches_one_process_which_can_resume_it(tmp_path: Path) -> None:
    both = {"checkpoint.every_rounds": 2, "eval.every_rounds": 2}
    layout = {"train.backend": "fsdp2", "cluster.placement": {"policy": "0-1", "rollout": "1"}}

    def run(name: str, settings: Settings, num_steps: int, resume: str = "none") -> Path:
        merged = {**both, **settings, "sft.steps": num_steps}
        return _run(tmp_path, name, merged, rounds=1, resume=resume, verb=commands.sft)

    alone = run("alone", {}, 4)
    run("group", layout, 2)
    group = run("group", {}, 4, resume="latest")
    _assert_alike(_lines(group), _lines(alone))
    mine, other = _weights(group, tmp_path), _weights(alone, tmp_path)
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.nightly
def test_passes_over_examples_on_ranks_match_one_process_which_can_resume_them(tmp_path: Path) -> None:
    """Steps of 4, 4 and 1 of nine examples: in the last one a rank has none."""
    source = {**_TASK, "response_key": "answer"}
    sft = {
        "data": [{**source, "size": 9}],
        "eval_data": [{**source, "seed": 100, "size": 5}],
        "rows_per_step": 4,
        "optimizer": {"lr": 1e-3, "eps": 1e-5},
    }
    both = {"data": {}, "eval.every_rounds": 3, "model.lora": {"rank": 2}}
    layout = {"train.backend": "fsdp2", "cluster.placement": {"policy": "0-1", "rollout": "1"}}

    def run(name: str, settings: Settings, epochs: int, resume: str = "none") -> Path:
        merged = copy.deepcopy({**both, **settings, "sft": sft | {"epochs": epochs}})
        return _run(tmp_path, name, merged, rounds=1, resume=resume, verb=commands.sft)

    alone = run("alone", {}, 2)
    run("group", layout, 1)
    group = run("group", {}, 2, resume="latest")
    assert [line["step"] for line in _lines(group)] == list(range(7))
    _assert_alike(_lines(group), _lines(alone))
    mine, other = _weights(group, tmp_path), _weights(alone, tmp_path)
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


PREFERENCES: dict[str, Settings] = {
    "policy": {},
    "adapters": {"model.lora": {"rank": 2}, "prefer.precompute_reference": True},
    "reward model": {"prefer.loss": "bradley_terry", "sft": None, "data": {}},
}


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "policy")) for name in PREFERENCES]
)
def test_preferences_learned_on_ranks_match_one_process_which_can_resume_them(
    tmp_path: Path, case: str
) -> None:
    rows = [{"prompt": f"{i} =", "chosen": str(i), "rejected": str(i * i + 10)} for i in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "file", "path": "pairs.jsonl"}
    prefer = {
        "data": [source],
        "eval_data": [source | {"name": "pairs"}],
        "pairs_per_step": 5,
        "optimizer": {"lr": 1e-3, "eps": 1e-5},
    }
    both = {"prefer": prefer, "checkpoint.every_rounds": 2, "eval.every_rounds": 2, **PREFERENCES[case]}
    roles = "policy" if case == "reward model" else "policy,reference"
    layout = {"train.backend": "fsdp2", "cluster.placement": {roles: "0-1", "rollout": "1"}}

    def run(name: str, settings: Settings, num_steps: int, resume: str = "none") -> Path:
        merged = copy.deepcopy({**both, **settings, "prefer.steps": num_steps})
        return _run(tmp_path, name, merged, rounds=1, resume=resume, verb=commands.prefer)

    alone = run("alone", {}, 4)
    run("group", layout, 2)
    group = run("group", {}, 4, resume="latest")
    _assert_alike(_lines(group), _lines(alone))
    mine, other = _weights(group, tmp_path), _weights(alone, tmp_path)
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.nightly
def test_critics_and_references_without_adapters_take_over_merged_weights_of_a_policy_on_ranks(
    tmp_path: Path,
) -> None:
    model = ModelConfig(build=BuildSpec.model_validate(BUILD))
    lm = load_policy(model, temperature=1.0, seed=7, device=torch.device("cpu"))
    save_pretrained(lm, load_tokenizer(model), tmp_path / "reference")
    settings = {
        "model.lora": {"rank": 4},
        "algorithm.advantage": "gae",
        "reference.path": str(tmp_path / "reference"),
        "reference.update_every_epochs": 1,
        "data.train": [{**_TASK, "size": 4}],
        "eval.every_rounds": 0,
    }
    alone = _run(tmp_path, "alone", settings, rounds=3)
    layout = {
        "train.backend": "fsdp2",
        "cluster.placement": {"policy,critic,reference": "0-1", "rollout": "1"},
    }
    group = _run(tmp_path, "group", {**settings, **layout}, rounds=3)
    _assert_alike(_lines(group), _lines(alone))
    kl = [line["policy/kl"] for line in _lines(alone) if "policy/kl" in line]
    # The folder's weights are far away at first; those of a round ago are near.
    assert min(kl[1:]) < 1e-2 * kl[0]


@pytest.mark.nightly
@WITH_VLLM
def test_an_engine_that_cannot_start_is_named_before_weights_wait_for_it(tmp_path: Path) -> None:
    settings = {
        "model.build": {**BUILD, "head_dim": 32, "max_positions": 256},
        "rollout.engine": {"kind": "vllm", "max_model_tokens": 8000},
        "cluster.placement": {"policy": "0", "rollout": "1"},
    }
    with pytest.raises(
        WorkerError, match=r"rollout worker 0 of 1 failed while in receivers\(\).*: EngineError: vLLM"
    ):
        _run(tmp_path, "unfit", settings, rounds=1)


@WITH_VLLM
@pytest.mark.nightly
def test_vllm_samples_from_the_merged_weights_of_adapters_on_ranks(tmp_path: Path) -> None:
    settings = {
        "model.build": {**BUILD, "head_dim": 32},  # vLLM's smallest on a CPU
        "model.lora": {"rank": 4},
        "train.backend": "fsdp2",
        "train.optimizer": {"lr": 2e-2},
        "rollout.engine": "vllm",
        "cluster.placement": {"policy": "0-1", "rollout": "2", "reference": "0-1"},
        "eval.every_rounds": 0,
    }
    lines = _lines(_run(tmp_path, "adapters", settings, rounds=3))
    moved = [line["policy/kl"] for line in lines if "policy/kl" in line]
    assert moved[-1] > 1e-3  # the adapters have changed the policy
    # Log-probs of the engine and the trainer, which adds adapters' products up in another order.
    assert max(line.get("policy/logprob_mismatch_max", 0.0) for line in lines) < 1e-3


@WITH_VLLM
def test_vllm_samples_while_the_policy_is_trained(tmp_path: Path) -> None:
    settings = {
        "model.build": {**BUILD, "head_dim": 32},
        "rollout.engine": "vllm",
        "pipeline.max_lag": 1,
        "pipeline.on_new_weights": "interrupt",
        "cluster.placement": {"policy": "0", "rollout": "1", "reference": "0"},
        "train.backend": "single",
        "eval.every_rounds": 0,
    }
    lines = _lines(_run(tmp_path, "pipelined", settings, rounds=4))[1:]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert max(line["pipeline/lag_max"] for line in lines) == 1
