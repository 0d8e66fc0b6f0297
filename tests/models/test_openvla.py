"""OpenVLA and OpenVLA-OFT: layout, images, actions, and the forward pass."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.vla_checkpoints import DINO, SIGLIP, STATISTICS, tiny_openvla, tiny_raw, tiny_tokenizer
from tests.rounding import assert_near, rounding
from torch import Tensor
from transformers import AutoConfig, DynamicCache

from braid.config.model import VlaConfig
from braid.errors import ModelError
from braid.models.vla.actions import bin_centers, bins_of, range_of, values_of
from braid.models.vla.openvla import (
    Checkpoint,
    OpenVla,
    load_openvla,
    openvla_prompt,
    save_openvla,
    visible_keys,
)
from braid.models.vla.vision import prepared

PROMPTS = torch.tensor([[-1, -1, 5, 6, 3], [7, 8, 9, 10, 3]])
PUBLISHED = {
    "model_type": "openvla",
    "timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],
    "use_fused_vision_backbone": True,
    "image_sizes": [224, 224],
    "n_action_bins": 256,
    "pad_to_multiple_of": 64,
    "text_config": {"model_type": "llama", "vocab_size": 32064, "pad_token_id": 32000},
}


def _norm(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def _linear(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _tower(
    pixels: Tensor, w: dict[str, Tensor], name: str, heads: int, patch: int, num_prefix: int
) -> Tensor:
    """One image [3, h, w] -> [N, width], from the weights alone."""
    w = {key.removeprefix(f"{name}."): value for key, value in w.items() if key.startswith(f"{name}.")}
    rows = range(0, pixels.shape[1], patch)
    cut = torch.stack([pixels[:, y : y + patch, x : x + patch].flatten() for y in rows for x in rows])
    x = cut @ w["patch_embed.proj.weight"].flatten(1).T + w["patch_embed.proj.bias"] + w["pos_embed"][0]
    if num_prefix:
        x = torch.cat([w["cls_token"][0], w["reg_token"][0], x])
    depth = 1 + max(int(key.split(".")[1]) for key in w if key.startswith("blocks."))
    for n in range(depth - 1):
        block = f"blocks.{n}"
        q, k, v = _linear(_norm(x, w, f"{block}.norm1"), w, f"{block}.attn.qkv").chunk(3, dim=-1)
        size = q.shape[-1] // heads
        out = []
        for head in range(heads):
            part = slice(head * size, (head + 1) * size)
            out.append((q[:, part] @ k[:, part].T / math.sqrt(size)).softmax(-1) @ v[:, part])
        x = x + w.get(f"{block}.ls1.scale_factor", 1.0) * _linear(
            torch.cat(out, dim=-1), w, f"{block}.attn.proj"
        )
        inner = _gelu(_linear(_norm(x, w, f"{block}.norm2"), w, f"{block}.mlp.fc1"))
        x = x + w.get(f"{block}.ls2.scale_factor", 1.0) * _linear(inner, w, f"{block}.mlp.fc2")
    return x[num_prefix:]


def _rotated(x: Tensor, theta: float = 10000.0) -> Tensor:
    """[N, d] with the rotary embedding of positions 0 to N - 1."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
    a, b = x[:, :half], x[:, half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _llama(x: Tensor, w: dict[str, Tensor], *, is_causal: bool, heads: int = 4, kv_heads: int = 2) -> Tensor:
    """One sequence without padding [N, D] -> [N, D]."""
    w = {k.removeprefix("language_model.model."): v for k, v in w.items()}
    size = x.shape[-1] // heads
    hidden = torch.ones(len(x), len(x)).triu(1).bool() & is_causal
    for n in range(2):
        layer = f"layers.{n}"
        y = _rms(x, w[f"{layer}.input_layernorm.weight"])
        q, k, v = (_linear(y, w, f"{layer}.self_attn.{name}_proj") for name in "qkv")
        out = []
        for head in range(heads):
            columns = slice(head * size, (head + 1) * size)
            group = head * kv_heads // heads
            shared = slice(group * size, (group + 1) * size)
            scores = _rotated(q[:, columns]) @ _rotated(k[:, shared]).T / math.sqrt(size)
            out.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v[:, shared])
        x = x + _linear(torch.cat(out, dim=-1), w, f"{layer}.self_attn.o_proj")
        y = _rms(x, w[f"{layer}.post_attention_layernorm.weight"])
        gate = _linear(y, w, f"{layer}.mlp.gate_proj")
        inner = gate * gate.sigmoid() * _linear(y, w, f"{layer}.mlp.up_proj")
        x = x + _linear(inner, w, f"{layer}.mlp.down_proj")
    return _rms(x, w["norm.weight"])


def _prefix(images: list[Tensor], prompt: Tensor, w: dict[str, Tensor], *, fused: bool) -> Tensor:
    """Embeddings before the action tokens of one observation, from the weights alone."""
    patches = []
    for image in images:
        pixels = image.permute(2, 0, 1) / 255
        mean, std = (torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        half = (pixels - 0.5) / 0.5
        if fused:
            dino = _tower((pixels - mean) / std, w, "vision_backbone.featurizer", DINO.heads, 8, 3)
            siglip = _tower(half, w, "vision_backbone.fused_featurizer", SIGLIP.heads, 8, 0)
            patches.append(torch.cat([dino, siglip], dim=-1))
        else:
            patches.append(_tower(half, w, "vision_backbone.featurizer", SIGLIP.heads, 8, 0))
    x = _gelu(_linear(torch.cat(patches), w, "projector.fc1"))
    x = _linear(x, w, "projector.fc2")
    if fused:
        x = _linear(_gelu(x), w, "projector.fc3")
    embedding = w["language_model.model.embed_tokens.weight"]
    return torch.cat([embedding[1:2], x, embedding[prompt[prompt >= 0]]])


def _images(num: int = 2, size: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (2, size, size, 3), dtype=torch.uint8, generator=generator) for _ in range(num)
    ]


@pytest.mark.parametrize(("fused", "num_images"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("form", ["openvla", "rlinf", "official"])
def test_forward_pass_is_that_of_the_weights(tmp_path: Path, fused: bool, num_images: int, form: str) -> None:
    """Attention is causal for OpenVLA, and bidirectional for both forms of OFT; only `official` has an end
    token."""
    tiny_openvla(tmp_path, fused=fused)
    model = load_openvla(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    images, bins = _images(num_images), torch.tensor([[3, 255, 0, 77], [9, 8, 1, 2]])
    with torch.no_grad():
        prefix, mask = model.prefix(images, PROMPTS, None, center_crop=False)
        if form == "openvla":
            states = model.causal_states(prefix, mask, bins)
        else:
            states = model.parallel_states(prefix, mask, 4, has_stop=form == "official")
        logits = model.action_logits(states)
    w = model.state_dict()
    embedding, first_id = w["language_model.model.embed_tokens.weight"], 256 + 48 - 8 - 256
    for row in range(2):
        before = _prefix([image[row].float() for image in images], PROMPTS[row], w, fused=fused)
        if form == "openvla":
            after = embedding[bins[row, :3] + first_id]
        else:
            after = torch.cat([torch.zeros(4, 32), embedding[2:3]])[: 5 if form == "official" else 4]
        hidden = _llama(torch.cat([before, after]), w, is_causal=form == "openvla")[len(before) - 1 :][:4]
        plain = hidden @ w["language_model.lm_head.weight"][first_id : first_id + 256].T
        # sums of at most 64 terms in each of about 30 layers of sums
        assert_near(logits[row], plain, rounding(30 * 64), form)


def test_mask_is_what_the_form_says() -> None:
    mask = torch.tensor([[True, False, True, True]])
    causal = [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert visible_keys(mask, is_causal=True)[0, 0].int().tolist() == causal
    assert visible_keys(mask, is_causal=False)[0, 0].int().tolist() == [[1, 0, 1, 1]] * 4


def test_writing_token_by_token_gives_the_states_of_one_pass(tmp_path: Path) -> None:
    model = tiny_openvla(tmp_path)
    bins = torch.tensor([[3, 255, 0, 77], [9, 8, 1, 2]])
    with torch.no_grad():
        prefix, mask = model.prefix(_images(), PROMPTS, None, center_crop=False)
        cache = DynamicCache()
        steps = [model.next_state(prefix, mask, bins[:, :n], cache) for n in range(4)]
        assert_near(torch.stack(steps, dim=1), model.causal_states(prefix, mask, bins), rounding(30 * 64))


def test_padding_changes_nothing(tmp_path: Path) -> None:
    """The prompt of the first row is shorter; alone, it has no padding."""
    model = tiny_openvla(tmp_path)
    images = _images()
    with torch.no_grad():
        both = model.parallel_states(
            *model.prefix(images, PROMPTS, None, center_crop=True), 4, has_stop=False
        )
        alone = model.prefix([image[:1] for image in images], PROMPTS[:1], None, center_crop=True)
        assert alone[1].all()
        assert_near(both[:1], model.parallel_states(*alone, 4, has_stop=False), rounding(30 * 64))


def test_proprioception_is_one_more_position(tmp_path: Path) -> None:
    tiny_openvla(tmp_path, proprio_size=2)
    assert (tmp_path / "proprio_projector--0_checkpoint.pt").is_file()
    model = load_openvla(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), use_proprio=True)
    state, w = torch.tensor([[0.5, -0.5], [1.0, 0.0]]), model.state_dict()
    with torch.no_grad():
        without, _ = model.prefix(_images(), PROMPTS, None, center_crop=False)
        with_state, mask = model.prefix(_images(), PROMPTS, state, center_crop=False)
    num_before = 1 + 2 * 9
    expected = _linear(_gelu(_linear(state, w, "proprio_projector.fc1")), w, "proprio_projector.fc2")
    torch.testing.assert_close(with_state[:, num_before], expected)
    others = [n for n in range(with_state.shape[1]) if n != num_before]
    assert torch.equal(with_state[:, others], without)
    assert mask.shape == with_state.shape[:2]


def test_saved_folder_loads_with_the_same_weights(tmp_path: Path) -> None:
    model = tiny_openvla(tmp_path / "a")
    loaded = load_openvla(str(tmp_path / "a"), dtype=torch.float32, device=torch.device("cpu"))
    save_openvla(loaded.state_dict(), loaded.checkpoint, tiny_tokenizer(), tmp_path / "b")
    again = load_openvla(str(tmp_path / "b"), dtype=torch.bfloat16, device=torch.device("cpu")).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
        assert torch.equal(again[name], tensor.bfloat16()), name
    trained = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not [name for name in trained if "attn_pool" in name or "blocks.2." in name]


def test_published_config_has_the_published_shapes() -> None:
    with torch.device("meta"):
        model = OpenVla(Checkpoint.parse(PUBLISHED, "test"))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    dino, siglip = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
    expected = {
        f"{dino}cls_token": (1, 1, 1024),
        f"{dino}reg_token": (1, 4, 1024),
        f"{dino}pos_embed": (1, 256, 1024),
        f"{dino}patch_embed.proj.weight": (1024, 3, 14, 14),
        f"{dino}blocks.23.attn.qkv.weight": (3072, 1024),
        f"{dino}blocks.0.ls1.scale_factor": (1024,),
        f"{dino}blocks.0.mlp.fc1.weight": (4096, 1024),
        f"{dino}norm.bias": (1024,),
        f"{siglip}pos_embed": (1, 256, 1152),
        f"{siglip}blocks.26.attn.qkv.bias": (3456,),
        f"{siglip}blocks.26.mlp.fc1.weight": (4304, 1152),
        f"{siglip}attn_pool.latent": (1, 1, 1152),
        f"{siglip}attn_pool.kv.weight": (2304, 1152),
        f"{siglip}attn_pool.mlp.fc2.weight": (1152, 4304),
        "projector.fc1.weight": (8704, 2176),
        "projector.fc2.weight": (4096, 8704),
        "projector.fc3.bias": (4096,),
        "language_model.lm_head.weight": (32064, 4096),
        "language_model.model.layers.31.mlp.down_proj.weight": (4096, 11008),
    }
    assert {name: shapes.get(name) for name in expected} == expected
    assert f"{dino}blocks.24.norm1.weight" not in shapes
    assert f"{siglip}cls_token" not in shapes
    assert sum(math.prod(shape) for shape in shapes.values()) == pytest.approx(7.54e9, rel=5e-3)
    assert (model.action_ids.start, model.action_ids.stop) == (31744, 32000)


def test_images_are_resized_then_cropped_to_90_percent_of_the_area() -> None:
    """A horizontal ramp stays one; the crop's outermost pixels lie (1 - sqrt(0.9)) / 2 inside."""
    ramp = torch.arange(101).expand(101, 101)[:, :, None].expand(-1, -1, 3).to(torch.uint8)[None, None]
    whole = prepared(ramp, 101, center_crop=False)[0, 0, 0, 0] * 255
    cropped = prepared(ramp, 101, center_crop=True)[0, 0, 0, 0] * 255
    assert whole.tolist() == pytest.approx(list(range(101)))
    assert (round(float(cropped[0])), round(float(cropped[-1]))) == (3, 97)
    assert prepared(ramp, 24, center_crop=True).shape == (1, 1, 3, 24, 24)


def test_tokens_count_down_and_decode_as_published() -> None:
    """token = V - digitize(a), and centers[clip(V - token - 1, 0, 254)] back."""
    values = np.array([-1.0, -0.999, 0.0, 0.5, 1.0])
    ids = 31744 + bins_of(values, 256)
    assert ids.tolist() == [32000 - int(np.digitize(a, np.linspace(-1, 1, 256))) for a in values]
    assert (ids[0], ids[-1]) == (31999, 31744)
    decoded = values_of(ids - 31744, 256)
    assert np.abs(decoded - values).max() <= 1 / 255 + 1e-9
    assert values_of(np.array([0]), 256) == values_of(np.array([1]), 256) == bin_centers(256)[-1]


def test_actions_are_unnormalized_where_the_mask_says() -> None:
    bounds = range_of(STATISTICS, VlaConfig(unnorm_key="toy"), size=3)
    np.testing.assert_allclose(bounds.unnormalize(np.array([[-1, 1, 0.3]])), [[-0.5, 3.0, 0.3]], atol=1e-7)
    np.testing.assert_allclose(bounds.normalize(np.array([[0.0, 9.0, 0.3]])), [[0.0, 1.0, 0.3]], atol=1e-7)
    widest = range_of(STATISTICS, VlaConfig(normalization="bounds"))
    assert (widest.low[1], widest.high[1]) == (-2.0, 4.0)


@pytest.mark.parametrize(
    ("config", "size", "named"),
    [
        ({"unnorm_key": "tuy"}, 3, r"model\.vla\.unnorm_key=tuy: .*set it to one of: toy_no_noops"),
        ({"unnorm_key": "toy"}, 7, "3 action dimensions, not 7"),
    ],
)
def test_unusable_statistics_are_refused(config: dict[str, Any], size: int, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        range_of(STATISTICS, VlaConfig(**config), size=size)


def test_several_statistics_need_a_key_and_none_are_not_enough() -> None:
    with pytest.raises(ModelError, match=r"no statistics of actions.*norm_stats.*dataset_statistics\.json"):
        range_of({}, VlaConfig(unnorm_key="toy"))
    with pytest.raises(ModelError, match=r"unnorm_key is not set; set it to one of: bridge, toy_no_noops"):
        range_of({**STATISTICS, "bridge": {}}, VlaConfig())


def test_statistics_beside_the_checkpoint_are_added(tmp_path: Path) -> None:
    tiny_openvla(tmp_path)
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"mine": STATISTICS["toy_no_noops"]}))
    model = load_openvla(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert model.checkpoint.statistics.keys() == {"mine", "toy_no_noops"}


def test_prompt_ends_with_the_space_token() -> None:
    tokenizer = tiny_tokenizer()
    words = tokenizer.convert_ids_to_tokens(openvla_prompt(tokenizer, "Push RED cube"))
    assert words == [
        *[
            "In",
            ":",
            "What",
            "action",
            "should",
            "the",
            "robot",
            "take",
            "to",
            "push",
            "red",
            "cube",
            "?",
            "Out",
            ":",
        ],
        "▁",
    ]


def test_other_kinds_of_checkpoints_are_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"type 'llama', not openvla.*model\.vla\.kind"):
        load_openvla(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("what", ["missing", "shape", "no proprio"])
def test_incomplete_checkpoints_are_refused(tmp_path: Path, what: str) -> None:
    model = tiny_openvla(tmp_path)
    weights = dict(model.state_dict())
    if what == "missing":
        del weights["projector.fc3.bias"]
    elif what == "shape":
        weights["projector.fc3.bias"] = torch.zeros(3)
    save_openvla(weights, model.checkpoint, tiny_tokenizer(), tmp_path)
    match = "use_proprio" if what == "no proprio" else r"projector\.fc3\.bias"
    with pytest.raises(ModelError, match=match):
        load_openvla(
            str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), use_proprio=what == "no proprio"
        )


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "action_head--150000_checkpoint.pt",
            "",
            "by L1 regression or diffusion; choose one with action tokens",
        ),
        ("vision_backbone--150000_checkpoint.pt", "", "vision backbone with FiLM"),
        ("config.json", "{", r"config\.json cannot be read: Expecting"),
        ("config.json", "[]", r"config\.json cannot be read: it contains a JSON list"),
        ("config.json", '{"model_type": "openvla"}', "lacks image_sizes"),
        ("dataset_statistics.json", "nothing", r"dataset_statistics\.json cannot be read"),
        ("model.safetensors", "short", r"cannot load model\.path=.*: Error while deserializing"),
    ],
)
def test_folders_that_would_give_wrong_actions_or_cannot_be_read_are_refused(
    tmp_path: Path, file: str, content: str, words: str
) -> None:
    """The actions of a checkpoint with an action head are not those of its tokens."""
    tiny_openvla(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=words):
        load_openvla(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))


def test_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ModelError, match="use_fused_vision_backbone"):
        Checkpoint.parse({**tiny_raw(), "use_fused_vision_backbone": False}, "model.path=x")
    with pytest.raises(ModelError, match="unknown vision tower"):
        Checkpoint.parse({**PUBLISHED, "timm_model_ids": ["resnet50"]}, "model.path=x")
