"""Which layers a list of numbers names, in each format that has such a list."""

from __future__ import annotations

import pytest

from dflash.convert import layer_ids
from dflash.drafts.layers import eagle_layer_ids
from dflash.errors import CheckpointError

PUBLISHED = [1, 16, 31, 46, 61]  # Qwen3.6-27B-DFlash, outputs
IN_GGUF = [2, 17, 32, 47, 62]  # the same draft's GGUF header


def test_hugging_face_names_outputs() -> None:
    assert layer_ids.from_target_layer_ids(PUBLISHED) == PUBLISHED
    assert layer_ids.to_target_layer_ids(PUBLISHED) == PUBLISHED


def test_gguf_names_inputs_one_higher() -> None:
    assert layer_ids.to_gguf(PUBLISHED) == IN_GGUF
    assert layer_ids.from_gguf(IN_GGUF) == PUBLISHED


def test_speculators_names_inputs_one_higher() -> None:
    assert layer_ids.to_speculators([1, 9, 17, 25, 33]) == [2, 10, 18, 26, 34]
    assert layer_ids.from_speculators([2, 10, 18, 26, 34]) == [1, 9, 17, 25, 33]


def test_an_eagle_list_on_top_names_inputs() -> None:
    assert layer_ids.from_eagle([2, 18, 33]) == [1, 17, 32]
    assert layer_ids.to_eagle([1, 17, 32]) == [2, 18, 33]


def test_an_eagle_list_of_specforge_names_outputs() -> None:
    assert layer_ids.from_specforge([1, 17, 32]) == [1, 17, 32]
    assert layer_ids.to_specforge([1, 17, 32]) == [1, 17, 32]


def test_the_two_eagle_lists_of_one_draft_differ_by_one() -> None:
    taps = eagle_layer_ids({}, 36)  # the draft names none
    assert layer_ids.to_eagle(taps) == [2, 18, 33]
    assert layer_ids.to_specforge(taps) == [1, 17, 32]


def test_the_input_of_the_first_layer_is_no_tap() -> None:
    with pytest.raises(CheckpointError, match="input of layer 0 is the embedding"):
        layer_ids.from_speculators([0, 4])
