"""Turns: everybody's pass comes, nobody waits for a long answer, and who leaves is gone at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import Queue
from typing import Any

import pytest

from dflash.errors import ConfigError, OutOfMemory
from dflash.results import Chunk
from dflash.serve.errors import ApiError
from dflash.serve.worker import Event, Job, Worker

CHUNK = Chunk("x", (1,), ("target",))


class Line:
    """A worker whose passes are written down; the first waits until the test lets it go."""

    def __init__(self, most_running: int = 4, most_waiting: int = 4) -> None:
        self.worker = Worker(most_running, most_waiting)
        self.passes: list[str] = []
        self.closed: list[str] = []
        self.heard: dict[str, Queue[Event]] = {}
        self.gate: Queue[None] = Queue()
        self.worker.start()
        self.first = self.job("first", 1, before=lambda: self.gate.get(timeout=60))
        self.worker.submit(self.first)

    def job(self, name: str, passes: int, before: Callable[[], Any] = int, **more: Any) -> Job:
        def stream() -> Iterator[Chunk]:
            try:
                before()
                for _ in range(passes):
                    self.passes.append(name)
                    yield CHUNK
            finally:
                self.closed.append(name)

        self.heard[name] = Queue()
        return Job(stream(), self.heard[name].put, **more)

    def submit(self, name: str, passes: int, **more: Any) -> Job:
        job = self.job(name, passes, **more)
        self.worker.submit(job)
        return job

    def go(self) -> None:
        self.gate.put(None)

    def told(self, name: str) -> list[Event]:
        """All that ``name`` hears, up to its end."""
        found: list[Event] = []
        while not found or isinstance(found[-1], Chunk):
            found.append(self.heard[name].get(timeout=60))
        return found


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.go()
    made.worker.stop()


def test_every_job_gets_a_pass_in_turn(line: Line) -> None:
    for name, passes in (("long", 9), ("short", 2), ("other", 3)):
        line.submit(name, passes)
    line.go()
    assert line.told("short") == [CHUNK, CHUNK, None]
    assert line.told("long") == [CHUNK] * 9 + [None]
    places = [place for place, name in enumerate(line.passes) if name == "short"]
    assert places[-1] <= 6  # the long one did not go first


def test_a_full_line_is_refused_with_a_time_to_come_back() -> None:
    line = Line(most_running=1, most_waiting=1)
    line.submit("waits", 1)
    with pytest.raises(ApiError) as refused:
        line.submit("too many", 1)
    assert refused.value.status == 429 and refused.value.retry_after is not None
    line.go()
    assert line.told("waits") == [CHUNK, None]
    line.worker.stop()


def test_a_cancelled_job_gets_no_further_pass(line: Line) -> None:
    leaving = line.submit("leaves", 5)
    line.submit("stays", 3)
    line.worker.cancel(leaving)
    line.go()
    assert line.told("stays") == [CHUNK] * 3 + [None]
    assert "leaves" not in line.passes
    assert line.worker.running + line.worker.waiting == 0


def test_a_job_cancelled_between_two_passes_is_closed_before_the_next(line: Line) -> None:
    holder: list[Job] = []
    passes: list[int] = []

    def stream() -> Iterator[Chunk]:
        try:
            while True:
                passes.append(1)
                if len(passes) == 2:
                    line.worker.cancel(holder[0])
                yield CHUNK
        finally:
            line.closed.append("endless")

    holder.append(Job(stream(), Queue[Event]().put))
    line.worker.submit(holder[0])
    line.submit("after", 6)
    line.go()
    line.told("after")
    assert len(passes) == 2 and "endless" in line.closed


def test_a_late_job_is_told_so_running_or_waiting() -> None:
    line = Line(most_running=1)
    line.submit("late", 5, deadline=0.0)
    line.go()
    (problem,) = line.told("late")
    assert isinstance(problem, ApiError) and problem.status == 504
    line.worker.stop()


@pytest.mark.parametrize(
    ("problem", "status"),
    [(ConfigError("no"), 400), (OutOfMemory("full"), 503), (RuntimeError("cable pulled"), 500)],
)
def test_a_fault_ends_its_own_job_only(line: Line, problem: Exception, status: int) -> None:
    def fail() -> None:
        raise problem

    line.submit("breaks", 1, before=fail)
    line.submit("works", 2)
    line.go()
    (told,) = line.told("breaks")
    assert isinstance(told, ApiError) and told.status == status
    assert "cable" not in str(told)  # what went wrong inside is for the log
    assert line.told("works") == [CHUNK, CHUNK, None]


def test_stopping_tells_everybody_who_is_left(line: Line) -> None:
    line.worker.drain()
    with pytest.raises(ApiError) as refused:
        line.submit("late comer", 1)
    assert refused.value.status == 503
    line.go()
    line.worker.stop()
    last = line.told("first")[-1]
    assert last is None or (isinstance(last, ApiError) and last.status == 503)


def test_draining_lets_accepted_jobs_finish(line: Line) -> None:
    line.submit("accepted", 3)
    line.worker.drain()
    line.go()
    assert line.told("accepted") == [CHUNK] * 3 + [None]
