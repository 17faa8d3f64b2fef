"""Decoder layers of the common dense families in fewer, larger products.

transformers' layer of a Llama makes seven products and some forty small operations; at one to
sixteen rows on a CPU the small ones take a quarter of a pass. Here query, key and value are one
product, gate and up another, and rotation is one multiplication of complex numbers. Same weights,
same formulas, results within rounding: `load.py` compares logits before and after, and keeps
transformers' layers where they differ.

The layers stand where transformers' stood, so masks, caches, hooks and everything that calls the
model stay as they are. Keys lie in the cache with the two halves of a head interleaved, which no
product of queries and keys can see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash.backends.torch.attention import NAME as STACKED

FAMILIES = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)
ATTENTION = frozenset({"sdpa", STACKED})  # what the layers were written for
STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies never change
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}

Look = Callable[[str, Tensor], None]


@dataclass(frozen=True, slots=True)
class FuseReport:
    """How many layers were replaced, or why none was."""

    layers: int = 0
    reason: str = ""  # empty when layers were replaced


class FusedLayer(nn.Module):
    """One pre-norm decoder layer: attention and gated feed-forward, both residual."""

    is_causal = True  # transformers' attention functions ask for it

    def __init__(self, layer: Any) -> None:
        """Take over the weights of ``layer``; joined ones are copies."""
        super().__init__()
        self._parts: tuple[Any, ...] = ()
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.num_key_value_groups = attention.num_key_value_groups
        self.widths = [attention.q_proj.out_features + attention.k_proj.out_features]
        self.widths.append(attention.v_proj.out_features)
        self.queries = attention.q_proj.out_features // self.head_dim
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.gate_up, self.act = joined(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self.before_attention, self.before_mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.eps = float(layer.input_layernorm.variance_epsilon)
        self.head_norm: nn.Parameter | None = None
        if hasattr(attention, "q_norm"):
            keys = attention.k_proj.out_features // self.head_dim
            parts = [attention.q_norm.weight.expand(self.queries, -1)]
            parts.append(attention.k_norm.weight.expand(keys, -1))
            self.head_norm = nn.Parameter(torch.cat(parts), requires_grad=False)

    def forward(
        self,
        hidden_states: Tensor,  # [B, n, H]
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,  # [B, n, 1, D/2] complex: see `Turns`
        **options: Any,
    ) -> Tensor:  # [B, n, H]
        """The layer as transformers calls it."""
        assert position_embeddings is not None, "the model's rotary embedding was not replaced"
        cache = options.get("cache", options.get("past_key_values"))
        qkv, out, gate_up, down, act, first, second = self._parts or self._at_hand()
        x = qkv(rms_norm(hidden_states, first, self.eps))
        x = hidden_states + out(self._attend(x, attention_mask, position_embeddings, cache))
        gate, up = gate_up(rms_norm(x, second, self.eps)).chunk(2, dim=-1)
        result: Tensor = x + down(act(gate) * up)
        return result

    def _attend(self, qkv: Tensor, mask: Tensor | None, turns: Tensor, cache: Any) -> Tensor:
        """[B, n, (nh + 2 nkv) * D] to [B, n, nh * D]."""
        both, value = torch.split(qkv, self.widths, dim=-1)
        both = both.reshape(*both.shape[:-1], -1, self.head_dim)
        if self.head_norm is not None:
            both = rms_norm(both, self.head_norm, self.eps)
        both = rotate(both, turns).transpose(1, 2)  # [B, nh + nkv, n, D]
        query, key = both[:, : self.queries], both[:, self.queries :]
        value = value.reshape(*value.shape[:-1], -1, self.head_dim).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed: Tensor = attend(self, query, key, value, mask, dropout=0.0, scaling=self.scaling)[0]
        return mixed.flatten(-2)

    def _at_hand(self) -> tuple[Any, ...]:
        """What every call needs, as plain attributes: a module's own are looked up slowly."""
        products = (self.qkv, self.o_proj, self.gate_up, self.down_proj, self.act)
        norms = (self.before_attention.weight, self.before_mlp.weight)
        self._parts = (*(part.forward for part in products), *norms)
        return self._parts


class Turns(nn.Module):
    """Rotary embedding as complex numbers, from the frequencies of transformers' module."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # noqa: ARG002 - its signature
        """Positions [B, n] to turns, complex64 [B, n, 1, D/2]."""
        angles = position_ids[..., None].float() * self.rotary.inv_freq.float()
        length = torch.full_like(angles, self.rotary.attention_scaling)
        return torch.polar(length, angles)[:, :, None]


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Heads [B, n, h, D] turned by [B, n, 1, D/2]; halves come back interleaved."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    left, right = wide.chunk(2, dim=-1)
    return torch.view_as_real(torch.complex(left, right) * turns).flatten(-2).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one kernel; mean() is two
    wide = wide * torch.rsqrt(length.square_().div_(x.shape[-1]).add_(eps))
    return weight * wide.to(x.dtype)


def joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer with the outputs of ``layers`` behind each other."""
    first = layers[0]
    bias = None if first.bias is None else torch.cat([x.bias for x in layers])
    # The meta device: weights that are replaced at once need no memory and no random numbers.
    result = nn.Linear(first.in_features, 1, bias=bias is not None, device="meta")
    weight = torch.cat([x.weight for x in layers])
    result.out_features = weight.shape[0]
    result.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        result.bias = nn.Parameter(bias, requires_grad=False)
    return result


def why_not(model: Any) -> str:
    """Why the layers of ``model`` stay as they are; empty when they can be fused."""
    config = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    layers: Any = getattr(decoder, "layers", None) or ()
    rotary: Any = getattr(decoder, "rotary_emb", None)
    kinds = {type(layer).__name__ for layer in layers}
    if not kinds or not kinds <= FAMILIES:
        return f"layers of {', '.join(sorted(kinds)) or type(model).__name__} are not fused"
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        return "sliding layers are not fused"
    if getattr(config, "sliding_window", None) is not None:
        return "a sliding window is not fused"
    if getattr(rotary, "rope_type", None) not in STEADY_ROPES:
        return f"rope of type {getattr(rotary, 'rope_type', None)!r} is not fused"
    size = 2 * rotary.inv_freq.shape[-1]
    if any(size != layer.self_attn.head_dim for layer in layers):
        return "heads that are rotated in part are not fused"
    if config._attn_implementation not in ATTENTION:
        return f"attention {config._attn_implementation!r} is not fused"
    plain = all(type(x) is nn.Linear for layer in layers for x in _products(layer))
    return "" if plain else "layers that are not plain linear ones are not fused"


def _products(layer: Any) -> list[Any]:
    a, m = layer.self_attn, layer.mlp
    return [a.q_proj, a.k_proj, a.v_proj, a.o_proj, m.gate_proj, m.up_proj, m.down_proj]


def fuse_model(model: Any, settle: Callable[[nn.Module], None], look: Look) -> FuseReport:
    """Replace every decoder layer of a model that `why_not` allows; ``settle`` packs each.

    ``look(name, weight)`` sees each weight before. Layer by layer, so that weights are never held
    twice. Changes the model: only for models this package loaded itself.
    """
    decoder = model.get_decoder()
    with torch.inference_mode():
        for index, layer in enumerate(decoder.layers):
            for name, weight in layer.named_parameters():
                look(f"model.layers.{index}.{name}", weight)
            fused = FusedLayer(layer).eval()
            decoder.layers[index] = fused
            del layer
            settle(fused)
        decoder.rotary_emb = Turns(decoder.rotary_emb)
    return FuseReport(len(decoder.layers))


def differs(before: Tensor, after: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits moved by more than rounding, relative to their spread."""
    spread = before.std().clamp_min(1e-6)
    return not bool((before - after).abs().max() <= TOLERANCE.get(dtype, 0.0) * spread)
