"""What all drafts on llama.cpp share behind the seam: which rows there are, and which wait.

``_tokens`` is prompt plus committed tokens, the last is the anchor at position ``s``. A context row
exists for every position before it: absorbed (in the draft's cache) or queued (features waiting for
the next `propose`). What a proposal itself writes from position ``s`` on is forgotten right after,
so what is cached is always features of the target.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from dflash.backends.gguf.native import Array, Context, Floats
from dflash.core.host import Drafted
from dflash.core.types import PLAIN, Outlook, Plan, Proposal, Request, Verdict

QUEUE_BYTES = 32 << 20  # features that may wait; past it a commit absorbs them


@dataclass(frozen=True, slots=True)
class Limits:
    """How long drafts are."""

    most: int  # drafts of a proposal
    p_min: float = 0.0  # one ends before a place whose likeliest token is less probable
    n_min: int = 0  # shorter ones are not proposed, unless they were drawn before that was known

    @property
    def fewest(self) -> int:
        """Drafts of a proposal: one of none is a plain step."""
        return max(1, self.n_min)


class QueuedDraft(ABC):
    """DraftSession over one context of llama.cpp."""

    def __init__(self, opened: Callable[[int], Context], capacity: int, limits: Limits) -> None:
        """``opened`` makes a context for ``capacity`` tokens."""
        self._opened, self._capacity, self._limits = opened, capacity, limits
        self._context = opened(capacity)
        self._tokens: list[int] = []
        self._request = Request((), 0)
        self._absorbed = 0
        self._queue: list[Floats] = []
        self._queued = 0  # rows in it: counted, because every round asks

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and the rows held, at most ``most``."""
        return min(most, self._held(), self._common(prompt))

    def begin(self, request: Request, reuse: int) -> None:
        """Start a request whose first ``reuse`` rows are held; later ones are forgotten."""
        assert reuse <= self._held(), f"{reuse} rows asked for, {self._held()} held"
        queued = max(0, reuse - self._absorbed)
        self._queue = [np.concatenate(self._queue)[:queued]] if queued else []
        self._queued = queued
        if reuse < self._absorbed:
            self._forget(reuse)
            self._absorbed = reuse
        self._tokens, self._request = list(request.prompt), request

    def outlook(self) -> Outlook:
        """A full block as soon as there is an anchor; ``lag`` is the queue's rows."""
        queued = self._queued
        ready = len(self._tokens) == self._absorbed + queued + 1
        limits = self._limits
        return Outlook(limits.most if ready else 0, 0, queued, 0, (), limits.fewest)

    def propose(self, plan: Plan) -> Proposal[Array]:
        """A token of each row, as the request draws them; catching up is part of it."""
        rows = min(plan.rows, self.outlook().most)
        if rows < self._limits.fewest:
            return PLAIN
        began = time.perf_counter_ns()
        self._absorb(self._held())
        start = len(self._tokens) - 1
        assert self._absorbed == start, f"{self._absorbed} rows absorbed, anchor at {start}"
        drafted = self._drafted(rows, start)
        self._forget(start)
        if drafted.q is None and len(drafted.tokens) < self._limits.n_min:
            return PLAIN  # never a sampled one: what was drawn made it so short, and may not choose
        ns = time.perf_counter_ns() - began
        return Proposal(drafted.tokens, len(drafted.tokens), q=drafted.q, meta=ns)

    def commit(self, verdict: Verdict[Array], rows: int) -> None:
        """Queue the first ``rows`` feature rows and tokens of ``verdict``."""
        if not rows:
            return
        features = verdict.features
        assert features is not None, "the target captures no features"
        self._queue.append(features if len(features) == rows else features[:rows])
        self._queued += rows
        self._tokens += verdict.tokens[:rows]
        if self._queued * features.nbytes > QUEUE_BYTES * len(features):
            self._absorb(self._held() - self._newest)

    def fork(self) -> Self:
        """An independent session with the same rows."""
        twin = self._twin()
        if self._absorbed:
            twin._context.restore(self._context.save())
        twin._tokens, twin._request = list(self._tokens), self._request
        twin._absorbed, twin._queue = self._absorbed, list(self._queue)
        twin._queued = self._queued
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
        self._tokens, self._queue, self._absorbed, self._queued = [], [], 0, 0

    _newest = 0
    """Rows that stay in a full queue, because a proposal begins with them."""

    @abstractmethod
    def _twin(self) -> Self:
        """A fresh session of the same kind."""

    @abstractmethod
    def _take(self, rows: Floats, start: int) -> None:
        """Features [n, L*E] of positions from ``start`` on into the cache."""

    @abstractmethod
    def _drafted(self, rows: int, start: int) -> Drafted:
        """At most ``rows`` tokens after the anchor at ``start``; may write from there on."""

    def _held(self) -> int:
        return self._absorbed + self._queued

    def _common(self, prompt: Sequence[int]) -> int:
        """Leading tokens that ``prompt`` shares with those known here."""
        known = min(len(prompt), len(self._tokens))
        return next((i for i in range(known) if prompt[i] != self._tokens[i]), known)

    def _absorb(self, length: int) -> None:
        """Queued rows into the cache until it has ``length``."""
        if not self._queue or length <= self._absorbed:
            return
        whole = self._queue[0] if len(self._queue) == 1 else np.concatenate(self._queue)
        taken = length - self._absorbed
        self._take(whole[:taken], self._absorbed)
        self._absorbed = length
        self._queue = [whole[taken:]] if taken < len(whole) else []
        self._queued = len(whole) - taken

    def _forget(self, length: int) -> None:
        forgotten = self._context.rollback(length)
        assert forgotten, "a draft's cache forgets by position"

    @property
    def _least(self) -> float:
        """Probability under which a draft ends: the engine's setting, or the request's."""
        return max(self._limits.p_min, self._request.sampling.draft_p_min)

    def _output(self) -> list[int]:
        return self._tokens[len(self._request.prompt) :]
