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


@dataclass(frozen=True, slots=True)
class Eagle3:
    """Where an EAGLE-3 draft has norms."""

    norm_before_residual: bool = False  # the residual is the normed state, not the state
    norm_before_fc: bool = False  # one norm over all taps side by side
    fc_norm: bool = False  # one norm a tap
    norm_output: bool = False  # the next step reads the normed state (EAGLE 3.1)
    qk_norm: bool = False  # norms on queries and keys, as in Qwen3 layers
