"""Is a difference rounding or a fault? The target alone judges, in a pass of one row.

The number of rows of a pass changes the last bits of a sum, so two tokens whose logits are closer
than that may change places. In float32 two logits within 1e-3 are a tie; in narrower formats four
steps of the format at that size are. Anything wider is a real difference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from math import frexp
from typing import Any

from dflash.core.noise import gumbel
from dflash.core.types import Sampling
from dflash.verify.probe import Probe

TIE = 1e-3  # float32
STEPS = 4  # of a narrower format
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}

Gap = Callable[[Sequence[int], int, int, int], tuple[float, float]]
"""(prompt and output so far, output position, token, token) -> (gap, widest gap that is a tie)."""


def tolerance(dtype: str, size: float) -> float:
    """Widest gap that is a tie between logits of about ``size`` in ``dtype``."""
    bits = SIGNIFICANT_BITS.get(dtype)
    if bits is None:
        return TIE
    step: float = 2.0 ** (frexp(abs(size))[1] - bits)
    return max(TIE, STEPS * step)


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """The part of an engine's keywords that says how a token is chosen."""
    known = {field.name for field in fields(Sampling)} & set(settings)
    return Sampling(**{name: settings[name] for name in known if settings[name] is not None})


def one_row_gap(probe: Probe, sampling: Sampling | None = None) -> Gap:
    """The judge over ``probe``: distance of two logits, with a seeded request's noise on them.

    Noise is in units of logits / temperature, so it is scaled back: the gap is always in logits.
    """
    warmth = sampling.temperature if sampling else 0.0

    def gap(prefix: Sequence[int], position: int, one: int, other: int) -> tuple[float, float]:
        row = probe.logits(prefix)
        limit = tolerance(probe.dtype, max(abs(row[one]), abs(row[other])))
        width = float(row[one]) - float(row[other])
        if sampling is not None and warmth > 0:
            noise = gumbel(sampling.seed, sampling.sample, position, row.size)
            width += warmth * (float(noise[one]) - float(noise[other]))
        return abs(width), limit

    return gap
