"""DFlash2 configs: told by name or by keys, all sizes required, sizes that fit each other."""

from __future__ import annotations

from typing import Any

import pytest

from dflash.drafts.methods import DFlash2
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError
from tests.drafts.configs import CONV_AND_SELECTOR, SPECULATORS, config, config2

SIZES = DFlash2(2, 16, 8, 4)


@pytest.mark.parametrize(
    "made",
    [
        config2(),
        config2(architectures=["DFlashDraftModel"]),
        config(nested={**CONV_AND_SELECTOR, "projector_type": "dflash2"}),
        config(**CONV_AND_SELECTOR),
    ],
    ids=["by name", "by keys", "by projector", "keys at the top"],
)
def test_a_dflash2_draft_is_told_by_name_or_by_its_keys(made: dict[str, Any]) -> None:
    spec = read_spec(made)
    assert (spec.kind, spec.dflash2) == ("dflash2", SIZES)


def test_a_v1_draft_has_none_of_it() -> None:
    assert (read_spec(config()).kind, read_spec(config()).dflash2) == ("dflash", None)


def test_the_published_qwen_draft_is_read() -> None:
    made = config2(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=5,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=248320,
        rope_theta=None,
        rope_parameters={"rope_theta": 1e7, "rope_type": "default"},
        layer_types=["sliding_attention"] * 5,
        sliding_window=2048,
        use_sliding_window=True,
        nested={
            "mask_token_id": 248070,
            "target_layer_ids": [5, 19, 33, 47, 61],
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    )
    spec = read_spec(made)
    assert spec.dflash2 == DFlash2(2, 16, 256, 16)
    assert (spec.block_size, spec.causal, spec.window) == (8, (False,) * 5, 2048)


def test_a_speculators_dflash2_is_not_causal_unless_it_says_so() -> None:
    made = {**SPECULATORS, **CONV_AND_SELECTOR, "speculators_model_type": "dflash2"}
    made.pop("sliding_window_non_causal", None)
    assert read_spec(made).kind == "dflash2"
    assert not any(read_spec(made).causal)


@pytest.mark.parametrize("key", [*CONV_AND_SELECTOR, "block_size"])
def test_every_size_is_required(key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        read_spec(config2(nested={key: None}))


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        ({"conv_group_size": 24}, "does not divide hidden_size 64"),
        ({"conv_kernel_size": 9}, "more than the block_size 8"),
        ({"selector_top_k": 513}, "more than the 512 tokens"),
        ({"draft_vocab_size": 3}, "more than the 3 tokens"),
        ({"selector_rank": 0}, "selector_rank must be"),
    ],
)
def test_sizes_that_no_module_could_have_are_refused(nested: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_spec(config2(nested=nested))
