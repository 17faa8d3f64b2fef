"""What this machine could do at best, and how close each pass comes.

Two ceilings, measured: bytes a second of a plain copy, and multiply-adds of a large matrix product.
A pass has to read the weights once and to do two operations a weight and row, so it cannot take
less than the longer of the two. Keys, values and activations are left out, so the bound is low.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash.core.protocols import Pair

MIB = 2**20
COPIED = 256 * MIB
SIZE = 1536  # rows of the square matrices
TIMES = 5
ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on this machine, on the device and in the number format of the pair."""

    bytes_per_second: float
    flops_per_second: float
    device: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Reached:
    """One kind of pass against its bound."""

    phase: str  # verify, draft
    rows: int
    measured_ms: float
    bound_ms: float  # no pass can take less
    by: str  # memory or arithmetic: which ceiling that is
    gigabytes_per_second: float  # weights read / time
    gigaflops: float

    @property
    def share(self) -> float:
        """Bound / measured: 1.0 = as fast as the machine can."""
        return self.bound_ms / self.measured_ms if self.measured_ms else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "share": self.share}


def ceilings(pair: Pair) -> Ceilings:
    """Bandwidth and arithmetic where ``pair`` runs; through torch where the pair does."""
    facts = pair.runs_on()
    dtype = facts.get("dtype", "float32").removeprefix("torch.")
    device = facts.get("device", "cpu").split(" ")[0]
    if pair.backend == "torch":
        copy, multiply = _with_torch(device, dtype)
    else:
        copy, multiply = _with_numpy()
    return Ceilings(2 * COPIED / _best(copy), 2 * SIZE**3 / _best(multiply), device, dtype)


def reached(
    top: Ceilings, memory: Mapping[str, int], passes: Sequence[tuple[str, int, float]]
) -> list[Reached]:
    """Each (phase, rows, ms) against its bound; ``memory`` is bytes of target and draft."""
    found = []
    for phase, rows, measured in passes:
        weights = memory.get("target" if phase == "verify" else "draft", 0)
        work = 2 * weights / ITEM.get(top.dtype, 4) * rows
        times = {
            "memory": weights / top.bytes_per_second,
            "arithmetic": work / top.flops_per_second,
        }
        by = max(times, key=times.__getitem__)
        if weights and measured > 0:
            a_second = 1e-6 / measured  # of a millisecond, in billions
            found.append(
                Reached(
                    *(phase, rows, measured, 1e3 * times[by], by),
                    gigabytes_per_second=weights * a_second,
                    gigaflops=work * a_second,
                )
            )
    return found


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few; the first call is left out."""
    work()
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def _with_numpy() -> tuple[Callable[[], object], Callable[[], object]]:
    source = np.ones(COPIED // 4, np.float32)
    goal, square = np.empty_like(source), np.ones((SIZE, SIZE), np.float32)
    out = np.empty_like(square)
    return lambda: np.copyto(goal, source), lambda: np.matmul(square, square, out=out)


def _with_torch(device: str, dtype: str) -> tuple[Callable[[], object], Callable[[], object]]:
    import torch

    source = torch.ones(COPIED // 4, dtype=torch.float32, device=device)
    goal = torch.empty_like(source)
    square = torch.ones((SIZE, SIZE), dtype=getattr(torch, dtype), device=device)
    out = torch.empty_like(square)

    def finished(result: Any) -> None:
        """A value is only there once the device is through."""
        result.view(-1)[0].item()

    return (
        lambda: finished(goal.copy_(source)),
        lambda: finished(torch.matmul(square, square, out=out)),
    )
