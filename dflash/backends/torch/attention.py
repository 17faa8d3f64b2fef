"""Attention of a few rows with shared key heads, without copying the keys.

Query heads that share a key head can be stacked as more rows of one head: the same products, and
the cache is read once. Same results within rounding, as the rows are independent.
"""

from __future__ import annotations

import threading
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

STACKED = "stacked_rows"  # its name in transformers, which takes "flash" in one for a library
LONG = 1024  # keys from which a CPU, too, gains by stacked rows: it reads each once, not per head
GAIN = 0.8  # of the time by heads that the same rows take stacked, on one core, from there on
SLICE = 32  # rows of a head that torch's kernel gives to a core at once
MOST_ROWS = 32  # beyond, the products are large and the copies no longer matter


def attend_rows(
    query: Tensor,  # [1, nh, n, D], rows lying behind each other
    key: Tensor,  # [1, nkv, T, D]
    value: Tensor,
    bias: Tensor | None,  # added to scores, see `places.Places.bias`
    scaling: float,
    causal: bool = True,  # without a bias: the last n rows of the sequence, each up to itself
) -> Tensor:
    """``[n, nh * D]``: a few rows over keys and values."""
    (_, heads, rows, width), (_, kept, seen, _) = query.shape, key.shape
    groups = stacked_groups(query, heads // kept)
    if groups == 1 and stacks(heads, kept, rows, seen):
        mask = None if bias is None else stacked_mask(bias, heads // kept, query.dtype)
        return by_stacked_heads(query, key, value, mask, scaling)
    if groups == 1 or rows > MOST_ROWS:
        return by_heads(query, key, value, bias, scaling, causal)
    stacked = query[0].transpose(0, 1).view(rows, -1, groups, width)
    stacked = stacked.transpose(0, 1).flatten(1, 2)[None]
    mixed = F.scaled_dot_product_attention(stacked, key, value, attn_mask=bias, scale=scaling)
    return mixed[0].view(-1, rows, groups, width).transpose(0, 1).flatten(1)


def by_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scaling: float,
    causal: bool,
) -> Tensor:
    """`attend_rows`, each query head for itself. TorchScript reads this, see `interpreted.py`."""
    _, heads, rows, width = query.shape
    mixed = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        is_causal=causal and bias is None and rows > 1,
        scale=scaling,
        enable_gqa=heads != key.shape[1],
    )
    side = heads * width
    if list(mixed.stride()) == [rows * side, width, side, 1]:  # a row's heads lie side by side
        return mixed.as_strided([rows, side], [side, 1])
    return mixed.transpose(1, 2).reshape(rows, side)


def by_stacked_heads(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scaling: float
) -> Tensor:
    """The same with the query heads of a key head as rows of one, on a CPU, and a bias that
    `stacked_mask` has made. TorchScript reads this, too."""
    _, heads, rows, width = query.shape
    kept = key.shape[1]
    mixed = F.scaled_dot_product_attention(
        query.reshape(1, kept, heads // kept * rows, width),
        key,
        value,
        attn_mask=bias,
        scale=scaling,
    )
    return mixed.reshape(heads, rows, width).transpose(0, 1).flatten(1)


def stacks(heads: int, keys: int, rows: int, seen: int) -> bool:
    """Whether a CPU runs ``rows`` over ``seen`` keys sooner by stacked heads."""
    return 1 < rows <= MOST_ROWS and seen >= LONG and stacking_pays(heads, keys, rows)


def stacking_pays(heads: int, keys: int, rows: int) -> bool:
    """Whether the cores are sooner done with stacked rows: these are fewer, larger parts."""
    cores, stacked = torch.get_num_threads(), heads // keys * rows
    slices = ceil(stacked / SLICE)
    longest = ceil(keys * slices / cores) * stacked / slices  # rows of the core with the most
    return heads > keys and GAIN * longest <= ceil(heads / cores) * rows


def attend_block(
    query: Tensor,  # [B, nh, R, D]
    key: Tensor,  # [B, nkv, T, D]
    value: Tensor,
    mask: Tensor | None,  # [.., R, T], of booleans or added to scores; None = all see all
) -> Tensor:  # [B, nh, R, D]
    """Attention of a draft's rows. On a GPU, only the slow kernel shares key heads under a mask."""
    batch, heads, rows, width = query.shape
    groups = stacked_groups(query, heads // key.shape[1])
    if mask is None or mask.dim() != 2 or groups == 1 or rows > MOST_ROWS:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    stacked = query.reshape(batch, heads // groups, groups * rows, width)
    mixed = F.scaled_dot_product_attention(stacked, key, value, attn_mask=mask.repeat(groups, 1))
    return mixed.reshape(batch, heads, rows, width)


def stacked_groups(like: Tensor, groups: int) -> int:
    """How many of ``groups`` query heads are stacked as rows of a key head, on ``like``'s device.

    None on a CPU, whose product shares key heads by itself and spreads query heads over the cores.
    """
    return 1 if like.is_cpu else groups


class _Last(threading.local):
    """The mask a thread stacked last: every layer of a pass comes with the same one."""

    mask: Tensor | None = None
    groups = 0
    stacked: Tensor


_last = _Last()


def stacked_mask(mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """``[.., n, T]`` as ``[.., groups * n, T]`` to be added to scores, as the product wants it."""
    if _last.mask is not mask or _last.groups != groups or _last.stacked.dtype != dtype:
        if mask.dtype == torch.bool:
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            bias.masked_fill_(mask.logical_not(), -torch.inf)
        else:
            bias = mask.to(dtype)
        _last.mask, _last.groups = mask, groups
        _last.stacked = bias.repeat(*[1] * (bias.dim() - 2), groups, 1)
    return _last.stacked
