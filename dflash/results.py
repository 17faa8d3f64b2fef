"""What a generation hands back: frozen, plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from dflash.core.stats import Stats

Source = Literal["draft", "target"]


class Piece(NamedTuple):
    """Text that one source made; a character cut between tokens belongs to the later one."""

    text: str
    source: Source


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one round committed. The last chunk of a stream has finish_reason and stats."""

    text: str  # printable now; text that may still change is held back
    token_ids: tuple[int, ...]
    sources: tuple[Source, ...]  # per token: an accepted draft, or the target's own
    pieces: tuple[Piece, ...] = ()  # the same text, split by who made it
    finish_reason: str | None = None  # "stop" or "length"
    stats: Stats | None = None
    state: str | None = None  # prefill, speculating, fallback, done; None = nothing to decide


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished text."""

    text: str
    token_ids: tuple[int, ...]  # the stop token included, as the target produced it
    finish_reason: str
    stats: Stats


def joined(chunks: Sequence[Chunk]) -> Generation:
    """All chunks of a finished stream as one result."""
    last = chunks[-1]
    assert last.finish_reason is not None and last.stats is not None, "a stream ends with these"
    return Generation(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        finish_reason=last.finish_reason,
        stats=last.stats,
    )
