"""Names of a draft's tensors: the published ones, and other spellings of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

TABLES = frozenset({"embed_tokens.weight", "lm_head.weight", "d2t"})
_SPELLINGS = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^(candidate_selector\.\w+_codebook)\.weight$"), r"\1"),
)
_DERIVED = re.compile(r"rotary_emb\.|^verifier_(lm_head|norm)\.|^t2d$")  # d2t says what t2d says


def published_name(name: str) -> str | None:
    """``name`` without prefixes and as published files spell it; None = it follows from others."""
    for pattern, ours in _SPELLINGS:
        name = pattern.sub(ours, name)
    return None if _DERIVED.search(name) else name


def own_table(name: str) -> bool:
    """Whether a tensor is an embedding, head or vocabulary map that the draft brought itself."""
    return name in TABLES


def unfuse(name: str, rows: int, sizes: Sequence[int]) -> list[tuple[str, int, int]]:
    """``(name, first row, end)`` of query, key and value in a fused projection; [] = not fused.

    ``sizes`` are the rows of the three.
    """
    if "self_attn.qkv_proj." not in name or rows != sum(sizes):
        return []
    edges = [0, sizes[0], sizes[0] + sizes[1], sum(sizes)]
    return [
        (name.replace("qkv_proj", f"{which}_proj"), start, stop)
        for which, start, stop in zip("qkv", edges[:-1], edges[1:], strict=True)
    ]
