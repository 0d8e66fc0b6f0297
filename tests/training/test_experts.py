"""Adapters of routed experts on ranks: the steps and merged weights of one process, or a refusal; and their
routers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.forks import run_ranks
from transformers import AutoConfig, AutoModelForCausalLM

from braid.config.schema import RunConfig
from braid.errors import ModelError
from braid.models.causal_lm import CausalLM
from braid.models.loading import save_pretrained
from braid.models.roles import make_policy
from braid.models.tokenizer import character_tokenizer
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import supervised_loss
from braid.types import Row

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def _config(folder: Path, backend: str) -> RunConfig:
    lora = {"rank": 2, "alpha": 5.0}
    train = {"backend": backend, "optimizer": {"lr": 0.01, "eps": 1e-4}}
    return RunConfig.model_validate({"model": {"path": str(folder), "lora": lora}, "train": train})


def _save(folder: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    tokens = {"vocab_size": 96, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}
    config = AutoConfig.for_model("qwen3_moe", num_key_value_heads=1, **sizes, **experts, **tokens)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    save_pretrained(CausalLM(model), character_tokenizer("".join(map(chr, range(33, 117)))), folder)


def _check(rank: int, folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model = folder / "model"
    rows = [
        Row({"input_ids": np.random.default_rng(i).integers(3, 60, 9)}, np.arange(9) > 2, i, i)
        for i in range(4)
    ]
    for backend in ("fsdp2", "deepspeed"):
        config = _config(model, backend)
        single = SingleBackend(make_policy(config, CPU), config.train, total_steps=3, device=CPU)
        policy, train = make_policy(config, CPU, rank=rank), config.train
        sharded = train.backend.build(policy, train, total_steps=3, device=CPU)
        for _ in range(3):
            one = single.train(rows, [1 / 24] * 4, supervised_loss())
            other = sharded.train(rows[2 * rank : 2 * rank + 2], [1 / 24] * 2, supervised_loss(), rows[0])
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        merged, expected = sharded.full_weights(merged=True), single.full_weights(merged=True)
        for name, tensor in expected.items() if rank == 0 else ():
            torch.testing.assert_close(merged[name], tensor, rtol=1e-5, atol=1e-5)
    config = _config(model, "fsdp")
    with pytest.raises(ModelError, match=r"adapters of routed experts; set train\.backend=fsdp2"):
        config.train.backend.build(
            make_policy(config, CPU, rank=rank), config.train, total_steps=3, device=CPU
        )
    dist.destroy_process_group()


def test_adapters_of_experts_are_trained_on_ranks_as_in_one_process(tmp_path: Path) -> None:
    _save(tmp_path / "model")
    run_ranks(_check, tmp_path)


def _check_routers(rank: int, folder: Path) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    random = np.random.default_rng(0)
    rows: list[Row] = []
    for i, num in enumerate((9, 12, 7, 9)):
        chosen = random.integers(0, 3, (num, 2, 1)) + np.arange(2)
        inputs = {"input_ids": random.integers(3, 60, num), "experts": chosen.astype(np.int8)}
        rows.append(Row(inputs, np.arange(num) > 2, i, i))
    settings = {"optimizer": {"lr": 0.01, "eps": 1e-4}, "micro_batch_rows": 1}
    routers = {"router_replay": "rollout", "router_aux_coef": 0.5}
    weight = 1 / sum(row.num_tokens for row in rows)
    for sharding in (
        {"backend": "fsdp2"},
        {"backend": "fsdp2", "sequence_parallel": 2},
        {"backend": "deepspeed"},
    ):
        train = settings | routers | sharding
        config = RunConfig.model_validate({"model": {"path": str(folder / "model")}, "train": train})
        single = SingleBackend(make_policy(config, CPU), config.train, total_steps=2, device=CPU)
        policy = make_policy(config, CPU, rank=rank)
        sharded = config.train.backend.build(policy, config.train, total_steps=2, device=CPU)
        mine = rows if "sequence_parallel" in sharding else rows[3 * rank : 3 * rank + 3]  # 3 and 1
        for part, row in zip(sharded.infer(mine, frozenset({"experts"}), rows[0]), mine, strict=True):
            np.testing.assert_array_equal(part["experts"], row.inputs["experts"])
        for _ in range(2):
            one = single.train(rows, [weight] * 4, supervised_loss())
            other = sharded.train(mine, [weight] * len(mine), supervised_loss(), rows[0])
            assert other.loss == pytest.approx(one.loss, rel=1e-5)
            assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
            for name in ("router/load_max", "router/entropy", "router/aux_loss"):
                assert other.metrics[name] == pytest.approx(one.metrics[name], rel=1e-5)
        expected = single.full_weights()
        for name, tensor in sharded.full_weights().items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)
    dist.destroy_process_group()


def test_routers_are_replayed_and_balanced_on_ranks_as_in_one_process(tmp_path: Path) -> None:
    _save(tmp_path / "model")
    run_ranks(_check_routers, tmp_path)
