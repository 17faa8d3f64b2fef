"""Parity with the independent DFlash v1 in transformers (Muse Glimmer's assistant)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from dflash.backends.torch.dflash import DFlashDraftModel, block_mask
from dflash.backends.torch.draft_weights import load_weights
from dflash.drafts.spec import read_spec

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def theirs(folder: Path, **changes: Any) -> Any:
    """A seeded random model of transformers, also saved to ``folder``."""
    config = MuseGlimmerAssistantConfig(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 128,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "block_size": 6,
            "mask_token_id": 3,
            "target_layer_ids": [0, 2],
            **changes,
        }
    )
    torch.manual_seed(0)
    model = MuseGlimmerAssistantModel(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if "norm" in name else 0.0, scale)
    model.save_pretrained(folder)
    return model


def ours(folder: Path) -> DFlashDraftModel:
    model, tables = load_weights(folder, read_spec(folder), device=CPU, dtype=torch.float32)
    assert not tables
    return model


CASES: dict[str, dict[str, Any]] = {
    "full": {"layer_types": ["full_attention"] * 2},
    "sliding": {"layer_types": ["sliding_attention"] * 2},
    "mixed_three_layers": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_key_value_heads": 1,
        "target_layer_ids": [0, 1, 3],
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("context", [1, 5, 40])
def test_the_forward_agrees_with_transformers(tmp_path: Path, case: str, context: int) -> None:
    reference, model = theirs(tmp_path, **CASES[case]), ours(tmp_path)
    spec, rows = model.spec, model.spec.block_size
    features = torch.randn(1, context, len(spec.taps) * 64)
    noise = torch.randn(1, rows, 64)
    with torch.inference_mode():
        cache = DFlashCache(config=reference.config)
        cache.set_previous_accepted_tokens(context)  # without it their mask starts at position 0
        wanted = reference(noise, features, cache=cache).last_hidden_state
        keys = torch.arange(context + rows)
        positions = keys[context:]
        masks = [
            block_mask(positions, keys, causal=causal, window=window)
            for causal, window in zip(spec.causal, windows(model), strict=True)
        ]
        held = model.context_kv(model.fuse(features), keys[:context])
        found = model.block(noise, positions, held, masks)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


def windows(model: DFlashDraftModel) -> list[int | None]:
    """Their mask lets a key stand exactly ``sliding_window`` away; everyone else's stops before.

    (Their cache then keeps one row less than that mask wants, so their own cached and uncached
    forwards differ at this edge. We follow the format: fewer than ``sliding_window`` away.)
    """
    window = model.spec.sliding_window
    edge = None if window is None else window + 1
    return [edge if kind == "sliding_attention" else None for kind in model.spec.layer_types]
