"""A sidecar back as a draft: the inverse of `write`.

Matrices keep their bits where they are stored as F32, F16 or BF16; quantised ones are dequantised
to F32. Rope comes back in halves, as published drafts have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash.convert.draft import Draft, make_d2t
from dflash.convert.gguf.architecture import D2T, Architecture, head_dim
from dflash.convert.gguf.extra import with_extra
from dflash.convert.gguf.kinds import ARCHITECTURES
from dflash.convert.tensor import Tensor
from dflash.drafts.kinds import kind_of
from dflash.errors import CheckpointError, MissingBackend
from dflash.gguf_file import Header, read_header

PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read(file: Path) -> Draft:
    """The draft in ``file``. Raises CheckpointError, MissingBackend."""
    header = read_header(file)
    kind = _architecture(header)
    names = {name: kind.hf_name(name) for name in header.tensors}
    if unknown := sorted(name for name, ours in names.items() if ours is None):
        raise CheckpointError(f"{file} has tensors of no known meaning: {', '.join(unknown)}")
    size = head_dim(header)
    tensors = {
        ours: kind.from_file(ours, read_tensor(header, name), size)
        for name, ours in names.items()
        if ours is not None
    }
    config = config_of(header)
    return Draft(kind_of(config), config, tensors)


def config_of(header: Header) -> dict[str, Any]:
    """The draft's config, as a folder would have it. Raises CheckpointError."""
    kind = _architecture(header)
    try:
        config = {key: value for key, value in kind.config(header).items() if value is not None}
    except (TypeError, ValueError) as problem:  # int(None)
        raise CheckpointError(
            f"{header.path} lacks keys that every {kind.name} file has: get it again"
        ) from problem
    return with_extra(config, header)


def _architecture(header: Header) -> Architecture:
    kind = ARCHITECTURES.get(header.architecture)
    if kind is None or "markov_w1.weight" in header.tensors:
        raise CheckpointError(
            f"{header.path} is no DFlash, DFlash2 or EAGLE-3 file "
            f"(architecture {header.architecture!r})"
        )
    return kind


def read_tensor(header: Header, name: str) -> Tensor:
    """One tensor; ``d2t`` as differences, quantised ones as F32.

    Raises CheckpointError for a type that is not read, MissingBackend without the ``gguf`` package.
    """
    info = header.tensors[name]
    start = header.start + info.offset
    if name == D2T:
        return make_d2t(np.fromfile(header.path, "<i8", info.shape[0], offset=start))
    if info.kind_name in PLAIN:
        words = PLAIN[info.kind_name]
        count = int(np.prod(info.shape))
        values = np.fromfile(header.path, words, count, offset=start).reshape(info.shape)
        return Tensor(info.kind_name, values)
    try:
        import gguf
    except ImportError as problem:
        raise MissingBackend(
            "quantised sidecars need the gguf package: pip install 'dflash-engine[gguf]'"
        ) from problem
    if info.bytes is None:
        raise CheckpointError(f"{header.path}: {name} is stored as {info.kind_name}: not read")
    raw = np.fromfile(header.path, np.uint8, info.bytes, offset=start)
    rows = raw.reshape(*info.shape[:-1], -1)
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType(info.kind))
    return Tensor("F32", np.asarray(values, np.float32).reshape(info.shape))


def tables_in(header: Header) -> tuple[Tensor | None, Tensor | None]:
    """A target's embedding and head [V, H], which may be one; None where the file has none."""
    embed, head = (
        read_tensor(header, name) if name in header.tensors else None
        for name in ("token_embd.weight", "output.weight")
    )
    return embed, embed if head is None else head
