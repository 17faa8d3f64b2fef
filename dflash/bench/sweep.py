"""The best block size of a pair on this machine, quickly: successive halving.

All candidates run on a few prompts; the faster half runs on as many new ones as there were so far,
and so on, until two are left or the time is used up. Every candidate writes the same greedy text,
so a survivor is judged by everything it ran: by the median over texts of its speed-up, which one
disturbance does not move. Plain decoding takes part as block 1; in the first heat it ends each text
once more, and where the two differ much the machine is too noisy for the answer to be trusted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from dflash.bench import guards, record
from dflash.bench.arms import PLAIN, Arm, Run, interleaved
from dflash.bench.paired import Ratio, alike

SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
FIRST = 3  # prompts of the first heat
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Heat:
    """One round of the sweep."""

    prompts: int  # new ones
    speedup: dict[str, float]  # arm -> over plain decoding, on everything so far
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What was found."""

    block_size: int  # 1 = plain decoding
    speedup: Ratio | None  # over texts; None = plain decoding, or none could be compared
    heats: tuple[Heat, ...]
    seconds: float
    stopped: str  # why it ended: decided, out of time, out of prompts
    noise: str | None = None  # why the figures are not to be built on

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def candidates(native: int) -> list[int]:
    """Block sizes to try, the draft's own included."""
    return sorted({size for size in (*SIZES, native) if 1 < size <= native})


def sweep(
    arms: Mapping[int, Arm],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seconds: float,
    clock: Clock = time.monotonic,
) -> Sweep:
    """Run ``arms`` (block size -> arm; 1 has to be there) until one block is left.

    Another heat begins only if it would end within ``seconds``, going by the ones before.
    """
    names = {PLAIN if size == 1 else f"block {size}": size for size in arms}
    left = [name for name in names if name != PLAIN]
    texts: list[dict[str, list[Run]]] = []
    heats: list[Heat] = []
    start, new, source = clock(), FIRST, iter(prompts)
    stopped = "decided"
    while True:
        before = clock()
        running = {name: arms[names[name]] for name in (PLAIN, *left)}
        heat = list(_heat(running, source, new, tokens, again=not heats))
        if not heat:
            stopped = "out of prompts"
            break
        texts += heat
        gains = {name: _gain(texts, name) for name in left}
        keep = max(1, len(left) // 2) if len(left) > 2 else len(left)
        kept = sorted(left, key=lambda name: -gains[name])[:keep]
        heats.append(Heat(len(heat), gains, tuple(kept)))
        used, shrunk = clock() - before, (len(kept) + 1) / (len(left) + 1)
        decided, left, new = len(left) <= 2, kept, len(texts)
        if decided:
            break
        if clock() - start + used * shrunk * new / len(heat) > seconds:
            stopped = "out of time"
            break
    gains = {name: _gain(texts, name) for name in left}
    best = max(left, key=gains.__getitem__, default=PLAIN)
    plain = best == PLAIN or gains[best] <= 1
    return Sweep(
        block_size=1 if plain else names[best],
        speedup=None if plain else _over_texts(_with(texts, best), best),
        heats=tuple(heats),
        seconds=clock() - start,
        stopped=stopped,
        noise=guards.noise(guards.spread([[run.decode for run in t[PLAIN]] for t in texts])),
    )


def _heat(
    arms: Mapping[str, Arm],
    source: Iterator[Sequence[int]],
    count: int,
    tokens: int,
    *,
    again: bool,
) -> Iterator[dict[str, list[Run]]]:
    """``count`` texts that say something about speed, as long as there are prompts.

    ``again``: plain decoding runs also last.
    """
    while count and (prompt := next(source, None)) is not None:
        text = interleaved(prompt, arms, tokens, 1)
        plain = text[PLAIN][0]
        if not (guards.stuck(plain.ids) or guards.in_circles(plain.ids)):
            count -= 1
            if again:
                text[PLAIN].append(arms[PLAIN](prompt, tokens))
            yield text


def _over_texts(texts: Sequence[dict[str, list[Run]]], name: str) -> Ratio:
    """Plain time / its time over texts; each ran once, so the interval resamples them."""
    same = alike(texts, (name, PLAIN))

    def over(pick: Sequence[int]) -> float:
        plain, fast = (sum(same[i][arm][0].decode for i in pick) for arm in (PLAIN, name))
        return plain / fast if fast else 0.0

    count = len(same)
    return Ratio(over(range(count)), *record.bootstrap(count, over), count)


def _with(texts: Sequence[dict[str, list[Run]]], name: str) -> list[dict[str, list[Run]]]:
    return [text for text in texts if name in text]


def _gain(texts: Sequence[dict[str, list[Run]]], name: str) -> float:
    """Median over the texts that it wrote as plain decoding does; 0.0 without any."""
    same = alike(_with(texts, name), (name, PLAIN))
    gains = [text[PLAIN][0].decode / text[name][0].decode for text in same]
    return float(median(gains or [0.0]))
