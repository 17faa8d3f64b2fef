"""Rotary settings in GGUF and in a config, and the order of rows that goes with them.

llama.cpp turns numbers i and i + D/2 of a head together (halves) in DFlash drafts, numbers 2i and
2i + 1 (pairs) in EAGLE-3 ones; published drafts nearly always turn halves.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from dflash.drafts.spec import DraftSpec
from dflash.gguf_file import Header

KNOWN = {"default", "linear", "yarn"}  # kinds of scaling that llama.cpp has keys for


def rope_keys(spec: DraftSpec, target: Header) -> dict[str, Any]:
    """Metadata without the architecture's prefix."""
    rope = next(iter(spec.rope_parameters.values()))
    rotated = int(spec.head_dim * rope["partial_rotary_factor"])
    keys: dict[str, Any] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": rotated,
    }
    if any(target.own("rope.dimension_sections") or ()):
        keys["rope.dimension_sections"] = [rotated // 2, 0, 0, 0]  # text positions only
    if rope["rope_type"] == "default":
        return keys
    keys["rope.scaling.type"] = str(rope["rope_type"])
    keys["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name):
                keys[f"rope.scaling.yarn_{name}"] = float(rope[name])
    return keys


def rope_config(header: Header, head_dim: int) -> dict[str, Any]:
    """The inverse of `rope_keys`, as keys of a config."""
    own = header.own
    found: dict[str, Any] = {"rope_theta": own("rope.freq_base")}
    rotated = int(own("rope.dimension_count", head_dim))
    if rotated != head_dim:
        found["partial_rotary_factor"] = rotated / head_dim
    kind = own("rope.scaling.type", "none")
    if kind == "none":
        return found
    scaling = {
        "rope_type": kind,
        "factor": own("rope.scaling.factor"),
        "original_max_position_embeddings": own("rope.scaling.original_context_length"),
        "beta_fast": own("rope.scaling.yarn_beta_fast"),
        "beta_slow": own("rope.scaling.yarn_beta_slow"),
    }
    return {**found, "rope_scaling": {k: v for k, v in scaling.items() if v is not None}}


def halves_first(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of every head from pairs (2i, 2i + 1) to halves: the even ones first."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)


def pairs_first(values: NDArray[Any], head_dim: int) -> NDArray[Any]:
    """Rows of every head from halves to pairs: the inverse of `halves_first`."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)
