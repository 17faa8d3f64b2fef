"""Decoder layers of the common dense families, replaced by fused ones (`decoder.py`).

`load.py` compares logits before and after, and keeps transformers' layers where they differ. The
layers stand where transformers' stood, so everything that calls the model goes on working.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dflash.backends.torch.attention import STACKED, stacked_groups
from dflash.backends.torch.decoder import DecoderLayer, Shape, rotate_, widened
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
    warning: str = ""  # for the user, where a reason should not be


class FusedLayer(DecoderLayer):
    """A decoder layer that stands where transformers' own stood."""

    def __init__(self, layer: Any) -> None:
        """Take over the weights of ``layer``; joined ones are copies."""
        attention, norm = layer.self_attn, layer.input_layernorm
        eps, act = float(norm.variance_epsilon), layer.mlp.act_fn
        super().__init__(layer, Shape(attention.head_dim, attention.scaling, eps, act, causal=True))
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.num_key_value_groups = attention.num_key_value_groups

    def forward(
        self,
        hidden_states: Tensor,  # [B, n, H]
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,  # [B, n, 1, D/2] complex: see `Turns`
        **options: Any,
    ) -> Tensor:  # [B, n, H]
        """The layer as transformers calls it."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # it is there, who calls

        assert position_embeddings is not None, "the model's rotary embedding was not replaced"
        held = options.get("cache", options.get("past_key_values"))
        turns = widened(position_embeddings, self.turned, self.keys)
        heads = rotate_(self.joint(hidden_states), turns)
        heads = heads.view(*hidden_states.shape[:-1], -1, self.head_dim).transpose(1, 2)
        parts = torch.split(heads, [self.queries, self.keys, self.keys], dim=1)
        query, key, value = parts
        if held is not None:
            key, value = held.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        mixed: Tensor = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling
        )[0]
        return self.rest(hidden_states, mixed.flatten(-2))


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
