"""The EAGLE-3 draft in MLX: one decoder layer that reads a token and a state side by side.

The row of position P joins the embedding of token P + 1 with a state of position P: the target's
tapped states through ``fc`` where the target has been, else the row's own output one step before.
It says what follows token P + 1. Source: EAGLE-3 (arXiv 2503.01840, section 3) and the options of
speculators' config. Names are those of published files (``midlayer.`` is ``layers.0.``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx import nn

from dflash.backends.mlx.dflash import (
    MLP,
    Attention,
    Context,
    CosSin,
    DraftModule,
    Layer,
    Rotary,
    blank,
    make_rotary,
)
from dflash.drafts.methods import Eagle3
from dflash.drafts.spec import DraftSpec


class PlainLayer(Layer):
    """A decoder layer, with or without norms on queries and keys."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        _settle_norms(self.self_attn, spec)


class FirstLayer(nn.Module):
    """The layer that reads token and state: projections of twice the width, a norm for each."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self._residual_is_normed = _options(spec).norm_before_residual
        self.self_attn = Attention(spec, 2 * spec.hidden_size)
        _settle_norms(self.self_attn, spec)
        self.mlp = MLP(spec)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps))

    def __call__(
        self,
        read: tuple[Any, Any],  # embedded tokens and states, [1, n, H] each
        rotary: Rotary,
        angles: CosSin,
        context: Context,
        mask: Any,
    ) -> Any:  # [1, n, H]
        """Rows through attention and feed-forward."""
        embedded, state = read
        normed = self.hidden_norm(state)
        residual = normed if self._residual_is_normed else state
        x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        h = residual + self.self_attn(x, rotary, angles, context, mask)
        return h + self.mlp(self.post_attention_layernorm(h))


class Eagle3Module(DraftModule):
    """Parameters as published checkpoints name them; NaN until loaded."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__(spec)
        options = _options(spec)
        taps, eps = len(spec.taps), spec.rms_norm_eps
        self.fc = nn.Linear(taps * spec.target_hidden_size, spec.hidden_size, bias=False)
        others = [PlainLayer(spec) for _ in spec.layer_types[1:]]
        self.layers = [FirstLayer(spec), *others]
        self.norm = nn.RMSNorm(spec.hidden_size, eps=eps)
        if options.norm_before_fc:
            self.input_norm = nn.RMSNorm(taps * spec.target_hidden_size, eps=eps)
        if options.fc_norm:
            self.fc_norm = [nn.RMSNorm(spec.target_hidden_size, eps=eps) for _ in spec.taps]
        self._rotary = make_rotary(spec)
        blank(self)

    def fuse(self, features: Any) -> Any:
        """Tapped hidden states [.., M*Ht] to states [.., H]."""
        options = _options(self._spec)
        if options.norm_before_fc:
            features = self.input_norm(features)
        if options.fc_norm:
            parts = mx.split(features, len(self._spec.taps), axis=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = mx.concatenate(normed, axis=-1)
        return self.fc(features)

    def rows(
        self,
        embedded: Any,  # [1, n, H] tokens one position on
        state: Any,  # [1, n, H]
        start: int,
        context: Sequence[Context],  # one a layer
        masks: Sequence[Any],  # one a layer
    ) -> tuple[Any, Any]:  # each [1, n, H]
        """Normed rows for the head, and the states that the next step reads."""
        count = embedded.shape[1]
        angles = {kind: rotary(start, count) for kind, rotary in self._rotary.items()}
        h: Any = embedded, state  # what the first layer reads; the others read rows
        for index, kind in enumerate(self._spec.layer_types):
            layer: Any = self.layers[index]
            h = layer(h, self._rotary[kind], angles[kind], context[index], masks[index])
        normed = self.norm(h)
        return normed, normed if _options(self._spec).norm_output else h


def _options(spec: DraftSpec) -> Eagle3:
    assert spec.eagle3 is not None, "the spec is of another kind of draft"
    return spec.eagle3


def _settle_norms(attention: Attention, spec: DraftSpec) -> None:
    if not _options(spec).qk_norm:
        attention.q_norm = attention.k_norm = nn.Identity()
