"""Ctrl-C between updates, never inside one.

A checkpoint written after an interrupt must hold the weights of the step it names.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A SIGINT during the body arrives when the body has ended.

    Only the main thread gets signals; in others, and where the handler is none of Python's,
    nothing is held.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            signal.raise_signal(signal.SIGINT)
