"""The settings of a pair as llama.cpp's structs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dflash.backends.gguf.library import Library
from dflash.backends.gguf.native import Model
from dflash.config import LoadConfig
from dflash.gguf_options import CACHE_TYPES, FLASH, gpu_layers

SPLIT = {"f16", "f32"}  # cached in these, which both come to f16, keys are divided among threads
ROOM = 32  # cache rows past the capacity: one block may be written there and rolled back


class Settings:
    """What a load asked for; makes models and the parameters of contexts."""

    def __init__(self, load: LoadConfig, library: Library) -> None:
        """``library`` is the one that runs the pair."""
        self.library, self.options = library, load.gguf
        self.threads = load.threads or available_threads()
        self._on_cpu = load.device == "cpu"

    def target(self, file: Path, heads: bool) -> Model:
        """The weights of ``file``; with its multi-token prediction ``heads``."""
        return self._model(file, self.options.n_gpu_layers, heads)

    def draft(self, file: Path) -> Model:
        """The weights of a draft."""
        asked = self.options.draft_n_gpu_layers
        return self._model(file, self.options.n_gpu_layers if asked is None else asked, False)

    def params(self, capacity: int) -> Any:
        """Those of a target's context for ``capacity`` tokens."""
        options = self.options
        params = self.library.llama_context_default_params()
        params.n_ctx, params.n_batch = capacity, options.n_batch
        params.n_ubatch = min(options.n_ubatch, options.n_batch)
        params.n_threads = self.threads
        params.n_threads_batch = options.threads_batch or self.threads
        params.type_k, params.type_v = CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]
        params.flash_attn_type = FLASH[options.flash_attn]
        return params

    def draft_params(self, capacity: int, rows: int) -> Any:
        """Those of a draft's context, whose passes have at most ``rows`` rows."""
        options, params = self.options, self.params(capacity + ROOM)
        params.n_batch = params.n_ubatch = rows
        threads = options.draft_threads
        params.n_threads = threads or params.n_threads
        params.n_threads_batch = options.draft_threads_batch or threads or params.n_threads_batch
        params.type_k = CACHE_TYPES[options.draft_type_k or options.type_k]
        params.type_v = CACHE_TYPES[options.draft_type_v or options.type_v]
        return params

    def why_rows_differ(self) -> str:
        """Why one row and several may round differently on this CPU; "" = no setting makes them.

        llama.cpp divides the keys of a single row among threads where keys and values are f16,
        from 512 places of the cache on, and those of several rows never.
        """
        options = self.options
        if options.flash_attn == "off":
            return (
                "without flash attention llama.cpp multiplies one row by cached values otherwise "
                "than several, so texts may part at near-ties: leave --flash-attn off out"
            )
        if self.threads > 1 and {options.type_k, options.type_v} <= SPLIT:
            return (
                f"past 256 tokens llama.cpp adds up a single row's attention in {self.threads} "
                "parts, one a thread, and that of several rows in one, so texts may part at "
                "near-ties: --cache-type-v bf16 or --threads 1 rules that out"
            )
        return ""

    def _model(self, file: Path, asked: Any, heads: bool) -> Model:
        layers = 0 if self._on_cpu else gpu_layers("n_gpu_layers", asked)
        repack = self.options.repack
        return Model(self.library, file, gpu_layers=layers, repack=repack, heads=heads)


def available_threads() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
