"""A DFlash sidecar as its header describes it: the numbers a session needs. No weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dflash.errors import CheckpointError
from dflash.gguf_file import Header

DEFAULT_BLOCK_SIZE = 16  # llama.cpp's, where a file is silent
COUNTS = (
    "block_count",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
)
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
OWN_SERVER = (
    "llama.cpp's own server drafts with others, too, by flags of its own: dflash serve --engine "
    "llama-server --engine-arg=FLAG"
)
OTHER_METHODS = {
    "eagle3": "an EAGLE-3 draft",  # eagle_file.py reads those
    "dflash-draft": "in an older community format",
    "gemma4-dflash-draft": "in an older community format",
    "gemma4-assistant": "Gemma 4's own assistant",
}


@dataclass(frozen=True, slots=True)
class Sidecar:
    """One draft. Sizes count elements, ids count from zero."""

    header: Header
    layers: int
    width: int  # E
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int  # anchor included
    taps: tuple[int, ...]  # input-of-layer ids, as llama.cpp counts
    mask_token_id: int
    causal: bool
    selector: tuple[int, int, int, int] | None  # kernel, group, rank, top k; None = v1
    softcap: float
    logit_scale: float

    @property
    def top_k(self) -> int:
        """Candidates of a place in DFlash2's lattice; 0 = a v1 draft."""
        return 0 if self.selector is None else self.selector[3]

    @property
    def name(self) -> str:
        """What the variant is called."""
        return "DFlash2" if self.top_k else "DFlash"


def read_sidecar(header: Header) -> Sidecar:
    """The sidecar behind ``header``. Raises CheckpointError with the key that is wrong."""
    file = header.path.name
    if header.architecture != "dflash":
        what = OTHER_METHODS.get(header.architecture, f"a {header.architecture!r} model")
        raise CheckpointError(
            f"{file} is {what}, not a DFlash sidecar. The gguf backend drafts with DFlash, DFlash2 "
            "and EAGLE-3 sidecars (general.architecture dflash or eagle3), or with --draft ngram; "
            f"{OWN_SERVER}"
        )
    if "markov_w1.weight" in header.tensors or header.own("sample_from_anchor"):
        raise CheckpointError(
            f"{file} is a DSpark draft, which is not supported yet; DFlash and DFlash2 are"
        )
    return Sidecar(
        header,
        *read_sizes(header),
        block_size=count(header, "block_size", DEFAULT_BLOCK_SIZE, least=2),
        taps=read_taps(header),
        mask_token_id=_mask(header),
        causal=bool(header.own("attention.causal", False)),
        selector=_selector(header, count(header, "embedding_length")),
        softcap=float(header.own("final_logit_softcapping", 0.0)),
        logit_scale=float(header.own("logit_scale", 0.0)) or 1.0,
    )


def read_sizes(header: Header) -> tuple[int, int, int, int, int, int]:
    """Layers, width, feed-forward width, heads, KV heads, head width. Raises CheckpointError."""
    layers, width, feed_forward, heads, kv_heads = (count(header, key) for key in COUNTS)
    file, head_dim = header.path.name, count(header, "attention.key_length", width // heads)
    if count(header, "attention.value_length", head_dim) != head_dim:
        raise CheckpointError(f"{file}: keys and values of a draft must have the same width")
    if heads % kv_heads:
        raise CheckpointError(f"{file}: {heads} heads are no multiple of {kv_heads} KV heads")
    return layers, width, feed_forward, heads, kv_heads, head_dim


def count(header: Header, key: str, default: int | None = None, least: int = 1) -> int:
    """The number under ``key``. Raises CheckpointError where it is missing or none."""
    value: Any = header.own(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        found = "is missing" if value is None else f"is {value!r}"
        raise CheckpointError(
            f"{header.path.name}: {header.architecture}.{key} {found}, and must be a number of "
            f"{least} or more. Convert the draft again: dflash convert DRAFT --to gguf"
        )
    return value


def read_taps(header: Header) -> tuple[int, ...]:
    """Input-of-layer ids, as llama.cpp counts. Raises CheckpointError."""
    taps = header.own("target_layers")
    if not isinstance(taps, list) or not taps or len(set(taps)) < len(taps):
        raise CheckpointError(
            f"{header.path.name} has no {header.architecture}.target_layers (or names a layer "
            "twice): the layers of the target it reads. Convert the draft again: dflash convert "
            "DRAFT --to gguf"
        )
    return tuple(int(tap) for tap in taps)


def _mask(header: Header) -> int:
    mask = header.metadata.get("tokenizer.ggml.mask_token_id")
    if mask is None:
        raise CheckpointError(
            f"{header.path.name} has no tokenizer.ggml.mask_token_id, and it is never guessed: "
            "another id would only lower acceptance. Convert the draft again: dflash convert "
            "DRAFT --to gguf"
        )
    return int(mask)


def _selector(header: Header, width: int) -> tuple[int, int, int, int] | None:
    positive = int(header.own("selector_top_k", 0)) > 0
    if not positive and "selector_hidden.weight" not in header.tensors:
        return None
    kernel, group, rank, top_k = (count(header, key) for key in DFLASH2)
    if width % group:
        raise CheckpointError(
            f"{header.path.name}: conv_group_size {group} does not divide its width {width}"
        )
    if width < top_k * (top_k + 1):
        raise CheckpointError(
            f"{header.path.name}: a selector over {top_k} candidates needs a width of at least "
            f"{top_k * (top_k + 1)} in llama.cpp, and this draft's is {width}"
        )
    return kernel, group, rank, top_k
