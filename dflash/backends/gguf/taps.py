"""The features a draft reads: what enters certain layers of the target, row by row.

Many architectures hand these out themselves; asking one that does not aborts the process, so they
are listed. For all others the evaluation callback copies the output of the layer before, which is
the same numbers; it is called for every node of the graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from dflash.backends.gguf.native import Context, Floats, rows_at
from dflash.errors import PairError

NATIVE = frozenset(
    {
        *("llama", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe", "qwen4exp"),
        *("gemma4", "gpt-oss", "lfm2", "minimax-m2", "minimax-01", "bailingmoe3", "nemotron_h"),
        *("nanbeige", "hunyuan_vl", "mimo2", "muse-glimmer", "deepseek4", "k2-horizon"),
    }
)
"""``general.architecture`` of files whose graph publishes the inputs of its layers."""
AFTER_LAST = frozenset({"mimo2", "nemotron_h", "deepseek4"})
"""Those that also publish what leaves the last layer."""

ROOM = 32  # single rows that room is made for in one go
_Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)


def is_native(architecture: str) -> bool:
    """Whether a target of this architecture publishes its layers' inputs."""
    return architecture in NATIVE


class Taps(Protocol):
    """Captures features of the passes of one context."""

    def prepare(self, params: Any) -> None:
        """Change the parameters of the context to be made."""

    def attach(self, context: Context) -> None:
        """Take the context that was made."""

    def rows(self, count: int) -> Floats | None:
        """A copy of the first ``count`` rows [count, L*E] of the last pass; None without taps."""


def make_taps(architecture: str, ids: Sequence[int], width: int) -> Taps:
    """Taps for input-of-layer ``ids`` of a target that is ``width`` wide."""
    if not ids:
        return NoTaps()
    kind = NativeTaps if is_native(architecture) else CallbackTaps
    return kind(ids, width)


class NoTaps:
    """Nothing is captured."""

    def prepare(self, params: Any) -> None:
        """Nothing to prepare."""

    def attach(self, context: Context) -> None:
        """Nothing to take."""

    def rows(self, count: int) -> Floats | None:  # noqa: ARG002 - the protocol
        """None."""
        return None


class NativeTaps:
    """From llama.cpp's own buffers of layer inputs: parts of one memory, in the layers' order.

    Where they lie evenly, one look at the first says where all are, and one copy takes a row of
    all.
    """

    def __init__(self, ids: Sequence[int], width: int) -> None:
        """``ids`` in the order of the draft's features."""
        self._ids, self._width = tuple(ids), width
        self._first = ids[0]
        self._room: list[tuple[Floats, Floats]] = []  # for single rows: [1, L, E] and [1, L*E]
        # where the first lay -> a row of all [1, L, E], and as many as there are
        self._seen: dict[int, tuple[Floats, Floats]] = {}

    def prepare(self, params: Any) -> None:
        """Nothing to prepare."""

    def attach(self, context: Context) -> None:
        """Switch the buffers on."""
        self._handle, self._most = context.handle, context.most
        self._get = context.library.get_layer_input
        self._seen.clear()
        for tap in self._ids:
            context.library.set_layer_input(context.handle, tap, True)

    def rows(self, count: int) -> Floats:
        """As the protocol says."""
        seen = self._seen.get(self._get(self._handle, self._first))
        one, many = self._found(count) if seen is None else seen
        if count > 1:
            return many[:count].copy().reshape(count, -1)
        if not self._room:
            self._room = self._made()
        place, row = self._room.pop()
        place[...] = one
        return row

    def _made(self) -> list[tuple[Floats, Floats]]:
        """New room for single rows. A plain step that made its own would do so with cold caches."""
        block = np.empty((ROOM, len(self._ids), self._width), np.float32)
        flat = block.reshape(ROOM, -1)
        return [(block[i : i + 1], flat[i : i + 1]) for i in range(ROOM)]

    def _found(self, count: int) -> tuple[Floats, Floats]:
        """Rows of the last pass, one and at least ``count``; kept where they lie evenly."""
        places = [self._get(self._handle, tap) for tap in self._ids]
        parts = [rows_at(at, self._most, self._width) for at in places]
        gaps = {after - before for before, after in pairwise(places)}
        if len(gaps) > 1:
            block = np.stack([part[:count] for part in parts], axis=1)
            return block[:1], block
        strides = parts[0].strides[0], next(iter(gaps), 0), parts[0].itemsize
        block = as_strided(parts[0], (self._most, len(parts), self._width), strides)
        return self._seen.setdefault(places[0], (block[:1], block))


class LastState:
    """What leaves the target for the heads inside it, of every row."""

    def __init__(self, width: int) -> None:
        """``width`` of the target."""
        self._width = width

    def prepare(self, params: Any) -> None:
        """Nothing to prepare."""

    def attach(self, context: Context) -> None:
        """Switch the buffer on, for rows without logits too."""
        self._handle, self._get = context.handle, context.library.get_next
        context.library.set_next(context.handle, True, False)

    def rows(self, count: int) -> Floats:
        """As the protocol says."""
        return rows_at(self._get(self._handle), count, self._width).copy()


class CallbackTaps:
    """From the outputs of the layers before, copied while the graph is computed."""

    def __init__(self, ids: Sequence[int], width: int) -> None:
        """``ids`` in the order of the draft's features; 0 (the embedding) is not offered."""
        self._names = tuple(f"l_out-{tap - 1}".encode() for tap in ids)
        self._width = width
        self._library: Any = None
        self._parts: dict[bytes, list[Floats]] = {name: [] for name in self._names}
        self._callback = _Callback(self._take)  # the context keeps the pointer

    def prepare(self, params: Any) -> None:
        """Put the callback in."""
        params.cb_eval = ctypes.cast(self._callback, ctypes.c_void_p).value

    def attach(self, context: Context) -> None:
        """What was captured while the context was made is dropped."""
        self._library = context.library
        context.before_pass = self._clear
        self._clear()

    def rows(self, count: int) -> Floats:
        """As the protocol says. Raises PairError for a graph that names its layers otherwise."""
        if any(not parts for parts in self._parts.values()):
            raise PairError(
                "llama.cpp's graph of this target does not show the outputs of its layers, so a "
                "draft cannot read them: decode without a draft, or with --draft ngram"
            )
        taps = [np.concatenate(self._parts[name])[:count] for name in self._names]
        return np.concatenate(taps, axis=1)

    def _clear(self) -> None:
        for parts in self._parts.values():
            parts.clear()

    def _take(self, tensor: int, ask: bool, _: Any) -> bool:
        library = self._library
        if library is None:
            return False
        name = library.ggml_get_name(tensor)
        wanted = name in self._parts
        if ask or not wanted:
            return wanted or not ask
        size = library.ggml_nbytes(tensor)
        copy = np.empty((size // (4 * self._width), self._width), np.float32)
        library.ggml_backend_tensor_get(tensor, copy.ctypes.data, 0, size)
        self._parts[name].append(copy)
        return True
