"""One line that says where a long command is: a spinner on a terminal, few lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dflash.cli.output import status

SECONDS = 10.0  # between two lines about the same part of a log


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A function that takes steps, ``part: where in it``, and shows them on standard error.

    ``quiet`` shows nothing, for output that a program reads.
    """
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("...") as spinner:
            yield lambda step: spinner.update(f"{step} ...")
    else:
        yield Log()


class Log:
    """Prints the first step of each part, and of a long part one now and then."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` in seconds."""
        self._clock = clock
        self._part, self._last = "", 0.0

    def __call__(self, step: str) -> None:
        """Hear of a step."""
        part, now = step.partition(":")[0], self._clock()
        if part != self._part or now >= self._last + SECONDS:
            status(f"{step} ...")
            self._part, self._last = part, now
