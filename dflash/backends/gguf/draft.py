"""DFlash and DFlash2 sidecars behind the seam: llama.cpp's draft graph, our bookkeeping.

``_tokens`` is prompt plus committed tokens, the last is the anchor at position ``s``. A context row
exists for every position before it: absorbed (in the draft's cache) or queued (features waiting for
the next `propose`). A block is [anchor, mask, ...] at positions from ``s``; its rows leave the
cache right after, so what is cached is always features of the target.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.backends.gguf.native import Array, Context, Floats, rows_at
from dflash.backends.gguf.sidecar import Sidecar
from dflash.core import noise
from dflash.core.accept import draw
from dflash.core.host import Drafted, propose
from dflash.core.logits import changes_logits
from dflash.core.noise import Stream
from dflash.core.types import PLAIN, Outlook, Plan, Proposal, Request, Verdict

QUEUE_BYTES = 32 << 20  # features that may wait; past it a commit absorbs them


class GgufDraft:
    """DraftSession over one context of a sidecar."""

    def __init__(
        self,
        opened: Callable[[int], Context],
        capacity: int,
        sidecar: Sidecar,
        *,
        p_min: float = 0.0,
        n_min: int = 0,
    ) -> None:
        """``opened`` makes a context for ``capacity`` tokens. ``p_min`` ends a block before a place
        whose likeliest token is less probable; one shorter than ``n_min`` is not proposed."""
        self._opened, self._capacity, self._sidecar = opened, capacity, sidecar
        self._p_min, self._n_min = p_min, n_min
        self._context = opened(capacity)
        self._tokens: list[int] = []
        self._request = Request((), 0)
        self._absorbed = 0
        self._queue: list[Floats] = []

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and the rows held, at most ``most``."""
        limit = min(most, len(prompt), self._held())
        return next((i for i in range(limit) if prompt[i] != self._tokens[i]), limit)

    def begin(self, request: Request, reuse: int) -> None:
        """Start a request whose first ``reuse`` rows are held; later ones are forgotten."""
        assert reuse <= self._held(), f"{reuse} rows asked for, {self._held()} held"
        queued = max(0, reuse - self._absorbed)
        self._queue = [np.concatenate(self._queue)[:queued]] if queued else []
        if reuse < self._absorbed:
            self._forget(reuse)
            self._absorbed = reuse
        self._tokens, self._request = list(request.prompt), request

    def outlook(self) -> Outlook:
        """A full block as soon as there is an anchor; ``lag`` is the queue's rows."""
        ready = len(self._tokens) == self._held() + 1
        most = self._sidecar.block_size - 1 if ready else 0
        return Outlook(most, lag=self._held() - self._absorbed)

    def propose(self, plan: Plan) -> Proposal[Array]:
        """A token of each row, as the request draws them; catching up is part of it."""
        rows = min(plan.rows, self.outlook().most)
        if rows < 1:
            return PLAIN
        began = time.perf_counter_ns()
        self._absorb()
        start = len(self._tokens) - 1
        assert self._absorbed == start, f"{self._absorbed} rows absorbed, anchor at {start}"
        block = [self._tokens[-1], *[self._sidecar.mask_token_id] * rows]
        self._context.run(block, start, 0 if self._sidecar.top_k else rows + 1)
        drafted = self._walk(rows) if self._sidecar.top_k else self._marginals(rows)
        self._forget(start)
        if len(drafted.tokens) < self._n_min:
            return PLAIN
        q = drafted.q
        ns = time.perf_counter_ns() - began
        return Proposal(drafted.tokens, len(drafted.tokens), q=q, meta=ns)

    def commit(self, verdict: Verdict[Array], rows: int) -> None:
        """Queue the first ``rows`` feature rows and tokens of ``verdict``."""
        if not rows:
            return
        assert verdict.features is not None, "the target captures no features"
        self._queue.append(verdict.features[:rows])
        self._tokens += verdict.tokens[:rows]
        if sum(part.nbytes for part in self._queue) > QUEUE_BYTES:
            self._absorb()

    def fork(self) -> GgufDraft:
        """An independent session with the same rows."""
        limits: Any = {"p_min": self._p_min, "n_min": self._n_min}
        twin = GgufDraft(self._opened, self._capacity, self._sidecar, **limits)
        if self._absorbed:
            twin._context.restore(self._context.save())
        twin._tokens, twin._request = list(self._tokens), self._request
        twin._absorbed, twin._queue = self._absorbed, list(self._queue)
        return twin

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens, in a larger context. Raises OutOfMemory."""
        before, context = self._context, self._opened(capacity)
        if self._absorbed:
            context.restore(before.save())
        self._context, self._capacity = context, capacity
        before.close()

    def close(self) -> None:
        """Free the context; idempotent."""
        self._context.close()
        self._tokens, self._queue, self._absorbed = [], [], 0

    def _held(self) -> int:
        return self._absorbed + sum(len(part) for part in self._queue)

    def _absorb(self) -> None:
        for part in self._queue:
            self._context.feed(part, self._absorbed)
            self._absorbed += len(part)
        self._queue = []

    def _forget(self, length: int) -> None:
        forgotten = self._context.rollback(length)
        assert forgotten, "a draft's cache forgets by position"

    @property
    def _least(self) -> float:
        """Probability under which a draft ends: the engine's setting, or the request's."""
        return max(self._p_min, self._request.sampling.draft_p_min)

    def _output(self) -> list[int]:
        return self._tokens[len(self._request.prompt) :]

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
            return Drafted(_likeliest(lattice, top))
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


def _likeliest(lattice: NDArray[np.float64], top: int) -> list[int]:
    """Tokens of the path whose steps, each a distribution, multiply to the most (Viterbi).

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
    return [int(row[place]) for row, place in zip(lattice, reversed(places), strict=True)]


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
