"""DraftSession over the DFlash2 module: v1's bookkeeping, and tokens chosen one after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash.backends.torch.best_first import Beam, Candidates, Ranking
from dflash.backends.torch.dflash2 import CandidateSelector, DFlash2DraftModel, best_path
from dflash.backends.torch.dflash_session import DFlashSession
from dflash.backends.torch.kinds import DraftKind
from dflash.backends.torch.rows import Options, Rows, whole
from dflash.backends.torch.sampling import Ids, to_host
from dflash.backends.torch.tables import States
from dflash.backends.torch.upload import upload
from dflash.core.types import MOST_NODES


class DFlash2Session(DFlashSession):
    """State of one DFlash2 draft over one growing token sequence (batch 1)."""

    def _rows(self, states: States) -> Rows:
        assert isinstance(self._model, DFlash2DraftModel), "a session of another kind of draft"
        anchor = torch.full((1,), self._tokens[-1], device=states.hidden.device)
        selector = self._model.candidate_selector
        return SelectorRows(selector, states.hidden, whole(states.logits), anchor)


@dataclass(frozen=True, slots=True)
class SelectorRows:
    """Rows whose tokens are the selector's candidates, each scored after the token before it.

    Tokens that are no candidates have no probability: -inf.
    """

    selector: CandidateSelector
    hidden: Tensor  # [n, H]
    logits: Tensor  # [n, V]
    anchor: Tensor  # [1]

    @property
    def count(self) -> int:
        """Rows there are."""
        return self.logits.shape[0]

    @property
    def choices(self) -> int:
        """Candidates of a row."""
        return self.selector.top_k

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.logits.device

    def row(self, offset: int, ids: Ids, options: Options | None) -> Tensor:
        """``[1, V]``: the candidates' scores after the last of ``ids``."""
        logits = self.logits[offset : offset + 1]
        logits = logits if options is None else options(logits)
        before = upload(ids[-1:], self.device) if offset else self.anchor
        best, scores = self.selector.candidates(logits)
        hidden = self.hidden[offset : offset + 1]
        scores = scores.float() + self.selector.transitions(hidden, before[None], best)[:, 0]
        row = scores.new_full((1, logits.shape[-1]), -torch.inf)
        return row.scatter_(1, best, scores)

    def path(self, options: Options | None) -> Tensor | None:
        """``[n]``: the candidates whose scores, each a distribution, multiply to the most."""
        logits = self.logits if options is None else options(self.logits)
        ids, scores = self.selector.candidates(logits)
        scores = scores.float()
        first = self.selector.transitions(self.hidden[:1], self.anchor[None], ids[:1])
        later = self.selector.transitions(self.hidden[1:], ids[:-1], ids[1:])
        places = best_path(scores[0] + first[0, 0], scores[1:, None] + later)
        return ids.gather(1, places[:, None])[:, 0]

    @property
    def widest(self) -> int:
        """All there may be: a level costs no pass."""
        return MOST_NODES

    def after(self, level: int, beam: Beam | None, ranking: Ranking, most: int) -> Candidates:
        """The row's candidates, scored after each node."""
        row = ranking.prepared(self.logits[level : level + 1], level)
        ids, scores = self.selector.candidates(row)
        before = self.anchor if beam is None else beam.tokens
        hidden = self.hidden[level : level + 1]
        scores = scores.float() + self.selector.transitions(hidden, before[None], ids)[0]
        logs = ranking.logs(scores, level, ids[0], row.shape[-1])
        best = logs.topk(min(most, logs.shape[-1]))
        return Candidates(ids[0][best.indices], best.values)

    def to_host(self) -> SelectorRows:
        """Waits for the rows; the selector's copy is made once."""
        return replace(
            self,
            selector=self.selector.on_host(),
            hidden=to_host(self.hidden),
            logits=to_host(self.logits),
            anchor=to_host(self.anchor),
        )


DFLASH2 = DraftKind(DFlash2DraftModel, DFlash2Session)
