"""Pearson's chi-square test of counts against exact probabilities. No scipy.

Bins that are expected fewer than five times are pooled, as the approximation asks for (Cochran
1954). A token that was drawn although its probability is zero needs no statistics: p is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, lgamma, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LEAST = 5.0  # expected count of a bin


class Fit(NamedTuple):
    """A statistic and its degrees of freedom; those of independent tests add up."""

    statistic: float
    freedom: int

    @property
    def p(self) -> float:
        """Chance of a statistic at least this large if the probabilities are right."""
        return 1.0 if self.freedom == 0 else upper_gamma(self.freedom / 2, self.statistic / 2)


def fit(counts: Mapping[int, int], p: NDArray[np.float64]) -> Fit:
    """How ``counts`` by token fit the distribution ``p`` [V]."""
    if any(p[token] <= 0 for token in counts):
        return Fit(float("inf"), 1)
    drawn = sum(counts.values())
    expected = drawn * p
    bins = [(float(expected[i]), counts.get(int(i), 0)) for i in np.flatnonzero(expected >= LEAST)]
    rest = drawn - sum(seen for _, seen in bins)
    rest_expected = float(drawn - sum(mean for mean, _ in bins))
    if rest_expected >= LEAST or not bins:
        bins.append((rest_expected, rest))
    else:  # too few to stand alone: with the smallest of the others
        bins.sort()
        mean, seen = bins[0]
        bins[0] = (mean + max(0.0, rest_expected), seen + rest)
    return Fit(sum((seen - mean) ** 2 / mean for mean, seen in bins if mean > 0), len(bins) - 1)


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(a, x).

    Series below a + 1, continued fraction (modified Lentz) above: Numerical Recipes, section 6.2.
    """
    if x <= 0:
        return 1.0
    if x == float("inf"):
        return 0.0
    front = exp(a * log(x) - x - lgamma(a))
    return 1.0 - front * _series(a, x) if x < a + 1 else front * _fraction(a, x)


def _series(a: float, x: float) -> float:
    term = total = 1.0 / a
    step = a
    while abs(term) > abs(total) * 1e-15:
        step += 1
        term *= x / step
        total += term
    return total


def _fraction(a: float, x: float) -> float:
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    found, i, change = d, 0, 0.0
    while abs(change - 1) > 1e-15 and i < 100_000:
        i += 1
        factor = -i * (i - a)
        b += 2
        d = 1 / _away(factor * d + b, tiny)
        c = _away(b + factor / c, tiny)
        change = d * c
        found *= change
    return found


def _away(value: float, tiny: float) -> float:
    return value if abs(value) >= tiny else tiny
