"""An EAGLE-3 draft as its GGUF header describes it, and what must hold before llama.cpp sees it.

Architecture ``eagle3``: one layer that reads a token and a state, three taps, tables of its own or
the target's. What llama.cpp would answer with an abort is looked for here. No weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dflash.backends.gguf.sidecar import count, read_sizes, read_taps
from dflash.backends.gguf.validate import (
    broken_map,
    depths_apart,
    refuse_broken,
    refuse_unfit,
    tokens_apart,
    vocabulary,
    wrong_shapes,
)
from dflash.drafts.eagle3 import DRAFTED
from dflash.errors import CheckpointError
from dflash.gguf_file import Header

TAPS = 3  # llama.cpp fuses so many


@dataclass(frozen=True, slots=True)
class EagleFile:
    """One draft. Sizes count elements, ids count from zero."""

    header: Header
    width: int  # E
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    target_width: int
    taps: tuple[int, ...]  # input-of-layer ids, as llama.cpp counts
    name = "EAGLE-3"
    block_size = DRAFTED + 1  # the format has no place for a depth

    @property
    def borrows(self) -> bool:
        """Whether a table of the target's is used."""
        return not {"token_embd.weight", "output.weight"} <= self.header.tensors.keys()


def read_eagle(header: Header) -> EagleFile:
    """The draft behind ``header``. Raises CheckpointError with the key that is wrong."""
    layers, width, feed_forward, heads, kv_heads, head_dim = read_sizes(header)
    taps = read_taps(header)
    if layers != 1 or len(taps) != TAPS:
        raise CheckpointError(
            f"{header.path.name} has {layers} layers and {len(taps)} taps: llama.cpp runs EAGLE-3 "
            f"drafts of 1 layer and {TAPS} taps. Use the draft's safetensors folder, on torch"
        )
    sizes = width, feed_forward, heads, kv_heads, head_dim
    return EagleFile(header, *sizes, count(header, "target_hidden_size"), taps)


def check_eagle(target: Header, draft: EagleFile) -> None:
    """Raise WeightsError for a draft that contradicts itself, PairError for two that do not fit."""
    refuse_broken(draft.header, _broken(draft))
    refuse_unfit(
        target,
        draft.header,
        [
            *_widths(target, draft),
            *depths_apart(target, draft.taps),
            *tokens_apart(target, draft.header),
        ],
    )


def _broken(draft: EagleFile) -> Iterator[str]:
    d, header, tensors = draft, draft.header, draft.header.tensors
    read = TAPS * d.target_width
    layer = {
        "attn_norm": (d.width,),
        "attn_norm_2": (d.width,),
        "attn_q": (d.heads * d.head_dim, 2 * d.width),
        "attn_k": (d.kv_heads * d.head_dim, 2 * d.width),
        "attn_v": (d.kv_heads * d.head_dim, 2 * d.width),
        "attn_output": (d.width, d.heads * d.head_dim),
        "ffn_norm": (d.width,),
        "ffn_gate": (d.feed_forward, d.width),
        "ffn_up": (d.feed_forward, d.width),
        "ffn_down": (d.width, d.feed_forward),
    }
    needed: dict[str, tuple[int, ...]] = {
        "fc.weight": (d.width, read),
        "output_norm.weight": (d.width,),
        **{f"blk.0.{name}.weight": shape for name, shape in layer.items()},
    }
    if header.own("norm_before_fc", False):
        needed["enc.output_norm.weight"] = (read,)
    head = tensors["d2t"].shape[0] if "d2t" in tensors else vocabulary(header)
    others = {
        "token_embd.weight": (vocabulary(header), d.width),
        "output.weight": (head, d.width),
    }
    yield from wrong_shapes(header, needed, others)
    if "d2t" in tensors:
        yield from broken_map(header)


def _widths(target: Header, draft: EagleFile) -> Iterator[str]:
    width = target.own("embedding_length")
    if width != draft.target_width:
        yield f"the target is {width} wide and the draft reads {draft.target_width}"
    elif width != draft.width and draft.borrows:
        yield (
            f"the target is {width} wide and the draft {draft.width}, which needs "
            "token_embd.weight and output.weight of its own"
        )
