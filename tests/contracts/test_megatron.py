"""Megatron-core matches single-process training in every layout; its checkpoints can be resumed by every
backend.

Its workers run with tests/megatron_cpu on their path: the CPU in place of its GPU. Two run all layouts in
turn.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.contracts.megatron_ranks import SuccessiveRanks
from tests.on_ranks import OnRanks
from tests.rounding import rounding
from transformers import AutoConfig, AutoModelForCausalLM

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import RECIPES
from braid.cluster.ray import RayGroup, connect, disconnect
from braid.config.load import load_config
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.models.base import Output
from braid.models.loading import load_policy
from braid.models.roles import make_critic
from braid.trainer import commands
from braid.training.backend import Loss, StepReport
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, value_loss_of
from braid.types import Row

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

CPU = torch.device("cpu")
CPU_FOLDER = Path(__file__).parents[1] / "megatron_cpu"
BUILD = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 4, "num_heads": 4, "head_dim": 16}
LLAMA = {**BUILD, "architecture": "llama", "tie_embeddings": False}
QWEN2 = {**BUILD, "architecture": "qwen2"}
LAYOUTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "tensor": (LLAMA, {"tensor_parallel": 2}),
    "tensor and sequence": (BUILD, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pipeline": (BUILD, {"pipeline_parallel": 2, "recompute_granularity": "full"}),
    "interleaved pipeline": (QWEN2, {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "context": (BUILD, {"context_parallel": 2, "recompute_granularity": "selective"}),
    "data": (
        BUILD,
        {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20_000},
    ),
    "expert": (None, {"expert_parallel": 2}),
}
"""The model's sizes (None: a mixture of experts) and train.backend."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(CPU_FOLDER), prepend=os.pathsep)
        connect(_config(BUILD).cluster, num_processes=2)
        yield
        disconnect()


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[RayGroup]:
    config = _config(BUILD)
    group = RayGroup("policy", 2, config.cluster).make(partial(SuccessiveRanks, config=config))
    yield group
    group.close()


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose layers choose 2 of 4 experts, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("mixture")
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=91,
        hidden_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _config(model: dict[str, Any] | Path, critic: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    train = {"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 64, **train}
    source = {"path": str(model)} if isinstance(model, Path) else {"build": model}
    return RunConfig.model_validate(
        {"model": source, "train": train, "critic": critic or {}, "run": {"device": "cpu"}}
    )


def _single(config: RunConfig) -> SingleBackend:
    model = load_policy(config.model, temperature=1.0, seed=0, device=CPU)
    return SingleBackend(model, config.train, total_steps=9, device=CPU)


@contextmanager
def _on(pair: RayGroup, role: TrainingRole, config: RunConfig) -> Iterator[OnRanks]:
    """A model on the ranks, for the block."""
    group = OnRanks(pair, role, config)
    yield group
    group.close()
    pair.call(SuccessiveRanks.leave)


def _rows() -> list[Row]:
    """Ragged rows, so that ranks get unlike numbers of micro-batches, whose sizes no number of ranks
    divides."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group in range(5):
        prompt = rng.integers(0, 90, rng.integers(5, 9))
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(0, 90, rng.integers(3, 40))])
            mask = np.arange(len(ids)) >= len(prompt)
            fields = {
                name: rng.normal(size=len(ids)).astype(np.float32) * mask
                for name in ("advantages", "values", "returns")
            }
            rows.append(Row({"input_ids": ids}, mask, group, len(rows), fields=fields))
    return rows


def _poisoned() -> list[Row]:
    rows = _rows()
    rows[2].fields["advantages"][-1] = np.nan
    return rows


GRPO = policy_loss(RECIPES["grpo"])
VALUES: frozenset[Output] = frozenset({"values"})


def _train(
    backend: OnRanks | SingleBackend,
    num_steps: int,
    rows: list[Row] | None = None,
    loss: Loss = GRPO,
) -> list[StepReport]:
    rows = rows or _rows()
    weights = row_weights(
        [row.num_tokens for row in rows], [row.group for row in rows], mode="token_mean", constant=None
    )
    return [backend.train(rows, weights, loss) for _ in range(num_steps)]


def _assert_close(mine: dict[str, Any], other: dict[str, Any]) -> None:
    """Within two hundredths of one AdamW step, which divides small gradients, and their roundings, by their
    own size."""
    assert list(mine) == list(other)
    for name, tensor in other.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=1e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_matches_one_process_and_either_resumes_from_the_other(
    layout: str, pair: RayGroup, mixture: Path
) -> None:
    # 4 layers: sums over 64 and 96 features and up to 48 positions; numbers of size 1
    tolerance = rounding(4 * (64 + 96 + 48))
    build, megatron = LAYOUTS[layout]
    model = build or mixture
    single = _single(_config(model))
    with _on(pair, "policy", _config(model, backend={"kind": "megatron", **megatron})) as group:
        rows = _rows()
        outputs: frozenset[Output] = frozenset({"logprobs", "entropy"})
        for mine, other in zip(group.infer(rows, outputs), single.infer(rows, outputs), strict=True):
            for name in outputs:
                np.testing.assert_allclose(mine[name], other[name], atol=tolerance)
        assert group.state()["optimizer"] == {}  # a checkpoint before the first step changes nothing
        assert all(_train(backend, 1, _poisoned())[0].is_skipped for backend in (group, single))
        for mine, other in zip(_train(group, 3), _train(single, 3), strict=True):
            assert mine.loss == pytest.approx(other.loss, abs=1e-6)
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
            assert mine.checks["loss_weight"] == pytest.approx(1.0, rel=1e-6)  # of a mean over tokens
            assert (mine.lr, mine.num_tokens, mine.is_skipped) == (
                other.lr,
                other.num_tokens,
                other.is_skipped,
            )
            assert mine.metrics.keys() == other.metrics.keys()
            for name, (total, count) in mine.metrics.items():
                assert count == other.metrics[name][1]
                assert total == pytest.approx(other.metrics[name][0], rel=1e-5, abs=1e-4)
        _assert_close(group.full_weights(), dict(single.named_weights()))
        alone = _single(_config(model))
        alone.load(copy.deepcopy(group.state()))
        _train(alone, 1)
        group.load(copy.deepcopy(alone.state()))
        _train(group, 1)
        _train(single, 2)
        _assert_close(group.full_weights(), dict(single.named_weights()))


def test_layers_recomputed_in_autocast_get_the_gradients_of_kept_ones(pair: RayGroup) -> None:
    norms: list[list[float]] = []
    for megatron in ({}, {"recompute_granularity": "full", "recompute_method": "block"}):
        config = _config(
            {**BUILD, "num_layers": 2}, backend={"kind": "megatron", **megatron}, autocast="fp16"
        )
        with _on(pair, "policy", config) as group:
            norms.append([report.grad_norm for report in _train(group, 2)])
    kept, recomputed = norms
    assert recomputed == kept  # of the same operations on the same numbers


CRITICS: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "tensor": (LLAMA, True, {"tensor_parallel": 2}),
    "tensor and sequence": (BUILD, False, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pipeline": (BUILD, True, {"pipeline_parallel": 2}),
    "context": (BUILD, True, {"context_parallel": 2}),
}
"""The model's sizes, whether values are normalized, and train.backend."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name != "tensor and sequence")) for name in CRITICS],
)
def test_a_critic_learns_the_values_of_one_process(layout: str, pair: RayGroup) -> None:
    # as of policies: float32 rounding of the same sums
    build, normalizes, megatron = CRITICS[layout]
    critic = {"normalize_values": normalizes, "head_name": "score"}
    optimizer = {"lr": 1e-3, "value_lr": 1e-2, "eps": 1e-5}
    config = _config(build, critic, backend={"kind": "megatron", **megatron}, optimizer=optimizer)
    single = SingleBackend(make_critic(config, CPU), config.train, total_steps=9, device=CPU)
    loss = value_loss_of(RECIPES["ppo"])
    with _on(pair, "critic", config) as group:
        for mine, other in zip(_train(group, 3, loss=loss), _train(single, 3, loss=loss), strict=True):
            assert mine.loss == pytest.approx(other.loss, rel=1e-5)
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        for mine, other in zip(group.infer(_rows(), VALUES), single.infer(_rows(), VALUES), strict=True):
            np.testing.assert_allclose(mine["values"], other["values"], atol=1e-5)
        _assert_close(group.full_weights(), dict(single.named_weights()))
        state = copy.deepcopy(single.state())
        assert state["weights"].keys() == group.state()["weights"].keys()
        _train(single, 1, loss=loss)
        group.load(state)
        _train(group, 1, loss=loss)
        _assert_close(group.full_weights(), dict(single.named_weights()))


@pytest.mark.nightly
def test_a_run_can_be_resumed_with_another_backend(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braid.plan.available.count_gpus", lambda: 2)  # for which the workers take the CPU
    task = {
        "kind": "procedural",
        "generator": "chain_sum",
        "params": {"min_terms": 2, "max_terms": 2},
        "size": 8,
    }
    config: dict[str, Any] = {
        "run": {"name": "run", "output_dir": str(tmp_path), "device": "cpu", "num_threads": 1},
        "model": {"build": {**BUILD, "num_layers": 2}},
        "data": {"train": [task], "max_prompt_tokens": 128},
        "reward": {"parts": [{"kind": "exact"}]},
        "rollout": {"prompts_per_round": 2, "group_size": 4, "sampling": {"max_new_tokens": 8}},
        "algorithm": {"kl_coef": 0.01},
        "train": {"backend": {"kind": "megatron", "pipeline_parallel": 2}, "optimizer": {"lr": 1e-3}},
        "cluster": {"placement": {"policy,reference": "0-1", "rollout": "1"}},
        "checkpoint": {"every_rounds": 1},
        "report": {"console": "none", "tensorboard": False},
    }
    path = tmp_path / "run.yaml"
    for rounds, train in ((1, {}), (2, {"backend": "single"})):
        config["run"] |= {"max_rounds": rounds, "resume": "none" if rounds == 1 else "latest"}
        config["train"] |= train
        config["cluster"] |= {} if rounds == 1 else {"placement": {}}
        path.write_text(yaml.safe_dump(config))
        commands.train(load_config(path))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    norms = [line["policy/grad_norm"] for line in lines if "policy/grad_norm" in line]
    assert len(norms) == 2
    assert np.isfinite(norms).all()


def test_without_a_gpu_megatron_suggests_other_backends() -> None:
    code = (
        "import torch.distributed as dist; dist.init_process_group('gloo', "
        "init_method='tcp://127.0.0.1:0', rank=0, world_size=1)\nfrom braid.training.backends.megatron.kind "
        "import Megatron; from braid.training.backends.megatron.ranks import join\njoin(Megatron())"
    )
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert "TrainingError: train.backend=megatron needs a CUDA device (" in last
    assert "use fsdp2, fsdp or deepspeed on CPUs" in last
