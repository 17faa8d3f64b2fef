"""A DFlash draft over the decoder layers that a fused target runs (`decoder.py`).

Context rows of all layers come out of one product and go into one block of memory; block rows run
through the same layers as a target's rows, only that all of them see each other. `fuse_draft`
replaces the layers of a draft that `why_not` allows (`draft_load.py` compares states before and
after, and reads a draft again whose states differ); `FusedDraft` is what a session runs then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.attention import MOST_ROWS, stacked_groups
from dflash.backends.torch.decoder import (
    DecoderLayer,
    Shape,
    Stack,
    interleave,
    joined,
    multiply_of,
    norm_of,
    rotate_,
    widened,
)
from dflash.backends.torch.dflash import ACTIVATIONS, DFlashDraftModel, Layer, block_mask
from dflash.backends.torch.draft_cache import LayerCache
from dflash.backends.torch.places import Places
from dflash.backends.torch.slots import FixedSlot, OuterSlot, Slot

ROWS = 5  # of the check: context rows, and block rows


class ContextKV(nn.Module):
    """What makes keys and values of context rows for all layers, out of one product."""

    def __init__(self, layers: Sequence[Any]) -> None:
        """Copies what ``layers`` project keys and values with."""
        super().__init__()
        attentions = [layer.self_attn for layer in layers]
        self.keys, self.width = attentions[0].kv_heads, attentions[0].head_dim
        self.kv = joined(*(part for a in attentions for part in (a.k_proj, a.v_proj)))
        norms = torch.stack([a.k_norm.weight for a in attentions]).repeat(1, self.keys)
        for part in (self.kv.weight, self.kv.bias):
            if part is not None:
                for stretch in part.data.chunk(len(layers)):
                    interleave(stretch, self.keys, self.width)
        for row in norms:
            interleave(row, self.keys, self.width)
        norms = norms.view(len(layers), self.keys, self.width)
        self.norms = nn.Parameter(norms, requires_grad=False)


class FusedDraft:
    """What a session runs of a draft that `fuse_draft` has fused, over one cache for all layers."""

    def __init__(self, model: DFlashDraftModel) -> None:
        """``model``'s rotary embedding and taps are read now."""
        spec, like = model.spec, model.norm.weight
        context: Any = model.fused_context
        self.stack = Stack(model.layers, like, spec.rms_norm_eps)  # type: ignore[arg-type]
        first = self.stack.first
        self._fc, self._kv = multiply_of(model.fc), multiply_of(context.kv)
        self._norm_fused = norm_of(model.hidden_norm.weight, spec.rms_norm_eps)
        self._norm_keys = norm_of(context.norms, spec.rms_norm_eps)
        self._groups = stacked_groups(like, first.queries // first.keys)
        self.places = Places(turns_of(model.rotary[spec.layer_types[0]]), self._groups, like)

    def absorb(self, cache: LayerCache, features: Tensor, start: int) -> None:
        """Features [n, M*Ht] of positions from ``start`` on to keys and values in ``cache``."""
        turns, half = self.places.turns(start, start + features.shape[0]), self.stack.first.keys
        heads = self.context(features, turns)
        cache.append(heads[:, :half], heads[:, half:], start)

    def context(self, features: Tensor, turns: Tensor) -> Tensor:
        """Keys, then values [L, 2 * nkv, n, D] of features [n, M*Ht] with turns [n, 1, D/2]."""
        count, first = features.shape[0], self.stack.first
        turns = widened(turns, first.keys, first.keys)[:, None]
        rows = self._kv(self._norm_fused(self._fc(features)))
        rows = rows.view(count, len(self.stack.layers), -1)
        heads = rows.view(*rows.shape[:2], -1, first.head_dim)  # [n, L, 2 * nkv, D]
        keys = heads.narrow(2, 0, first.keys)
        keys.copy_(self._norm_keys(keys))
        return rotate_(rows, turns).view(heads.shape).permute(1, 2, 0, 3)

    def block(self, cache: LayerCache, noise: Tensor, start: int, mask: Tensor | None) -> Tensor:
        """Final states [R, H] of block rows [R, H] from position ``start`` on.

        ``mask`` [R, T + R] is True where a row sees a key; None = everywhere.
        """
        rows = noise.shape[0]
        turns = self.places.turns(start, start + rows + self.more(rows))
        bias = None if mask is None else self.bias(mask, noise)
        return self.through(noise, turns, bias, cache.slots(rows))

    def more(self, count: int) -> int:
        """Rows to be added to ``count`` for speed alone."""
        return max(0, self.stack.least - count)

    def through(
        self,
        noise: Tensor,  # [R, H]
        turns: Tensor,  # [R + more, 1, D/2]
        bias: Tensor | None,
        slots: Iterable[Slot | FixedSlot | OuterSlot],  # one a layer
    ) -> Tensor:  # [R, H]
        """Final states of block rows."""
        rows = noise.shape[0]
        more = turns.shape[0] - rows
        x = F.pad(noise, (0, 0, 0, more)) if more else noise
        return self.stack(x, turns, bias, slots)[:rows]

    def bias(self, mask: Tensor, like: Tensor) -> Tensor:
        """What is added to scores where ``mask [R, T]`` is not True."""
        bias = like.new_zeros(mask.shape).masked_fill_(mask.logical_not(), -torch.inf)
        few = bias.shape[0] <= MOST_ROWS
        return bias.repeat_interleave(self._groups, dim=0) if few else bias


def fused_of(model: DFlashDraftModel) -> FusedDraft | None:
    """What a session runs in place of ``model``; None where `fuse_draft` left it alone."""
    return FusedDraft(model) if hasattr(model, "fused_context") else None


def why_not(model: DFlashDraftModel) -> str:
    """Why the layers of ``model`` stay as they are; empty when they can be fused."""
    spec = model.spec
    layers: list[Any] = list(model.layers)
    if spec.kind != "dflash" or any(type(layer) is not Layer for layer in layers):
        return f"layers of a {spec.kind} draft are not fused"
    if len(set(spec.layer_types)) > 1 or len(set(spec.causal)) > 1:
        return "layers that differ are not fused"
    if spec.sinks or spec.value_scale != 1.0:
        return "attention with sinks or scaled values is not fused"
    rotary: Any = model.rotary[spec.layer_types[0]]
    if spec.rope_interleaved or 2 * rotary.inv_freq.shape[-1] != spec.head_dim:
        return "heads that are rotated otherwise are not fused"
    return ""


def fuse_draft(model: DFlashDraftModel) -> None:
    """Replace the decoder layers of a model that `why_not` allows."""
    spec, layers = model.spec, model.layers
    shape = Shape(
        spec.head_dim,
        spec.head_dim**-0.5,
        spec.rms_norm_eps,
        ACTIVATIONS[spec.hidden_act],
        causal=False,
    )
    with torch.inference_mode():
        model.fused_context = ContextKV(list(layers))
        for index, layer in enumerate(layers):
            layers[index] = DecoderLayer(layer, shape)
    model.eval().requires_grad_(False)


def sample_states(model: DFlashDraftModel) -> Tensor:
    """Final states [ROWS, H] of a made-up block behind a made-up context."""
    spec, like = model.spec, model.norm.weight
    generator = torch.Generator().manual_seed(0)
    wide = len(spec.taps) * spec.target_hidden_size
    made = [torch.randn(ROWS, size, generator=generator) for size in (wide, spec.hidden_size)]
    features, noise = (rows.to(like) for rows in made)
    places = torch.arange(2 * ROWS, device=like.device)
    window = spec.sliding_window if spec.layer_types[0] == "sliding_attention" else None
    mask = block_mask(places[ROWS:], places, causal=spec.causal[0], window=window)
    fused, masks = fused_of(model), [mask] * spec.num_layers
    with torch.inference_mode():
        if fused is None:
            context = model.context_kv(model.fuse(features[None]), places[:ROWS])
            return model.block(noise[None], places[ROWS:], context, masks)[0].float()
        cache = LayerCache(
            spec, 2 * ROWS, None, device=like.device, dtype=like.dtype, layers=spec.num_layers
        )
        fused.absorb(cache, features, 0)
        return fused.block(cache, noise, ROWS, mask).float()


def turns_of(rotary: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """What makes turns [B, n, 1, D/2] of positions [B, n] with a draft's `rope.Rotary`."""

    def turns(_like: Tensor, positions: Tensor) -> Tensor:
        angles = positions[..., None].float() * rotary.inv_freq
        return torch.polar(torch.full_like(angles, rotary.scale), angles)[:, :, None]

    return turns
