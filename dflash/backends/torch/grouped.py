"""Attention of a few rows for the models that run through transformers.

transformers repeats keys and values for every query head as soon as a mask is given, that is, in
every verify pass; stacked query heads (`attention.py`) read the cache once. 7 % of an 8-row pass of
the demo target at 1,024 tokens of context.

Only for models this package loaded itself, on a CPU, where transformers would use its "sdpa".
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from dflash.backends.torch.attention import MOST_ROWS, STACKED, stacked_mask


def grouped_attention(
    module: Any,
    query: Tensor,  # [B, nh, n, D]
    key: Tensor,  # [B, nkv, T, D]
    value: Tensor,  # [B, nkv, T, D]
    attention_mask: Tensor | None,  # [B, 1, n, T]
    **options: Any,
) -> tuple[Tensor, None]:
    """``[B, n, nh, D]``, as transformers' attention functions return it."""
    batch, heads, rows, width = query.shape
    groups = heads // key.shape[1]
    stackable = (
        attention_mask is not None
        and attention_mask.shape[1] == 1
        and 1 < rows <= MOST_ROWS
        and groups > 1
        and not any(options.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    )
    if attention_mask is None or not stackable:
        plain: Any = sdpa_attention_forward
        out: tuple[Tensor, None] = plain(module, query, key, value, attention_mask, **options)
        return out
    mixed = F.scaled_dot_product_attention(
        query.reshape(batch, heads // groups, groups * rows, width),
        key,
        value,
        attn_mask=stacked_mask(attention_mask, groups, query.dtype),
        scale=options.get("scaling"),
    )
    return mixed.reshape(batch, heads, rows, -1).transpose(1, 2).contiguous(), None


def group_attention(model: Any) -> bool:
    """Let ``model`` use `grouped_attention` where it would use "sdpa"; whether it does now."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "_attn_implementation", None) != "sdpa" or model.device.type != "cpu":
        return False
    AttentionInterface.register(STACKED, grouped_attention)
    AttentionMaskInterface.register(STACKED, sdpa_mask)
    model.set_attn_implementation(STACKED)
    return True
