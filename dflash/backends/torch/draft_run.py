"""A draft alone, on features that are given: how conversions and ports are held against each other.

No target, no cache, no vocabulary: features and embedded block rows go in, final states come out.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.backends.torch.dflash import block_mask
from dflash.backends.torch.draft_weights import load_weights
from dflash.drafts.spec import read_spec

Floats = NDArray[np.float32]


class TorchDraftRunner:
    """Runs draft folders in float32 on the CPU."""

    kinds = ("dflash", "dflash2")

    def hidden_states(self, folder: Path, features: Floats, block: Floats) -> Floats:
        """Final states [B, H] of block rows [B, H] after context features [T, M*Ht]."""
        spec = read_spec(folder)
        model, _ = load_weights(folder, spec, device=torch.device("cpu"), dtype=torch.float32)
        context, rows = features.shape[0], block.shape[0]
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


RUNNER = TorchDraftRunner()
