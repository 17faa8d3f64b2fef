"""A draft alone, on features that are given: how conversions and ports are held against each other.

No target, no cache, no vocabulary: features and embedded block rows go in, final states come out.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.dflash import block_mask
from dflash.backends.mlx.draft_weights import load_weights
from dflash.drafts.spec import read_spec

Floats = NDArray[np.float32]


class MlxDraftRunner:
    """Runs draft folders in float32."""

    kinds = ("dflash", "dflash2")

    def hidden_states(self, folder: Path, features: Floats, block: Floats) -> Floats:
        """Final states [B, H] of block rows [B, H] after context features [T, M*Ht]."""
        spec = read_spec(folder)
        model, _ = load_weights(folder, spec, mx.float32)
        context, rows = features.shape[0], block.shape[0]
        masks = [
            block_mask(
                rows,
                context,
                causal=causal,
                window=spec.sliding_window if kind == "sliding_attention" else None,
            )
            for causal, kind in zip(spec.causal, spec.layer_types, strict=True)
        ]
        kv = model.context_kv(model.fuse(mx.array(features)[None]), 0)
        out = model.block(mx.array(block)[None], context, kv, masks)
        found: Floats = np.array(out[0])
        return found


RUNNER = MlxDraftRunner()
