"""The statistic, against values from tables; and the pooling of rare tokens."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from dflash.verify.chi_square import Fit, fit, upper_gamma


@pytest.mark.parametrize(
    ("freedom", "statistic", "p"),  # tables of the chi-square distribution
    [(1, 3.841459, 0.05), (2, 5.991465, 0.05), (10, 29.588298, 0.001), (100, 149.449253, 0.001)],
)
def test_p_is_that_of_the_tables(freedom: int, statistic: float, p: float) -> None:
    assert Fit(statistic, freedom).p == pytest.approx(p, rel=1e-5)


def test_p_of_many_degrees_of_freedom_is_near_the_normal_one() -> None:
    for freedom in (1000, 20_000):
        assert Fit(float(freedom), freedom).p == pytest.approx(0.5, abs=0.01)
        assert Fit(freedom + 4 * (2 * freedom) ** 0.5, freedom).p < 1e-3
        assert Fit(freedom - 4 * (2 * freedom) ** 0.5, freedom).p > 0.999


def test_both_halves_of_the_gamma_function_meet() -> None:
    for a in (0.5, 3.0, 40.0):
        below, above = upper_gamma(a, a + 1 - 1e-9), upper_gamma(a, a + 1 + 1e-9)
        assert below == pytest.approx(above, rel=1e-6)
    assert upper_gamma(2.0, 0.0) == 1.0
    assert upper_gamma(2.0, float("inf")) == 0.0


def test_counts_as_expected_fit_perfectly() -> None:
    assert fit({0: 50, 1: 30, 2: 20}, np.array([0.5, 0.3, 0.2])) == (pytest.approx(0), 2)


def test_rare_tokens_are_pooled() -> None:
    p = np.array([0.5, 0.4, *([0.01] * 10)])
    counts = {0: 50, 1: 40, 2: 6, 3: 4}
    assert fit(counts, p) == (pytest.approx(0), 2), "ten tokens of one each are one bin"
    few = np.array([0.5, 0.48, 0.01, 0.01])
    assert fit({0: 50, 1: 48, 2: 2}, few).freedom == 1, "two expected: with the smallest bin"


def test_a_token_that_cannot_be_drawn_fails_at_once() -> None:
    assert fit(Counter({0: 99, 2: 1}), np.array([0.5, 0.5, 0.0])).p == 0.0


def test_nothing_to_compare_proves_nothing() -> None:
    assert fit({}, np.array([1.0])).p == 1.0
