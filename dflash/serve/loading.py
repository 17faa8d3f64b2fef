"""Runs something in a thread that ends with it: how a server loads its pair.

An OpenMP runtime keeps a team of threads for each thread that ever computed, until that thread
ends. Weights are loaded and packed in one thread and passes run in another: two teams for the same
cores. GNU's runtime, which torch brings, counts them together: once they are more than the cores,
they go to sleep after every parallel part of a pass instead of waiting for the next, and are woken
up hundreds of times a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


class _Outcome(Generic[T]):
    """What came of a call; as a context, it takes up what is raised in it.

    Whatever that is, and though it is no door: nothing ends here, it is raised again in the thread
    that waits. What was let go would end in this one, and the other have neither value nor reason.
    """

    value: T

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error
        return True


def apart(call: Callable[[], T]) -> T:
    """What ``call()`` returns or raises, be it what it may; its thread, and the team of that, end
    before."""
    outcome = _Outcome[T]()

    def run() -> None:
        with outcome:
            outcome.value = call()

    # a daemon: a program that is interrupted does not wait for a download
    thread = Thread(target=run, name="dflash-load", daemon=True)
    thread.start()
    thread.join()
    if outcome.error is not None:
        raise outcome.error
    return outcome.value
