"""Decoder layers of the common dense families in fewer, larger products.

transformers' layer of a Llama makes seven products and some forty small operations; at one to
sixteen rows on a CPU the small ones take a quarter of a pass. Here query, key and value are one
product, gate and up another, and rotation is one multiplication of complex numbers. Same weights,
same formulas, results within rounding: `load.py` compares logits before and after, and keeps
transformers' layers where they differ.

The layers stand where transformers' stood, so everything that calls the model goes on working.
`FusedLayer.rows` is the same layer for the rows behind one sequence, with nothing around it: no
module calls, one write to the cache, rotations and masks as slices of tables (`places.py`). Keys
lie in the cache with the two halves of a head interleaved, which no product of queries and keys can
see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash.backends.torch.attention import NAME as STACKED
from dflash.backends.torch.attention import attend_rows, stacked_groups
from dflash.backends.torch.cache import Slot
from dflash.backends.torch.places import Places

FAMILIES = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"}
)
ATTENTION = frozenset({"sdpa", STACKED})  # what the layers were written for
STEADY_ROPES = frozenset({"default", "linear", "llama3", "yarn"})  # frequencies never change
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
ROUNDED = {
    "float16": 0.1,
    "bfloat16": 0.2,
    "int8": 0.5,
}  # a wrong formula moves logits by 1 and more

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
        self.queries = attention.q_proj.out_features // self.head_dim
        self.keys = attention.k_proj.out_features // self.head_dim
        turned = self.queries + self.keys
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        _interleave(self.qkv.weight, turned, self.head_dim)
        if self.qkv.bias is not None:
            _interleave(self.qkv.bias, turned, self.head_dim)
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.gate_up, self.act = joined(mlp.gate_proj, mlp.up_proj), mlp.act_fn
        self.before_attention, self.before_mlp = (
            layer.input_layernorm,
            layer.post_attention_layernorm,
        )
        self.eps = float(layer.input_layernorm.variance_epsilon)
        self.head_norm: nn.Parameter | None = None
        if hasattr(attention, "q_norm"):
            parts = [attention.q_norm.weight.repeat(self.queries)]
            parts.append(attention.k_norm.weight.repeat(self.keys))
            weight = torch.cat(parts)
            _interleave(weight, turned, self.head_dim)
            self.head_norm = nn.Parameter(weight.view(turned, -1), requires_grad=False)

    def forward(
        self,
        hidden_states: Tensor,  # [B, n, H]
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,  # [B, n, 1, D/2] complex: see `Turns`
        **options: Any,
    ) -> Tensor:  # [B, n, H]
        """The layer as transformers calls it."""
        assert position_embeddings is not None, "the model's rotary embedding was not replaced"
        held = options.get("cache", options.get("past_key_values"))
        heads = self._heads(hidden_states, position_embeddings).transpose(1, 2)
        query, key, value = torch.split(heads, [self.queries, self.keys, self.keys], dim=1)
        if held is not None:
            key, value = held.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed: Tensor = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling
        )[0]
        return self._rest(hidden_states, mixed.flatten(-2))

    def rows(
        self,
        x: Tensor,  # [n, H], and perhaps rows behind them that are there for speed alone
        turns: Tensor,  # as many rows, [n, 1, D/2] complex
        bias: Tensor | None,  # see `Places.bias`
        slot: Slot,
    ) -> Tensor:  # [n, H]
        """The layer on the rows behind one sequence, with nothing around it."""
        heads, rows = self._heads(x, turns), slot.new.shape[0]
        if rows < x.shape[0]:
            heads = heads[:rows]
        slot.new.copy_(heads[:, self.queries :].view(rows, 2, self.keys, -1))
        mixed = attend_rows(heads[:, : self.queries], slot.keys, slot.values, bias, self.scaling)
        if rows < x.shape[0]:
            mixed = F.pad(mixed, (0, 0, 0, x.shape[0] - rows))
        return self._rest(x, mixed)

    def _heads(self, x: Tensor, turns: Tensor) -> Tensor:
        """Rows [.., n, H] to heads [.., n, nh + 2 nkv, D], queries and keys rotated."""
        qkv, _, _, _, _, norm, _ = self._parts or self._at_hand()
        joint: Tensor = qkv(rms_norm(x, norm, self.eps))
        heads = joint.view(*x.shape[:-1], -1, self.head_dim)
        turned = self.queries + self.keys
        if self.head_norm is not None:
            both = heads[..., :turned, :]
            both.copy_(rms_norm(both, self.head_norm, self.eps))
        return rotate_(heads, turned, turns)

    def _rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows on attention's result [.., nh * D]."""
        _, out, gate_up, down, act, _, norm = self._parts
        x = x + out(mixed)
        gate, up = gate_up(rms_norm(x, norm, self.eps)).chunk(2, dim=-1)
        result: Tensor = x + down(act(gate).mul_(up))
        return result

    def _at_hand(self) -> tuple[Any, ...]:
        """What every call needs, as plain attributes: a module's own are looked up slowly."""
        products = (self.qkv, self.o_proj, self.gate_up, self.down_proj, self.act)
        norms = (self.before_attention.weight, self.before_mlp.weight)
        calls = (getattr(part, "multiply", part.forward) for part in products)
        self._parts = (*calls, *norms)
        return self._parts


class Turns(nn.Module):
    """Rotary embedding as complex numbers, from the frequencies of transformers' module."""

    def __init__(self, rotary: Any) -> None:
        super().__init__()
        self.rotary = rotary
        self._places: Places | None = None

    def places(self, layer: FusedLayer, like: Tensor) -> Places:
        """The tables of passes over one sequence; all layers are like ``layer``."""
        if self._places is None:
            groups = stacked_groups(like, layer.num_key_value_groups)
            self._places = Places(self.forward, groups, like)
        return self._places

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:  # noqa: ARG002 - its signature
        """Positions [B, n] to turns, complex64 [B, n, 1, D/2]."""
        angles = position_ids[..., None].float() * self.rotary.inv_freq.float()
        length = torch.full_like(angles, self.rotary.attention_scaling)
        return torch.polar(length, angles)[:, :, None]


def rotate_(heads: Tensor, count: int, turns: Tensor) -> Tensor:
    """The first ``count`` of heads [.., n, h, D], halves interleaved, turned by [.., n, 1, D/2].

    In place where the numbers are wide enough.
    """
    wide = heads if heads.dtype in (torch.float32, torch.float64) else heads.float()
    pairs = torch.view_as_complex(wide.view(*heads.shape[:-1], -1, 2))
    pairs[..., :count, :].mul_(turns)
    return wide.to(heads.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""
    wide = x.float()
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # one kernel; mean() is two
    mean = torch.addcmul(_number(eps, wide.device), length, length, value=1 / x.shape[-1])
    return wide.mul(mean.rsqrt_()).to(x.dtype).mul_(weight)


@cache
def _number(value: float, device: torch.device) -> Tensor:
    """``value`` as a tensor, made once: numbers become tensors anew in every call."""
    with torch.inference_mode(False):
        return torch.full((1,), value, device=device)


def _interleave(weight: Tensor, heads: int, width: int) -> None:
    """Put the two halves of each of the first ``heads`` heads of ``width`` rows side by side."""
    part = weight.data[: heads * width]
    halves = part.view(heads, 2, width // 2, *part.shape[1:]).transpose(1, 2)
    part.copy_(halves.flatten(0, 2).clone())


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


def differs(before: Tensor, after: Tensor, dtype: torch.dtype, weights: str | None = None) -> bool:
    """Whether logits moved by more than rounding, relative to their spread.

    By the largest move where rounding is fine, by the usual one in 16 bits, where a few are large.
    ``weights`` is the form that the weights were rounded to on the way, if any.
    """
    spread, moves = before.std().clamp_min(1e-6), (before - after).abs()
    fine = dtype.itemsize > 2 and weights is None
    move = moves.max() if fine else moves.square().mean().sqrt()
    most = TOLERANCE.get(dtype, 0.0) if weights is None else ROUNDED[weights]
    return not bool(move <= most * spread)
