"""Leases sessions of a pair, and parks them afterwards for whoever continues the same text.

A session is only ever in one hand. One whose call raised is closed, never parked; one whose reader
left between two rounds is whole, and parked. Not thread-safe: the engine holds
its lock around every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dflash.core.protocols import DraftSession, Pair, Session, TargetSession

SMALLEST = 512  # tokens; below this a bigger buffer costs nothing worth saving


@dataclass(eq=False)
class Lease:
    """A target session with its drafts, and how many tokens of the prompt they already hold."""

    target: TargetSession[Any]
    drafts: list[DraftSession[Any]]
    capacity: int
    reuse: int = 0

    def holds(self, prompt: Sequence[int]) -> int:
        """Longest prefix at which target and drafts can all resume; leaves one token to run."""
        everyone: list[Session] = [self.target, *self.drafts]
        most, before = len(prompt) - 1, -1
        while most != before:  # an answer of one may be more than another can resume at
            before = most
            for session in everyone:
                most = session.holds(prompt, most)
        return most

    def close(self) -> None:
        """Free everything, drafts first; idempotent."""
        for session in [*reversed(self.drafts), self.target]:
            session.close()


class Sessions:
    """At most ``keep`` parked leases; the one unused for longest makes room."""

    def __init__(self, pair: Pair, keep: int = 2) -> None:
        """``pair`` makes the sessions; it must outlive this object."""
        self._pair = pair
        self._keep = keep
        self._parked: list[Lease] = []  # oldest first
        self._out: list[Lease] = []

    def take(self, prompt: Sequence[int], tokens: int, *, fresh: bool = False) -> Lease:
        """A lease with room for ``tokens``; ``fresh`` forgets what earlier requests left."""
        best = max(self._parked, key=lambda lease: lease.holds(prompt), default=None)
        held = best.holds(prompt) if best else 0
        if best is None or fresh or not held:
            best = self._open(tokens)
        else:
            self._parked.remove(best)
            best.reuse = held
        if best.capacity < tokens:  # the conversation has outgrown its buffer
            best.close()
            best = self._open(tokens)
        self._out.append(best)
        return best

    def give_back(self, lease: Lease, whole: bool) -> None:
        """Park the lease if it is whole; close it if a call of its sessions raised."""
        if lease not in self._out:  # closed together with the engine
            return
        self._out.remove(lease)
        if not whole:
            lease.close()
            return
        self._parked.append(lease)
        while len(self._parked) > self._keep:
            self._parked.pop(0).close()

    def close(self) -> None:
        """Close every session, those in use included; idempotent."""
        for lease in [*self._parked, *self._out]:
            lease.close()
        self._parked.clear()
        self._out.clear()

    def _open(self, tokens: int) -> Lease:
        while len(self._parked) >= self._keep:
            self._parked.pop(0).close()
        capacity = min(max(SMALLEST, _power_of_two(tokens)), self._pair.context_length)
        return Lease(self._pair.open_target(capacity), self._pair.open_drafts(capacity), capacity)


def _power_of_two(tokens: int) -> int:
    """At least ``tokens``: a growing conversation moves to a bigger buffer only log times."""
    return 1 << max(tokens - 1, 0).bit_length()
