"""Stored numbers, bit for bit: what a conversion moves without knowing an array library's types.

numpy has no bfloat16, so such a tensor is kept as its 16-bit words; what is not computed with is
never decoded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.errors import CheckpointError
from dflash.tensor_files import read_header

NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "U32": "<u4",
    "BOOL": "?",
}
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """``values`` in the numpy type of ``dtype`` (safetensors' name); BF16 as uint16 words."""

    dtype: str
    values: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self.values.shape

    def equals(self, other: Tensor) -> bool:
        """Same dtype, shape and bits."""
        same = self.dtype == other.dtype and self.shape == other.shape
        return same and self.values.tobytes() == other.values.tobytes()

    def same_numbers(self, other: Tensor) -> bool:
        """Same shape and numbers, in whatever float type."""
        if self.shape != other.shape or self.dtype == other.dtype:
            return self.equals(other)
        return np.array_equal(self.floats(), other.floats())

    def floats(self) -> NDArray[np.float32]:
        """The numbers as float32 (exact for F32, F16 and BF16)."""
        if self.dtype == "BF16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the first axis."""
        return Tensor(self.dtype, self.values[start:stop])

    def mapped(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Tensor:
        """With its values moved about; none is computed with."""
        return Tensor(self.dtype, change(self.values))

    def narrowed(self, dtype: str) -> Tensor:
        """In ``dtype`` where that keeps every bit, else as it is."""
        if self.dtype != "F32" or dtype not in ("F16", "BF16"):
            return self
        made = to_dtype(self.floats(), dtype)
        return made if np.array_equal(made.floats(), self.floats()) else self


def to_dtype(values: NDArray[np.float32], dtype: str) -> Tensor:
    """float32 numbers as F32, F16 or BF16 (rounded half to even)."""
    if dtype != "BF16":
        with np.errstate(over="ignore"):  # what overflows is seen by whoever compares
            return Tensor(dtype, values.astype(NUMPY[dtype]))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    words = bits + (((bits >> 16) & 1) + 0x7FFF).astype(np.uint32)
    return Tensor("BF16", (words >> 16).astype(np.uint16))


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors file, mapped rather than read. Raises CheckpointError."""
    header = read_header(file)
    data = np.memmap(file, np.uint8, "r", header.start) if header.entries else np.empty(0, np.uint8)
    for name, entry in header.entries.items():
        dtype = entry["dtype"]
        if dtype not in NUMPY:
            raise CheckpointError(
                f"{file}: {name} is stored as {dtype}, which is not converted; use the draft's "
                "bfloat16 weights"
            )
        start, stop = entry["data_offsets"]
        yield name, Tensor(dtype, data[start:stop].view(NUMPY[dtype]).reshape(entry["shape"]))


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; the same input always gives the same bytes.

    The format is a little-endian length, a JSON header and the bytes; the widest dtypes come
    first so that every tensor is aligned.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].values.itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.values.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            stream.write(np.ascontiguousarray(tensors[name].values).tobytes())
