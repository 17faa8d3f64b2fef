"""Multi-token prediction heads inside a target (MTP, nextn), as far as a config and names go."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from dflash.drafts.eagle3 import NO_MASK
from dflash.drafts.spec import DraftSpec

BLOCK = 8  # rows of the longest chain, anchor included; the policy finds out how many pay
FINAL_NORM = -1000
"""In place of a layer: the state after the final norm, which the head reads (MTP heads do too)."""
COUNTS = ("num_mtp_layers", "mtp_num_hidden_layers", "num_nextn_predict_layers")


def count_heads(said: Callable[[str], Any]) -> int:
    """Heads that a config speaks of; ``said`` gives the value of a key, None where it has none."""
    return next((int(count) for name in COUNTS if (count := said(name))), 0)


def holds_heads(names: Iterable[str], depth: int) -> bool:
    """Whether heads are among the tensors of a checkpoint whose target is ``depth`` layers deep."""
    ours = re.compile(rf"(^|\.)mtp\.|(^|\.)layers\.{depth}\.(enorm|hnorm|eh_proj)\.")
    return any(ours.search(name) for name in names)


def mtp_spec(
    *,
    hidden_size: int,
    intermediate_size: int,
    num_heads: int,
    head_dim: int,
    vocab_size: int,
    num_layers: int,
) -> DraftSpec:
    """What the rest of the package wants to know of heads; numbers are their target's."""
    return DraftSpec(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        block_size=BLOCK,
        mask_token_id=NO_MASK,
        taps=(FINAL_NORM,),
        rope_parameters={},
        layer_types=(),
        causal=(),
        target_hidden_size=hidden_size,
        kind="mtp",
        num_target_layers=num_layers,
    )
