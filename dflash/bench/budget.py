"""Time for a run. When it is used up the run ends, and what is complete by then counts."""

from __future__ import annotations

import time
from collections.abc import Callable

from dflash.checks import counted


class Budget:
    """Seconds from now on; None = as long as it takes."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Starts now."""
        self._seconds, self._clock, self._start = seconds, clock, clock()

    def is_over(self, share: float = 1.0) -> bool:
        """Whether this share of the time is used up."""
        if self._seconds is None:
            return False
        return self._clock() - self._start >= share * self._seconds

    def note(self, done: int, asked: int) -> str:
        """What to say of a run that was ended after ``done`` of ``asked`` prompts."""
        prompts = counted(asked, "prompt")
        return (
            f"time was up after {self._seconds:g} s: {done} of {prompts} complete; others do not "
            "count. --seconds gives more time, --block-sizes and --max-tokens ask for less"
        )
