"""Answers and records as a run would have written them."""

from __future__ import annotations

from typing import Any

from dflash.bench.trial import Key, Outcome, Record

WORDS = tuple(range(40))  # ids of a sound text: long enough, nothing repeated


def outcome(seconds: float = 1.0, ids: tuple[int, ...] = WORDS, **more: Any) -> Outcome:
    return Outcome(tokens=len(ids), first=1, prefill=0.1, decode=seconds, ids=ids, **more)


def drafted(seconds: float, histogram: tuple[int, ...], **more: Any) -> Outcome:
    """An answer whose rounds kept so many drafts; every round judged the whole block."""
    rounds = sum(histogram)
    kept = sum(place * count for place, count in enumerate(histogram))
    ids = tuple(range(1 + rounds + kept))
    depth = len(histogram) - 1
    counts = {"rounds": rounds, "drafted": rounds * depth, "accepted": kept}
    judged = (rounds,) * depth
    return outcome(seconds, ids, histogram=histogram, judged=judged, **counts, **more)


def record(arm: str, answer: Outcome, prompt: str = "p", repeat: int = 0, **more: Any) -> Record:
    group = more.get("set", "s")
    return Record(Key(arm, group, prompt, 0, repeat), more.get("category", group), answer)
