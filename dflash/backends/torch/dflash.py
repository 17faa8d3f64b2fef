"""The DFlash v1 draft as a module: a small Qwen3-style stack over an injected context.

Equations: docs/concepts/block.md (DFlash paper, arXiv 2602.06036, section 4.1 and appendix A.3).
Context rows enter only as keys and values, projected once per committed token; block rows (the
anchor and the mask tokens) run through the layers. The module owns no embedding and no head: both
are the target's. It does not choose tokens and keeps no cache: `session.py` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:
    from dflash.drafts.spec import DraftSpec

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}

KeyValue = tuple[Tensor, Tensor]  # each [B, nkv, T, D], keys already rotated


class RMSNorm(nn.Module):
    """``w * x / sqrt(mean(x^2) + eps)``, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), float("nan")))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)


class Rotary(nn.Module):
    """Rotate-half position embedding with float32 frequencies."""

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        # float64 then float32: bf16 frequencies would drift at long positions
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        self.register_buffer("inv_freq", (theta**-exponent).float(), persistent=False)

    def forward(self, positions: Tensor) -> KeyValue:
        """Cosine and sine, each [.., n, D], for integer positions [.., n]."""
        angles = positions.float()[..., None] * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary cosine and sine [.., 1, n, D] to heads [.., nh, n, D]."""
    left, right = x.chunk(2, dim=-1)
    turned = torch.cat((-right, left), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention of block rows over context and block."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        width, bias = spec.hidden_size, spec.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, width, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, spec.rms_norm_eps)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """[B, n, heads*D] to [B, heads, n, D]."""
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def key_value(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """Keys (normed, rotated) and values of rows x [B, n, H]."""
        key = rotate(self.k_norm(self.split(self.k_proj(x), self.kv_heads)), cos, sin)
        return key, self.split(self.v_proj(x), self.kv_heads)

    def forward(
        self,
        x: Tensor,  # [B, R, H] normed block rows
        rope: KeyValue,  # cos, sin of the block rows
        context: KeyValue,
        mask: Tensor | None,  # [.., R, T + R] True = visible; None = all
    ) -> Tensor:  # [B, R, H]
        """Attend from block rows to context and block."""
        query = rotate(self.q_norm(self.split(self.q_proj(x), self.heads)), *rope)
        key, value = self.key_value(x, *rope)
        key = torch.cat((context[0], key), dim=2)
        value = torch.cat((context[1], value), dim=2)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


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
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.self_attn = Attention(spec)
        self.mlp = MLP(spec)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)

    def forward(self, h: Tensor, rope: KeyValue, context: KeyValue, mask: Tensor | None) -> Tensor:
        """Block rows [B, R, H] through one layer."""
        h = h + self.self_attn(self.input_layernorm(h), rope, context, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class DFlashDraftModel(nn.Module):
    """Parameters as published DFlash v1 checkpoints name them; NaN until loaded."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec = spec
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        theta = float(spec.rope_parameters["full_attention"]["rope_theta"])
        self.rotary = Rotary(spec.head_dim, theta)

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped hidden states [.., M*Ht] to context rows c [.., H]."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, c: Tensor, positions: Tensor) -> list[KeyValue]:
        """Keys and values of context rows c [B, n, H] at positions [n], a pair per layer."""
        cos, sin = self.rotary(positions)
        return [layer.self_attn.key_value(c, cos, sin) for layer in self.layers]

    def block(
        self,
        noise: Tensor,  # [B, R, H] embedded anchor and mask tokens
        positions: Tensor,  # [R] or [B, 1, R]
        context: list[KeyValue],
        masks: list[Tensor | None] | None = None,
    ) -> Tensor:  # [B, R, H]
        """Final hidden states of block rows; row 0 (the anchor's) predicts nothing."""
        rope = self.rotary(positions)
        h = noise
        for index, layer in enumerate(self.layers):
            h = layer(h, rope, context[index], masks[index] if masks else None)
        return self.norm(h)
