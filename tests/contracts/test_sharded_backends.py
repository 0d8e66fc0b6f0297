"""Every sharded layout matches single-process training.

One group of two processes runs all layouts in turn; a last one has four.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.test_indexed import SIZES
from tests.models.test_stateful import hybrid
from tests.on_ranks import OnRanks
from tests.pictures import model_of, picture, vision_of
from tests.rounding import rounding
from transformers import AutoConfig, AutoModelForCausalLM

from braid.algorithms.aggregate import row_weights
from braid.algorithms.recipes import FULL_DIVERGENCES, RECIPES
from braid.cluster.ray import RayGroup, connect, disconnect
from braid.config.data import ImageLimits
from braid.config.model import LoraConfig, ModelConfig
from braid.config.roles import TrainingRole
from braid.config.schema import RunConfig
from braid.errors import ModelError
from braid.models.causal_lm import CausalLM
from braid.models.loading import load_tokenizer, save_pretrained
from braid.models.roles import make_critic, make_policy, make_reference
from braid.models.vision import load_vision
from braid.training.backend import Loss, StepReport
from braid.training.backends import BACKENDS
from braid.training.backends.single.backend import SingleBackend
from braid.training.losses import policy_loss, value_loss_of
from braid.training.worker import Rank
from braid.types import Row

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("workers")]

CPU = torch.device("cpu")
LEAVES = {"weights": True, "gradients": True, "optimizer": True}
ON_CPUS = [name for name, kind in BACKENDS.items() if kind.is_sharded and not kind.needs_gpu]
LAYOUTS: dict[str, dict[str, Any]] = {
    **{name: {"backend": name} for name in ON_CPUS},
    "fsdp2, gradients travel in the last pass only": {
        "backend": {"kind": "fsdp2", "sync_last_micro_batch_only": True},
    },
    "fsdp2, replicas of one": {"backend": {"kind": "fsdp2", "size": 1}},
    "fsdp2 in host memory": {"backend": {"kind": "fsdp2", "cpu_offload": True}},
    "fsdp2, sequences shared": {"backend": "fsdp2", "sequence_parallel": 2},
    "fsdp, gradients and optimizer": {"backend": {"kind": "fsdp", "sharding": "grad_op"}},
    "fsdp, nothing sharded": {"backend": {"kind": "fsdp", "sharding": "none"}},
    "fsdp, sequences shared": {"backend": "fsdp", "sequence_parallel": 2},
    "deepspeed, secondary partitions": {"backend": {"kind": "deepspeed", "hpz_partition_size": 2}},
    "deepspeed in host memory": {"backend": {"kind": "deepspeed", "cpu_offload": True}},
    "deepspeed, away between steps": {"backend": "deepspeed", "offload": LEAVES},
    "deepspeed, sequences shared": {"backend": "deepspeed", "sequence_parallel": 2},
}
RARE = (
    "deepspeed in host memory", "deepspeed, away between steps", "deepspeed, secondary partitions",
    "fsdp, nothing sharded", "fsdp, sequences shared",
    "fsdp2, gradients travel in the last pass only", "fsdp2, replicas of one",
)  # fmt: skip
"""Layouts of `make nightly`."""
OF_FOUR = {
    "fsdp2, shards of two, sequences shared": {
        "backend": {"kind": "fsdp2", "size": 2},
        "sequence_parallel": 2,
    },
    "deepspeed, sequences shared, layers computed again": {
        "backend": "deepspeed",
        "sequence_parallel": 2,
        "gradient_checkpointing": True,
    },
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    connect(_config({}).cluster, num_processes=4)
    yield
    disconnect()


@pytest.fixture(scope="module")
def pair(cluster: None) -> Iterator[RayGroup]:
    yield from _ranks(2)


@pytest.fixture(scope="module")
def four(cluster: None) -> Iterator[RayGroup]:
    yield from _ranks(4)


def _ranks(size: int) -> Iterator[RayGroup]:
    config = _config({})
    group = RayGroup("policy", size, config.cluster).make(partial(Rank, config=config))
    yield group
    group.close()


def _config(train: dict[str, Any]) -> RunConfig:
    # Sizes that two and four ranks cannot share evenly, and one head of keys and values for two of queries.
    # AdamW divides small gradients, and their roundings, by their own size; a large eps bounds that.
    build = {
        "hidden_size": 62,
        "intermediate_size": 93,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 10,
    }
    train = {"optimizer": {"lr": 1e-3, "eps": 1e-5, "value_lr": 1e-2}, "micro_batch_tokens": 96, **train}
    return RunConfig.model_validate(
        {
            "model": {"build": build},
            "train": train,
            "critic": {"normalize_values": True},
            "run": {"device": "cpu"},
        }
    )


def _group(workers: RayGroup, role: TrainingRole, train: dict[str, Any]) -> OnRanks:
    return OnRanks(workers, role, _config(train))


def _single(role: str) -> SingleBackend:
    config = _config({})
    model = make_policy(config, CPU) if role == "policy" else make_critic(config, CPU)
    return SingleBackend(model, config.train, total_steps=9, device=CPU)


def _rows() -> list[Row]:
    """Ragged rows, so that ranks get unlike numbers of micro-batches."""
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group in range(5):
        prompt = rng.integers(0, 90, rng.integers(5, 9))
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(0, 90, rng.integers(3, 40))])
            rows.append(_row_of(ids, len(prompt), group, len(rows), rng))
    return rows


def _row_of(ids: Any, num_prompt: int, group: int, index: int, rng: np.random.Generator) -> Row:
    mask = np.arange(len(ids)) >= num_prompt
    fields = {
        name: rng.normal(size=len(ids)).astype(np.float32) * mask
        for name in ("advantages", "values", "returns")
    }
    return Row({"input_ids": ids}, mask, group, index, fields=fields)


LOSSES: dict[TrainingRole, Loss] = {
    "policy": policy_loss(RECIPES["grpo"]),
    "critic": value_loss_of(RECIPES["ppo"]),
}
OUTPUTS = {"policy": frozenset({"logprobs", "entropy"}), "critic": frozenset({"values"})}


def _train(
    backend: OnRanks | SingleBackend, loss: Loss, num_steps: int = 1, rows: list[Row] | None = None
) -> list[StepReport]:
    rows = rows or _rows()
    weights = row_weights(
        [row.num_tokens for row in rows], [row.group for row in rows], mode="token_mean", constant=None
    )
    return [backend.train(rows, weights, loss) for _ in range(num_steps)]


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * (name in RARE)) for name in LAYOUTS]
)
def test_a_layout_of_two_matches_one_process(pair: RayGroup, layout: str) -> None:
    _holds_as_one_process(pair, LAYOUTS[layout])


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.nightly] * ("deepspeed" in name)) for name in OF_FOUR]
)
def test_a_layout_of_four_matches_one_process(four: RayGroup, layout: str) -> None:
    _holds_as_one_process(four, OF_FOUR[layout])


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("deepspeed", "untied"),
        ("fsdp", "adapters"),
        ("fsdp2", "tied"),
        ("fsdp2, sequences shared", "untied"),
        *(
            pytest.param(name, "untied", marks=pytest.mark.nightly)
            for name in LAYOUTS
            if name.startswith("fsdp") and name != "fsdp2, sequences shared"
        ),
        pytest.param("fsdp", "tied", marks=pytest.mark.nightly),
        pytest.param("fsdp2", "adapters", marks=pytest.mark.nightly),
    ],
)
def test_the_full_kl_of_a_layout_is_that_of_one_process(pair: RayGroup, layout: str, model: str) -> None:
    config = _config(LAYOUTS[layout])
    made = ModelConfig(
        build=config.model.build.model_copy(update={"tie_embeddings": model == "tied"}),
        lora=LoraConfig(rank=2) if model == "adapters" else None,
    )
    config, other = (
        config.model_copy(update={"model": made, "run": config.run.model_copy(update={"seed": seed})})
        for seed in (0, 1)
    )
    group, reference = OnRanks(pair, "policy", config), OnRanks(pair, "reference", other, 0)
    try:
        train = _config({}).train
        single = SingleBackend(make_policy(config, CPU), train, total_steps=9, device=CPU)
        single.use_reference(
            SingleBackend(make_reference(other, CPU), train, total_steps=0, device=CPU).logits
        )
        for estimator, divergence in FULL_DIVERGENCES.items():
            _infer_alike(group, single, frozenset({divergence}))
            recipe = replace(RECIPES["grpo"], kl_coef=10.0, kl_estimator=estimator)
            _learn_alike(group, single, policy_loss(recipe))
    finally:
        group.close()
        reference.close()


FROM_FILES: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp2 in host memory": {"backend": {"kind": "fsdp2", "cpu_offload": True}},
    "fsdp": {"backend": "fsdp"},
    "fsdp, nothing sharded": {"backend": {"kind": "fsdp", "sharding": "none"}},
    "deepspeed": {"backend": "deepspeed"},
}


@pytest.mark.parametrize(
    ("layout", "role", "model"),
    [
        *((layout, "policy", "plain") for layout in FROM_FILES),
        *((layout, "policy", "tied") for layout in ("fsdp2", "deepspeed")),
        *((layout, "policy", "adapters") for layout in ("fsdp", "fsdp2", "deepspeed")),
        ("fsdp2", "critic", "plain"),
        ("fsdp2", "reference", "plain"),
    ],
)
def test_only_the_first_rank_reads_a_models_files(
    pair: RayGroup, tmp_path: Path, layout: str, role: TrainingRole, model: str
) -> None:
    made = _config(FROM_FILES[layout])
    spec = made.model.build.model_copy(update={"tie_embeddings": model == "tied"})
    lm = make_policy(made.model_copy(update={"model": ModelConfig(build=spec)}), CPU)
    save_pretrained(lm, load_tokenizer(made.model), tmp_path)
    lora = LoraConfig(rank=2) if model == "adapters" else None
    config = made.model_copy(update={"model": ModelConfig(path=str(tmp_path), lora=lora)})

    num_steps = 0 if role == "reference" else 9
    group = OnRanks(pair, role, config, num_steps)
    try:
        make = {"policy": make_policy, "critic": make_critic, "reference": make_reference}[role]
        single = SingleBackend(make(config, CPU), made.train, total_steps=num_steps, device=CPU)
        _infer_alike(group, single, OUTPUTS["critic" if role == "critic" else "policy"])
        _assert_close(group.full_weights(), single.full_weights(), atol=0.0)
    finally:
        group.close()


@pytest.fixture(scope="module")
def with_sinks(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A gpt-oss model with a different sink per head."""
    folder = tmp_path_factory.mktemp("gpt_oss")
    tokenizer = load_tokenizer(_config({}).model)
    sizes = {"hidden_size": 60, "intermediate_size": 28, "num_hidden_layers": 2, "head_dim": 10}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    more = {"num_local_experts": 2, "num_experts_per_tok": 2, "rope_parameters": rope, "pad_token_id": None}
    config = AutoConfig.for_model("gpt_oss", vocab_size=96, **sizes, **heads, **more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data = torch.tensor([-2.0, 3.0, 0.5, 5.0])  # next to scores of about 0
    save_pretrained(CausalLM(model), tokenizer, folder)
    return ModelConfig(path=str(folder))


@pytest.mark.parametrize("backend", ["fsdp", "fsdp2"])
def test_attention_sinks_are_sharded_with_their_heads(
    pair: RayGroup, with_sinks: ModelConfig, backend: str
) -> None:
    config = _config({"backend": backend, "sequence_parallel": 2}).model_copy(update={"model": with_sinks})
    group = OnRanks(pair, "policy", config)
    try:
        single = SingleBackend(make_policy(config, CPU), _config({}).train, total_steps=9, device=CPU)
        before = {name: tensor.clone() for name, tensor in single.full_weights().items()}
        _infer_alike(group, single, OUTPUTS["policy"])
        _learn_alike(group, single, LOSSES["policy"])
        after = single.full_weights()
        sinks = [name for name in before if name.endswith("sinks")]
        assert len(sinks) == 2
        assert all((after[name] != before[name]).all() for name in sinks), "every head's sink is trained"
    finally:
        group.close()


OF_HYBRIDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"backend": "fsdp2"},
    "fsdp": {"backend": "fsdp"},
    **{
        f"{name}, sequences shared, layers computed again": {
            "backend": name,
            "sequence_parallel": 2,
            "gradient_checkpointing": True,
        }
        for name in ("fsdp2", "fsdp")
    },
}


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny models by architecture: a gated delta net, Mamba 2, Mamba 1, and an indexer.
    Their weights are as transformers initialises them, since a gated delta net with large ones amplifies
    rounding."""
    tokenizer, folders = load_tokenizer(_config({}).model), dict[str, str]()
    for architecture in ("qwen3_next", "bamba", "jamba", "glm_moe_dsa"):
        folder = tmp_path_factory.mktemp(architecture)
        config = hybrid(architecture, **(SIZES if architecture == "glm_moe_dsa" else {})).config
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        save_pretrained(CausalLM(model), tokenizer, folder)
        folders[architecture] = str(folder)
    return folders


EVERY_TIME = [("qwen3_next", "fsdp2"), ("bamba", "fsdp, sequences shared, layers computed again")]
"""Hybrids on layouts that `make slow` has; the others are of `make nightly`."""


@pytest.mark.parametrize(
    ("architecture", "layout", "lora"),
    [
        *(
            pytest.param(name, layout, None, marks=[pytest.mark.nightly] * ((name, layout) not in EVERY_TIME))
            for name in ("qwen3_next", "bamba", "jamba")
            for layout in OF_HYBRIDS
        ),
        ("glm_moe_dsa", "fsdp2", None),
        pytest.param("glm_moe_dsa", "fsdp", None, marks=pytest.mark.nightly),
        *(
            pytest.param("bamba", layout, {"rank": 2}, marks=pytest.mark.nightly)
            for layout in ("fsdp2", "fsdp")
        ),
    ],
)
def test_layers_with_a_state_or_an_indexer_are_sharded(
    pair: RayGroup, hybrids: dict[str, str], architecture: str, layout: str, lora: dict[str, Any] | None
) -> None:
    model = ModelConfig.model_validate({"path": hybrids[architecture], "lora": lora})
    config = _config(OF_HYBRIDS[layout]).model_copy(update={"model": model})
    single = SingleBackend(make_policy(config, CPU), _config({}).train, total_steps=9, device=CPU)
    group = OnRanks(pair, "policy", config)
    try:
        _infer_alike(group, single, OUTPUTS["policy"])
        _learn_alike(group, single, LOSSES["policy"])
        _go_on_alike(group, single, LOSSES["policy"])
    finally:
        group.close()


WITH_IMAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        f"{name}, {part} of the tower trained": ({"backend": name}, {"vision": {"train": part, "lr": 5e-3}})
        for name in ON_CPUS
        for part in ("none", "projector", "all")
    },
    "fsdp2, adapters": ({"backend": "fsdp2"}, {"vision": {}, "lora": {"rank": 2}}),
    "fsdp2 in host memory, gradients travel in the last pass only, layers computed again": (
        {
            "backend": {"kind": "fsdp2", "cpu_offload": True, "sync_last_micro_batch_only": True},
            "gradient_checkpointing": True,
        },
        {"vision": {"train": "all"}},
    ),
    "fsdp2, replicas of one": (
        {"backend": {"kind": "fsdp2", "size": 1}},
        {"vision": {"train": "projector"}},
    ),
    "fsdp, nothing sharded": (
        {"backend": {"kind": "fsdp", "sharding": "none"}},
        {"vision": {"train": "all"}},
    ),
}


@pytest.mark.parametrize(
    ("layout", "role"),
    [
        *((name, "policy") for name in WITH_IMAGES),
        *((f"{name}, all of the tower trained", "critic") for name in ON_CPUS),
    ],
)
def test_ranks_with_and_without_images_match_one_process(
    pair: RayGroup, layout: str, role: TrainingRole
) -> None:
    """One rank, both, or neither has images. Where neither has, a trained tower stays as it is."""
    train, model = WITH_IMAGES[layout]
    made = _config(train)
    spec = made.model.build.model_dump() | {"architecture": "qwen3_vl", "head_dim": 16, "tower": TOWER}
    changes = {"model": ModelConfig.model_validate({"build": spec, **model})}
    config = made.model_copy(update=changes)
    make = make_policy if role == "policy" else make_critic
    single = SingleBackend(make(config, CPU), made.train, total_steps=9, device=CPU)
    group = OnRanks(pair, role, config, balances=False)
    try:
        for images in ([(0,), (0, 1), (), ()], [(0, 1), (), (2,), ()], [(), (), (), ()], [(), (3,), (), ()]):
            rows = _rows_with_images(config.model, images)
            _infer_alike(group, single, OUTPUTS[role], rows)
            _learn_alike(group, single, LOSSES[role], rows, 1)
    finally:
        group.close()


TOWER = {"image_size": 16, "hidden_size": 24, "intermediate_size": 30, "num_heads": 2, "depth": 2}


def _rows_with_images(model: ModelConfig, images: list[tuple[int, ...]]) -> list[Row]:
    """Three ragged rows for each prompt with these images."""
    vision = load_vision(model, ImageLimits(), load_tokenizer(model))
    assert vision is not None
    rng = np.random.default_rng(0)
    rows: list[Row] = []
    for group, numbers in enumerate(images):
        text = [int(token) for token in rng.integers(5, 80, 4)]
        text[2:2] = [vision.placeholder] * len(numbers)
        prompt, placed = vision.expand(text, [picture(number) for number in numbers])
        for _ in range(3):
            ids = np.concatenate([prompt, rng.integers(5, 80, rng.integers(3, 30))])
            row = _row_of(ids, len(prompt), group, len(rows), rng)
            rows.append(replace(row, images=placed))
    return rows


@pytest.mark.parametrize("family", ["llava", "gemma4"])
def test_deepspeed_refuses_images_of_models_that_would_differ(family: str) -> None:
    policy = CausalLM(model_of(family))
    policy.vision = vision_of(family)
    with pytest.raises(ModelError, match=f"deepspeed cannot train a model of type {family} with images"):
        BACKENDS["deepspeed"]().build(policy, _config({}).train, total_steps=1, device=CPU)


def test_deepspeed_refuses_layers_with_a_state(hybrids: dict[str, str]) -> None:
    config = _config({"backend": "deepspeed"})
    policy = make_policy(config.model_copy(update={"model": ModelConfig(path=hybrids["bamba"])}), CPU)
    with pytest.raises(ModelError, match="deepspeed cannot train models with layers that carry a state"):
        BACKENDS["deepspeed"]().build(policy, config.train, total_steps=1, device=CPU)


def _holds_as_one_process(workers: RayGroup, train: dict[str, Any]) -> None:
    for role, loss in LOSSES.items():
        single, group = _single(role), _group(workers, role, train)
        try:
            _infer_alike(group, single, OUTPUTS[role])
            _learn_alike(group, single, loss)
            _leave_steps_out_alike(group, loss)
            _go_on_alike(group, single, loss)
        finally:
            group.close()


def _infer_alike(group: OnRanks, single: SingleBackend, outputs: Any, rows: list[Row] | None = None) -> None:
    # 2 layers: sums over 62 and 93 features and up to 48 positions; numbers of size 1
    tolerance, rows = rounding(2 * (62 + 93 + 48)), rows or _rows()
    for mine, other in zip(group.infer(rows, outputs), single.infer(rows, outputs), strict=True):
        for name in outputs:
            np.testing.assert_allclose(mine[name], other[name], atol=tolerance)


def _learn_alike(
    group: OnRanks, single: SingleBackend, loss: Loss, rows: list[Row] | None = None, num_steps: int = 3
) -> None:
    reports = (_train(backend, loss, num_steps, rows) for backend in (group, single))
    for mine, other in zip(*reports, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-6)
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-5)
        assert mine.checks["loss_weight"] == pytest.approx(other.checks["loss_weight"], rel=1e-5)
        same = ("lr", "num_tokens", "is_skipped", "is_stopped")
        assert [getattr(mine, name) for name in same] == [getattr(other, name) for name in same]
        assert mine.metrics.keys() == other.metrics.keys()
        for name, (total, count) in mine.metrics.items():
            assert count == other.metrics[name][1]
            assert total == pytest.approx(other.metrics[name][0], rel=1e-5, abs=1e-4)
        assert mine.maxima == pytest.approx(other.maxima, rel=1e-5)
    _assert_close(group.full_weights(), single.full_weights())


def _leave_steps_out_alike(group: OnRanks, loss: Loss) -> None:
    """A step that is not finite, or stopped by its loss, does not change weights but counts for the
    schedule."""
    before = copy.deepcopy(group.state())
    spoiled = _rows()
    for name in ("advantages", "returns"):
        spoiled[-1].fields[name][-1] = np.nan
    (report,) = _train(group, loss, rows=spoiled)
    assert report.is_skipped
    metric = next(iter(report.metrics))
    (report,) = _train(group, Loss(loss.outputs, loss.compute, {metric: -1e9}))
    assert report.is_stopped
    after = group.state()
    assert after["num_steps"] == before["num_steps"] + 2
    for name, tensor in before["weights"].items():
        if "moments" in name or "value_head" in name:
            continue  # the head keeps its values in other units after it has seen returns
        torch.testing.assert_close(after["weights"][name], tensor, rtol=0, atol=0)
    for name, moments in before["optimizer"].items():
        for key, tensor in moments.items():
            torch.testing.assert_close(after["optimizer"][name][key], tensor, rtol=0, atol=0)
    group.load(before)


def _go_on_alike(group: OnRanks, single: SingleBackend, loss: Loss) -> None:
    """States equal those of one process, and each resumes from the other's."""
    group.to_host()
    _assert_close(group.full_weights(), single.full_weights())
    mine, other = copy.deepcopy(group.state()), copy.deepcopy(single.state())
    group.to_device()
    assert {k: v for k, v in mine.items() if k not in ("weights", "optimizer")} == {
        k: v for k, v in other.items() if k not in ("weights", "optimizer")
    }
    _assert_close(mine["weights"], other["weights"])
    assert mine["optimizer"].keys() == other["optimizer"].keys()
    for name, moments in other["optimizer"].items():
        _assert_close(mine["optimizer"][name], moments)
    _train(single, loss)
    unbroken = {name: tensor.clone() for name, tensor in single.full_weights().items()}
    group.load(other)
    _train(group, loss)
    _assert_close(group.full_weights(), unbroken)
    single.load(mine)
    _train(single, loss)
    _assert_close(single.full_weights(), unbroken)
    group.load_weights(mine["weights"])
    _assert_close(group.full_weights(), mine["weights"], atol=0.0)


def _assert_close(mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    """Within a hundredth of one step of AdamW."""
    assert mine.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(
            mine[name], tensor, rtol=1e-5 if atol else 0.0, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
