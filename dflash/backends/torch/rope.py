"""Rotary position embedding of a draft: default, linear, YaRN and Llama 3 frequencies.

Frequencies stay float32 whatever the weights are: in bfloat16 they drift at long positions.
What they are is in `dflash.drafts.rope`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from dflash.drafts.rope import inverse_frequencies

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
        self.register_buffer("inv_freq", torch.tensor(frequencies), persistent=False)

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
