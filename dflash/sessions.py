"""Leases sessions of a pair, and parks them afterwards for whoever continues the same text.

A session is only ever in one hand. One whose call raised is closed, never parked; one whose reader
left between two rounds is whole, and parked. Not thread-safe: the engine holds its lock around
every call.

A request that begins like a parked text takes that text's sessions over, and forgets what came
after. A server keeps many texts: there a request that would forget much of one goes on with a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.core.protocols import DraftSession, Growing, Pair, Session, TargetSession
from dflash.errors import OutOfMemory

SMALLEST = 512  # tokens; below this a bigger buffer costs nothing worth saving
WORTH_A_COPY = 16  # tokens held; fewer are run again sooner than copied
MAY_BE_LOST = 64  # tokens of another text; taking that over costs its reader about as little


@dataclass(eq=False)
class Lease:
    """A target session with its drafts, and how many tokens of the prompt they already hold."""

    target: TargetSession[Any]
    drafts: list[DraftSession[Any]]
    capacity: int
    reuse: int = 0
    length: int = 0  # tokens of the text it stands in

    @property
    def sessions(self) -> list[Session]:
        """Target first."""
        return [self.target, *self.drafts]

    def holds(self, prompt: Sequence[int]) -> int:
        """Longest prefix at which target and drafts can all resume; leaves one token to run."""
        most, before = len(prompt) - 1, -1
        while most != before:  # an answer of one may be more than another can resume at
            before = most
            for session in self.sessions:
                most = session.holds(prompt, most)
        return most

    def fork(self) -> Lease:
        """An independent copy."""
        drafts = [draft.fork() for draft in self.drafts]
        return Lease(self.target.fork(), drafts, self.capacity, self.reuse, self.length)

    def grow(self, capacity: int) -> bool:
        """Make room for ``capacity`` tokens; False = these sessions cannot."""
        growing = [session for session in self.sessions if isinstance(session, Growing)]
        if len(growing) < len(self.sessions):
            return False
        for session in growing:
            session.grow(capacity)
        self.capacity = capacity
        return True

    def bytes(self) -> int:
        """Bytes of its buffers, as far as its sessions know."""
        counts = (getattr(session, "bytes", None) for session in self.sessions)
        return sum(count() for count in counts if count is not None)

    def close(self) -> None:
        """Free everything, drafts first; idempotent."""
        for session in reversed(self.sessions):
            session.close()


class Sessions:
    """At most ``keep`` parked leases; the one unused for longest makes room."""

    def __init__(self, pair: Pair, keep: int = 2) -> None:
        """``pair`` makes the sessions; it must outlive this object."""
        self._pair = pair
        self._keep = keep
        self._most_bytes: int | None = None
        self._parked: list[Lease] = []  # oldest first
        self._out: list[Lease] = []

    def limit(self, keep: int, most_bytes: int) -> None:
        """Keep ``keep`` texts apart from each other, within ``most_bytes`` with those in use."""
        self._keep, self._most_bytes = keep, most_bytes

    @property
    def parked(self) -> int:
        """Texts that can be gone on with."""
        return len(self._parked)

    @property
    def out(self) -> int:
        """Texts in work."""
        return len(self._out)

    def bytes(self) -> int:
        """Bytes of all buffers, parked and in use."""
        return sum(lease.bytes() for lease in (*self._parked, *self._out))

    def take(self, prompt: Sequence[int], tokens: int, *, fresh: bool = False) -> Lease:
        """A lease with room for ``tokens``; ``fresh`` forgets what earlier requests left."""
        try:
            lease = self._take(prompt, tokens, fresh)
        except OutOfMemory:
            if not self._parked:
                raise
            self._forget(len(self._parked))
            lease = self._open(tokens)
        self._out.append(lease)
        self._shrink()
        return lease

    def give_back(self, lease: Lease, whole: bool) -> None:
        """Park the lease if it is whole; close it if a call of its sessions raised."""
        if lease not in self._out:  # closed together with the engine
            return
        self._out.remove(lease)
        if not whole:
            lease.close()
            return
        self._parked.append(lease)
        self._shrink()

    def close(self) -> None:
        """Close every session, those in use included; idempotent."""
        for lease in [*self._parked, *self._out]:
            lease.close()
        self._parked.clear()
        self._out.clear()

    def _take(self, prompt: Sequence[int], tokens: int, fresh: bool) -> Lease:
        best = max(self._parked, key=lambda lease: lease.holds(prompt), default=None)
        held = best.holds(prompt) if best else 0
        if best is None or fresh or not held:
            return self._open(tokens)
        if self._most_bytes is not None and best.length - held > MAY_BE_LOST:
            if held < WORTH_A_COPY:
                return self._open(tokens)
            best = best.fork()
        else:
            self._parked.remove(best)
        best.reuse = held
        # a conversation that has outgrown its buffers
        if best.capacity < tokens and not best.grow(self._room(tokens)):
            best.close()
            best = self._open(tokens)
        return best

    def _shrink(self) -> None:
        """Forget texts, the oldest first, until the limits hold."""
        self._forget(len(self._parked) - self._keep)
        if self._most_bytes is not None:
            while self._parked and self.bytes() > self._most_bytes:
                self._forget(1)

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._parked.pop(0).close()

    def _open(self, tokens: int) -> Lease:
        if self._most_bytes is None:
            self._forget(len(self._parked) - self._keep + 1)
        capacity = self._room(tokens)
        return Lease(self._pair.open_target(capacity), self._pair.open_drafts(capacity), capacity)

    def _room(self, tokens: int) -> int:
        return min(max(SMALLEST, _power_of_two(tokens)), self._pair.context_length)


def _power_of_two(tokens: int) -> int:
    """At least ``tokens``: a growing conversation moves to a bigger buffer only log times."""
    return 1 << max(tokens - 1, 0).bit_length()
