"""DraftSession over the head inside a target: EAGLE-3's bookkeeping, the target's own block."""

from __future__ import annotations

from typing import Any

from dflash.backends.mlx.cache import Caches
from dflash.backends.mlx.dflash_session import Tables
from dflash.backends.mlx.draft_load import LoadedDraft, quantise
from dflash.backends.mlx.eagle3_session import Eagle3Session
from dflash.backends.mlx.kinds import DraftKind
from dflash.backends.mlx.load import LoadedTarget
from dflash.backends.mlx.mtp import MtpModule
from dflash.backends.mlx.mtp_weights import read_mtp
from dflash.config import MTP


class HeadCache:
    """Keys and values of the block under the names a draft's session uses."""

    bound = None  # sees everything

    def __init__(self, rows: Caches) -> None:
        self.rows = rows

    def crop(self, end: int) -> None:
        """Forget what has read tokens behind the one at ``end``."""
        self.rows.trim(min(end, self.rows.length))

    def copy(self) -> HeadCache:
        """An independent cache with the same rows."""
        return HeadCache(self.rows.copy())

    def bytes(self) -> int:
        """Bytes held."""
        return self.rows.bytes()


class MtpSession(Eagle3Session):
    """State of a target's head over one growing token sequence (batch 1)."""

    _model: MtpModule

    def __init__(self, model: Any, tables: Tables, *, window: int | None = None) -> None:
        """``window`` is not for heads: they see what the target sees."""
        super().__init__(model, tables, window=window)
        self._caches: list[Any] = [HeadCache(model.cache())]

    def _step(self, tokens: Any, state: Any, start: int) -> tuple[Any, Any]:  # noqa: ARG002
        embedded = (self._tables.embed(tokens) * self._tables.scale)[None]
        out = self._model.rows(embedded.astype(self._model.dtype), state, self._caches[0].rows)
        return out, out


def load_mtp(target: LoadedTarget, bits: int | None = None) -> LoadedDraft:
    """The head inside ``target`` as its draft; ``bits`` as for others. Raises CheckpointError."""
    model = read_mtp(target)
    quantise(model, bits)
    tables = Tables(embed=target.embed, head=target.head, rows=target.vocab_size)
    return LoadedDraft(model, tables, MTP, bits=bits)


HEAD = DraftKind(MtpModule, MtpSession)
