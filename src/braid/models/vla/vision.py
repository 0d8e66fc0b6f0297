"""Vision towers of OpenVLA with the weight names of timm: DINOv2 with registers, and SigLIP."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CENTRED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_CROP_AREA = 0.9


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """Sizes of a vision transformer. With `registers` (DINOv2) there is a class token, that many registers,
    and LayerScale; without (SigLIP) patches alone, and an attention pool that OpenVLA does not use."""

    width: int
    depth: int
    heads: int
    mlp: int
    patch: int
    registers: int

    @property
    def normalization(self) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and deviation of the pixels that the tower was trained on."""
        return IMAGENET if self.registers else CENTRED


TOWERS = {
    "vit_large_patch14_reg4_dinov2.lvd142m": TowerSizes(1024, 24, 16, 4096, 14, 4),
    "vit_so400m_patch14_siglip_224": TowerSizes(1152, 27, 16, 4304, 14, 0),
}
"""Sizes by timm's model id, as in a checkpoint's timm_model_ids."""


class Tower(nn.Module):
    """Patch features [B, N, width] of images: the output of the second last block, without prefix tokens and
    final norm. What comes after that block is part of a checkpoint, but never runs."""

    def __init__(self, sizes: TowerSizes, image_size: int) -> None:
        super().__init__()
        self.sizes, width = sizes, sizes.width
        if sizes.registers:
            self.cls_token = nn.Parameter(torch.randn(1, 1, width) * 1e-2)
            self.reg_token = nn.Parameter(torch.randn(1, sizes.registers, width) * 1e-2)
        self.pos_embed = nn.Parameter(torch.randn(1, (image_size // sizes.patch) ** 2, width) * 2e-2)
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, sizes.patch, sizes.patch)})
        self.blocks = nn.ModuleList(_Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        unused = [self.blocks[-1], self.norm]
        if not sizes.registers:
            self.attn_pool = _Pool(sizes)
            unused.append(self.attn_pool)
        for module in unused:
            module.requires_grad_(False)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embed["proj"](pixels).flatten(2).transpose(1, 2) + self.pos_embed
        if self.sizes.registers:
            prefix = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(x), -1, -1)
            x = torch.cat([prefix, x], dim=1)
        for block in self.blocks[:-1]:
            x = block(x)
        return x[:, 1 + self.sizes.registers :] if self.sizes.registers else x


class _Block(nn.Module):
    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        width = sizes.width
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = _mlp(width, sizes.mlp)
        self.ls1, self.ls2 = (
            (_Scale(width), _Scale(width)) if sizes.registers else (nn.Identity(), nn.Identity())
        )
        self._heads = sizes.heads

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv).transpose(1, 2).flatten(2)
        x = x + self.ls1(self.attn["proj"](attended))
        return x + self.ls2(self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x)))))


class _Scale(nn.Module):
    """LayerScale. OpenVLA's checkpoints call its weight scale_factor, as transformers renames gamma."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Pool(nn.Module):
    """The weights of SigLIP's attention pool."""

    def __init__(self, sizes: TowerSizes) -> None:
        super().__init__()
        width = sizes.width
        self.latent = nn.Parameter(torch.zeros(1, 1, width))
        self.q, self.kv, self.proj = (
            nn.Linear(width, width),
            nn.Linear(width, 2 * width),
            nn.Linear(width, width),
        )
        self.norm, self.mlp = nn.LayerNorm(width, eps=1e-6), _mlp(width, sizes.mlp)


def _mlp(width: int, inner: int) -> nn.ModuleDict:
    return nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})


class VisionBackbone(nn.Module):
    """One tower, or two whose features are joined."""

    def __init__(self, towers: Sequence[TowerSizes], image_size: int) -> None:
        super().__init__()
        self.featurizer = Tower(towers[0], image_size)
        if len(towers) == 2:
            self.fused_featurizer = Tower(towers[1], image_size)

    @property
    def towers(self) -> list[Tower]:
        return [tower for tower in self.children() if isinstance(tower, Tower)]

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, I, 3, h, w] with pixels from 0 to 1 -> [B, I * N, width of all towers]: the patches of
        one image after those of the other."""
        flat = images.flatten(0, 1)
        features = [tower(_normalized(flat, *tower.sizes.normalization)) for tower in self.towers]
        return torch.cat(features, dim=-1).unflatten(0, images.shape[:2]).flatten(1, 2)


def _normalized(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    means, stds = (images.new_tensor(x)[:, None, None] for x in (mean, std))
    return (images - means) / stds


def prepared(images: Tensor, image_size: int, *, center_crop: bool) -> Tensor:
    """uint8 [B, I, h, w, 3] -> float32 [B, I, 3, image_size, image_size] from 0 to 1.

    Resized bicubically without regard to the aspect ratio (`resize-naive`). `center_crop` takes the central
    90 % of the area, as policies trained with random crops need, with the sampling points of
    tf.image.crop_and_resize.
    """
    flat = images.flatten(0, 1).permute(0, 3, 1, 2).float()
    size = (image_size, image_size)
    if flat.shape[-2:] != size:
        flat = F.interpolate(flat, size, mode="bicubic", antialias=True).round().clamp(0, 255)
    if center_crop:
        side = math.sqrt(_CROP_AREA)
        theta = flat.new_tensor([[side, 0, 0], [0, side, 0]]).expand(len(flat), 2, 3)
        grid = F.affine_grid(theta, list(flat.shape), align_corners=True)
        flat = F.grid_sample(flat, grid, align_corners=True).round().clamp(0, 255)
    return (flat / 255).unflatten(0, images.shape[:2])
