"""The native engine of a run computes as its training does."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.native_engines import make_engine

import braid_kernels
from braid.config.load import load_config
from braid.errors import ModelError
from braid.models.kernels import check_attention
from braid.models.roles import make_policy
from braid.plan import machine
from braid.rollout.engine import Completion, Request, Sampling
from braid.rollout.engines.native.cache import DecodeAttention
from braid.trainer import commands
from braid.trainer.collectors import native_engine

BASE = [
    "model.build={num_layers: 1}",
    "run.max_rounds=1",
    "data.train=[{kind: procedural, generator: chain_sum, size: 100}]",
    "reward.parts=[{kind: exact}]",
]
FLOAT, HALF = torch.float32, torch.bfloat16
SHORT, LONG = "rollout.prompts_per_round=1", "rollout.prompts_per_round=100000"


@pytest.mark.parametrize(
    ("overrides", "linear", "norm"),
    [
        ([], FLOAT, FLOAT),
        (["train.autocast=bf16", SHORT], HALF, FLOAT),
        (["train.autocast=bf16", "rollout.engine.dtype=fp32"], FLOAT, FLOAT),
        (["train.backend=fsdp2", "train.autocast=bf16", SHORT], HALF, HALF),
        (["train.backend=fsdp2", "train.backend.param_dtype=bf16", SHORT], HALF, HALF),
    ],
)
def test_the_engine_computes_as_training_does(
    overrides: list[str], linear: torch.dtype, norm: torch.dtype
) -> None:
    config = load_config(None, [*BASE, *overrides]).config
    lm = make_policy(config, torch.device("cpu"))
    engine = native_engine(config, str, lm)
    weights = dict(engine.named_parameters())
    assert weights["model.layers.0.mlp.down_proj.weight"].dtype == linear
    assert weights["model.norm.weight"].dtype == norm
    assert engine.shares_weights == (linear == FLOAT)


@pytest.mark.parametrize(
    ("overrides", "flags", "dtype"),
    [
        ([], "fma avx512_bf16", FLOAT),
        ([], "avx512_bf16 amx_bf16", HALF),
        (["rollout.engine.compile=never"], "avx512_bf16", HALF),
        (["rollout.engine.dtype=bf16"], "avx512_bf16", HALF),
    ],
)
def test_under_autocast_the_weights_themselves_sample_where_compiled_steps_are_faster(
    overrides: list[str],
    flags: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(machine, "cpu_info", lambda _: flags)
    config = load_config(None, [*BASE, "train.autocast=bf16", LONG, *overrides]).config
    lm = make_policy(config, torch.device("cpu"))
    engine = native_engine(config, str, lm)
    assert dict(engine.named_parameters())["model.layers.0.mlp.down_proj.weight"].dtype == dtype
    assert engine.shares_weights == (dtype == FLOAT)
    assert (engine._decoder._attention is not DecodeAttention) == (dtype == FLOAT)
    assert ("samples in fp32, training computes in bf16" in caplog.text) == (dtype == FLOAT)


@pytest.mark.parametrize(
    ("overrides", "is_compiled", "said"),
    [
        ([SHORT], False, "not compiled: rounds are too short for that"),
        (
            [SHORT, "run.max_rounds=1000000"],
            False,
            "not compiled: rounds are too short",
        ),
        ([LONG], True, "compiled by Numba"),
        (["rollout.engine.compile=always"], True, "compiled by Numba"),
        (["rollout.engine.compile=never", LONG], False, None),
        (["rollout.engine.dtype=bf16", LONG], False, None),
    ],
)
def test_decoding_is_compiled_where_a_round_samples_enough(
    overrides: list[str], is_compiled: bool, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    config = load_config(None, [*BASE, *overrides]).config
    engine = native_engine(config, str, make_policy(config, torch.device("cpu")))
    assert (engine._decoder._attention is not DecodeAttention) == is_compiled
    assert f"decode steps are {said}" in caplog.text if said else "decode steps" not in caplog.text


def _without_package(patch: pytest.MonkeyPatch) -> str:
    patch.setitem(sys.modules, "braid_kernels", None)
    return "the package braid_kernels is not installed; install braid-rl anew"


def _without_numba(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(braid_kernels, "find_spec", lambda name: None)
    return "the package numba is not installed"


@pytest.mark.parametrize("without", [_without_package, _without_numba])
def test_a_machine_that_cannot_compile_samples_without_or_says_why(
    without: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = without(monkeypatch)
    for mode in ("auto", "always"):
        config = load_config(None, [*BASE, LONG, f"rollout.engine.compile={mode}"]).config
        lm = make_policy(config, torch.device("cpu"))
        if mode == "auto":
            assert native_engine(config, str, lm)._decoder._attention is DecodeAttention
            assert lm.attention == "auto"
        else:
            with pytest.raises(ModelError, match=f"compile=always, but {reason}"):
                native_engine(config, str, lm)
    with pytest.raises(ModelError, match=f"model.attention=compiled .*, but {reason}"):
        check_attention("compiled", torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("without", [_without_package, _without_numba])
def test_the_engine_samples_the_same_without_kernels(
    without: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each completion's tokens, with log-probs that differ by rounding."""
    config = load_config(None, BASE).config
    requests = [Request((5, 6, 7, last), Sampling(12), (0, last), (1,)) for last in (8, 8, 9)]

    def completions(compile: str) -> list[Completion]:
        engine = make_engine(make_policy(config, torch.device("cpu")), compile=compile)

        async def gather() -> list[Completion]:
            return await asyncio.gather(*map(engine.generate, requests))

        return asyncio.run(gather())

    compiled = completions("always")
    without(monkeypatch)
    for plain, fast, absent in zip(completions("never"), compiled, completions("always"), strict=True):
        assert plain.token_ids == fast.token_ids == absent.token_ids
        assert plain.logprobs == absent.logprobs != fast.logprobs
        assert fast.logprobs == pytest.approx(plain.logprobs, abs=2e-5)


@pytest.mark.slow
def test_the_frozen_lake_plays_all_its_turns_with_compiled_steps(tmp_path: Path) -> None:
    """Episodes of several turns whose prompts are equal, with answers of one token."""
    example = Path(__file__).parents[2] / "examples/frozen_lake.yaml"
    settings = [
        "rollout.engine.compile=always",
        "run.max_rounds=2",
        f"run.output_dir={tmp_path}",
        "eval.target=null",
    ]
    smaller = ["rollout.group_size=8", "env.eval_episodes=4", "report.console=none", "run.device=cpu"]
    run = commands.train(load_config(example, [*settings, *smaller])).run_dir
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        assert line["status/invalid"] == 0
        assert line["status/finished"] + line["status/truncated"] == 32
