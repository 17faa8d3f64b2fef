"""How long no tensor kernel runs in a round, by a clock inside torch's dispatcher.

A kernel runs while an operator that computes is in the dispatcher, from where its call is taken to
where it returns. So its own fixed cost (checks, the library's set-up of a product) counts as
kernel; Python, the reading of arguments in torch's bindings, and operators that compute nothing
(views, allocations), those called by other operators too, do not. That is what torch's profiler
measures as an operator's own time. But the profiler's notes lengthen just the time between
operators; this clock is read twice an operator and adds to a sum, and nothing else.

What it adds is measured on a loop of small operators in the same process, and taken off. A loop is
hot and a round is not, so that is looked at in place, too: rounds are noted once and, in turn with
them, twice, by a second copy of the same code with sums of its own. What torch itself does for a
clock, before it asks it, stays in the gaps: they come out too long by that.

The clock is some lines of C++ (`observer.cpp`), so that it needs a compiler: `why_not` says so.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

SOURCE = Path(__file__).with_name("observer.cpp")
LOOP, TURNS = 2000, 15  # small operators in a loop, and loops of which the median counts
NS = 1e6  # a millisecond


@dataclass(frozen=True, slots=True)
class Seen:
    """Operators of one round."""

    ns: int  # of the round
    own: Mapping[str, int]  # ns of each operator without those it calls
    calls: Mapping[str, int]
    inner: Mapping[str, int]  # operators that each calls
    outer: int  # operators that none calls


@dataclass(frozen=True, slots=True)
class Gap:
    """One round, what the clock adds taken off."""

    ms: float
    gap_ms: float  # no kernel ran
    operators: int

    @property
    def share(self) -> float:
        """Of the round."""
        return self.gap_ms / self.ms


@dataclass(frozen=True, slots=True)
class Gaps:
    """Rounds with the clock and, in turn with them, without."""

    share: float  # median of rounds
    quarters: tuple[float, float]  # a half of the rounds lies between
    gap_ms: float
    round_ms: float
    bare_ms: float  # of rounds without the clock
    operators: float  # a round
    added_us: float  # by the clock, an operator, in a loop of small ones
    in_place_us: float  # the same in gaps of these rounds; moves more
    rounds: int  # with the clock once


class Observer:
    """The clock, built for the torch that is installed."""

    def __init__(self, folder: Path) -> None:
        """Compile into ``folder``. Raises RuntimeError where that fails."""
        import torch

        home, made = Path(torch.__file__).parent, folder / "observer.so"
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        include = [f"-I{home / 'include'}"]
        link = [f"-L{home / 'lib'}", f"-Wl,-rpath,{home / 'lib'}", "-ltorch_cpu", "-lc10"]
        command = ["c++", "-O2", "-std=c++20", "-fPIC", "-shared", abi, *include, str(SOURCE)]
        done = subprocess.run(
            [*command, *link, "-o", str(made)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"the clock cannot be built: {done.stderr.strip()[-400:]}")
        shutil.copy(made, folder / "twin.so")
        self._library, self._twin = (_opened(folder / name) for name in (made.name, "twin.so"))

    @contextmanager
    def watching(self, twice: bool = False) -> Iterator[None]:
        """Note this thread's operators from nothing on; ``twice``: in both copies."""
        notes = (self._twin.observer_enters(), self._twin.observer_leaves())
        self._library.observer_twin(*(notes if twice else (None, None)))
        self._library.observer_on()
        try:
            yield
        finally:
            self._library.observer_off()

    def seen(self, ns: int) -> Seen:
        """What was noted, in a round of ``ns``."""
        own, calls, inner = Counter[str](), Counter[str](), Counter[str]()
        name, numbers, place = ctypes.c_char_p(), (ctypes.c_int64 * 3)(), 0
        while (place := self._library.observer_next(place, ctypes.byref(name), numbers)) >= 0:
            key = (name.value or b"").decode()
            calls[key] += numbers[0]
            inner[key] += numbers[1]
            own[key] += numbers[2]
        return Seen(ns, own, calls, inner, self._library.observer_outer())


def _opened(path: Path) -> Any:
    library = ctypes.CDLL(str(path))
    library.observer_outer.restype = ctypes.c_int64
    library.observer_enters.restype = library.observer_leaves.restype = ctypes.c_void_p
    library.observer_twin.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    library.observer_twin.restype = None
    return library


def why_not() -> str:
    """Why there is no such clock here; "" = there is."""
    return "" if shutil.which("c++") else "it takes a C++ compiler, and there is none here"


@contextmanager
def observer() -> Iterator[Observer]:
    """The clock. Raises RuntimeError where it cannot be built."""
    with TemporaryDirectory() as folder:
        yield Observer(Path(folder))


def gap_of(seen: Seen, computes: Callable[[str], bool], added: float) -> Gap:
    """The gap of a round, where ``added`` ns are the clock's for each operator.

    The clock's own time lies between operators, or in the one that called the operator.
    """
    working = [name for name in seen.own if computes(name)]
    inside = sum(seen.inner[name] for name in working)
    operators = sum(seen.calls.values())
    kernels = sum(seen.own[name] for name in working) - added * inside
    whole = seen.ns - added * operators
    return Gap(whole / NS, (whole - kernels) / NS, operators)


def added_by(watching: Callable[[], Any]) -> float:
    """Nanoseconds that ``watching`` adds to an operator, by this thread's time on a processor."""
    import torch

    row = torch.zeros(8)

    def loop() -> float:
        start = time.thread_time_ns()
        for _ in range(LOOP):
            row.mul_(row)
        return (time.thread_time_ns() - start) / LOOP

    found = []
    loop()
    for _ in range(TURNS):
        alone = loop()
        with watching():
            found.append(loop() - alone)
    return median(found)


def gaps(
    watch: Observer, step: Callable[[], object], count: int, computes: Callable[[str], bool]
) -> Gaps:
    """``count`` rounds without the clock, with it, and with it twice, in turn; ``step`` is a round,
    and gives None when there is no more. An operator ``computes``, or it is in no kernel's time."""
    ways = (nullcontext, watch.watching, lambda: watch.watching(twice=True))
    bare, once, twice = list[float](), list[Seen](), list[Seen]()
    for place in range(3 * count):
        with ways[place % 3]():
            start = time.perf_counter_ns()
            more = step()
            spent = time.perf_counter_ns() - start
        if more is None:
            break
        if place % 3:
            (once, twice)[place % 3 - 1].append(watch.seen(spent))
        else:
            bare.append(spent / NS)
    added = added_by(watch.watching)
    found = [gap_of(seen, computes, added) for seen in once]
    low, _, high = quantiles([gap.share for gap in found], n=4)
    return Gaps(
        share=median(gap.share for gap in found),
        quarters=(low, high),
        gap_ms=median(gap.gap_ms for gap in found),
        round_ms=median(gap.ms for gap in found),
        bare_ms=median(bare),
        operators=median(gap.operators for gap in found),
        added_us=added / 1e3,
        in_place_us=in_place(once, twice, computes) / 1e3,
        rounds=len(found),
    )


def in_place(once: Sequence[Seen], twice: Sequence[Seen], computes: Callable[[str], bool]) -> float:
    """Nanoseconds that the clock adds to an operator in a gap of these rounds."""
    short, long = (median(gap_of(s, computes, 0).gap_ms for s in part) for part in (once, twice))
    in_gaps = median(
        sum(seen.calls.values()) - sum(seen.inner[name] for name in seen.own if computes(name))
        for seen in once
    )
    return NS * (long - short) / in_gaps
