"""What our loop costs beside llama.cpp's calls, on plain steps and on speculative rounds.

    python -m bench.gguf_overhead --kinds q4_1,q8_0 --tokens 97

Two measures, both of rounds as the reader of a stream waits for them:

beside bare  our stream, and after each round of it a loop over the same tokens that consists of
             llama_decode, llama_get_logits and numpy's argmax on a context of its own; time of ours
             over time of the bare loop. For blocks and auto that is the price, or the gain, against
             plain llama.cpp without any draft loaded
             With --taps its context publishes the layers that the draft reads, as ours does: what
             is left is the price of our loop, without llama.cpp's own copying of layers
host share   of a round's time, what is spent outside llama_decode

Medians, with 95 % intervals over resampled rounds. A text in which a pass of several rows rounds
otherwise than one of a single row, so that the two part, is left there; how many, and how far apart
the two tokens' logits lay, is printed.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import dflash
from bench import gguf_files, record, sets
from bench.gguf_speed import DRAFTS, Native, names
from bench.table import markdown
from dflash.backends.gguf.layout import Batch
from dflash.backends.gguf.native import rows_at
from dflash.sessions import SMALLEST

COLUMNS = ("target", "arm", "rounds", "ms", "ours us", "host share", "beside bare", "by sums")


class Bare:
    """Greedy decoding with nothing in it but the calls and an argmax."""

    def __init__(self, pair: Any, prompt: Sequence[int], capacity: int, taps: bool) -> None:
        """Runs the prompt; ``token`` is the one after it."""
        self._context, _ = pair.open_context(capacity, taps)
        self._context.run(prompt, 0, 1)
        self._decode = self._context.library.llama_decode
        self._get = self._context.library.llama_get_logits
        self._handle = self._context.handle
        self._token, self._pos = (np.zeros(1, np.int32) for _ in range(2))
        self._one, self._zero = np.ones(1, np.int32), np.zeros(1, np.int32)
        self._wanted = np.ones(1, np.int8)
        self._sequences = np.array([self._zero.ctypes.data], np.uintp)
        wanted = self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        places = (self._pos.ctypes.data, self._one.ctypes.data, self._sequences.ctypes.data, wanted)
        self._batch = Batch(1, self._token.ctypes.data, None, *places)
        self._address = self._get(self._handle)
        self._row = rows_at(self._address, 1, pair.vocab_size)[0]
        self._length, self.token = len(prompt), int(self._row.argmax())

    def step(self) -> None:
        """One token more."""
        self._token[0], self._pos[0] = self.token, self._length
        assert self._decode(self._handle, self._batch) == 0
        assert self._get(self._handle) == self._address, "llama.cpp moved its logits"
        self.token = int(self._row.argmax())
        self._length += 1

    def gap(self, token: int) -> float:
        """How far the logit of ``token`` lies below that of ours."""
        return float(self._row[self.token] - self._row[token])

    def close(self) -> None:
        """Free the context."""
        self._context.close()


@dataclass(frozen=True, slots=True)
class Round:
    """A round of ours, and the bare loop's steps over the same tokens; seconds."""

    whole: float
    inside: float  # of it in llama_decode
    bare: float


def rounds(
    engine: Any, prompt: Sequence[int], size: Any, flags: Any, gaps: list[float]
) -> Iterator[Round]:
    """One text, both ways by turns, until they part; ``gaps`` then gets one more."""
    tokens: int = flags.tokens
    with Native() as native:
        asked: dict[str, Any] = {"max_tokens": tokens, "block_size": size, "reuse": False}
        stream = engine.stream(list(prompt), ignore_eos=True, **asked)
        next(stream)
    room = max(SMALLEST, 1 << (len(prompt) + tokens - 1).bit_length())  # as sessions have it
    bare = Bare(engine.pair, prompt, room, flags.taps)
    left = tokens - 1
    while left:
        before, start = native.seconds, time.perf_counter()
        chunk = next(stream)
        whole, inside = time.perf_counter() - start, native.seconds - before
        left -= len(chunk.token_ids)
        steps = 0.0
        for token in chunk.token_ids:
            start = time.perf_counter()
            bare.step()
            steps += time.perf_counter() - start
            if bare.token != token:
                gaps.append(bare.gap(token))
                left = 0
                break
        else:
            yield Round(whole, inside, steps)
    bare.close()
    stream.close()


def interval(found: Sequence[Round], statistic: Callable[[Sequence[Round]], float]) -> list[float]:
    """Value, and its 95 % interval."""
    low, high = record.bootstrap(
        len(found), lambda pick: statistic([found[i] for i in pick]), draws=1000
    )
    return [statistic(found), low, high]


def ours(found: Sequence[Round]) -> float:
    """Median seconds of a round outside llama_decode."""
    return median(one.whole - one.inside for one in found)


def host_share(found: Sequence[Round]) -> float:
    """Median share of a round outside llama_decode."""
    return median(1 - one.inside / one.whole for one in found)


def beside(found: Sequence[Round]) -> float:
    """Median round of ours over the bare loop's steps, minus 1."""
    return median(one.whole / one.bare for one in found) - 1


def by_sums(found: Sequence[Round]) -> float:
    """The same of all time together: what blocks that are rare cost is in it."""
    return sum(one.whole for one in found) / sum(one.bare for one in found) - 1


def arms(flags: Any) -> Iterator[tuple[str, str | None, Any]]:
    """(name, draft, block size) of each way to decode."""
    yield "plain", "none", 1
    draft = names(flags.method)
    yield f"plain, {flags.method} loaded", draft, 1
    for size in flags.blocks.split(","):
        yield f"{flags.method} {size}", draft, size if size == "auto" else int(size)


def measured(kind: str, flags: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each arm's figures on one target."""
    target = str(gguf_files.target(kind))
    prompts = [p.text for name in sets.HELD_OUT for p in sets.load(name, flags.prompts_per_set)]
    for name, draft, size in arms(flags):
        with dflash.load(
            target, draft, backend="gguf", threads=flags.threads, profile=False
        ) as engine:
            engine.generate(prompts[0], max_tokens=8, block_size=size)
            gaps: list[float] = []
            ids = [engine.encode(text) for text in prompts]
            found = [one for p in ids for one in rounds(engine, p, size, flags, gaps)]
        statistics = (ours, host_share, beside, by_sums)
        result: dict[str, Any] = {f.__name__: interval(found, f) for f in statistics}
        result |= {"rounds": len(found), "round": median(one.whole for one in found)}
        seconds = [[one.whole, one.inside, one.bare] for one in found]
        yield name, {**result, "parted": gaps, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=97, prompts=2)
    parser.add_argument("--kinds", default="q4_1,q8_0")
    parser.add_argument("--method", choices=DRAFTS, default="dflash")
    parser.add_argument("--blocks", default="auto,4")
    parser.add_argument("--taps", action="store_true", help="the bare loop publishes layers, too")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    rows, found = [], {}
    for kind in flags.kinds.split(","):
        for name, one in measured(kind, flags):
            found[f"{kind} {name}"] = one
            cells = [_percent(*one[column]) for column in ("host_share", "beside", "by_sums")]
            time_of = f"{1e3 * one['round']:.2f}", f"{1e6 * one['ours'][0]:.0f}"
            rows.append([kind, name, one["rounds"], *time_of, *cells])
            print(*rows[-1], f"parted {[round(gap, 4) for gap in one['parted']]}", flush=True)
    print(markdown(COLUMNS, rows))
    result = {"conditions": before, "found": found}
    record.write(flags.out or Path("runs/gguf-overhead.json"), result)


def _percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:+.2f} % ({100 * low:+.2f} to {100 * high:+.2f})"


if __name__ == "__main__":
    main()
