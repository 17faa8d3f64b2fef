"""The one thread that runs passes: every accepted request gets a pass in turn.

One ``next()`` of a job's stream is one pass of the target, so a long answer delays a short one by
at most one pass per round. Cancelled and late jobs are closed before their next pass; closing
parks their sessions for whoever continues the same text.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Thread

from dflash.results import Chunk
from dflash.serve.errors import ApiError, as_api_error

Event = Chunk | Exception | None
"""What a job hears: a chunk, why there will be no more, or that it is complete."""


class Job:
    """A request that was accepted: a stream of chunks, and who listens."""

    def __init__(
        self, stream: Iterator[Chunk], hear: Callable[[Event], None], deadline: float | None = None
    ) -> None:
        """``hear`` is called on the worker's thread; ``deadline`` is of ``time.monotonic``."""
        self.stream, self.hear, self.deadline = stream, hear, deadline
        self.cancelled = False
        self.submitted, self.started, self.ended = time.monotonic(), 0.0, 0.0


class Worker:
    """Runs jobs. ``submit``, ``cancel`` and the counts may be called from any thread."""

    def __init__(
        self,
        most_running: int,
        most_waiting: int,
        explain: Callable[[Exception], Exception] = as_api_error,
    ) -> None:
        """``most_running`` jobs take turns, ``most_waiting`` wait, one more is refused.

        ``explain``: what a job hears of a fault in its stream.
        """
        self._explain = explain
        self._most_running, self._most_waiting = most_running, most_waiting
        self._running: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        self._changed = Condition()
        self._open, self._stopping = True, False
        self._mean = 1.0  # seconds a job takes from its first pass on, fading average
        self._thread = Thread(target=self._run, name="dflash-passes", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def running(self) -> int:
        """Jobs that take turns."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Jobs that wait for a turn."""
        return len(self._waiting)

    @property
    def accepting(self) -> bool:
        """Whether more may be submitted, as far as shutting down goes."""
        return self._open

    def check_room(self) -> None:
        """Raise what ``submit`` would raise now: 429 with a full line, 503 while shutting down."""
        if not self._open:
            raise _shutting_down()
        if self.running + self.waiting >= self._most_running + self._most_waiting:
            raise ApiError(
                429,
                f"the line is full ({self.waiting} waiting): try again later",
                code="queue_full",
                retry_after=self._wait(),
            )

    def submit(self, job: Job) -> None:
        """Accept ``job``. Raises ApiError: 429 with a full line, 503 while shutting down."""
        with self._changed:
            self.check_room()
            self._waiting.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Stop ``job`` before its next pass; nothing more is heard of it."""
        with self._changed:
            job.cancelled = True
            self._changed.notify()

    def drain(self) -> None:
        """Accept nothing more; what was accepted goes on."""
        with self._changed:
            self._open = False

    def stop(self) -> None:
        """End every job that is left with an error, and the thread; returns when it ended."""
        with self._changed:
            self._open, self._stopping = False, True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._turn(job)
        for job in [*self._running, *self._waiting]:
            self._end(job, _shutting_down())

    def _next(self) -> Job | None:
        """The job whose turn it is, once there is one; None = stop."""
        with self._changed:
            while not self._stopping:
                late = self._dead()
                if late is not None:
                    return late
                while self._waiting and len(self._running) < self._most_running:
                    self._running.append(self._waiting.popleft())
                if self._running:
                    self._running.rotate(-1)
                    return self._running[-1]
                self._changed.wait()
        return None

    def _dead(self) -> Job | None:
        """A job, running or waiting, that nobody wants any more."""
        now = time.monotonic()
        for job in (*self._running, *self._waiting):
            if job.cancelled or (job.deadline is not None and now > job.deadline):
                return job
        return None

    def _turn(self, job: Job) -> None:
        if job.cancelled:
            return self._end(job, None, tell=False)
        if job.deadline is not None and time.monotonic() > job.deadline:
            return self._end(job, _late())
        job.started = job.started or time.monotonic()
        try:
            chunk = next(job.stream, None)
        except Exception as problem:  # noqa: BLE001 - the door: one request's fault ends that one
            return self._end(job, self._explain(problem))
        if chunk is None:
            self._mean += (time.monotonic() - job.started - self._mean) / 8
            return self._end(job, None)
        job.hear(chunk)
        return None

    def _end(self, job: Job, problem: Exception | None, tell: bool = True) -> None:
        close = getattr(job.stream, "close", None)
        if close is not None:
            close()
        with self._changed:
            for line in (self._running, self._waiting):
                if job in line:
                    line.remove(job)
        job.ended = time.monotonic()
        if tell:
            job.hear(problem)

    def _wait(self) -> int:
        """Seconds until a place in the line should be free."""
        return max(1, min(60, round(self._mean)))


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=5)


def _late() -> ApiError:
    return ApiError(504, "the deadline of this request has passed", code="deadline_exceeded")
