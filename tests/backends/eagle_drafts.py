"""Small random EAGLE-3 drafts as folders, in the layouts they are published in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash.backends.torch.eagle3 import Eagle3DraftModel
from dflash.drafts.spec import read_spec

from .tiny import HIDDEN, LAYERS, VOCAB

KEPT = 200  # tokens of the reduced vocabulary: every second one

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "draft_vocab_size": KEPT,
    "rope_theta": 10000.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
}


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Every tensor of a draft: the module's, a head of its own, and the map of its vocabulary."""
    model = Eagle3DraftModel(read_spec(config, num_target_layers=LAYERS))
    generator = torch.Generator().manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> Tensor:
        mean, scale = (1.0, 0.2) if "norm" in name else (0.0, 1.5 / shape[-1] ** 0.5)
        return torch.empty(shape).normal_(mean, scale, generator=generator)

    state = {name: made(name, tuple(weight.shape)) for name, weight in model.named_parameters()}
    state["lm_head.weight"] = made("lm_head", (KEPT, HIDDEN))
    state["d2t"] = torch.arange(KEPT)  # target id 2 i, less i
    state["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).scatter(0, torch.arange(KEPT) * 2, True)
    return state


def save_eagle(folder: Path, seed: int = 0, prefix: str = "midlayer.", **changes: Any) -> Path:
    """A draft folder; ``prefix`` is what the layout calls its one layer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    state = {
        name.replace("layers.0.", prefix): tensor
        for name, tensor in random_weights(config, seed).items()
    }
    save_file(state, folder / "model.safetensors")
    return folder
