"""One noise for everybody: fixed for good, keyed by seed, sample and output position."""

import numpy as np
import pytest

from dflash.core.noise import gumbel


def test_the_noise_is_the_same_on_every_machine_and_version() -> None:
    expected = [0.1944944, -0.5865780, 4.0255427, 0.2659739]
    assert gumbel(7, 0, 3, 4).tolist() == pytest.approx(expected, abs=1e-6)


def test_it_is_float32_and_finite_in_bulk() -> None:
    noise = gumbel(1, 0, 0, 200_000)
    assert noise.dtype == np.float32
    assert np.isfinite(noise).all()


def test_it_is_standard_gumbel_distributed() -> None:
    noise = gumbel(1, 0, 0, 200_000).astype(float)
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.01)
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.02)
    assert (noise < 1).mean() == pytest.approx(np.exp(-np.exp(-1)), abs=0.005)


@pytest.mark.parametrize("other", [(8, 0, 3), (7, 1, 3), (7, 0, 4), (7 + 2**63, 0, 3), (0, 7, 3)])
def test_seed_sample_and_position_each_give_their_own_noise(other: tuple[int, int, int]) -> None:
    mine, others = gumbel(7, 0, 3, 5_000), gumbel(*other, 5_000)
    assert abs(float(np.corrcoef(mine, others)[0, 1])) < 0.06


def test_a_larger_vocabulary_begins_with_the_noise_of_a_smaller_one() -> None:
    assert (gumbel(7, 0, 3, 300)[:100] == gumbel(7, 0, 3, 100)).all()


def test_neighbouring_positions_do_not_overlap() -> None:
    one, two = gumbel(7, 0, 3, 50_000), gumbel(7, 0, 4, 50_000)
    assert np.intersect1d(one[:2000], two).size < 20  # a shared stream would show all 2000


def test_a_seed_beyond_64_bits_wraps() -> None:
    assert (gumbel(-1, 0, 0, 9) == gumbel(2**64 - 1, 0, 0, 9)).all()


@pytest.mark.parametrize("seed", [2**53, 2**63, 2**64 - 2])
def test_every_bit_of_a_large_seed_counts(seed: int) -> None:
    assert (gumbel(seed, 0, 0, 9) != gumbel(seed + 1, 0, 0, 9)).any()
