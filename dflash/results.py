"""What a generation hands back: frozen, plain data.

Chunks are made anew each round, so it is the type checker that keeps them frozen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from dflash.core.types import light

if TYPE_CHECKING:
    from dflash.core.stats import Stats
    from dflash.core.types import Logprob

Source = Literal["draft", "target", "prompt"]


class Piece(NamedTuple):
    """Text that one source made; a character cut between tokens belongs to the later one."""

    text: str
    source: Source


@light
class Chunk:
    """What one round committed. The last chunk of each text has finish_reason and stats."""

    text: str  # printable now; text that may still change is held back
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]  # per token: an accepted draft, the target's own, or an echo
    pieces: tuple[Piece, ...] = ()  # the same text, split by who made it
    finish_reason: str | None = None  # "stop" or "length"
    stats: Stats | None = None
    state: str | None = None  # prefill, speculating, fallback, done; None = nothing to decide
    logprobs: tuple[Logprob, ...] | None = None  # per token, an echo's left out; None = not asked
    index: int = 0  # which of n texts
    drafted: int = 0  # tokens proposed and judged in this round; 0 = a plain step, or the prefill


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text."""

    text: str
    token_ids: tuple[int, ...]  # the stop token included, as the target produced it
    finish_reason: str
    stats: Stats
    logprobs: tuple[Logprob, ...] | None = None  # per generated token; None = not asked for
    others: tuple[Generation, ...] = ()  # the second to the n-th text

    @property
    def choices(self) -> tuple[Generation, ...]:
        """All n texts, this one first."""
        return (replace(self, others=()), *self.others)


def joined(chunks: Sequence[Chunk]) -> Generation:
    """All chunks of a finished stream as one result."""
    first, *others = (_text(list(group)) for _, group in groupby(chunks, key=lambda c: c.index))
    return replace(first, others=tuple(others))


def _text(chunks: Sequence[Chunk]) -> Generation:
    last = chunks[-1]
    assert last.finish_reason is not None and last.stats is not None, "a stream ends with these"
    return Generation(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        finish_reason=last.finish_reason,
        stats=last.stats,
        logprobs=None
        if last.logprobs is None
        else tuple(entry for chunk in chunks for entry in chunk.logprobs or ()),
    )
