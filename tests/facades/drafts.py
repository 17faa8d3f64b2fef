"""Tiny random drafts for the tiny targets, as folders that a user would name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.kinds import KINDS
from dflash.drafts.spec import read_spec
from tests.backends.tiny import HIDDEN, LAYERS, VOCAB

MASK = 300
NATIVE = 6


def config(**changes: Any) -> dict[str, Any]:
    """A flat DFlash v1 config for ``tiny_target``; ``None`` removes a key."""
    keys = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "num_target_layers": LAYERS,
        "block_size": NATIVE,
        "dtype": "float32",
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 2]},
        **changes,
    }
    return {key: value for key, value in keys.items() if value is not None}


def save_draft(folder: Path, stored: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A seeded random draft written to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = config(**{"dtype": str(stored).removeprefix("torch."), **changes})
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    spec = read_spec(keys)
    model: DFlashDraftModel = KINDS.load(spec.kind).module(spec)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0)
    state = {name: tensor.to(stored).contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
