"""A draft alone, on features that are given: how conversions and ports are held against each other.

No target, no cache, no vocabulary: features and embedded block rows go in, final states come out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.backends.mlx.dflash import block_mask
from dflash.backends.mlx.draft_weights import load_weights
from dflash.drafts.layers import ANY_DEPTH
from dflash.drafts.spec import DraftSpec, read_spec

Floats = NDArray[np.float32]


class MlxDraftRunner:
    """Runs draft folders in float32."""

    kinds = ("dflash", "dflash2", "eagle3")

    def hidden_states(self, folder: Path, features: Floats, block: Floats) -> Floats:
        """Final states [B, H] of block rows [B, H] after context features [T, M*Ht].

        Of an EAGLE-3 draft: normed states [B, H] of rows that read the first B features and, as
        their tokens' embeddings, the block rows.
        """
        spec = read_spec(folder, num_target_layers=ANY_DEPTH)
        model, _ = load_weights(folder, spec, mx.float32)
        if spec.eagle3 is not None:
            count = min(len(features), len(block))
            return _eagle_states(model, spec, features[:count], block[:count])
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


def _eagle_states(model: Any, spec: DraftSpec, features: Floats, block: Floats) -> Floats:
    """Of rows that read each other and nothing before them."""
    windows = [spec.sliding_window if k == "sliding_attention" else None for k in spec.layer_types]
    masks = [block_mask(len(block), 0, causal=True, window=window) for window in windows]
    state, embedded = model.fuse(mx.array(features)[None]), mx.array(block)[None]
    normed, _ = model.rows(embedded, state, 0, [None] * len(masks), masks)
    found: Floats = np.array(normed[0])
    return found


RUNNER = MlxDraftRunner()
