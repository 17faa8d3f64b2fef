"""Models and contexts of llama.cpp as objects: numpy in, numpy out, freed with their owner.

A context is the state of one sequence. What llama.cpp would answer with an abort of the whole
process (more output rows than reserved, positions past the end) is an assertion here. What is freed
has no pointer any more: asking it for one raises EngineClosed.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.backends.gguf.layout import Batch
from dflash.backends.gguf.library import Library
from dflash.errors import (
    CLOSED,
    CheckpointError,
    ConfigError,
    DFlashError,
    EngineClosed,
    OutOfMemory,
)

Floats = NDArray[np.float32]
Array = NDArray[Any]
OUTPUTS = 64  # most rows of a pass whose logits are wanted
MULTI_SECTION = (8, 40)  # rope types whose feature rows have four positions (M-RoPE)
POINTERS = ("handle", "vocab", "memory")
FULL = "the context is full: start with a larger n_ctx, or a shorter prompt"


class Owner:
    """What holds pointers into llama.cpp, until it frees them."""

    _free: Callable[[], object]

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is not there. Raises EngineClosed for a pointer that was freed."""
        raise EngineClosed(CLOSED) if name in POINTERS else AttributeError(name)

    def close(self) -> None:
        """Free it; idempotent. Contexts are closed before their models."""
        for name in POINTERS:
            self.__dict__.pop(name, None)
        self._free()


class Model(Owner):
    """Weights and vocabulary of one GGUF file."""

    order = 1  # of freeing

    def __init__(
        self,
        library: Library,
        file: Path,
        *,
        gpu_layers: int = -1,
        repack: bool = True,
        heads: bool = False,
    ) -> None:
        """``heads``: the multi-token prediction heads in the file, too.

        Raises CheckpointError with llama.cpp's own words when it cannot load the file.
        """
        params = library.llama_model_default_params()
        params.load_mtp = heads
        params.n_gpu_layers = gpu_layers
        params.use_extra_bufts = repack
        errors = library.listen()
        handle = library.llama_model_load_from_file(os.fsencode(file), params)
        if not handle:
            raise CheckpointError(f"llama.cpp cannot load {file}: {_told(errors)}")
        self.library, self.handle, self.file = library, ctypes.c_void_p(handle), file
        self._free = weakref.finalize(self, library.llama_model_free, self.handle)
        self._free.atexit = False  # the library sees to that
        library.owners.add(self)
        self.lock = RLock()  # whoever reads the vocabulary holds it, so that nobody frees it then
        self.vocab = ctypes.c_void_p(library.llama_model_get_vocab(self.handle))
        self.vocab_size = int(library.llama_vocab_n_tokens(self.vocab))
        self.width = int(library.llama_model_n_embd(self.handle))
        self.layers = int(library.llama_model_n_layer(self.handle))
        self.context_length = int(library.llama_model_n_ctx_train(self.handle))
        self.bytes = int(library.llama_model_size(self.handle))
        self.rope_type = int(library.llama_model_rope_type(self.handle))
        self.recurrent = bool(
            library.llama_model_is_recurrent(self.handle)
            or library.llama_model_is_hybrid(self.handle)
        )

    def close(self) -> None:
        """Free the weights, once nobody reads the vocabulary; idempotent."""
        with self.lock:
            super().close()


class Context(Owner):
    """One sequence of ``model``: its cache, and the buffers of its calls."""

    order = 0

    def __init__(self, model: Model, params: Any, *, width: int = 0, states: bool = False) -> None:
        """``params`` are llama.cpp's; ``width`` is that of rows of features, where it takes any,
        and ``states`` says whether tokens come with a row of the model's own width.

        Raises OutOfMemory when there is no room, with llama.cpp's own words, and ConfigError for a
        format of cached values that the model's widths rule out.
        """
        library = model.library
        params.n_outputs_max = min(OUTPUTS, params.n_batch)
        params.n_outputs_max_per_seq = params.n_outputs_max
        errors = library.listen()
        handle = library.llama_init_from_model(model.handle, params)
        if not handle:
            raise _no_context(_told(errors), params.n_ctx)
        self.model, self.library, self.handle = model, library, ctypes.c_void_p(handle)
        # the finaliser holds the model too: whatever goes first, weights outlive their contexts
        self._free = weakref.finalize(self, _free, library, self.handle, model)
        self._free.atexit = False
        library.owners.add(self)
        self.memory = ctypes.c_void_p(library.llama_get_memory(self.handle))
        self.size = int(library.llama_n_ctx(self.handle))
        self.most = int(params.n_batch)
        self.before_pass: Callable[[], None] | None = None
        self._logits = library.llama_get_logits
        self._decode = library.llama_decode
        self._seen = 0  # where the last pass's logits lay
        self._all: Floats  # of them [n, V]
        self._first: Floats  # [1, V]
        self._make_buffers(width, self.model.width if states else 0)

    def _make_buffers(self, width: int, state: int) -> None:
        most = self.most
        self._token = np.zeros(most, np.int32)
        self._sections = 4 if self.model.rope_type in MULTI_SECTION else 1
        self._pos = np.zeros(most * self._sections, np.int32)
        self._wanted = np.zeros(most, np.int8)
        self._ones = np.ones(most, np.int32)
        self._zero = np.zeros(1, np.int32)
        # the same memory for a single row: a plain step is timed in microseconds
        self._one = self._token.data, self._pos.data, self._wanted.data
        self._sequences = np.full(most, self._zero.ctypes.data, np.uintp)
        self._batches = self._over(self._token, None)
        self._rows = np.zeros((most, width), np.float32) if width else None
        if self._rows is not None:
            self._feature_batches = self._over(None, self._rows)
        self._states = np.zeros((most, state), np.float32) if state else None
        if self._states is not None:
            self._pair_batches = self._over(self._token, self._states)

    def _over(self, *inputs: Array | None) -> tuple[Batch, Batch]:
        """Batches over the same memory, of one row and of as many as it is told."""
        data = [None if rows is None else rows.ctypes.data for rows in inputs]
        wanted = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        places = (self._pos.ctypes.data, self._ones.ctypes.data, self._sequences.ctypes.data)
        return Batch(1, *data, *places, wanted), Batch(0, *data, *places, wanted)

    def run(self, tokens: Sequence[int], start: int, outputs: int) -> None:
        """Run ``tokens`` at positions from ``start``; the last ``outputs`` rows give logits."""
        count = len(tokens)
        assert 0 < count <= self.most, f"{count} rows in one pass of at most {self.most}"
        assert outputs <= count and outputs <= OUTPUTS, f"logits of {outputs} rows at once"
        if count == 1:
            self._one[0][0] = tokens[0]
        else:
            self._token[:count] = tokens
        self._call(self._batches, count, start, outputs)

    def feed(self, rows: Floats, start: int) -> None:
        """Feature rows [n, width] into the cache at positions from ``start``; no logits."""
        assert self._rows is not None, "this context takes no features"
        for at in range(0, len(rows), self.most):
            part = rows[at : at + self.most]
            self._rows[: len(part)] = part
            self._call(self._feature_batches, len(part), start + at, 0)

    def step(self, tokens: Sequence[int], states: Floats, start: int, outputs: int) -> None:
        """`run` for tokens that each come with a row of ``states`` [n, width of the model]."""
        assert self._states is not None, "this context takes no states"
        self._token[: len(tokens)] = tokens
        self._states[: len(tokens)] = states
        self._call(self._pair_batches, len(tokens), start, outputs)

    def encode(self, rows: Floats, start: int) -> Floats:
        """Feature rows [n, width] through the model's encoder: a copy of its output [n, H]."""
        assert self._rows is not None, "this context takes no features"
        self._rows[: len(rows)] = rows
        self._call(self._feature_batches, len(rows), start, len(rows), self.library.llama_encode)
        return self.states(len(rows)).copy()

    def states(self, rows: int) -> Floats:
        """What the next step reads [rows, H], of the last pass; llama.cpp's memory."""
        return rows_at(self.library.get_next(self.handle), rows, self.model.width)

    def _call(
        self,
        batches: tuple[Batch, Batch],
        count: int,
        start: int,
        outputs: int,
        compute: Any = None,
    ) -> None:
        assert start + count <= self.size, FULL
        batch, many = batches
        if count == 1:
            _, pos, wanted = self._one
            pos[0], wanted[0] = start, outputs
            if self.library.errors:  # of an earlier call: no reason why this one fails
                self.library.listen()
        else:
            batch = many
            batch.n_tokens = count
            self.library.listen()  # whoever took the log hardly did so between two single rows
            self._pos[:count] = np.arange(start, start + count, dtype=np.int32)
            self._wanted[:count] = 0
            self._wanted[count - outputs : count] = 1
        if self._sections > 1 and not batch.token:  # one after the other; text has three alike
            self._pos[: 4 * count] = np.append(np.tile(self._pos[:count], 3), [0] * count)
        if self.before_pass is not None:
            self.before_pass()
        status = (compute or self._decode)(self.handle, batch)
        if status != 0:
            told = _told(self.library.errors)
            raise OutOfMemory(f"llama.cpp's decode failed with status {status}: {told}")

    def logits(self, rows: int) -> Floats:
        """Logits [rows, V] of the last pass; llama.cpp's memory, good until the next one."""
        address = self._logits(self.handle)
        if address != self._seen:  # it hardly ever moves
            most = min(OUTPUTS, self.most)  # room for that many was asked for
            self._all = rows_at(address, most, self.model.vocab_size)
            self._seen, self._first = address, self._all[:1]
        return self._first if rows == 1 else self._all[:rows]

    def rollback(self, length: int) -> bool:
        """Forget positions from ``length`` on. False: this memory cannot, and has not."""
        return bool(self.library.llama_memory_seq_rm(self.memory, 0, length, -1))

    def clear(self) -> None:
        """Forget everything."""
        self.library.llama_memory_clear(self.memory, True)

    def save(self) -> NDArray[np.uint8]:
        """The cache as bytes, for `restore` into any context of the same kind."""
        size = self.library.llama_state_seq_get_size(self.handle, 0)
        state = np.empty(size, np.uint8)
        self.library.llama_state_seq_get_data(self.handle, state.ctypes.data, size, 0)
        return state

    def restore(self, state: NDArray[np.uint8]) -> None:
        """Replace the cache by a saved one."""
        taken = self.library.llama_state_seq_set_data(
            self.handle, state.ctypes.data, state.nbytes, 0
        )
        assert taken == state.nbytes, "a cache was saved that does not fit here"


def _free(library: Library, handle: Any, _: Model) -> None:
    library.llama_free(handle)


def trim() -> None:
    """Give freed memory back to the system, where the allocator would keep it (glibc)."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if release is not None:
        release(0)


def rows_at(address: int | None, rows: int, width: int) -> Floats:
    """``[rows, width]`` float32 over llama.cpp's memory."""
    assert address, "llama.cpp has no such output"
    block = (ctypes.c_float * (rows * width)).from_address(address)
    found: Floats = np.frombuffer(memoryview(block), np.float32).reshape(rows, width)
    return found


def _no_context(told: str, size: int) -> DFlashError:
    """Why there is no context of ``size`` tokens, by what llama.cpp ``told``."""
    if "cache type" in told or "V cache" in told:
        return ConfigError(f"{told}. For cached values f16 and f32 work with every model")
    return OutOfMemory(
        f"llama.cpp cannot make a context of {size} tokens: {told}. "
        "A smaller context, or fewer layers on the GPU, needs less"
    )


def _told(errors: list[str]) -> str:
    return "; ".join(errors[-3:]) or "it gives no reason"
