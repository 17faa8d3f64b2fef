"""What is compared: ways to continue a prompt, each timed by the reader's clock.

The clock runs from the call to the first token (prefill) and from there to the end (decode), so
detokenising and streaming count, as they do for a person who waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dflash.core.stats import Stats
from dflash.engine import Engine
from dflash.results import Chunk

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Run:
    """One continuation."""

    ids: tuple[int, ...]
    first: int  # tokens that came with the prefill
    prefill: float  # seconds
    decode: float  # seconds
    stats: Stats | None = None

    @property
    def tokens(self) -> int:
        """Of the answer, all of them."""
        return len(self.ids)

    @property
    def rate(self) -> float:
        """Tokens a second after the prefill."""
        return (len(self.ids) - self.first) / self.decode if self.decode else 0.0


Arm = Callable[[Sequence[int], int], Run]
"""(ids of the prompt, new tokens at most) -> what came of it."""


Through = Callable[[Iterator[Chunk]], Iterator[Chunk]]
"""A stream as it is, or as somebody else reads it."""


def engine_arm(
    engine: Engine, block_size: Any, through: Through = lambda chunks: chunks, **options: Any
) -> Arm:
    """Our engine at one block size (1 = plain, "auto"), nothing reused between prompts.

    ``through``: who reads its streams; ``options`` are further keywords of ``Engine.stream``.
    """

    def run(prompt: Sequence[int], tokens: int) -> Run:
        ids: list[int] = []
        first, stats = 0, None
        start = time.perf_counter()
        begun = start
        chunks = engine.stream(
            list(prompt), max_tokens=tokens, block_size=block_size, reuse=False, **options
        )
        for chunk in through(chunks):
            if not ids:
                begun, first = time.perf_counter(), len(chunk.token_ids)
            ids += chunk.token_ids
            stats = chunk.stats
        return Run(tuple(ids), first, begun - start, time.perf_counter() - begun, stats)

    return run


def in_turn(names: Sequence[str], repeats: int) -> Iterator[tuple[int, str]]:
    """(repeat, arm): every arm in each repeat, the order rotated from one to the next."""
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in [*names[shift:], *names[:shift]]:
            yield repeat, name


def interleaved(
    prompt: Sequence[int], arms: Mapping[str, Arm], tokens: int, repeats: int
) -> dict[str, list[Run]]:
    """Every arm on one prompt: a machine that slows down slows all of them."""
    runs: dict[str, list[Run]] = {name: [] for name in arms}
    for _, name in in_turn(list(arms), repeats):
        runs[name].append(arms[name](prompt, tokens))
    return runs
