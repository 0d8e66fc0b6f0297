"""How often the host waits for the device, and how many operators it launches: each wait leaves a GPU without
work."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fake_cuda import waits
from tests.native_engines import make_engine
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from braid.algorithms.policy_losses import POLICY_LOSSES
from braid.algorithms.policy_losses.ppo_clip import PpoClip
from braid.algorithms.recipes import RECIPES, Correction, Recipe
from braid.config.model import MlpSpec, ModelConfig
from braid.config.train import TrainConfig
from braid.models.base import TrainableModel
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_policy
from braid.models.mlp import MlpPolicy, MlpValue
from braid.models.value import ValueModel
from braid.rollout.engine import Request, Sampling
from braid.rollout.engines.native.engine import NativeEngine
from braid.rollout.engines.native.sampler import Sampler
from braid.training.backend import Loss
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, supervised_loss, value_loss_of
from braid.training.packing import grouped_micro_batches
from braid.types import ActionSpace, Row, Spaces
from braid.weights.fingerprint import check_synced, fingerprint, fingerprints

CUDA = torch.device("cuda")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"greedy": True},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_new_tokens": {"min_new_tokens": 90, "stop_token_ids": (5,)},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
}


@cache
def language_model(num_layers: int = 2) -> CausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "max_positions": 1024}
    config = ModelConfig.model_validate({"build": {"num_layers": num_layers, **sizes}})
    return load_policy(config, temperature=1.0, seed=0, device=CUDA)


def run_all(engine: NativeEngine, requests: Sequence[Request]) -> None:
    async def gather() -> None:
        await asyncio.gather(*(engine.generate(request) for request in requests))

    asyncio.run(gather())


def samples(num_tokens: int, **how: Any) -> list[Request]:
    """Four completions of one prompt."""
    how = {"min_new_tokens": num_tokens, **how} if "min_new_tokens" in how else how
    return [Request((3, 4, 5, 6), Sampling(max_new_tokens=num_tokens, **how), (i,)) for i in range(4)]


class Operators(TorchDispatchMode):
    """Counts operators on the device."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        self.num += any(x.is_cuda for x in tensors) and not func.is_view
        return out


@pytest.mark.parametrize("cuda_graphs", [True, False])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_decode_step_waits_once_whatever_the_sampling_settings(sampling: str, cuda_graphs: bool) -> None:
    how = SAMPLINGS[sampling]
    engine = make_engine(language_model(), max_running=8, cuda_graphs=cuda_graphs)
    run_all(engine, samples(15, **how))  # captures the graphs
    counts: list[int] = []
    for num_tokens in (5, 15):
        waits.clear()
        run_all(engine, samples(num_tokens, **how))
        counts.append(waits.total())
    assert counts == [5, 15]


def test_the_tokens_of_a_nucleus_beyond_the_candidates_are_those_of_a_sort() -> None:
    """Rows whose most probable tokens do not reach top_p are drawn again, with a second wait."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([5.0, 0.01, 5.0, 0.5, 5.0])[:, None]
    logits = torch.randn(5, 4096, generator=generator) * spread
    drawn = {}
    for device in ("cpu", "cuda"):
        sampler = Sampler(8, 4096, torch.device(device))
        for slot in range(5):
            sampling = Sampling(max_new_tokens=9, top_p=0.9, repetition_penalty=1.2, greedy=slot == 3)
            sampler.put(slot, sampling, (slot,), (1, 2, 3))
        on_device = logits.to(device)
        waits.clear()
        drawn[device] = [sampler.sample(on_device, 0) for _ in range(4)]
    assert waits.total() == 8
    for (tokens, logprobs), (expected, expected_logprobs) in zip(drawn["cuda"], drawn["cpu"], strict=True):
        assert tokens == expected
        # the same kernels on the same memory, but sums over other numbers of rows
        np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-6)


@pytest.mark.parametrize("sampling", ["plain", "all"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_prefill_waits_once_whatever_the_number_of_layers(num_layers: int, sampling: str) -> None:
    engine = make_engine(language_model(num_layers), max_running=8)
    prompts = [tuple(range(3, 8 + 9 * i)) for i in range(3)]

    def run_turn(turn: int) -> None:
        sampling_of = Sampling(max_new_tokens=1, **SAMPLINGS[sampling])
        run_all(
            engine,
            [
                Request(ids, sampling_of, (i, turn, k), (i, k))
                for i, ids in enumerate(prompts)
                for k in (0, 1)
            ],
        )

    run_turn(0)
    for turn in (1, 2):  # the second continues from the cache
        waits.clear()
        run_turn(turn)
        assert waits.total() == 1, waits
        assert len(engine._prefixes) == 6
        prompts = [(*ids, 7, 8, 9) for ids in prompts]


MOST_OPERATORS_OF_A_LAYER, MOST_OPERATORS_BESIDE_A_GRAPH = 30, 9
"""28 with transformers 5.19; a copy of the inputs, the sampler's operators, and a copy of the tokens."""


def test_a_decode_step_launches_a_few_operators_per_layer_and_a_graph_none() -> None:
    """Operators of a step of four sequences, by number of layers."""
    nums: dict[bool, list[int]] = {}
    for cuda_graphs in (False, True):
        for num_layers in (1, 2, 4):
            engine = make_engine(
                language_model(num_layers), max_running=8, cuda_graphs=cuda_graphs, compile="always"
            )
            run_all(engine, samples(15))
            counts = list[int]()
            for num_tokens in (5, 15):
                with Operators() as operators:
                    run_all(engine, samples(num_tokens))
                counts.append(operators.num)
            of_steps, rest = divmod(counts[1] - counts[0], 10)
            assert rest == 0
            nums.setdefault(cuda_graphs, []).append(of_steps)
    one, two, four = nums[False]
    assert four - two == 2 * (two - one)
    assert two - one <= MOST_OPERATORS_OF_A_LAYER
    assert len(set(nums[True])) == 1, "a replayed graph launches nothing for its layers"
    assert nums[True][0] <= MOST_OPERATORS_BESIDE_A_GRAPH


def text_rows(recipe: Recipe | None = None) -> list[Row]:
    """Rows with every field that a loss reads, four to a prompt, two turns each."""
    rng, rows = np.random.default_rng(0), list[Row]()
    for index in range(8):
        length = 24 + index % 5
        place = np.arange(length)
        decision = np.select([place < 8, place < 14, place < 16], [-1, 0, -1], 1).astype(np.int32)
        mask = decision >= 0
        ids = rng.integers(3, 60, length)
        ids[:8] = index // 4 + np.arange(3, 11)

        def field(mask: Any = mask) -> Any:
            return np.where(mask, rng.normal(-1, 0.1, len(mask)), 0).astype(np.float32)

        names = ["advantages", "old_logprobs", "behavior_logprobs", "values", "returns", "supervised_weights"]
        if recipe is not None and recipe.kl_coef > 0:
            names.append("ref_logprobs")
        fields = {name: field() for name in names}
        if recipe is not None and recipe.policy_loss.selects_tokens:
            fields["is_chosen"] = mask * (place % 3 == 0).astype(np.float32)
        rows.append(Row({"input_ids": ids}, mask, index // 4, index, fields=fields, decision=decision))
    return rows


def simulated_rows() -> list[Row]:
    """Episodes of eight chunks of two actions with two components each, and what follows the last."""
    rng = np.random.default_rng(0)
    rows = list[Row]()
    for index in range(8):
        fields = {
            name: rng.normal(-1, 0.1, 16).astype(np.float32)
            for name in ("advantages", "old_logprobs", "behavior_logprobs", "values", "returns")
        }
        rows.append(
            Row(
                {"actions": rng.normal(size=(16, 2)).astype(np.float32)}, np.ones(16, np.bool_), index // 4, index,
                fields=fields, decision=(np.arange(16) // 2).astype(np.int32),
                observations={"state": rng.normal(size=(9, 3)).astype(np.float32)},
            )
        )  # fmt: skip
    return rows


def waits_of_training(
    model: TrainableModel, rows: Sequence[Row], loss: Loss, **train: Any
) -> tuple[int, int]:
    """Waits of a step, and its micro-batches."""
    config = TrainConfig.model_validate({"optimizer": {"lr": 1e-3}, "micro_batch_tokens": 40, **train})
    backend = SingleBackend(model, config, total_steps=9, device=CUDA)
    weights = [1.0 / len(rows)] * len(rows)
    cuts = grouped_micro_batches(rows, 40, None, whole_trajectories=loss.whole_trajectories)
    waits.clear()
    assert not backend.train(rows, weights, loss).is_skipped
    return waits.total(), len(cuts)


CORRECTIONS = (
    Correction(level="token", mode="truncate", low=0.0, high=2.0),
    Correction(level="sequence", mode="mask_sequence", low=0.5, high=2.0),
)
LEVELS = Recipe(
    logprob_level="chunk",
    policy_loss=PpoClip(ratio_level="turn"),
    entropy_coef=0.1,
    entropy_level="chunk",
    kl_coef=0.1,
)
LOSSES: dict[str, Recipe] = {
    **{f"recipe {name}": recipe for name, recipe in RECIPES.items()},
    **{f"policy_loss {name}": Recipe(policy_loss=kind()) for name, kind in POLICY_LOSSES.items()},
    "levels": LEVELS,
    "corrections": replace(RECIPES["grpo"], corrections=CORRECTIONS, supervised_coef=0.1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_waits_once_and_its_micro_batches_never(name: str) -> None:
    recipe = LOSSES[name]
    num_waits, num_micro_batches = waits_of_training(language_model(), text_rows(recipe), policy_loss(recipe))
    assert num_micro_batches >= 3
    assert num_waits == 1, waits


KINDS = ("supervised", "checkpointed", "critic", "normalizing critic", "mlp", "mlp critic")


@pytest.mark.parametrize(
    ("kind", "autocast"),
    # PyTorch reads the number of tokens of each expert on the host, except for bf16
    [*((kind, autocast) for kind in KINDS for autocast in ("none", "bf16")), ("experts", "bf16")],
)
def test_no_kind_of_model_waits_in_a_micro_batch(kind: str, autocast: str) -> None:
    rows, recipe = text_rows(), RECIPES["ppo"]
    loss = supervised_loss() if kind == "supervised" else policy_loss(recipe)
    lm = language_model()
    model: TrainableModel = lm
    spaces = Spaces(3, ActionSpace("continuous", 2))
    spec = MlpSpec(hidden_sizes=(16,), num_action_chunks=2)
    num_of_step = 1
    lm.set_gradient_checkpointing(kind == "checkpointed")
    if kind == "experts":
        model = experts()
    elif "critic" in kind:
        loss = value_loss_of(recipe)
        if "mlp" in kind:
            model = MlpValue(spec, spaces, seed=0)
        else:
            model = ValueModel.copy_of(lm, normalizes="normalizing" in kind)
        num_of_step += 2 * ("normalizing" in kind)  # its moments before and after the step's returns
    elif kind == "mlp":
        model = MlpPolicy(spec, spaces, seed=0)
    if "mlp" in kind:
        rows = simulated_rows()
        model.module.to(CUDA)
    num_waits, num_micro_batches = waits_of_training(model, rows, loss, autocast=autocast)
    assert num_micro_batches >= 3
    assert num_waits == num_of_step, waits


def experts() -> CausalLM:
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    with CUDA:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return CausalLM(model.eval())


def test_inference_waits_once_per_micro_batch() -> None:
    rows = text_rows()
    config = TrainConfig.model_validate({"micro_batch_tokens": 70})
    backend = SingleBackend(language_model(), config, total_steps=0, device=CUDA)
    waits.clear()
    backend.infer(rows, frozenset({"logprobs"}))
    assert waits.total() == len(grouped_micro_batches(rows, 70, None)) >= 4


def test_a_check_of_weights_waits_once_per_model(tmp_path: Path) -> None:
    lm = language_model()
    weights = {name: tensor.detach() for name, tensor in lm.named_weights()}
    weights |= {
        "large": torch.randn(300, 301, device=CUDA),
        "odd": torch.ones(5, dtype=torch.bfloat16, device=CUDA)[1:],
    }
    expected = [fingerprint(tensor.cpu()) for tensor in weights.values()]
    waits.clear()
    assert fingerprints(weights.values()) == expected
    assert waits.total() == 1
    waits.clear()
    check_synced(weights.items(), [(n, t.clone()) for n, t in weights.items()], version=1, folder=tmp_path)
    assert waits.total() == 2
