"""A target and its draft as GGUF files, and the sessions they make."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any, Self

from dflash.backends.gguf.draft import GgufDraft
from dflash.backends.gguf.library import library
from dflash.backends.gguf.native import Context, Model
from dflash.backends.gguf.sidecar import OWN_SERVER, Sidecar, read_sidecar
from dflash.backends.gguf.taps import Taps, make_taps
from dflash.backends.gguf.target import GgufTarget
from dflash.backends.gguf.tokenizer import GgufTokenizer
from dflash.backends.gguf.validate import check_files, check_target
from dflash.config import MTP, LoadConfig
from dflash.errors import ConfigError
from dflash.gguf_file import Header, read_header
from dflash.gguf_options import CACHE_TYPES, FLASH, gpu_layers

ROOM = 32  # cache rows past the capacity: one block may be written there and rolled back
DRAFT_BATCH = 128  # rows of features taken in at once
SMALL = 32  # tokens of the context that only lends the target's tables to drafts
TORCH_ONLY = ("dtype", "draft_dtype", "draft_sliding_window_size", "taps")


class GgufPair:
    """The Pair protocol over two models of llama.cpp."""

    backend = "gguf"

    def __init__(self, load: LoadConfig, target: Header, sidecar: Sidecar | None) -> None:
        """Load the weights of files that were checked."""
        options, lib = load.gguf, library()
        lib.verbose = options.verbose
        self._load, self._options, self.sidecar = load, options, sidecar
        self.threads = load.threads or available_threads()
        self._header = target
        self._model = Model(
            lib,
            target.path,
            gpu_layers=_layers(load, options.n_gpu_layers),
            repack=options.repack,
        )
        self._draft: Model | None = None
        self._lender: Context | None = None
        if sidecar is not None:
            self._draft, self._lender = self._open_draft(sidecar)
        self.target_name, self.draft_name = load.target, load.draft
        self.tokenizer = GgufTokenizer(self._model, target.metadata)
        trained = self._model.context_length
        self.context_length = min(options.n_ctx or trained, trained)
        self.vocab_size = self._model.vocab_size
        self.eos_ids = frozenset(
            token
            for token in range(self.vocab_size)
            if lib.llama_vocab_is_eog(self._model.vocab, token)
        )
        self.draft_block_size = None if sidecar is None else sidecar.block_size
        self.default_block_size = None

    @classmethod
    def open(cls, load: LoadConfig) -> Self:
        """Check both files, then load them. Raises as `open_pair` says."""
        given = [name for name in TORCH_ONLY if getattr(load, name) is not None]
        if given:
            raise ConfigError(
                f"{given[0]} is not a setting of the gguf backend: a GGUF file says that itself"
            )
        if load.draft == MTP:
            raise ConfigError(
                "multi-token prediction heads inside a target do not draft through this loop on "
                f"llama.cpp; {OWN_SERVER}. Or --backend torch"
            )
        if load.force_dflash:
            raise ConfigError(
                "force_dflash needs a draft of another width, and llama.cpp runs a draft of the "
                "target's own width only: use the draft's safetensors folder, on torch"
            )
        if load.device not in (None, "cpu") and not library().llama_supports_gpu_offload():
            raise ConfigError(
                f"device {load.device} was asked for, and this build of llama.cpp has no GPU in "
                "it: leave --device out, or install a wheel of xllamacpp that was built for one"
            )
        header = read_header(load.target)
        check_target(header)
        if load.draft is None:
            return cls(load, header, None)
        sidecar = read_sidecar(read_header(load.draft))
        check_files(header, sidecar)
        return cls(load, header, sidecar)

    @property
    def header(self) -> Header:
        """The target's metadata and tensors."""
        return self._header

    @property
    def model(self) -> Model:
        """The loaded target."""
        return self._model

    def runs_on(self) -> Mapping[str, str]:
        """Threads, build of llama.cpp, and the settings that its speed depends on."""
        options = self._options
        return {
            "device": f"{'gpu' if self._model.library.llama_supports_gpu_offload() else 'cpu'} "
            f"{platform.machine()}",
            "gpu_layers": str(options.n_gpu_layers),
            "threads": f"{self.threads} of {os.cpu_count()}",
            "cache": f"{options.type_k} {options.type_v} flash {options.flash_attn}",
            "llama.cpp": self._model.library.version,
        }

    def memory(self) -> Mapping[str, int]:
        """Bytes of the weights."""
        parts = {"target": self._model.bytes}
        return parts if self._draft is None else {**parts, "draft": self._draft.bytes}

    def open_target(self, capacity: int) -> GgufTarget:
        """A session with room for ``capacity`` tokens. Raises OutOfMemory."""
        return GgufTarget(self.open_context, capacity)

    def open_context(self, capacity: int, taps: bool = True) -> tuple[Context, Taps]:
        """A context of the target with its taps; ``taps`` False leaves them out."""
        ids = self.sidecar.taps if taps and self.sidecar is not None else ()
        wanted = make_taps(self._header.architecture, ids, self._model.width)
        params = self._params(capacity + ROOM)
        # snapshots of a recurrent state, one a token; llama.cpp insists on fewer than n_ubatch
        params.n_rs_seq = min(ROOM, max(params.n_ubatch - 2, 0)) if self._model.recurrent else 0
        wanted.prepare(params)
        context = Context(self._model, params)
        wanted.attach(context)
        return context, wanted

    def open_drafts(self, capacity: int) -> list[GgufDraft]:
        """One fresh session of the draft; [] without one."""
        sidecar = self.sidecar
        if sidecar is None:
            return []
        p_min, n_min = self._options.draft_p_min, self._options.draft_n_min
        return [GgufDraft(self._draft_context, capacity, sidecar, p_min=p_min, n_min=n_min)]

    def close(self) -> None:
        """Free the weights; idempotent. Sessions are closed first."""
        for part in (self._lender, self._draft, self._model):
            if part is not None:
                part.close()

    def _open_draft(self, sidecar: Sidecar) -> tuple[Model, Context]:
        options = self._options
        model = Model(
            self._model.library,
            sidecar.header.path,
            gpu_layers=_layers(self._load, options.draft_n_gpu_layers or options.n_gpu_layers),
            repack=options.repack,
        )
        params = self._params(SMALL)
        params.n_batch = params.n_ubatch = SMALL
        return model, Context(self._model, params)

    def _draft_context(self, capacity: int) -> Context:
        assert self._draft is not None and self._lender is not None and self.sidecar is not None
        options, sidecar = self._options, self.sidecar
        params = self._params(capacity + ROOM)
        # logits of a whole batch are reserved, so a small one; a block is computed at once
        params.n_batch = params.n_ubatch = max(DRAFT_BATCH, sidecar.block_size)
        params.n_threads = options.draft_threads or params.n_threads
        params.type_k = CACHE_TYPES[options.draft_type_k or options.type_k]
        params.type_v = CACHE_TYPES[options.draft_type_v or options.type_v]
        params.ctx_other = self._lender.handle
        context = Context(self._draft, params, width=len(sidecar.taps) * self._model.width)
        context.library.llama_set_causal_attn(context.handle, sidecar.causal)
        if sidecar.top_k:
            context.library.set_next(context.handle, True, False)
        return context

    def _params(self, tokens: int) -> Any:
        options = self._options
        params = self._model.library.llama_context_default_params()
        params.n_ctx, params.n_batch = tokens, options.n_batch
        params.n_ubatch = min(options.n_ubatch, options.n_batch)
        params.n_threads = self.threads
        params.n_threads_batch = options.threads_batch or self.threads
        params.type_k, params.type_v = CACHE_TYPES[options.type_k], CACHE_TYPES[options.type_v]
        params.flash_attn_type = FLASH[options.flash_attn]
        return params


def available_threads() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _layers(load: LoadConfig, asked: Any) -> int:
    return 0 if load.device == "cpu" else gpu_layers("n_gpu_layers", asked)
