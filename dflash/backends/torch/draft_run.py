"""A draft alone, on features that are given: how conversions and ports are held against each other.

No target, no cache, no vocabulary: features and embedded block rows go in, final states come out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.backends.torch.dflash import block_mask
from dflash.backends.torch.draft_weights import load_weights
from dflash.drafts.layers import ANY_DEPTH
from dflash.drafts.spec import read_spec

Floats = NDArray[np.float32]


class TorchDraftRunner:
    """Runs draft folders in float32 on the CPU."""

    kinds = ("dflash", "dflash2", "eagle3")

    def hidden_states(self, folder: Path, features: Floats, block: Floats) -> Floats:
        """Final states [B, H] of block rows [B, H] after context features [T, M*Ht].

        Of an EAGLE-3 draft: normed states [B, H] of rows that read the first B features and, as
        their tokens' embeddings, the block rows.
        """
        spec = read_spec(folder, num_target_layers=ANY_DEPTH)
        model, _ = load_weights(folder, spec, device=torch.device("cpu"), dtype=torch.float32)
        context, rows = features.shape[0], block.shape[0]
        if spec.eagle3 is not None:
            return _eagle_states(model, features[:rows], block[:context])
        keys = torch.arange(context + rows)
        positions = keys[context:]
        masks = [
            block_mask(
                positions,
                keys,
                causal=causal,
                window=spec.sliding_window if kind == "sliding_attention" else None,
            )
            for causal, kind in zip(spec.causal, spec.layer_types, strict=True)
        ]
        with torch.inference_mode():
            fused = model.fuse(torch.from_numpy(features)[None])
            kv = model.context_kv(fused, keys[:context])
            out = model.block(torch.from_numpy(block)[None], positions, kv, masks)
        found: Floats = out[0].numpy()
        return found


def _eagle_states(model: Any, features: Floats, block: Floats) -> Floats:
    spec, places = model.spec, torch.arange(block.shape[0])
    nothing = torch.zeros(1, spec.num_kv_heads, 0, spec.head_dim)
    masks = [
        block_mask(
            places,
            places,
            causal=True,
            window=spec.sliding_window if kind == "sliding_attention" else None,
        )
        for kind in spec.layer_types
    ]
    with torch.inference_mode():
        state = model.fuse(torch.from_numpy(features)[None])
        embedded = torch.from_numpy(block)[None]
        normed, _ = model(embedded, state, places, [(nothing, nothing)] * len(masks), masks)
    found: Floats = normed[0].numpy()
    return found


RUNNER = TorchDraftRunner()
