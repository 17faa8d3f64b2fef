"""How long no tensor kernel runs in a round, by a clock inside torch's dispatcher.

A kernel runs while an operator that computes is in the dispatcher, from where its call is taken to
where it returns. So its own fixed cost (checks, the library's set-up of a product) counts as
kernel; Python, the reading of arguments in torch's bindings, and operators that compute nothing
(views, allocations), those called by other operators too, do not. That is what torch's profiler
measures as an operator's own time. But the profiler's notes lengthen just the time between
operators; this clock is read twice an operator and adds to a sum, and nothing else.

What it adds to an operator is measured in the same process on a loop of small ones, and taken off.
A loop is hot and a round is not, so that is too little, and the share is at most too high. How much
too high is seen in place, with more noise: the thread's time of rounds with the clock, less that of
rounds without it, in turn; and a round in which a second copy of the same code notes beside it.

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
from dataclasses import dataclass, field
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
    in_place_us: float  # by all that a clock needs, an operator of these rounds; moves more
    in_place_error_us: float  # of that median
    twin_us: float  # by a second copy of the clock, an operator in a gap
    in_place_share: float  # `share`, if that is what is taken off
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


@dataclass(slots=True)
class Rounds:
    """Rounds without the clock, with it, and with it twice, in turn."""

    watch: Observer
    bare: list[float] = field(default_factory=list)  # milliseconds
    once: list[Seen] = field(default_factory=list)
    twice: list[Seen] = field(default_factory=list)
    more: list[float] = field(default_factory=list)  # ns of the thread, once less bare

    def run(self, step: Callable[[], object], count: int) -> None:
        """``count`` rounds of each kind; ``step`` is a round, None when there is no more."""
        kinds: tuple[Any, ...] = (nullcontext, self.watch.watching, self._twice)
        spent = [0, 0, 0]
        for place in range(3 * count):
            kind = (place + place // 3) % 3  # each comes first, second and last
            with kinds[kind]():
                start, mine = time.perf_counter_ns(), time.thread_time_ns()
                more = step()
                spent[kind] = time.thread_time_ns() - mine
                ns = time.perf_counter_ns() - start
            if more is None:
                return
            if kind:
                (self.once, self.twice)[kind - 1].append(self.watch.seen(ns))
            else:
                self.bare.append(ns / NS)
            if place % 3 == 2:
                self.more.append(spent[1] - spent[0])

    def _twice(self) -> Any:
        return self.watch.watching(twice=True)


def gaps(found: Rounds, computes: Callable[[str], bool]) -> Gaps:
    """Their figures. An operator ``computes``, or it is in no kernel's time."""
    added = added_by(found.watch.watching)
    less = [gap_of(seen, computes, added) for seen in found.once]
    low, _, high = quantiles([gap.share for gap in less], n=4)
    operators = median(gap.operators for gap in less)
    least, _, most = quantiles(found.more, n=4)
    place = median(found.more) / operators
    error = 1.25 * (most - least) / 1.35 / len(found.more) ** 0.5 / operators
    return Gaps(
        share=median(gap.share for gap in less),
        quarters=(low, high),
        gap_ms=median(gap.gap_ms for gap in less),
        round_ms=median(gap.ms for gap in less),
        bare_ms=median(found.bare),
        operators=operators,
        added_us=added / 1e3,
        in_place_us=place / 1e3,
        in_place_error_us=error / 1e3,
        twin_us=twin(found.once, found.twice, computes) / 1e3,
        in_place_share=median(gap_of(seen, computes, place).share for seen in found.once),
        rounds=len(less),
    )


def twin(once: Sequence[Seen], twice: Sequence[Seen], computes: Callable[[str], bool]) -> float:
    """Nanoseconds that a second copy adds to an operator in a gap of these rounds."""
    short, long = (median(gap_of(s, computes, 0).gap_ms for s in part) for part in (once, twice))
    in_gaps = median(
        sum(seen.calls.values()) - sum(seen.inner[name] for name in seen.own if computes(name))
        for seen in once
    )
    return NS * (long - short) / in_gaps
