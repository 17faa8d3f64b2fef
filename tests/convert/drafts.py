"""Random drafts of each kind as folders, without an array library that knows bfloat16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dflash.convert.tensor import Tensor, to_dtype, write_tensors

HIDDEN, WIDE, HEADS, KV, DIM, VOCAB, LAYERS = 64, 96, 4, 2, 16, 512, 2
TAPS = [0, 2]


def config(**changes: Any) -> dict[str, Any]:
    """A v1 config in the published form; keys of ``nested`` go to dflash_config."""
    nested = {"block_size": 8, "mask_token_id": 300, "target_layer_ids": TAPS}
    nested |= changes.pop("nested", {})
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"] * LAYERS,
        "sliding_window": None,
        "use_sliding_window": False,
        "is_causal": False,
        "num_target_layers": 4,
        "dflash_config": nested,
        **changes,
    }


def eagle_config(**changes: Any) -> dict[str, Any]:
    """An EAGLE-3 config as SpecForge writes it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "draft_vocab_size": 40,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
            "use_aux_hidden_state": True,
        },
        **changes,
    }


def random(*shape: int, dtype: str = "BF16", seed: int = 0) -> Tensor:
    """Numbers that keep the size of what is multiplied by them."""
    numbers = np.random.default_rng(seed).standard_normal(shape) / shape[-1] ** 0.5
    return to_dtype(numbers.astype(np.float32), dtype)


def v1_tensors(dtype: str = "BF16", **more: Tensor) -> dict[str, Tensor]:
    """All tensors of ``config()``."""
    shapes = {"fc.weight": (HIDDEN, len(TAPS) * HIDDEN), "hidden_norm.weight": (HIDDEN,)}
    shapes |= {"norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer(HIDDEN).items()}
    made = {n: random(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}
    return {**made, **more}


def eagle_tensors(dtype: str = "BF16") -> dict[str, Tensor]:
    """All tensors of ``eagle_config()``, with a reduced vocabulary of every twelfth token."""
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,)}
    shapes |= {"lm_head.weight": (40, HIDDEN), "midlayer.hidden_norm.weight": (HIDDEN,)}
    layer = {n: s for n, s in _layer(2 * HIDDEN).items() if "_norm" not in n.split(".")[1]}
    shapes |= {f"midlayer.{name}": shape for name, shape in layer.items()}
    made = {n: random(*s, dtype=dtype, seed=i) for i, (n, s) in enumerate(shapes.items())}
    kept = np.arange(0, 480, 12)
    mask = np.zeros(VOCAB, bool)
    mask[kept] = True
    made["d2t"], made["t2d"] = Tensor("I64", kept - np.arange(40)), Tensor("BOOL", mask)
    return made


def _layer(width: int) -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * DIM, width),
        "self_attn.k_proj.weight": (KV * DIM, width),
        "self_attn.v_proj.weight": (KV * DIM, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
        "self_attn.q_norm.weight": (DIM,),
        "self_attn.k_norm.weight": (DIM,),
        "mlp.gate_proj.weight": (WIDE, HIDDEN),
        "mlp.up_proj.weight": (WIDE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDE),
    }


def save(folder: Path, keys: dict[str, Any], tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """Write a draft folder, split into ``shards`` files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    if shards == 1:
        write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    homes = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensors[name] for name, home in homes.items() if home == file}
        write_tensors(folder / file, part, {"format": "pt"})
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
