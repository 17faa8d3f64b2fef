"""What draws drafts for a pair: a DFlash sidecar, an EAGLE-3 draft, or heads inside the target.

Each owns its weights, says which features of the target it reads, and opens sessions.
"""

from __future__ import annotations

from typing import Protocol

from dflash.backends.gguf.chain import ChainDraft
from dflash.backends.gguf.draft import GgufDraft
from dflash.backends.gguf.eagle_file import EagleFile
from dflash.backends.gguf.native import OUTPUTS, Context, Model
from dflash.backends.gguf.queued import Limits, QueuedDraft
from dflash.backends.gguf.settings import Settings
from dflash.backends.gguf.sidecar import Sidecar
from dflash.backends.gguf.taps import LastState, Taps, make_taps
from dflash.drafts.mtp import BLOCK
from dflash.errors import ConfigError

DRAFT_BATCH = 128  # rows of features taken in at once
SMALL = 32  # tokens of the context that only lends the target's tables to drafts
HEADS_CONTEXT = 1  # the kind of context that runs a target's heads (LLAMA_CONTEXT_TYPE_MTP)


class Drafter(Protocol):
    """One draft of a pair."""

    @property
    def block_size(self) -> int:
        """Native block size, anchor included."""

    @property
    def bytes(self) -> int:
        """Of its weights."""

    def taps(self, architecture: str, width: int) -> Taps:
        """What it reads of a target of that architecture and width."""

    def open(self, capacity: int) -> QueuedDraft:
        """A fresh session. Raises OutOfMemory."""

    def close(self) -> None:
        """Free the weights; idempotent. Sessions are closed first."""


class _Lent:
    """A draft with a file of its own, which may use tables of the target's."""

    def __init__(self, settings: Settings, target: Model, file: Sidecar | EagleFile) -> None:
        self._settings, self._file, self._target = settings, file, target
        self.block_size = min(file.block_size, OUTPUTS)
        self._limits = _limits(settings, self.block_size)  # before anything is loaded
        self._model = settings.draft(file.header.path)
        params = settings.params(SMALL)
        params.n_batch = params.n_ubatch = SMALL
        self._lender = Context(target, params)
        self.bytes = self._model.bytes

    def taps(self, architecture: str, width: int) -> Taps:
        """Inputs of the layers that the file names."""
        return make_taps(architecture, self._file.taps, width)

    def close(self) -> None:
        """As the protocol says."""
        self._lender.close()
        self._model.close()


class SidecarDrafter(_Lent):
    """DFlash and DFlash2."""

    _file: Sidecar

    def open(self, capacity: int) -> QueuedDraft:
        """As the protocol says."""
        return GgufDraft(self._context, capacity, self._limits, self._file)

    def _context(self, capacity: int) -> Context:
        sidecar = self._file
        # logits of a whole batch are reserved, so a small one; a block is computed at once
        params = self._settings.draft_params(capacity, DRAFT_BATCH)
        params.ctx_other = self._lender.handle
        width = len(sidecar.taps) * self._target.width
        context = Context(self._model, params, width=width)
        context.library.llama_set_causal_attn(context.handle, sidecar.causal)
        if sidecar.top_k:
            context.library.set_next(context.handle, True, False)
        return context


class EagleDrafter(_Lent):
    """EAGLE-3."""

    _file: EagleFile

    def open(self, capacity: int) -> QueuedDraft:
        """As the protocol says."""
        return ChainDraft(self._context, capacity, self._limits, fused=True)

    def _context(self, capacity: int) -> Context:
        params = self._settings.draft_params(capacity, OUTPUTS)
        params.ctx_other = self._lender.handle
        width = len(self._file.taps) * self._target.width
        context = Context(self._model, params, width=width, states=True)
        context.library.set_next(context.handle, True, True)
        return context


class HeadsDrafter:
    """Multi-token prediction heads inside the target."""

    block_size = BLOCK
    bytes = 0  # counted with the target

    def __init__(self, settings: Settings, target: Model) -> None:
        """``target`` was loaded with its heads, and is borrowed."""
        self._settings, self._target = settings, target
        self._limits = _limits(settings, self.block_size)

    def taps(self, architecture: str, width: int) -> Taps:  # noqa: ARG002 - the protocol
        """The target's last state."""
        return LastState(width)

    def open(self, capacity: int) -> QueuedDraft:
        """As the protocol says."""
        return ChainDraft(self._context, capacity, self._limits, fused=False)

    def close(self) -> None:
        """Nothing of its own."""

    def _context(self, capacity: int) -> Context:
        params = self._settings.draft_params(capacity, OUTPUTS)
        params.ctx_type = HEADS_CONTEXT
        context = Context(self._target, params, states=True)
        context.library.set_next(context.handle, True, True)
        return context


def _limits(settings: Settings, block_size: int) -> Limits:
    options, most = settings.options, block_size - 1
    if options.draft_n_min > most:
        raise ConfigError(
            f"draft_n_min is {options.draft_n_min}, and this draft proposes {most} tokens at most: "
            f"nothing would ever be drafted. Take {most} or less, or leave it out"
        )
    return Limits(most, options.draft_p_min, options.draft_n_min)
