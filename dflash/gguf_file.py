"""The header of a GGUF file: its metadata and what tensors it holds. No weight is read.

A few hundred kilobytes at the front of the file, parsed with the standard library: the ``gguf``
package's reader makes an array object for every token, which takes seconds on every load.
Format: the GGUF specification of the ggml project, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import json
import mmap
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, overload

from dflash.errors import CheckpointError

DRAFTS = frozenset({"dflash", "eagle3", "dflash-draft", "gemma4-dflash-draft", "gemma4-assistant"})
"""``general.architecture`` of files that are drafts, whether anything here runs them or not."""
MAGIC = b"GGUF"
KEPT = "dflash_engine.config"  # what a draft's config says and a sidecar has no key for, as JSON
VERSIONS = (2, 3)
_STRING, _ARRAY, _LENGTH = 8, 9, 8  # two types, and the bytes of a text's length
_SCALARS = {  # type number -> struct code
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
BLOCKS = {  # ggml type -> (name, numbers in a block, bytes of a block)
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
_BROKEN = (struct.error, KeyError, IndexError, ValueError, TypeError, ArithmeticError)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: ``shape`` as numpy has it, the slowest dimension first."""

    shape: tuple[int, ...]
    kind: int  # ggml type number
    offset: int  # bytes from the start of the tensor data

    @property
    def kind_name(self) -> str:
        """Type name, or its number where it is not in the table."""
        return BLOCKS[self.kind][0] if self.kind in BLOCKS else f"type {self.kind}"

    @property
    def bytes(self) -> int | None:
        """Bytes of the data; None for a type not in the table."""
        if self.kind not in BLOCKS:
            return None
        _, numbers, size = BLOCKS[self.kind]
        return prod(self.shape) // numbers * size


class Strings(Sequence[str]):
    """Texts as they lie in the file, a length before each; what is no character is U+FFFD.

    A vocabulary has a hundred thousand of them. As objects they take ten times the room, and each
    load and close leaves the interpreter's small blocks in more pieces.
    """

    __slots__ = ("_data", "_starts")

    def __init__(self, data: bytes, starts: array[int]) -> None:
        """``starts`` of the lengths in ``data``, and its end."""
        self._data, self._starts = data, starts

    def __len__(self) -> int:
        """Texts."""
        return len(self._starts) - 1

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> list[str]: ...
    def __getitem__(self, place: int | slice) -> str | list[str]:
        """A text, or a list of some."""
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        at = range(len(self))[place]
        start, end = self._starts[at] + _LENGTH, self._starts[at + 1]
        return self._data[start:end].decode(errors="replace")

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` has the same texts in the same order."""
        if isinstance(other, Strings):
            return self._data == other._data
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class Header:
    """Metadata and tensors of one file."""

    path: Path
    metadata: Mapping[str, Any]
    kinds: Mapping[str, tuple[int, int]]  # key -> (type, element type; -1 for no array)
    tensors: Mapping[str, TensorInfo]
    start: int = 0  # bytes from the start of the file to the tensor data

    @property
    def architecture(self) -> str:
        """``general.architecture``; "" where a file does not say."""
        return str(self.metadata.get("general.architecture", ""))

    def own(self, key: str, default: Any = None) -> Any:
        """The metadata ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @property
    def layers(self) -> int:
        """Decoder layers, without the prediction heads that a file counts as blocks behind them."""
        return int(self.own("block_count", 0)) - int(self.own("nextn_predict_layers", 0) or 0)


def is_gguf(name: str) -> bool:
    """Whether ``name`` is that of a GGUF file."""
    return name.lower().endswith(".gguf")


def kept_config(header: Header) -> dict[str, Any]:
    """The value of `KEPT`; {} in files of others. Raises CheckpointError where it is damaged."""
    try:
        found: dict[str, Any] = {**json.loads(header.metadata.get(KEPT, "{}"))}
    except (TypeError, ValueError) as problem:
        raise CheckpointError(
            f"{header.path.name}: {KEPT} is damaged ({problem}); convert the draft again"
        ) from problem
    return found


def read_header(path: str | Path) -> Header:
    """The header of the file at ``path``.

    Raises CheckpointError for a file that is missing, no GGUF file, damaged, or shorter than its
    tensors need.
    """
    place = Path(path).expanduser()
    insist_on_gguf(place)
    with (
        place.open("rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        try:
            return _parse(place, data)
        except _BROKEN as problem:
            raise CheckpointError(
                f"{path} is damaged or incomplete ({problem}): get it again"
            ) from problem


def insist_on_gguf(place: Path) -> None:
    """Raise CheckpointError, with what to do, unless a file is there that begins as GGUF does."""
    if not place.is_file():
        if place.is_dir():
            raise CheckpointError(f"{place} is a folder, whatever its name says: name a file in it")
        raise CheckpointError(f"no such file: {place}")
    with place.open("rb") as stream:
        start = stream.read(len(MAGIC))
    if start == MAGIC:
        return
    if not start:
        raise CheckpointError(f"{place} is empty: get it again")
    if is_gguf(place.name):
        raise CheckpointError(f"{place} is not a GGUF file, whatever its name says: get it again")
    raise CheckpointError(f"{place} is not a GGUF file: give a model's folder, or a .gguf file")


def _parse(place: Path, data: Any) -> Header:
    cursor = _Cursor(data)
    cursor.at = 4
    version = cursor.number("I")
    if version not in VERSIONS:
        raise ValueError(f"version {version}")
    tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    kinds: dict[str, tuple[int, int]] = {}
    for _ in range(key_count):
        key = cursor.string()
        metadata[key], kinds[key] = cursor.value()
    tensors = dict(_tensor(cursor) for _ in range(tensor_count))
    alignment = int(metadata.get("general.alignment", 32))
    if alignment.bit_count() != 1 or alignment < 1:
        raise ValueError(f"general.alignment {alignment} is no power of two")
    start = -(-cursor.at // alignment) * alignment
    for name, tensor in tensors.items():
        if start + tensor.offset + (tensor.bytes or 0) > len(data):
            raise ValueError(f"the file ends before the tensor {name}")
    return Header(place, metadata, kinds, tensors, start)


def _tensor(cursor: _Cursor) -> tuple[str, TensorInfo]:
    name = cursor.string()
    shape = cursor.numbers("Q", cursor.number("I"))
    kind, offset = cursor.number("I"), cursor.number("Q")
    return name, TensorInfo(tuple(reversed(shape)), kind, offset)


class _Cursor:
    """Reads values one after the other."""

    def __init__(self, data: Any) -> None:
        """``data`` is bytes, or a map of a file."""
        self._data, self.at = data, 0

    def number(self, code: str) -> Any:
        """One number of struct type ``code``."""
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        """``count`` of them."""
        if count * struct.calcsize(code) > len(self._data) - self.at:
            raise ValueError("it ends in the middle of its header")
        found = struct.unpack_from(f"<{count}{code}", self._data, self.at)
        self.at += struct.calcsize(f"<{count}{code}")
        return found

    def string(self) -> str:
        """A length and that many bytes of UTF-8; what is no character becomes U+FFFD."""
        size = self._over_string()
        return bytes(self._data[self.at - size : self.at]).decode(errors="replace")

    def strings(self, count: int) -> Strings:
        """``count`` of them."""
        first, starts = self.at, array("Q", [0])
        for _ in range(count):
            self._over_string()
            starts.append(self.at - first)
        return Strings(bytes(self._data[first : self.at]), starts)

    def _over_string(self) -> int:
        size: int = self.number("Q")
        if size > len(self._data) - self.at:
            raise ValueError("it ends in the middle of its header")
        self.at += size
        return size

    def value(self) -> tuple[Any, tuple[int, int]]:
        """A typed value, and its type with that of its elements."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self._one(kind), (kind, -1)
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            return list(self.numbers(_SCALARS[inner], count)), (kind, inner)
        if inner != _STRING:
            raise ValueError(f"an array of type {inner}")
        return self.strings(count), (kind, inner)

    def _one(self, kind: int) -> Any:
        return self.string() if kind == _STRING else self.number(_SCALARS[kind])
