"""The EAGLE-3 draft as a module: one decoder layer that reads a token and a state side by side.

The row of position P joins the embedding of token P + 1 with a state of position P: the target's
tapped states through ``fc`` where the target has been, else the row's own output one step before.
It says what follows token P + 1. Source: EAGLE-3 (arXiv 2503.01840, section 3) and the options of
speculators' config. It keeps no cache and chooses no tokens: `eagle3_session.py` does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dflash.backends.torch.dflash import MLP, Attention, Context, Layer, RMSNorm, make_rotary
from dflash.backends.torch.rope import CosSin
from dflash.drafts.methods import Eagle3
from dflash.drafts.spec import DraftSpec


class PlainLayer(Layer):
    """A decoder layer, with or without norms on queries and keys."""

    def __init__(self, spec: DraftSpec, kind: str) -> None:
        super().__init__(spec, kind)
        _settle_norms(self.self_attn, spec)


class FirstLayer(nn.Module):
    """The layer that reads token and state: projections of twice the width, a norm for each."""

    def __init__(self, spec: DraftSpec, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.residual_is_normed = _options(spec).norm_before_residual
        self.self_attn = Attention(spec)
        _settle_norms(self.self_attn, spec)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = nn.Linear(2 * spec.hidden_size, narrow.out_features, bias=spec.attention_bias)
            setattr(self.self_attn, name, wide)
        self.mlp = MLP(spec)
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = (
            RMSNorm(spec.hidden_size, spec.rms_norm_eps) for _ in range(3)
        )

    def forward(
        self,
        embedded: Tensor,  # [B, n, H]
        state: Tensor,  # [B, n, H]
        rope: CosSin,
        context: Context,
        mask: Tensor | None,
    ) -> Tensor:  # [B, n, H]
        """Rows through attention and feed-forward."""
        normed = self.hidden_norm(state)
        residual = normed if self.residual_is_normed else state
        x = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        h = residual + self.self_attn(x, rope, context, mask)
        out: Tensor = h + self.mlp(self.post_attention_layernorm(h))
        return out


class Eagle3DraftModel(nn.Module):
    """Parameters as speculators' checkpoints name them (``midlayer.`` is ``layers.0.``)."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.spec, options = spec, _options(spec)
        taps, eps = len(spec.taps), spec.rms_norm_eps
        self.fc = nn.Linear(taps * spec.target_hidden_size, spec.hidden_size, bias=False)
        first, *others = spec.layer_types
        self.layers = nn.ModuleList([FirstLayer(spec, first)])
        self.layers.extend(PlainLayer(spec, kind) for kind in others)
        self.norm = RMSNorm(spec.hidden_size, eps)
        if options.norm_before_fc:
            self.input_norm = RMSNorm(taps * spec.target_hidden_size, eps)
        if options.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(spec.target_hidden_size, eps) for _ in spec.taps)
        self.rotary = make_rotary(spec)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(torch.nan)  # a forgotten load must not pass as a weak draft

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped hidden states [.., M*Ht] to states [.., H]."""
        options = _options(self.spec)
        if options.norm_before_fc:
            features = self.input_norm(features)
        if options.fc_norm:
            parts = torch.split(features, self.spec.target_hidden_size, dim=-1)
            features = torch.cat(
                [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1
            )
        fused: Tensor = self.fc(features)
        return fused

    def forward(
        self,
        embedded: Tensor,  # [B, n, H] tokens one position on
        state: Tensor,  # [B, n, H]
        positions: Tensor,  # [n]
        context: Sequence[Context],  # one a layer
        masks: Sequence[Tensor | None],  # one a layer
    ) -> tuple[Tensor, Tensor]:  # each [B, n, H]
        """Normed rows for the head, and the states that the next step reads."""
        ropes = {kind: rotary(positions) for kind, rotary in self.rotary.items()}
        first, *others = self.layers
        h = first(embedded, state, ropes[str(first.kind)], context[0], masks[0])
        for layer, cache, mask in zip(others, context[1:], masks[1:], strict=True):
            h = layer(h, ropes[str(layer.kind)], cache, mask, h.shape[1])
        normed = self.norm(h)
        return normed, normed if _options(self.spec).norm_output else h


def _options(spec: DraftSpec) -> Eagle3:
    assert spec.eagle3 is not None, "the spec is of another kind of draft"
    return spec.eagle3


def _settle_norms(attention: Attention, spec: DraftSpec) -> None:
    if not _options(spec).qk_norm:
        attention.q_norm = attention.k_norm = nn.Identity()  # type: ignore[assignment]
