"""Rotary position embedding of a draft: default, linear, YaRN and Llama 3 frequencies.

Frequencies stay float32 whatever the weights are: in bfloat16 they drift at long positions.
Sources: RoFormer (arXiv 2104.09864), YaRN (arXiv 2309.00071, sections 3.2 to 3.4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

CosSin: TypeAlias = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """Cosines and sines of one layer type, for the rotated part of a head."""

    inv_freq: Tensor

    def __init__(self, head_dim: int, rope: Mapping[str, Any], *, interleaved: bool) -> None:
        """``rope`` is one entry of ``DraftSpec.rope_parameters``."""
        super().__init__()
        size = int(head_dim * rope["partial_rotary_factor"])
        self.interleaved = interleaved
        frequencies, self.scale = inverse_frequencies(size - size % 2, rope)
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> CosSin:
        """[.., n] integer positions to cosine and sine, float32 [.., n, rotated size]."""
        angles = positions.float()[..., None] * self.inv_freq.float()
        if self.interleaved:
            angles = angles.repeat_interleave(2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        """Move with the module, but never leave float32."""
        before = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.inv_freq = before.to(self.inv_freq.device)
        return self


def rotate(x: Tensor, rope: CosSin, *, interleaved: bool = False) -> Tensor:
    """Rotate heads [.., nh, n, D] by cosine and sine [.., n, size]; the rest of D passes."""
    cos, sin = rope
    turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if interleaved:
        pairs = turning.reshape(*turning.shape[:-1], -1, 2)
        turned = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).flatten(-2)
    else:
        left, right = turning.chunk(2, dim=-1)
        turned = torch.cat((-right, left), dim=-1)
    turning = (turning * cos + turned * sin).to(x.dtype)
    return torch.cat((turning, rest), dim=-1) if rest.shape[-1] else turning


def inverse_frequencies(size: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [size / 2], and the factor on cosine and sine."""
    theta, kind = rope["rope_theta"], rope["rope_type"]
    exponent = torch.arange(0, size, 2, dtype=torch.float64) / size
    plain: Tensor = theta**-exponent
    if kind == "default":
        return plain.float(), 1.0
    factor = float(rope["factor"])
    if kind == "linear":
        return (plain / factor).float(), 1.0
    if kind == "llama3":
        return _llama3(plain, factor, rope).float(), 1.0
    assert kind == "yarn", f"rope_type {kind} was let through"
    return _yarn(plain, size, factor, rope).float(), _yarn_scale(factor, rope)


def _llama3(plain: Tensor, factor: float, rope: Mapping[str, Any]) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    blended: Tensor = plain * keep + plain / factor * (1 - keep)
    return blended


def _yarn(plain: Tensor, size: int, factor: float, rope: Mapping[str, Any]) -> Tensor:
    """Dimensions that turn often are kept, those that turn seldom are interpolated."""
    original = rope["original_max_position_embeddings"]
    theta = rope["rope_theta"]

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(rope.get("beta_fast") or 32)
    high = dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    index = torch.arange(size // 2, dtype=torch.float64)
    interpolate = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return plain * (1 - interpolate) + plain / factor * interpolate


def _yarn_scale(factor: float, rope: Mapping[str, Any]) -> float:
    given = rope.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    return magnitude(over) / magnitude(under) if over and under else magnitude(1.0)
