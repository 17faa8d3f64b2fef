"""DFlash and DFlash2 sidecars behind the seam: llama.cpp's draft graph, our bookkeeping.

A block is [anchor, mask, ...] at positions from the anchor's on, run in one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import numpy as np
from numpy.typing import NDArray

from dflash.backends.gguf.native import Context, Floats, rows_at
from dflash.backends.gguf.queued import Limits, QueuedDraft
from dflash.backends.gguf.sidecar import Sidecar
from dflash.core import noise
from dflash.core.accept import draw
from dflash.core.host import Drafted, propose
from dflash.core.logits import changes_logits
from dflash.core.noise import Stream
from dflash.core.types import Request


class GgufDraft(QueuedDraft):
    """DraftSession over one context of a sidecar."""

    def __init__(
        self,
        opened: Callable[[int], Context],
        capacity: int,
        limits: Limits,
        sidecar: Sidecar,
    ) -> None:
        """``opened`` makes a context for ``capacity`` tokens."""
        super().__init__(opened, capacity, limits)
        self._sidecar = sidecar

    def _twin(self) -> Self:
        return type(self)(self._opened, self._capacity, self._limits, self._sidecar)

    def _take(self, rows: Floats, start: int) -> None:
        self._context.feed(rows, start)

    def _drafted(self, rows: int, start: int) -> Drafted:
        block = [self._tokens[-1], *[self._sidecar.mask_token_id] * rows]
        self._context.run(block, start, 0 if self._sidecar.top_k else rows + 1)
        return self._walk(rows) if self._sidecar.top_k else self._marginals(rows)

    def _marginals(self, rows: int) -> Drafted:
        """v1: a distribution a place, none looking at the others."""
        logits = self._context.logits(rows + 1)[1:]  # the graph gives all rows or none
        if self._sidecar.softcap or self._sidecar.logit_scale != 1.0:  # llama.cpp leaves these out
            logits = logits * np.float32(self._sidecar.logit_scale)
            cap = np.float32(self._sidecar.softcap)
            logits = np.tanh(logits / cap) * cap if cap else logits
        if least := self._least:
            sure = [1 / np.exp(row - row.max()).sum() >= least for row in logits]
            logits = logits[: sure.index(False)] if False in sure else logits
        if len(logits) < self._limits.n_min:
            return Drafted([])  # known before anything is drawn
        if self._request.sampling.draft_path == "best" and not changes_logits(self._request):
            return Drafted([int(i) for i in logits.argmax(axis=-1)])  # places that look at no other
        return propose(logits, self._request, self._output())

    def _walk(self, rows: int) -> Drafted:
        """DFlash2: from candidate to candidate through the lattice, place by place."""
        top = self._sidecar.top_k
        found = rows_at(
            self._context.library.get_next(self._context.handle), rows + 1, self._sidecar.width
        )
        lattice = found[1:, : top + top * top].astype(np.float64)
        if self._request.sampling.draft_path == "best":
            return Drafted(_likeliest(lattice, top, self._least))
        choose, before = _Chooser(self._request, len(self._output())), 0
        tokens: list[int] = []
        q = np.zeros((rows, self._context.model.vocab_size)) if choose.keeps_q else None
        for place, row in enumerate(lattice):
            ids = row[:top].astype(np.int64)
            scores = row[top:].reshape(top, top)[before]
            if 1 / np.exp(scores - scores.max()).sum() < self._least:
                break
            weights = choose.weights(scores)
            before = choose(weights, ids, place)
            tokens.append(int(ids[before]))
            if q is not None:
                q[place, ids] = weights
        return Drafted(tokens, None if q is None else q[: len(tokens)])


def _likeliest(lattice: NDArray[np.float64], top: int, least: float) -> list[int]:
    """Tokens of the path whose steps, each a distribution, multiply to the most (Viterbi), up to
    where no candidate has a probability of ``least``.

    A row of ``lattice`` holds ids [top] and scores [top, top]: after each candidate of the place
    before; the first place has one before it, the anchor.
    """
    scores = lattice[:, top:].reshape(-1, top, top)
    scores = scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
    total, back = scores[0, 0], list[NDArray[np.intp]]()
    for edges in scores[1:]:
        whole = total[:, None] + edges
        back.append(whole.argmax(axis=0))
        total = whole.max(axis=0)
    places = [int(total.argmax())]
    for arrows in reversed(back):
        places.append(int(arrows[places[-1]]))
    places.reverse()
    sure = [np.exp(row[before].max()) for row, before in zip(scores, [0, *places], strict=False)]
    kept = next((n for n, share in enumerate(sure) if share < least), len(places))
    return [int(row[place]) for row, place in zip(lattice[:kept], places, strict=False)]


class _Chooser:
    """How a candidate of one place is chosen under a request's sampling."""

    def __init__(self, request: Request, position: int) -> None:
        self._sampling, self._position = request.sampling, position
        self._greedy = self._sampling.temperature == 0 or self._sampling.greedy_drafts
        self.keeps_q = not self._greedy and self._sampling.rule != "match"

    def weights(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """Probabilities of the candidates; temperature alone shapes a proposal."""
        heat = 1.0 if self._greedy else self._sampling.temperature
        weights: NDArray[np.float64] = np.exp((scores - scores.max()) / heat)
        weights /= weights.sum()
        return weights

    def __call__(self, weights: NDArray[np.float64], ids: NDArray[np.int64], place: int) -> int:
        s = self._sampling
        if self._greedy:
            return int(weights.argmax())
        if s.rule == "match":
            gumbel = noise.gumbel(s.seed, s.sample, self._position + place, int(ids.max()) + 1)
            with np.errstate(divide="ignore"):
                return int((np.log(weights) + gumbel[ids]).argmax())
        key = (s.seed, s.sample, Stream.DRAFT, self._position, place + 1)
        return draw(weights, float(noise.coins(*key)[-1]))
