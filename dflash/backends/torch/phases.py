"""How long draft and target took in a round, without a wait of its own.

A mark is a place in the device's queue of work. On CUDA it is an event, read once the one wait of
the round is over; on a CPU, where nothing is queued, it is the clock. Other devices have no marks.
Host time between two kernels counts to the phase in which the device stood idle.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: an event on the device, or a reading of the clock, or neither."""

    event: Any = None  # torch.cuda.Event
    clock: int = UNKNOWN  # ns


def mark(device: torch.device) -> Mark:
    """The present place in the queue of ``device``."""
    if device.type == "cuda":
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return Mark(event)
    return Mark(clock=time.perf_counter_ns() if device.type == "cpu" else UNKNOWN)


def spans(meta: Any, rows: int, start: Mark, end: Mark) -> tuple[int, int]:
    """Nanoseconds of (draft, verify), read when the device has passed ``end``.

    ``meta`` came with the proposal: the mark where the draft began, or the nanoseconds that a draft
    on the host took. A plain step (``rows`` 0) has no draft.
    """
    if rows == 0:
        draft = 0
    elif isinstance(meta, Mark):
        draft = _span(meta, start)
    else:
        draft = meta if isinstance(meta, int) else UNKNOWN
    return draft, _span(start, end)


def _span(start: Mark, end: Mark) -> int:
    if start.event is not None and end.event is not None:
        milliseconds: float = start.event.elapsed_time(end.event)
        return round(milliseconds * 1e6)
    return UNKNOWN if min(start.clock, end.clock) < 0 else end.clock - start.clock
