"""The DFlash v1 draft as a module: a small Qwen3-style stack over an injected context.

Equations: docs/concepts/block.md (DFlash paper, arXiv 2602.06036, section 4.1 and appendix A.3).
Context rows enter only as keys and values, projected once per committed token; block rows (the
anchor and the mask tokens) run through the layers. The module owns no embedding and no head: both
are the target's. It does not choose tokens and keeps no cache: `dflash_session.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.attention import attend_block
from dflash.backends.torch.rope import CosSin, Rotary, rotate
from dflash.drafts.spec import DraftSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}

KeyValue: TypeAlias = tuple[Tensor, Tensor]
"""Each [B, nkv, T, D], keys already normed and rotated."""
Context: TypeAlias = KeyValue | Callable[[Tensor, Tensor], KeyValue]
"""A layer's context rows, or a cache that puts block rows behind its own."""


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)``, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of block rows over context and block."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.value_scale = spec.value_scale
        self.rotate = partial(rotate, interleaved=spec.rope_interleaved)
        width, bias = spec.hidden_size, spec.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, spec.rms_norm_eps)
        sinks = nn.Parameter(torch.empty(self.heads)) if spec.sinks else None
        self.attention_sink_bias = sinks

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[B, n, heads*D] to [B, heads, n, D]."""
        return x.reshape(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)

    def key_value(self, x: Tensor, rope: CosSin) -> KeyValue:
        """Keys (normed, rotated) and values of rows x [B, n, H]."""
        key = self.rotate(self.k_norm(self.split(self.k_proj(x), self.kv_heads)), rope)
        return key, self.split(self.v_proj(x), self.kv_heads)

    def forward(
        self,
        x: Tensor,  # [B, R, H] normed block rows
        rope: CosSin,  # of the block rows
        context: Context,
        mask: Tensor | None,  # [.., R, T + R] True = visible; None = all
    ) -> Tensor:  # [B, R, H]
        """Attend from block rows to context and block."""
        query = self.rotate(self.q_norm(self.split(self.q_proj(x), self.heads)), rope)
        key, value = self.key_value(x, rope)
        if callable(context):
            key, value = context(key, value)
        else:
            key = torch.cat((context[0], key), dim=2)
            value = torch.cat((context[1], value), dim=2)
        if self.attention_sink_bias is not None:
            key, value, mask = add_sink(key, value, mask, self.attention_sink_bias, x.shape[1])
        out = attend_block(query, key, value, mask)
        if self.value_scale != 1.0:
            out = out * self.value_scale
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged


def add_sink(
    key: Tensor,  # [B, nkv, T, D]
    value: Tensor,
    mask: Tensor | None,
    sink: Tensor,  # [nh] a logit a head that takes attention and gives nothing
    rows: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with one zero row in front, and the float mask that gives it its logit."""
    bias = key.new_zeros(rows, key.shape[2])
    if mask is not None:
        bias = torch.where(mask, bias, -torch.inf)
    bias = bias.expand(*bias.shape[:-2], rows, key.shape[2])
    bias = bias.expand(key.shape[0], sink.shape[0], -1, -1)
    column = sink.to(bias.dtype)[:, None, None].expand(*bias.shape[:-1], 1)
    zero = key.new_zeros(*key.shape[:2], 1, key.shape[3])
    return (
        torch.cat((zero, key), dim=2),
        torch.cat((zero, value), dim=2),
        torch.cat((column, bias), dim=-1),
    )


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)
        self.act = ACTIVATIONS[spec.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        """[.., H] to [.., H]."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, spec: DraftSpec, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(
        self,
        h: Tensor,  # [B, R, H] rows of one block, or of several of ``size`` rows
        rope: CosSin,
        context: Context,
        mask: Tensor | None,
        size: int,  # noqa: ARG002 - of no matter to layers that mix rows by attention alone
    ) -> Tensor:  # [B, R, H]
        """Block rows through one layer."""
        h = h + self.self_attn(self.input_layernorm(h), rope, context, mask)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class DFlashDraftModel(nn.Module):
    """Parameters as published DFlash v1 checkpoints name them; NaN until loaded."""

    make_layer: type[Layer] = Layer

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(spec, kind) for kind in spec.layer_types)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary = make_rotary(spec)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(torch.nan)  # a forgotten load must not pass as a weak draft

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped hidden states [.., M*Ht] to context rows c [.., H]."""
        fused: Tensor = self.hidden_norm(self.fc(features))
        return fused

    def context_kv(self, c: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of context rows c [B, n, H] at positions [n], a pair per layer."""
        ropes = self._ropes(positions)
        return [layer.self_attn.key_value(c, ropes[layer.kind]) for layer in self._stack()]

    def block(
        self,
        noise: Tensor,  # [B, R, H] embedded anchor and mask tokens
        positions: Tensor,  # [R] or [B, 1, R]
        context: Sequence[Context],  # one a layer
        masks: Sequence[Tensor | None] | None = None,  # one a layer, see `block_mask`
        size: int | None = None,  # rows of one block, where several are packed side by side
    ) -> Tensor:  # [B, R, H]
        """Final hidden states of block rows; row 0 (the anchor's) predicts nothing."""
        size = noise.shape[1] if size is None else size
        ropes = self._ropes(positions)
        h = noise
        for index, layer in enumerate(self._stack()):
            h = layer(h, ropes[layer.kind], context[index], masks[index] if masks else None, size)
        out: Tensor = self.norm(h)
        return out

    def _ropes(self, positions: Tensor) -> dict[str, CosSin]:
        return {kind: rotary(positions) for kind, rotary in self.rotary.items()}

    def _stack(self) -> list[Layer]:
        return list(self.layers)  # type: ignore[arg-type]


def make_rotary(spec: DraftSpec) -> nn.ModuleDict:
    """Rotary tables by layer type."""
    ropes = spec.rope_parameters.items()
    return nn.ModuleDict(
        {k: Rotary(spec.head_dim, rope, interleaved=spec.rope_interleaved) for k, rope in ropes}
    )


def block_mask(
    positions: Tensor,  # [R] of the block rows
    keys: Tensor,  # [T + R] of context and block rows
    *,
    causal: bool,
    window: int | None,
) -> Tensor:  # [R, T + R] True = visible
    """Who sees whom: all, less the later rows if causal, less what is ``window`` or more away.

    A window counts the query's own slot. Source: docs/concepts/block.md.
    """
    ahead = keys[None, :] - positions[:, None]
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if window is None else seen & (ahead.abs() < window)


def transform_logits(logits: Tensor, spec: DraftSpec) -> Tensor:
    """Head output to draft logits: multiplier, tanh soft cap, scale (in this order)."""
    if spec.output_multiplier != 1.0:
        logits = logits * spec.output_multiplier
    if spec.softcap is not None:
        logits = (logits / spec.softcap).tanh() * spec.softcap
    return logits if spec.logit_scale == 1.0 else logits * spec.logit_scale
