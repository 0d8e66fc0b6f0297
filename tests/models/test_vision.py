"""Packed rows with images give the log-probs and gradients of the plain model's, row by row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.pictures import FAMILIES, model_of, picture, vision_of

from braid.config.schema import RunConfig
from braid.errors import ModelError
from braid.models.causal_lm import CausalLM
from braid.models.roles import make_critic, make_policy
from braid.models.selfcheck import check_images
from braid.models.value import ValueModel
from braid.models.vision import Vision, modules_of_tower
from braid.training.packing import pack
from braid.types import Image, Placed, Row

PICTURES = [picture(seed) for seed in range(4)]
RESERVED = list({token for family in FAMILIES for token in vision_of(family).reserved})


def _conversations(vision: Vision) -> list[tuple[list[int], list[Image]]]:
    """Rows with 0, 1 and 2 images, two of which share a prompt with one."""
    rng = np.random.default_rng(0)

    def text(num: int) -> list[int]:
        return rng.integers(3, 30, num).tolist()

    mark = vision.placeholder
    prompt = [*text(5), mark, *text(4)]
    return [
        (text(17), []),
        ([*prompt, *text(9)], [PICTURES[1]]),
        ([*prompt, *text(6)], [PICTURES[1]]),
        ([*text(3), mark, *text(2), mark, *text(8)], [PICTURES[0], PICTURES[2]]),
        ([*text(2), mark, *text(7), mark, *text(5)], [PICTURES[1], PICTURES[3]]),
    ]


def _row(ids: Sequence[int], images: tuple[Placed, ...], num_prompt: int) -> Row:
    mask = (np.arange(len(ids)) >= num_prompt) & ~np.isin(ids, RESERVED)
    fields = {"behavior_logprobs": np.zeros(len(ids), np.float32)}
    return Row({"input_ids": np.array(ids)}, mask, group=0, trajectory=0, fields=fields, images=images)


def _plain_logprobs(model: Any, vision: Vision, ids: Sequence[int], images: Sequence[Placed]) -> torch.Tensor:
    """Log-probs [L - 1] of a row in the model's own forward pass, from its processor's inputs."""
    x = torch.tensor([ids])
    kwargs = vision.plain_inputs(x, images)
    if hasattr(model.model, "rope_deltas"):
        model.model.rope_deltas = None
    logits = model(input_ids=x, use_cache=False, **kwargs).logits[0].float()
    is_reserved = torch.zeros(logits.shape[-1], dtype=torch.bool)
    is_reserved[list(vision.reserved)] = True  # the policy never writes them
    logits = logits.masked_fill(is_reserved, float("-inf")).log_softmax(-1)
    return logits[:-1].gather(1, x[0, 1:, None])[:, 0]


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_with_images_are_those_of_the_plain_model(family: str, recomputes: bool) -> None:
    model, vision = model_of(family), vision_of(family)
    plain = copy.deepcopy(model)
    lm = CausalLM(model)
    lm.vision = vision
    lm.set_gradient_checkpointing(recomputes)
    rows = []
    for number, (ids, images) in enumerate(_conversations(vision)):
        expanded, placed = vision.expand(ids, images)
        end = placed[0].start + placed[0].num + 4 if number in (1, 2) else 1
        rows.append(_row(expanded, placed, end))
    batch = pack(rows, torch.device("cpu"))
    assert sum(num for _, num in batch.shared), "two rows share a prompt with an image"
    got = lm.forward(batch, frozenset({"logprobs"}))["logprobs"]
    weights = torch.rand(len(got), generator=torch.Generator().manual_seed(0))
    (got * weights).sum().backward()
    loss: Any = 0
    for row, part, weight in zip(rows, got.split(batch.stored), weights.split(batch.stored), strict=True):
        mask = torch.from_numpy(row.mask)
        written = mask[len(row) - len(part) :]
        expected = _plain_logprobs(plain, vision, row.inputs["input_ids"].tolist(), row.images)[mask[1:]]
        # a gated delta net amplifies rounding, and Gemma 4's embeddings are large
        bound = {"qwen3_5": 1e-4, "gemma4": 4e-5}.get(family, 1e-5)
        assert (part[written] - expected).abs().max() < bound
        loss = loss + (expected * weight[written]).sum()
    loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            assert mine.grad is not None, name
            scale = theirs.grad.abs().max() + 1e-2
            assert (mine.grad.to_dense() - theirs.grad).abs().max() / scale < 1e-3, name
    tower = [p.grad for name, p in model.named_parameters() if "vis" in name]
    assert any(grad is not None and grad.abs().sum() > 0 for grad in tower)


def test_an_image_goes_through_the_tower_once_per_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows have it, in shared prompts or in others."""
    lm = CausalLM(model_of("qwen3_vl"))
    lm.vision = vision_of("qwen3_vl")
    backbone: Any = lm.backbone
    encode, encoded = type(backbone).get_image_features, list[int]()

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        encoded.append(len(kwargs["image_grid_thw"]))
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(backbone), "get_image_features", counted)
    conversations = [lm.vision.expand(*one) for one in _conversations(lm.vision)]
    rows = [_row(ids, placed, 1) for ids, placed in conversations]
    assert sum(len(row.images) for row in rows) == 6, "four different ones"
    lm.forward(pack(rows, lm.device), frozenset({"logprobs"}))["logprobs"].sum().backward()
    assert encoded == [4], "once, and not again in the backward pass"
    lm.forward(pack(rows[:1], lm.device), frozenset({"logprobs"}))
    assert encoded == [4], "nothing to read in rows of text"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_that_no_row_has_gives_the_weights_that_one_reaches_a_gradient_of_0(family: str) -> None:
    model, vision = model_of(family), vision_of(family)
    lm = CausalLM(model)
    lm.vision = vision
    tower = modules_of_tower(model)

    def trained() -> dict[str, torch.Tensor]:
        grads = {name: p.grad for name, p in model.named_parameters() if name.rpartition(".")[0] in tower}
        model.zero_grad()
        return {name: grad for name, grad in grads.items() if grad is not None}

    ids, placed = vision.expand([5, vision.placeholder, 6, 7, 8], [picture(1)])
    batch = pack([_row(ids, placed, len(ids) - 2)], torch.device("cpu"))
    lm.forward(batch, frozenset({"logprobs"}))["logprobs"].sum().backward()
    reached = trained()
    plain = pack([_row([5, 6, 7], (), 1)], torch.device("cpu"))
    before = lm.forward(plain, frozenset({"logprobs"}))["logprobs"]
    after = lm.forward(replace(plain, runs_tower=True), frozenset({"logprobs"}))["logprobs"]
    assert torch.equal(before, after)
    after.sum().backward()
    unseen = trained()
    assert unseen.keys() == reached.keys()
    assert not any(grad.any() for grad in unseen.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_another_image_changes_the_log_probs(family: str) -> None:
    model, vision = model_of(family), vision_of(family)
    lm = CausalLM(model)
    lm.vision = vision
    logprobs = []
    for image in (PICTURES[0], picture(4)):
        ids, placed = vision.expand([5, vision.placeholder, 6, 7, 8], [image])
        batch = pack([_row(ids, placed, len(ids) - 2)], torch.device("cpu"))
        logprobs.append(lm.forward(batch, frozenset({"logprobs"}))["logprobs"])
    assert (logprobs[0] - logprobs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_the_load_check_accepts_a_model_and_refuses_one_that_is_wrong(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = CausalLM(model_of(family))
    lm.vision = vision_of(family)
    check_images(lm, lm.vision)
    backbone: Any = lm.backbone
    encode = type(backbone).get_image_features

    def blind(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = encode(self, *args, **kwargs)
        pooled = out.pooler_output
        out.pooler_output = (
            0 * pooled if isinstance(pooled, torch.Tensor) else tuple(0 * one for one in pooled)
        )
        if getattr(out, "deepstack_features", None):
            out.deepstack_features = [tuple(0 * one for one in layer) for layer in out.deepstack_features]
        return out

    monkeypatch.setattr(type(backbone), "get_image_features", blind)
    with pytest.raises(ModelError, match="does not see images"):
        check_images(lm, lm.vision)
    monkeypatch.undo()
    if lm.vision._family.has_grid:  # the positions after an image are off by one
        coordinates = Vision.coordinates
        monkeypatch.setattr(
            Vision,
            "coordinates",
            lambda self, length, images: coordinates(self, length, images) + (np.arange(length + 1) > 12),
        )
        with pytest.raises(ModelError, match="packed rows that have images"):
            check_images(lm, lm.vision)


def test_a_critic_trains_what_the_config_says_of_the_tower() -> None:
    model = {"build": {"architecture": "qwen3_vl"}, "vision": {"train": "projector"}}
    config = RunConfig.model_validate({"model": model, "run": {"device": "cpu"}})
    policy = make_policy(config, torch.device("cpu"))
    for critic in (
        make_critic(config, torch.device("cpu"), policy),
        make_critic(config, torch.device("cpu")),
    ):
        trained = {name for name, p in critic.module.named_parameters() if p.requires_grad}
        assert any("merger" in name for name in trained)
        assert not any("blocks" in name for name in trained)
        assert any("language_model" in name for name in trained)


def test_a_critic_sees_the_images_of_its_rows() -> None:
    lm = CausalLM(model_of("qwen3_vl"))
    lm.vision = vision_of("qwen3_vl")
    critic = ValueModel.copy_of(lm)
    torch.nn.init.normal_(critic.value_head.weight)
    rows = []
    for ids, images in _conversations(lm.vision):
        expanded, placed = lm.vision.expand(ids, images)
        rows.append(_row(expanded, placed, 1))
    batch = pack(rows, torch.device("cpu"))
    with torch.no_grad():
        together = critic.forward(batch, frozenset({"values"}))["values"].split(batch.stored)
        for row, values in zip(rows, together, strict=True):
            alone = critic.forward(pack([row], torch.device("cpu")), frozenset({"values"}))["values"]
            assert (values - alone[-len(values) :]).abs().max() < 1e-4
    swapped = rows[1].images[0]._replace(image=picture(5))
    row = _row(rows[1].inputs["input_ids"].tolist(), (swapped,), 1)
    with torch.no_grad():
        values = [
            critic.forward(pack([one], torch.device("cpu")), frozenset({"values"}))["values"]
            for one in (rows[1], row)
        ]
    assert (values[0] - values[1]).abs().max() > 1e-3
