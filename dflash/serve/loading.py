"""Runs something in a thread that ends with it: how a server loads its pair.

An OpenMP runtime keeps a team of threads for each thread that ever computed, until that thread
ends. Weights are loaded and packed in one thread and passes run in another: two teams for the same
cores. GNU's runtime, which torch brings, counts them together: once they are more than the cores,
they go to sleep after every parallel part of a pass instead of waiting for the next, and are woken
up hundreds of times a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from typing import TypeVar

T = TypeVar("T")


def apart(call: Callable[[], T]) -> T:
    """What ``call()`` returns or raises; its thread and the team of that end with it."""
    with ThreadPool(1) as pool:  # a daemon: an interrupted program does not wait for a download
        return pool.apply(call)
