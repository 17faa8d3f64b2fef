"""What a reply says of its speculation, in vLLM's words, and its use of tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.core.stats import Stats
from dflash.results import Chunk


@dataclass
class Tally:
    """Rounds of one request, added up as they come (so that a cancelled one counts, too)."""

    drafts: int = 0  # rounds with a draft
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0  # with and without a draft
    tokens: int = 0
    by_position: list[int] = field(default_factory=list)  # [i]: rounds that kept draft i + 1
    histogram: list[int] = field(default_factory=list)  # [a]: rounds with a draft that kept a
    began: float = field(default_factory=time.monotonic)
    first: float | None = None  # seconds to the first token, waiting included
    last: float = 0.0
    _begun: set[int] = field(default_factory=set)

    def add(self, chunk: Chunk) -> bool:
        """Count one pass; True = it ended a prefill."""
        made = len(chunk.token_ids) - chunk.sources.count("prompt")
        if not made:
            return False
        self.last = time.monotonic() - self.began
        if self.first is None:
            self.first = self.last
        self.tokens += made
        if chunk.index not in self._begun:  # the prefill's token is not a round
            self._begun.add(chunk.index)
            return True
        self.rounds += 1
        if chunk.drafted:
            kept = chunk.sources.count("draft")
            self.drafts += 1
            self.drafted += chunk.drafted
            self.accepted += kept
            _count(self.by_position, range(kept), max(chunk.drafted, kept))
            _count(self.histogram, (kept,), max(chunk.drafted, kept) + 1)
        return False

    def metrics(self, texts: Sequence[Stats], asked: Asked) -> dict[str, Any]:
        """The ``metrics`` of a reply."""
        gap = (self.last - (self.first or 0.0)) / max(1, self.tokens - 1)
        return {
            "time_to_first_token_ms": 1e3 * (self.first or 0.0),
            "mean_itl_ms": 1e3 * gap,
            "tokens_per_second": 1 / gap if gap > 0 else 0.0,
            "speculative_decoding": self.speculation(texts, asked),
        }

    def speculation(self, texts: Sequence[Stats], asked: Asked) -> dict[str, Any]:
        """Whether drafts were used, and how well; ``reason`` says why not."""
        policy = texts[0].policy if texts else "off"
        return {
            "speculated": self.drafts > 0,
            "reason": None if self.drafts else asked.reason or _why_not(texts),
            "mean_acceptance_length": 1 + self.accepted / self.drafts if self.drafts else None,
            "draft_acceptance_rate": self.accepted / self.drafted if self.drafted else None,
            "acceptance_histogram": list(self.histogram),
            "num_accepted_tokens_per_pos": list(self.by_position),
            "num_spec_steps": self.drafts,
            "num_steps": self.rounds,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "num_spec_tokens": None if asked.block_size is None else asked.block_size - 1,
            "block_size": asked.block_size,
            "clamped_from": asked.clamped_from,
            "policy": policy,
            "speedup": texts[0].speedup if texts else None,
        }


@dataclass(frozen=True)
class Asked:
    """The block size of a request: what it gets, and what was asked for if that was more."""

    block_size: int | None = None  # anchor included; None = chosen each round
    clamped_from: int | None = None
    reason: str | None = None  # why there is no speculation; None = there may be


def _why_not(texts: Sequence[Stats]) -> str:
    if not texts or texts[0].policy == "off":
        return "this request was decoded plainly"
    return texts[0].fallback_reason or "no round of it had a draft"


def _count(sums: list[int], places: Sequence[int], size: int) -> None:
    sums += [0] * (size - len(sums))
    for place in places:
        sums[place] += 1
