import pytest

from dflash.drafts.layers import build_target_layer_ids
from dflash.errors import ConfigError

PUBLISHED = {
    (36, 5): [1, 9, 17, 25, 33],
    (64, 5): [1, 16, 31, 46, 61],
    (32, 5): [1, 8, 15, 22, 29],
    (61, 6): [1, 12, 24, 35, 47, 58],
    (60, 6): [1, 12, 23, 35, 46, 57],
    (28, 5): [1, 7, 13, 19, 25],
}


@pytest.mark.parametrize("shape", PUBLISHED)
def test_the_formula_gives_the_taps_of_published_drafts(shape: tuple[int, int]) -> None:
    assert build_target_layer_ids(*shape) == PUBLISHED[shape]


def test_one_tap_sits_in_the_middle() -> None:
    assert build_target_layer_ids(36, 1) == [18]
    assert build_target_layer_ids(1, 1) == [0]


def test_halves_round_to_even() -> None:
    # 1 + 1 * 3 / 2 = 2.5 and 1 + 1 * 5 / 2 = 3.5
    assert build_target_layer_ids(7, 3) == [1, 2, 4]
    assert build_target_layer_ids(9, 3) == [1, 4, 6]


@pytest.mark.parametrize("shape", [(0, 1), (4, 0), (3, 2)])
def test_impossible_counts_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="target"):
        build_target_layer_ids(*shape)
