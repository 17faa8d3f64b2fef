"""A target and its draft as GGUF files, and the sessions they make."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Self

from dflash.backends.gguf.draft_file import DraftFile, read_draft
from dflash.backends.gguf.drafters import Drafter, EagleDrafter, HeadsDrafter, SidecarDrafter
from dflash.backends.gguf.heads import count_heads, insist_on_heads, why_no_heads
from dflash.backends.gguf.library import library
from dflash.backends.gguf.native import Context, Model, trim
from dflash.backends.gguf.queued import QueuedDraft
from dflash.backends.gguf.settings import ROOM, Settings
from dflash.backends.gguf.sidecar import Sidecar
from dflash.backends.gguf.taps import NoTaps, Taps
from dflash.backends.gguf.target import GgufTarget
from dflash.backends.gguf.tokenizer import GgufTokenizer
from dflash.backends.gguf.validate import check_target, insist_on_width
from dflash.config import MTP, LoadConfig
from dflash.errors import ConfigError
from dflash.gguf_file import Header, read_header

TORCH_ONLY = ("dtype", "draft_dtype", "draft_sliding_window_size", "taps")


class GgufPair:
    """The Pair protocol over two models of llama.cpp."""

    backend = "gguf"
    warnings: tuple[str, ...] = ()  # what is odd about this pair, in sentences for the user

    def __init__(
        self, load: LoadConfig, target: Header, draft: DraftFile | None = None, heads: bool = False
    ) -> None:
        """Load the weights of files that were checked; ``heads``: draft with the target's own."""
        lib = library()
        lib.verbose = load.gguf.verbose
        self._header, self.draft_file = target, draft
        self._settings = Settings(load, lib)
        self._model = self._settings.target(target.path, heads)
        self._drafter: Drafter | None = None
        if isinstance(draft, Sidecar):
            self._drafter = SidecarDrafter(self._settings, self._model, draft)
        elif draft is not None:
            self._drafter = EagleDrafter(self._settings, self._model, draft)
        elif heads:
            self._drafter = HeadsDrafter(self._settings, self._model)
        self.target_name, self.draft_name = load.target, MTP if heads else load.draft
        self.tokenizer = GgufTokenizer(self._model, target.metadata)
        trained = self._model.context_length
        self.context_length = min(load.gguf.n_ctx or trained, trained)
        self.vocab_size = self._model.vocab_size
        self.eos_ids = frozenset(
            token
            for token in range(self.vocab_size)
            if lib.llama_vocab_is_eog(self._model.vocab, token)
        )
        self.draft_block_size = None if self._drafter is None else self._drafter.block_size
        self.default_block_size = None
        self.most_rows = load.gguf.n_batch  # of one pass, anchor included

    @classmethod
    def open(cls, load: LoadConfig) -> Self:
        """Check the files, then load them. Raises as `open_pair` says."""
        given = [name for name in TORCH_ONLY if getattr(load, name) is not None]
        if given:
            raise ConfigError(
                f"{given[0]} is not a setting of the gguf backend: a GGUF file says that itself"
            )
        if load.device not in (None, "cpu") and not library().llama_supports_gpu_offload():
            raise ConfigError(
                f"device {load.device} was asked for, and this build of llama.cpp has no GPU in "
                "it: leave device out, or install one that was built for it"
            )
        header = read_header(load.target)
        check_target(header)
        if load.draft is None:
            return cls._alone(load, header)
        if load.draft == MTP:
            insist_on_heads(header)
        draft = None
        if load.draft != MTP:
            file = read_header(load.draft)
            if load.force_dflash:
                insist_on_width(header, file)
            draft = read_draft(header, file)
        library().insist_on_states()
        return cls(load, header, draft, heads=draft is None)

    @classmethod
    def _alone(cls, load: LoadConfig, target: Header) -> Self:
        """Without a draft, or with the heads inside the target; those that cannot are a note."""
        if not load.mtp or not count_heads(target):
            return cls(load, target)
        why = why_no_heads(target) or library().why_no_states()
        pair = cls(load, target, heads=not why)
        if why:
            pair.warnings = (f"plain decoding: {why}. --no-mtp (mtp=False) does not try them",)
        return pair

    @property
    def threads(self) -> int:
        """Threads of single tokens."""
        return self._settings.threads

    @property
    def why_rows_differ(self) -> str:
        """As the settings say it; "" too where a GPU may compute."""
        on_gpu = self._model.library.llama_supports_gpu_offload()
        return "" if on_gpu else self._settings.why_rows_differ()

    @property
    def sidecar(self) -> Sidecar | None:
        """The DFlash sidecar, if the draft is one."""
        return self.draft_file if isinstance(self.draft_file, Sidecar) else None

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
        options = self._settings.options
        return {
            "device": f"{'gpu' if self._model.library.llama_supports_gpu_offload() else 'cpu'} "
            f"{platform.machine()}",
            "gpu_layers": str(options.n_gpu_layers),
            "threads": f"{self.threads} of {os.cpu_count()}",
            "cache": f"{options.type_k} {options.type_v} flash {options.flash_attn}",
            "llama.cpp": self._model.library.name,
        }

    def memory(self) -> Mapping[str, int]:
        """Bytes of the weights."""
        parts = {"target": self._model.bytes}
        return parts if self._drafter is None else {**parts, "draft": self._drafter.bytes}

    def open_target(self, capacity: int) -> GgufTarget:
        """A session with room for ``capacity`` tokens. Raises OutOfMemory."""
        return GgufTarget(self.open_context, capacity)

    def open_context(self, capacity: int, taps: bool = True) -> tuple[Context, Taps]:
        """A context of the target with its taps; ``taps`` False leaves them out."""
        wanted: Taps = NoTaps()
        if taps and self._drafter is not None:
            wanted = self._drafter.taps(self._header.architecture, self._model.width)
        params = self._settings.params(capacity + ROOM)
        # snapshots of a recurrent state, one a token; llama.cpp insists on fewer than n_ubatch
        params.n_rs_seq = min(ROOM, max(params.n_ubatch - 2, 0)) if self._model.recurrent else 0
        wanted.prepare(params)
        context = Context(self._model, params)
        wanted.attach(context)
        return context, wanted

    def open_drafts(self, capacity: int) -> list[QueuedDraft]:
        """One fresh session of the draft; [] without one."""
        return [] if self._drafter is None else [self._drafter.open(capacity)]

    def close(self) -> None:
        """Free the weights; idempotent. Sessions are closed first."""
        if self._drafter is not None:
            self._drafter.close()
        self._model.close()
        trim()
