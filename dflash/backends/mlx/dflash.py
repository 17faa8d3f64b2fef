"""The DFlash v1 draft in MLX: a small Qwen3-style stack over an injected context.

Equations: docs/concepts/block.md. Context rows enter only as keys and values, projected once per
committed token; block rows (the anchor and the mask tokens) run through the layers. The module owns
no embedding and no head, keeps no cache, and chooses no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx import nn

from dflash.drafts.rope import inverse_frequencies
from dflash.drafts.spec import DraftSpec

ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "silu": nn.silu,
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
}
KeyValue: TypeAlias = tuple[Any, Any]
"""Each [1, nkv, T, D], keys already normed and rotated."""
CosSin: TypeAlias = tuple[Any, Any]
Context: TypeAlias = KeyValue | Callable[[Any, Any], KeyValue] | None
"""A layer's context rows, or a cache that puts rows behind its own; None = there are none."""


class Rotary:
    """Cosines and sines of one layer type, float32 whatever the weights are."""

    def __init__(self, head_dim: int, rope: Mapping[str, Any], *, interleaved: bool) -> None:
        """``rope`` is one entry of ``DraftSpec.rope_parameters``."""
        size = int(head_dim * rope["partial_rotary_factor"])
        frequencies, self.scale = inverse_frequencies(size - size % 2, rope)
        self.frequencies, self.interleaved = mx.array(frequencies, dtype=mx.float32), interleaved

    def __call__(self, start: int, count: int) -> CosSin:
        """For positions ``start`` and the next ``count - 1``: [count, rotated size] each."""
        positions = mx.arange(start, start + count).astype(mx.float32)
        angles = positions[:, None] * self.frequencies
        if self.interleaved:
            angles = mx.repeat(angles, 2, axis=-1)
        else:
            angles = mx.concatenate([angles, angles], axis=-1)
        return mx.cos(angles) * self.scale, mx.sin(angles) * self.scale

    def rotate(self, x: Any, angles: CosSin) -> Any:
        """Rotate heads [1, nh, n, D]; what is beyond the rotated size passes."""
        cos, sin = angles
        turning, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if self.interleaved:
            pairs = turning.reshape(*turning.shape[:-1], -1, 2)
            turned = mx.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(turning.shape)
        else:
            left, right = mx.split(turning, 2, axis=-1)
            turned = mx.concatenate([-right, left], axis=-1)
        turning = (turning * cos + turned * sin).astype(x.dtype)
        return mx.concatenate([turning, rest], axis=-1) if rest.shape[-1] else turning


class Attention(nn.Module):
    """Grouped-query attention of block rows over context and block."""

    def __init__(self, spec: DraftSpec, width: int | None = None) -> None:
        """``width`` is that of the rows read; None = the stack's."""
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.value_scale = spec.value_scale
        width, bias = width or spec.hidden_size, spec.attention_bias
        self.q_proj = nn.Linear(width, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, spec.hidden_size, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=spec.rms_norm_eps)
        if spec.sinks:
            self.attention_sink_bias = mx.zeros(self.heads)

    def split(self, x: Any, heads: int) -> Any:
        """[1, n, heads*D] to [1, heads, n, D]."""
        return x.reshape(*x.shape[:-1], heads, self.head_dim).swapaxes(1, 2)

    def key_value(self, x: Any, rotary: Rotary, angles: CosSin) -> KeyValue:
        """Keys (normed, rotated) and values of rows x [1, n, H]."""
        key = self.k_norm(self.split(self.k_proj(x), self.kv_heads))
        return rotary.rotate(key, angles), self.split(self.v_proj(x), self.kv_heads)

    def __call__(self, x: Any, rotary: Rotary, angles: CosSin, context: Context, mask: Any) -> Any:
        """[1, R, H] normed block rows to [1, R, H]; mask [R, T + R], None = all is seen."""
        query = rotary.rotate(self.q_norm(self.split(self.q_proj(x), self.heads)), angles)
        key, value = self.key_value(x, rotary, angles)
        if callable(context):
            key, value = context(key, value)
        elif context is not None:
            key = mx.concatenate([context[0], key], axis=2)
            value = mx.concatenate([context[1], value], axis=2)
        sinks = self.get("attention_sink_bias")
        out = mx.fast.scaled_dot_product_attention(
            query,
            key,
            value,
            scale=self.head_dim**-0.5,
            mask=mask,
            sinks=None if sinks is None else sinks.astype(query.dtype),
        )
        if self.value_scale != 1.0:
            out = out * self.value_scale
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:-1], -1))


class MLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)
        self.act = ACTIVATIONS[spec.hidden_act]

    def __call__(self, x: Any) -> Any:
        """[.., H] to [.., H]."""
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, both residual."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(spec), MLP(spec)
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)

    def __call__(self, h: Any, rotary: Rotary, angles: CosSin, context: Context, mask: Any) -> Any:
        """Block rows [1, R, H] through one layer."""
        h = h + self.self_attn(self.input_layernorm(h), rotary, angles, context, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class DraftModule(nn.Module):
    """What sessions ask of a draft's module beside its rows."""

    norm: Any

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self._spec = spec  # underscored: MLX takes it for no parameter

    @property
    def spec(self) -> DraftSpec:
        """The draft's config."""
        return self._spec

    @property
    def dtype(self) -> Any:
        """Of the weights."""
        return self.norm.weight.dtype


class DFlashModule(DraftModule):
    """Parameters as published checkpoints name them."""

    make_layer: Callable[[DraftSpec], Any] = Layer

    def __init__(self, spec: DraftSpec) -> None:
        """Weights are NaN until loaded: a forgotten load must not pass as a weak draft."""
        super().__init__(spec)
        make = type(self).make_layer
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.norm = nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = [make(spec) for _ in range(spec.num_layers)]
        self._rotary = make_rotary(spec)
        blank(self)

    def fuse(self, features: Any) -> Any:
        """Tapped hidden states [.., M*Ht] to context rows c [.., H]."""
        return self.hidden_norm(self.fc(features))

    def context_kv(self, c: Any, start: int) -> list[KeyValue]:
        """Keys and values of context rows c [1, n, H] from position ``start``, a pair per layer."""
        angles = self._angles(start, c.shape[1])
        return [
            layer.self_attn.key_value(c, self._rotary[kind], angles[kind])
            for layer, kind in zip(self.layers, self._spec.layer_types, strict=True)
        ]

    def block(
        self,
        noise: Any,  # [1, R, H] embedded anchor and mask tokens
        start: int,
        context: Sequence[KeyValue | None],  # one a layer
        masks: Sequence[Any],  # one a layer, see `block_mask`
    ) -> Any:  # [1, R, H]
        """Final hidden states of block rows; row 0 (the anchor's) predicts nothing."""
        angles = self._angles(start, noise.shape[1])
        h = noise
        for index, kind in enumerate(self._spec.layer_types):
            layer = self.layers[index]
            h = layer(h, self._rotary[kind], angles[kind], context[index], masks[index])
        return self.norm(h)

    def _angles(self, start: int, count: int) -> dict[str, CosSin]:
        return {kind: rotary(start, count) for kind, rotary in self._rotary.items()}


def make_rotary(spec: DraftSpec) -> dict[str, Rotary]:
    """Rotary tables by layer type."""
    return {
        kind: Rotary(spec.head_dim, rope, interleaved=spec.rope_interleaved)
        for kind, rope in spec.rope_parameters.items()
    }


def blank(module: nn.Module) -> None:
    """NaN for every weight: a forgotten load must not pass as a weak draft."""
    module.apply(lambda weight: mx.full(weight.shape, mx.nan))


def block_mask(rows: int, seen: int, *, causal: bool, window: int | None) -> Any:
    """[R, seen + R] True = visible, or None where everything is.

    All, less the later rows if causal, less what is ``window`` or more away (a query's own place
    counted). ``seen`` context rows stand directly before the block.
    """
    if not causal and (window is None or seen + rows <= window):
        return None
    ahead = mx.arange(seen + rows)[None, :] - mx.arange(seen, seen + rows)[:, None]
    visible = ahead <= 0 if causal else mx.ones(ahead.shape, dtype=mx.bool_)
    return visible if window is None else visible & (mx.abs(ahead) < window)


def transform_logits(logits: Any, spec: DraftSpec) -> Any:
    """Head output to draft logits: multiplier, tanh soft cap, scale (in this order)."""
    if spec.output_multiplier != 1.0:
        logits = logits * spec.output_multiplier
    if spec.softcap is not None:
        logits = mx.tanh(logits / spec.softcap) * spec.softcap
    return logits if spec.logit_scale == 1.0 else logits * spec.logit_scale
