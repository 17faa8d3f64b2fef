"""Small random drafts, their folders, and a slow forward to hold the real one against."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash.backends.torch.dflash import DFlashDraftModel
from dflash.backends.torch.dflash2 import DFlash2DraftModel
from dflash.drafts.spec import DraftSpec, read_spec
from tests.drafts.configs import config, config2

MIXED: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
}
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
ODDITIES: dict[str, dict[str, Any]] = {
    "full": {},
    "full_causal": {"is_causal": True},
    "mixed": MIXED,
    "mixed_bidirectional": {**MIXED, "is_causal": False},
    "sliding": SLIDING,
    "sliding_bidirectional": {**SLIDING, "is_causal": False},
    "window_of_one": {**SLIDING, "sliding_window": 1},
    "two_ropes": {
        **MIXED,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e3},
        },
    },
    "biased_gelu": {"attention_bias": True, "hidden_act": "gelu"},
    "interleaved": {"is_neox_style": False},
    "partial": {"partial_rotary_factor": 0.5},
    "partial_interleaved": {"partial_rotary_factor": 0.5, "is_neox_style": False},
    "sinks": {
        **MIXED,
        "nested": {"attention_sink_bias": True, "attention_value_scale": 0.7},
    },
    "one_kv_head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
}


def tiny_draft(seed: int = 0, **changes: Any) -> DFlashDraftModel:
    """A seeded random draft in eval mode, shaped for ``tests.backends.tiny`` targets."""
    return seeded(DFlashDraftModel(read_spec(config(**changes))), seed)


def tiny_draft2(seed: int = 0, **changes: Any) -> DFlash2DraftModel:
    """The same as a DFlash2 draft."""
    model = DFlash2DraftModel(read_spec(config2(**changes)))
    seeded(model, seed)
    return model


def seeded(model: DFlashDraftModel, seed: int) -> DFlashDraftModel:
    """Random weights: matrices keep the size of what they read, norms are near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 1.5 / weight.shape[-1] ** 0.5 if weight.dim() == 2 else 0.2
            mean = 1.0 if "norm" in name else 0.0
            weight.normal_(mean, scale, generator=generator)
    return model.eval().requires_grad_(False)


def save_draft(model: DFlashDraftModel, folder: Path, prefix: str = "") -> Path:
    """Write ``model`` as a draft folder; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.spec.raw), encoding="utf-8")
    state = {prefix + name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    return folder


def slow_forward(model: DFlashDraftModel, features: Tensor, noise: Tensor) -> Tensor:
    """[R, H] from all features [T, M*Ht] and block rows [R, H]: row by row, in float64.

    Shares the weights with ``model`` and nothing else: no cache, no masks, no fused attention.
    """
    weights = {name: tensor.double() for name, tensor in model.state_dict().items()}
    spec, context = model.spec, features.shape[0]
    fused = features.double() @ weights["fc.weight"].T
    fused = _norm(fused, weights["hidden_norm.weight"], spec)
    h = noise.double()
    for i in range(spec.num_layers):
        layer = {
            name.removeprefix(f"layers.{i}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{i}.")
        }
        x = torch.cat((fused, _norm(h, layer["input_layernorm.weight"], spec)))
        h = h + _attend(spec, i, layer, x, context)
        x = _norm(h, layer["post_attention_layernorm.weight"], spec)
        gate = x @ layer["mlp.gate_proj.weight"].T
        gate = gate * torch.sigmoid(gate) if spec.hidden_act == "silu" else _gelu(gate)
        h = h + (gate * (x @ layer["mlp.up_proj.weight"].T)) @ layer["mlp.down_proj.weight"].T
    return _norm(h, weights["norm.weight"], spec)


def _attend(
    spec: DraftSpec, index: int, layer: dict[str, Tensor], x: Tensor, context: int
) -> Tensor:
    kind = spec.layer_types[index]
    rows, width = x.shape[0], spec.head_dim
    zero = x.new_zeros(1)

    def project(name: str, heads: int) -> Tensor:
        out = x @ layer[f"self_attn.{name}.weight"].T
        return (out + layer.get(f"self_attn.{name}.bias", zero)).reshape(rows, heads, width)

    q = _norm(project("q_proj", spec.num_heads), layer["self_attn.q_norm.weight"], spec)
    k = _norm(project("k_proj", spec.num_kv_heads), layer["self_attn.k_norm.weight"], spec)
    v = project("v_proj", spec.num_kv_heads)
    q, k = (torch.stack([_turn(spec, kind, row, p) for p, row in enumerate(y)]) for y in (q, k))
    sinks = layer.get("self_attn.attention_sink_bias")
    out = x.new_zeros(rows - context, spec.num_heads, width)
    for query in range(context, rows):
        for head in range(spec.num_heads):
            kv = head // (spec.num_heads // spec.num_kv_heads)
            seen = [p for p in range(rows) if _sees(spec, index, query, p)]
            scores = [float(q[query, head] @ k[p, kv]) / math.sqrt(width) for p in seen]
            total = sum(map(math.exp, scores)) + (math.exp(sinks[head]) if sinks is not None else 0)
            for score, p in zip(scores, seen, strict=True):
                out[query - context, head] += math.exp(score) / total * v[p, kv]
    merged = (out * spec.value_scale).flatten(1) @ layer["self_attn.o_proj.weight"].T
    return merged + layer.get("self_attn.o_proj.bias", zero)


def _sees(spec: DraftSpec, index: int, query: int, key: int) -> bool:
    if spec.causal[index] and key > query:
        return False
    if spec.layer_types[index] == "full_attention":
        return True
    assert spec.sliding_window is not None
    return abs(query - key) < spec.sliding_window


def _turn(spec: DraftSpec, kind: str, heads: Tensor, position: int) -> Tensor:
    """Rotate pairs one by one."""
    rope = spec.rope_parameters[kind]
    size = int(spec.head_dim * rope["partial_rotary_factor"])
    out = heads.clone()
    for i in range(size // 2):
        one, two = (2 * i, 2 * i + 1) if spec.rope_interleaved else (i, i + size // 2)
        angle = position * rope["rope_theta"] ** (-2 * i / size)
        cos, sin = math.cos(angle), math.sin(angle)
        out[:, one] = heads[:, one] * cos - heads[:, two] * sin
        out[:, two] = heads[:, two] * cos + heads[:, one] * sin
    return out


def _norm(x: Tensor, weight: Tensor, spec: DraftSpec) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + spec.rms_norm_eps).sqrt() * weight


def _gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
