"""What single kinds of draft have beyond a DFlash stack; one frozen class a kind.

A field of `DraftSpec` holds it, and is None for every other kind.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DFlash2:
    """Sizes of the convolutions and of the candidate selector."""

    conv_kernel_size: int  # taps T; the first is the row itself
    conv_group_size: int  # channels that share a dynamic coefficient; divides H
    selector_rank: int  # r
    selector_top_k: int  # candidates k of a row
