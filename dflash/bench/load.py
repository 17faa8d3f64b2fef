"""Several requests at a time: each arm has the machine to itself and takes the whole set at once.

What counts then is the wall clock, for the times of single requests contain each other. A local
engine is asked through the server's fair queue: one pass a turn, round and round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Lock
from typing import Any

from dflash.bench.arms import in_turn
from dflash.bench.counters import Counters
from dflash.bench.prompts import Conversation
from dflash.bench.trial import Course, Journal, Record
from dflash.results import Chunk
from dflash.serve.worker import Event, Job, Worker


@dataclass(frozen=True, slots=True)
class Wall:
    """One repeat of one arm over the whole set."""

    requests: int
    tokens: int
    decode: float  # seconds by the wall clock
    first: int = 0  # the prefills' tokens count like all others
    ids: tuple[int, ...] = ()


Walls = Mapping[str, Sequence[Wall]]  # arm -> its repeats


@dataclass(frozen=True, slots=True)
class Load:
    """What one arm did in all repeats."""

    requests: int
    tokens: int
    seconds: float  # by the wall clock
    counters: Counters | None = None  # of a server, between beginning and end; other clients count

    @property
    def rate(self) -> float:
        """Tokens a second of all requests together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Counts and the throughput."""
        counted = None if self.counters is None else self.counters.to_json()
        plain = {"requests": self.requests, "tokens": self.tokens, "seconds": self.seconds}
        return {**plain, "throughput": self.rate, "counters": counted}

    def note(self, arm: str, concurrency: int) -> str:
        """One line for the reader."""
        text = f"{arm}: {self.rate:.1f} tokens/s at concurrency {concurrency}"
        if self.counters is None:
            return text
        counted = self.counters.to_json()
        return (
            f"{text}; its counters: {counted['rounds']} verify passes, "
            f"{100 * counted['acceptance_rate']:.0f} % of drafts accepted, acceptance length "
            f"{counted['acceptance_length']:.2f} (the bonus counted)"
        )


def measure(
    course: Course,
    conversations: Sequence[Conversation],
    concurrency: int,
    journal: Journal,
    say: Callable[[str], None],
) -> Walls:
    """Every arm in every repeat, ``concurrency`` conversations at a time."""
    walls: dict[str, list[Wall]] = {arm: [] for arm in course.contestants}
    shared = _Shared(journal)
    for repeat, arm in in_turn(list(course.contestants), course.repeats):
        alone = replace(course, contestants={arm: course.contestants[arm]}, repeats=repeat + 1)
        start = time.perf_counter()
        with ThreadPoolExecutor(concurrency) as pool:
            for job in [pool.submit(_one, alone, c, shared) for c in conversations]:
                job.result()
        spent = time.perf_counter() - start
        made = [r.outcome for k, r in journal.records.items() if (k.arm, k.repeat) == (arm, repeat)]
        walls[arm].append(Wall(len(made), sum(one.tokens for one in made), spent))
        say(f"repeat {repeat + 1} of {course.repeats}: {arm}")
    return walls


def loads(walls: Walls) -> dict[str, Load]:
    """The sums of each arm."""
    found = {}
    for arm, mine in walls.items():
        found[arm] = Load(
            requests=sum(one.requests for one in mine),
            tokens=sum(one.tokens for one in mine),
            seconds=sum(one.decode for one in mine),
        )
    return found


def _one(course: Course, conversation: Conversation, journal: Any) -> None:
    list(course.run([conversation], journal))


class _Shared:
    """A journal that several threads write."""

    def __init__(self, journal: Journal) -> None:
        """``journal`` stays the caller's."""
        self.records, self._journal, self._lock = journal.records, journal, Lock()

    def add(self, record: Record) -> None:
        """One at a time."""
        with self._lock:
            self._journal.add(record)


class Line(AbstractContextManager["Line"]):
    """The server's queue without a server: streams that are read through it take turns."""

    def __init__(self, most: int) -> None:
        """``most`` streams at a time."""
        self._worker = Worker(most, most, explain=lambda problem: problem)
        self._worker.start()

    def __exit__(self, *_: object) -> None:
        """End its thread."""
        self._worker.stop()

    def __call__(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """``chunks`` as their turns come. Raises what the engine raises."""
        heard: SimpleQueue[Event] = SimpleQueue()
        job = Job(chunks, heard.put)
        self._worker.submit(job)
        try:
            while (event := heard.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self._worker.cancel(job)


def one_at_a_time(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` behind a lock: tokenizers are not made for several threads."""
    lock = Lock()

    def locked(*arguments: Any) -> Any:
        with lock:
            return call(*arguments)

    return locked
