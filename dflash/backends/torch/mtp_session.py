"""DraftSession over the heads inside a target: EAGLE-3's bookkeeping, the target's own block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dflash.backends.torch.cache import PreallocatedCache
from dflash.backends.torch.draft_load import LoadedDraft
from dflash.backends.torch.eagle3_session import Eagle3Session
from dflash.backends.torch.load import LoadedTarget
from dflash.backends.torch.mtp import MtpDraft, read_mtp
from dflash.config import MTP


class HeadCache:
    """A cache of one block under the names a draft's session uses."""

    bound = None  # sees everything

    def __init__(self, rows: PreallocatedCache) -> None:
        self.rows = rows

    def crop(self, end: int) -> None:
        """Forget rows at ``end`` and after."""
        self.rows.rollback(min(end, self.rows.length))

    def copy(self) -> HeadCache:
        """An independent cache with the same rows."""
        return HeadCache(self.rows.copy())

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.rows.bytes()


class MtpSession(Eagle3Session):
    """State of a target's heads over one growing token sequence (batch 1)."""

    _model: MtpDraft  # type: ignore[assignment]

    def __init__(
        self, model: Any, tables: Any, capacity: int, *, window: int | None = None
    ) -> None:
        """``tables`` are the target's and reached through ``model``."""
        super().__init__(model, tables, capacity, window=window)
        self._caches: list[Any] = [HeadCache(model.cache(capacity + model.spec.block_size))]

    def step(self, tokens: Tensor, state: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """As EAGLE-3's; the row for the head is the row that the next step reads."""
        out = self._model(self._model.embed(tokens), state, start, self._caches[0].rows)
        return out, out

    def _branches(self) -> bool:
        """The target's block is run as the target runs it: rows in order."""
        return False

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last states are read as they are."""
        return features

    def logits(self, normed: Tensor) -> Tensor:
        """[n, H] to [n, V]."""
        return self._model.logits(normed)


@dataclass(frozen=True)
class LoadedMtp(LoadedDraft):
    """A target's heads ready to run."""

    def open(self, capacity: int) -> Any:
        """A session with room for ``capacity`` context rows."""
        return MtpSession(self.model, self.tables, capacity)

    def why_no_trees(self) -> str:
        """Its block is run as the target runs it."""
        return "the heads inside a target draft one token after the other"

    def bytes(self) -> int:
        """Bytes of the weights that are not the target's."""
        heads: Any = self.model
        return int(heads.bytes())


def load_mtp(target: LoadedTarget) -> LoadedMtp:
    """The heads inside ``target`` as its draft. Raises CheckpointError if there are none."""
    model: Any = read_mtp(target)
    tables: Any = None  # both are the target's, within the model
    return LoadedMtp(model, tables, MTP)
