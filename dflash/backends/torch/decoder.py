"""One decoder layer of the common dense families in few, large products; a target's and a draft's.

A layer of a Llama written out makes seven products and some forty small operations; at one to
sixteen rows on a CPU the small ones take a quarter of a pass. Here query, key and value are one
product, gate and up another, rotation is one multiplication of complex numbers, and what is added
to a product's result is added in the product where the packed form can. Same weights, same
formulas, results within rounding.

`DecoderLayer.rows` is the layer for the rows behind one sequence, with nothing around it: no module
calls, one write to the cache, rotations and masks as slices of tables (`places.py`). Keys lie in
the cache with the two halves of a head interleaved, which no product of queries and keys can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dflash.backends.torch.attention import attend_rows
from dflash.backends.torch.features import Tap
from dflash.backends.torch.gated import GatedLinear
from dflash.backends.torch.interpreted import Interpreted, Reason, normed, reason
from dflash.backends.torch.narrow import Multiply
from dflash.backends.torch.packed import least_rows
from dflash.backends.torch.products import Plus
from dflash.backends.torch.slots import FixedSlot, OuterSlot, Slot, Span

WIDE = {torch.float32: torch.complex64, torch.float64: torch.complex128}
"""Numbers wide enough to be turned where they lie, and what two of them are."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer's modules do not say of themselves under one name."""

    head_dim: int
    scaling: float  # of attention scores
    eps: float
    act: Callable[[Tensor], Tensor]
    causal: bool  # a row sees itself and those before it, where no mask says more


class DecoderLayer(nn.Module):
    """One pre-norm decoder layer: attention and gated feed-forward, both residual."""

    def __init__(self, layer: Any, shape: Shape) -> None:
        """Take over the weights of ``layer``, named as Llama names them; joined ones are copies."""
        super().__init__()
        self._parts: tuple[Any, ...] = ()
        self.by_python: Reason | None = None  # of all layers, on the first: see `interpreted.py`
        attention, mlp = layer.self_attn, layer.mlp
        self.head_dim, self.scaling, self.eps = shape.head_dim, shape.scaling, shape.eps
        self.is_causal = shape.causal
        self.queries = attention.q_proj.out_features // self.head_dim
        self.keys = attention.k_proj.out_features // self.head_dim
        self.turned = self.queries + self.keys  # heads that are rotated, the first ones
        self.qkv = joined(attention.q_proj, attention.k_proj, attention.v_proj)
        for part in (self.qkv.weight, self.qkv.bias):
            if part is not None:
                interleave(part, self.turned, self.head_dim)
        self.o_proj, self.down_proj = attention.o_proj, mlp.down_proj
        self.gate_up = GatedLinear(joined(mlp.gate_proj, mlp.up_proj), shape.act)
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.head_norm: nn.Parameter | None = None
        if hasattr(attention, "q_norm"):
            parts = [attention.q_norm.weight.repeat(self.queries)]
            parts.append(attention.k_norm.weight.repeat(self.keys))
            weight = torch.cat(parts)
            interleave(weight, self.turned, self.head_dim)
            self.head_norm = nn.Parameter(weight.view(self.turned, -1), requires_grad=False)

    def rows(
        self,
        x: Tensor,  # [n, H], and perhaps rows behind them that are there for speed alone
        turns: Tensor,  # as many rows, [n, heads * D/2] complex, see `widened`
        bias: Tensor | None,  # added to scores, see `attention.attend_rows`
        slot: Slot | FixedSlot | OuterSlot,
    ) -> Tensor:  # [n, H]
        """The layer on the rows behind one sequence, with nothing around it."""
        count, rows = x.shape[0], slot.rows
        heads = rotate_(self.joint(x), turns)
        if isinstance(slot, OuterSlot):
            mixed = slot.attend(heads.narrow(0, 0, rows))
        else:
            mixed = self.attend(heads, bias, slot)
        if rows < count:
            mixed = F.pad(mixed, (0, 0, 0, count - rows))
        return self.rest(x, mixed)

    def attend(self, heads: Tensor, bias: Tensor | None, slot: Slot | FixedSlot) -> Tensor:
        """Attention of turned rows [n, heads * D] to [n, nh * D]; their keys go into the cache."""
        query, new = self.parted(heads, slot.rows)
        slot.put(new)
        return attend_rows(query, slot.keys, slot.values, bias, self.scaling, self.is_causal)

    def parted(self, heads: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Of heads [n, heads * D] the first ``rows``: queries [1, nh, n, D]; keys, then values.

        Each in one call, where a view, a transposition, a cut and a split are four.
        """
        width, size, first = self.head_dim, heads.shape[1], heads.storage_offset()
        steps = (0, width, size, 1)
        query = heads.as_strided((1, self.queries, rows, width), steps, first)
        behind = first + self.queries * width
        return query, heads.as_strided((1, 2 * self.keys, rows, width), steps, behind)

    def rest(self, x: Tensor, mixed: Tensor) -> Tensor:
        """What follows on attention's result [.., nh * D]."""
        _, out, gated, down, _, norm, _ = self._parts
        x = out(mixed, x)
        result: Tensor = down(gated(norm(x)), x)
        return result

    def joint(self, x: Tensor) -> Tensor:
        """Rows [.., n, H] to heads [.., n, heads * D], normed where the family does."""
        product, _, _, _, norm, _, even = self._parts or self._at_hand()
        heads: Tensor = product(norm(x))
        if even is not None:
            both = heads.view(*x.shape[:-1], -1, self.head_dim).narrow(-2, 0, self.turned)
            both.copy_(even(both))
        return heads

    def _at_hand(self) -> tuple[Any, ...]:
        """What every call needs, as plain attributes: a module's own are looked up slowly."""
        norms = (self.input_layernorm.weight, self.post_attention_layernorm.weight)
        self._parts = (
            multiply_of(self.qkv),
            plus_of(self.o_proj),
            multiply_of(self.gate_up),
            plus_of(self.down_proj),
            *(norm_of(weight, self.eps) for weight in norms),
            None if self.head_norm is None else norm_of(self.head_norm, self.eps),
        )
        return self._parts


class Stack:
    """Decoder layers and the norm behind them, over the rows behind one sequence."""

    def __init__(self, layers: Iterable[DecoderLayer], norm: Tensor, eps: float) -> None:
        """All layers are alike in shape."""
        self.layers, self._norm = list(layers), norm_of(norm, eps)
        self.first = self.layers[0]
        self.least = least_rows(self.first.qkv)  # fewer rows cost no less
        why = reason(self.layers).why
        self._interpreted = None if why else Interpreted(self.layers, norm, eps)

    def __call__(
        self,
        x: Tensor,  # [n, H], and perhaps rows behind them that are there for speed alone
        turns: Tensor,  # as many rows, [n, 1, D/2] complex
        bias: Tensor | None,
        slots: Iterable[Slot | FixedSlot | OuterSlot],
        tap: Tap | None = None,
    ) -> Tensor:  # as x
        """Normed states of the last layer; ``tap`` sees the states that it wants, or all."""
        turns = widened(turns, self.first.turned, self.first.keys)
        if self._interpreted is not None and isinstance(slots, Span):
            return self._interpreted(x, turns, bias, slots, tap)
        for index, (layer, slot) in enumerate(zip(self.layers, slots, strict=True)):
            x = layer.rows(x, turns, bias, slot)
            if tap is not None:
                tap(index, x)
        return self._norm(x)


def multiply_of(part: Any) -> Multiply:
    """The product with a linear layer, packed or not."""
    found: Multiply = getattr(part, "multiply", part.forward)
    return found


def plus_of(part: Any) -> Plus:
    """``x, y -> part(x) + y``."""
    return getattr(part, "plus", lambda x, y: part(x).add_(y))


def widened(turns: Tensor, turning: int, still: int) -> Tensor:
    """Turns [.., 1, D/2] of a row for each of its heads, the last ``still`` of which stay as they
    are: [.., heads * D/2], so that a layer turns all at once, in memory that lies as they do.

    Or [.., 1, D/2, 2] to [.., heads * D/2, 2], where the complex numbers are pairs of real ones.
    """
    if not turns.is_complex():
        turned = turns.expand(*turns.shape[:-3], turning, -1, -1)
        ones = turns.new_ones((*turns.shape[:-3], still, turns.shape[-2]))
        stays = torch.stack((ones, torch.zeros_like(ones)), dim=-1)
        return torch.cat((turned, stays), dim=-3).flatten(-3, -2)
    *outer, _, half = turns.shape
    turned = turns.expand(*outer, turning, half)
    return torch.cat((turned, turns.new_ones((*outer, still, half))), dim=-2).flatten(-2)


def rotate_(heads: Tensor, turns: Tensor) -> Tensor:
    """Heads [.., h * D], halves interleaved, turned by [.., h * D/2].

    In place where the numbers are wide enough; but not by pairs [.., h * D/2, 2] of real ones.
    """
    kind = WIDE.get(heads.dtype)
    wide = heads.float() if kind is None else heads
    if not turns.is_complex():
        (x, y), (c, s) = wide.view(*heads.shape[:-1], -1, 2).unbind(-1), turns.unbind(-1)
        turned = torch.stack((x * c - y * s, x * s + y * c), dim=-1)
        return turned.view(heads.shape).to(heads.dtype)
    wide.view(kind or torch.complex64).mul_(turns)
    return heads if kind is not None else wide.to(heads.dtype)


def norm_of(weight: Tensor, eps: float) -> Multiply:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last axis, computed in float32."""
    part = 1 / weight.shape[-1]
    with torch.inference_mode(False):
        number = torch.full((1,), eps, device=weight.device)

    def wide(x: Tensor) -> Tensor:
        return normed(x, weight, number, part)

    def other(x: Tensor) -> Tensor:
        y = x.float()
        length = torch.linalg.vector_norm(y, 2, -1, True)
        scale = torch.addcmul(number, length, length, value=part).rsqrt_()
        return (y * scale).to(x.dtype).mul_(weight)

    return wide if weight.dtype == torch.float32 else other


def interleave(weight: Tensor, heads: int, width: int) -> None:
    """Put the two halves of each of the first ``heads`` heads of ``width`` rows side by side."""
    part = weight.data[: heads * width]
    halves = part.view(heads, 2, width // 2, *part.shape[1:]).transpose(1, 2)
    part.copy_(halves.flatten(0, 2).clone())


def joined(*layers: nn.Linear) -> nn.Linear:
    """One linear layer with the outputs of ``layers`` behind each other."""
    bias = None if layers[0].bias is None else torch.cat([x.bias for x in layers])
    return linear_of(torch.cat([x.weight for x in layers]), bias)


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer over ``weight [out, in]``, which is not copied."""
    # The meta device: weights that are replaced at once need no memory and no random numbers.
    result = nn.Linear(weight.shape[1], 1, bias=bias is not None, device="meta")
    result.out_features = weight.shape[0]
    result.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        result.bias = nn.Parameter(bias, requires_grad=False)
    return result
