"""A draft between two formats: the flat config and the tensors under their published names.

Every reader makes a `Draft`, every writer takes one. Config: Hugging Face's, DFlash keys in
``dflash_config`` or on top. Names: those of DFlash files and, for EAGLE-3, of its one layer as
``layers.0``. Layer ids: outputs (`dflash.convert.layer_ids`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash.convert.tensor import Tensor
from dflash.drafts.keys import Keys
from dflash.drafts.names import published_name, unfuse
from dflash.errors import CheckpointError, WeightsError

KINDS = ("dflash", "dflash2", "eagle3")

_NAMES = re.compile(
    r"(fc|norm|hidden_norm|embed_tokens|lm_head|input_norm|fc_norm\.\d+)\.weight|d2t"
    r"|layers\.\d+\.((input|post_attention)_layernorm|hidden_norm)\.weight"
    r"|layers\.\d+\.self_attn\.([qkvo]_proj\.(weight|bias)|[qk]_norm\.weight|attention_sink_bias)"
    r"|layers\.\d+\.mlp\.(gate|up|down)_proj\.weight"
    r"|layers\.\d+\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)"
    r"|candidate_selector\.(hidden_projection\.weight|(predecessor|successor)_codebook)"
)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a draft is, apart from how it is written down."""

    kind: str  # dflash, dflash2, eagle3
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    shards: Mapping[str, str] = field(default_factory=dict)  # tensor to file; {} = one file
    mask_embedding: Tensor | None = None  # [H], stands for the mask token's embedding row
    notes: tuple[str, ...] = ()  # what a person should know of the conversion so far

    @property
    def keys(self) -> Keys:
        """Look-ups in the config."""
        return Keys(self.config)


def collect(pairs: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors as read, under their published names, fused ones taken apart.

    ``t2d`` is left out: it is ``d2t`` the other way round (checked, and made anew by writers).
    Raises WeightsError for names that nobody knows, for two tensors of one name, and for a t2d that
    contradicts d2t.
    """
    found: dict[str, Tensor] = {}
    unknown, mask = [], None
    for stored, tensor in pairs:
        name = published_name(stored)
        if stored.endswith("t2d"):
            mask = tensor
        elif name is None:
            continue
        elif "self_attn.qkv_proj." in name:
            found |= _unfused(name, tensor, config)
        elif _NAMES.fullmatch(name):
            if name in found:
                raise WeightsError(f"{name} is stored twice, under two spellings")
            found[name] = tensor
        else:
            unknown.append(stored)
    if unknown:
        raise WeightsError(
            f"tensors with no known meaning, so nothing was converted: {', '.join(unknown)}. A "
            "converted draft without them would propose something else"
        )
    if mask is not None and "d2t" in found and not _agree(mask, found["d2t"]):
        raise WeightsError("t2d marks other tokens than d2t lists; one of the two is damaged")
    return found


def _unfused(name: str, tensor: Tensor, config: Mapping[str, Any]) -> dict[str, Tensor]:
    keys = Keys(config)
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    width = keys.count("head_dim", hidden // heads)
    few = keys.count("num_key_value_heads", heads) * width
    parts = unfuse(name, tensor.shape[0], [heads * width, few, few])
    if not parts:
        raise WeightsError(f"{name} has {tensor.shape[0]} rows, the config asks for another number")
    return {part: tensor.rows(start, stop) for part, start, stop in parts}


def target_ids(d2t: Tensor) -> Any:
    """Target id of each draft id [Vd], int64; files hold the difference of the two."""
    return d2t.values.astype(np.int64) + np.arange(d2t.values.size)


def make_d2t(ids: Any) -> Tensor:
    """The inverse of `target_ids`."""
    return Tensor("I64", np.asarray(ids, np.int64) - np.arange(len(ids)))


def make_t2d(d2t: Tensor, vocab_size: int) -> Tensor:
    """Which of the target's tokens the draft can say: bool [V]. Raises WeightsError."""
    ids = target_ids(d2t)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise WeightsError(f"d2t leads outside the target's vocabulary of {vocab_size}")
    mask = np.zeros(vocab_size, bool)
    mask[ids] = True
    return Tensor("BOOL", mask)


def _agree(t2d: Tensor, d2t: Tensor) -> bool:
    marked = np.flatnonzero(t2d.values)
    return np.array_equal(marked, np.unique(target_ids(d2t)))


def require_kind(draft: Draft, kinds: Iterable[str], layout: str) -> None:
    """Raise CheckpointError unless ``layout`` has a place for this kind of draft."""
    if draft.kind not in (known := tuple(kinds)):
        raise CheckpointError(
            f"the {layout} layout is for drafts of kind {', '.join(known)}; this one is "
            f"{draft.kind}"
        )
