"""DraftSession over the heads inside a target: EAGLE-3's bookkeeping, the target's own block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dflash.backends.torch.draft_load import LoadedDraft
from dflash.backends.torch.eagle3_session import Chain, Eagle3Session
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.load import LoadedTarget
from dflash.backends.torch.mtp import HeadRows, MtpDraft, read_mtp
from dflash.backends.torch.rows import Options
from dflash.backends.torch.sampling import Ids
from dflash.backends.torch.upload import upload
from dflash.config import MTP


class HeadCache:
    """A cache of all heads under the names a draft's session uses."""

    bound = None  # sees everything

    def __init__(self, rows: HeadRows) -> None:
        self.rows = rows

    def crop(self, end: int) -> None:
        """Forget what has read tokens behind the one at ``end``."""
        self.rows.rollback(end)

    def copy(self) -> HeadCache:
        """An independent cache with the same rows."""
        return HeadCache(self.rows.copy())

    def grow(self, capacity: int, block_size: int) -> None:
        """Room for ``capacity`` rows and one block."""
        self.rows.grow(capacity + block_size)

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.rows.bytes()


class MtpSession(Eagle3Session):
    """State of a target's heads over one growing token sequence (batch 1).

    ``_outs[k]`` are the rows that head k has said and head k + 1 reads, by position; they are the
    final ones where they have read committed tokens only.
    """

    _model: MtpDraft  # type: ignore[assignment]

    def __init__(
        self, model: Any, tables: Any, capacity: int, *, window: int | None = None
    ) -> None:
        """``tables`` are the target's and reached through ``model``."""
        super().__init__(model, tables, capacity, window=window)
        self._held_rows: HeadRows = model.cache(capacity + model.spec.block_size)
        self._caches: list[Any] = [HeadCache(self._held_rows)]
        self._outs: list[Tensor] = [torch.empty(0, model.spec.hidden_size)] * (model.count - 1)

    def step(self, tokens: Tensor, state: Tensor, start: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """As EAGLE-3's, by the first head; the others take the rows whose tokens are known."""
        out = self._model(0, tokens, state, self._held_rows)
        rows, known = out, len(self._tokens) - 1
        for head in range(1, self._model.count):
            first, end = self._held_rows.held(head), self._held_rows.held(head - 1)
            self._note(head - 1, rows)
            end = min(end, known - head)  # row i reads token i + 1 + head
            if end <= first:
                break
            ids = self._tokens[first + 1 + head : end + 1 + head]
            rows = self._model(head, ids, self._outs[head - 1][first:end][None], self._held_rows)
        return out, out

    def further(self, offset: int, drafted: Tensor, before: Tensor) -> Tensor:
        """``[1, n, H]``: rows for the token after ``drafted [offset]``, the last one is its own.

        ``before`` are those for the token before. The head whose turn it is runs all rows that
        read a drafted token, of which the first has a final row to read.
        """
        head, anchor = min(offset, self._model.count - 1), len(self._tokens) - 1
        out: Tensor
        if head < offset:
            out = self._model(head, drafted[-1:], before[:, -1:], self._held_rows)
            return out
        first = self._held_rows.held(head)
        states = [before] if head > 1 else []  # head 0 has read the anchor: a final row
        if anchor - head >= first:
            states.insert(0, self._outs[head - 1][first : anchor - head + 1][None])
        ids = drafted[first + head - anchor :]
        out = self._model(head, ids, torch.cat(states, dim=1), self._held_rows)
        return out

    def fork(self) -> Self:
        """An independent session with the same rows."""
        twin = super().fork()
        twin._held_rows = twin._caches[0].rows
        twin._outs = [rows.clone() for rows in self._outs]
        return twin

    def bytes(self) -> int:
        """Bytes of keys, values and states."""
        return super().bytes() + sum(rows.nbytes for rows in self._outs)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's last states are read as they are."""
        return features

    def logits(self, normed: Tensor) -> Tensor:
        """[n, H] to [n, V]."""
        return self._model.logits(normed)

    def _note(self, head: int, rows: Tensor) -> None:
        """Keep rows [1, n, H] that ``head`` has just said."""
        end, known = self._held_rows.held(head), self._outs[head]
        first = end - rows.shape[1]
        if end > known.shape[0]:
            more = rows.new_empty(2 * end, rows.shape[2])
            more[:first] = known[:first]
            self._outs[head] = known = more
        known[first:end] = rows[0]

    def _chain(self, count: int, normed: Tensor, state: Tensor, start: int) -> Chain:
        return HeadChain(self, count, normed, state, start)

    def _branches(self) -> bool:
        """The target's block is run as the target runs it: rows in order."""
        return False


class HeadChain(Chain):
    """Rows in turn, each by the next head."""

    _session: MtpSession

    def row(self, offset: int, ids: Ids, options: Options | None) -> Tensor:
        """``[1, V]`` of the token after ``ids``; asked for once, in order."""
        if offset:
            drafted = upload(ids, self.device).long()
            self._normed = self._session.further(offset, drafted, self._normed)
        return self._said(self._normed[0, -1:], options)


@dataclass(frozen=True)
class LoadedMtp(LoadedDraft):
    """A target's heads ready to run."""

    def open(self, capacity: int, graphs: Graphs | None = None) -> Any:  # noqa: ARG002
        """A session with room for ``capacity`` context rows."""
        return MtpSession(self.model, self.tables, capacity)

    @property
    def replayable(self) -> bool:
        """Heads run one after the other."""
        return False

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
