"""Configs of EAGLE-3 drafts in every layout, and of relatives that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dflash.drafts.eagle3 import DRAFTED, NO_MASK
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError

ORIGINAL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "draft_vocab_size": 128,
    "rms_norm_eps": 1e-5,
}
IDS = "eagle_aux_hidden_state_layer_ids"
SPECFORGE = {
    **ORIGINAL,
    "architectures": ["LlamaForCausalLMEagle3"],
    "rope_theta": 5e5,
    "eagle_config": {IDS: [1, 4, 6], "use_aux_hidden_state": True},
}


def speculators(**changes: Any) -> dict[str, Any]:
    stack = {**ORIGINAL, "model_type": "qwen3", "rope_parameters": {"rope_theta": 1e6}}
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": stack,
        "draft_vocab_size": 128,
        "speculators_config": {
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": "some/target"},
        },
        IDS: [2, 5, 7],
        **changes,
    }


def test_the_same_layers_are_tapped_whatever_layout_names_them() -> None:
    specforge, vllm = read_spec(SPECFORGE), read_spec({**ORIGINAL, IDS: [2, 5, 7]})
    assert specforge.taps == vllm.taps == read_spec(speculators()).taps == (1, 4, 6)


def test_a_silent_config_taps_before_layers_2_half_and_n_minus_3() -> None:
    assert read_spec(ORIGINAL, num_target_layers=32).taps == (1, 15, 28)
    with pytest.raises(CheckpointError, match="open it together with its target"):
        read_spec(ORIGINAL)
    assert read_spec(ORIGINAL, taps=[3, 5]).taps == (3, 5)


def test_two_lists_that_name_different_layers_are_refused() -> None:
    assert read_spec({**SPECFORGE, IDS: [2, 5, 7]}).taps == (1, 4, 6)
    with pytest.raises(CheckpointError, match="name different layers"):
        read_spec({**SPECFORGE, IDS: [1, 4, 6]})


def test_what_a_chain_has_and_a_block_has_not() -> None:
    spec = read_spec(SPECFORGE)
    assert (spec.kind, spec.mask_token_id, spec.block_size) == ("eagle3", NO_MASK, DRAFTED + 1)
    assert spec.causal == (True,) and spec.rope_parameters["full_attention"]["rope_theta"] == 5e5
    assert read_spec(speculators()).block_size == 5
    silent = read_spec(ORIGINAL, num_target_layers=8)
    assert silent.rope_parameters["full_attention"]["rope_theta"] == 10_000


def test_norms_are_where_the_config_puts_them() -> None:
    eagle = read_spec(speculators(norm_before_residual=True, fc_norm=True, norm_output=True)).eagle3
    assert eagle is not None and eagle.qk_norm and eagle.norm_before_residual
    assert eagle.fc_norm and eagle.norm_output and not eagle.norm_before_fc
    plain = read_spec(SPECFORGE).eagle3
    assert plain is not None and not plain.qk_norm and not plain.norm_before_residual
    with pytest.raises(CheckpointError, match="exclude each other"):
        read_spec(speculators(norm_before_fc=True, fc_norm=True))


@pytest.mark.parametrize("count", [0, "4", True])
def test_a_chain_of_no_length_is_refused(count: Any) -> None:
    methods = [{"speculative_tokens": count}]
    with pytest.raises(CheckpointError, match="speculative_tokens must be"):
        read_spec(speculators(speculators_config={"proposal_methods": methods}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({**ORIGINAL, "architectures": ["DSparkDraftModel"]}, "'dspark', which is not supported"),
        ({**ORIGINAL, "architectures": ["Qwen3DSparkModel"]}, "'dspark', which is not supported"),
        ({**ORIGINAL, "architectures": ["DominoDraftModel"]}, "'domino', which is not supported"),
        (speculators(speculators_model_type="dspark"), "'dspark', which is not supported"),
        (speculators(speculators_model_type="peagle"), "'peagle', which is not supported"),
        (speculators(speculators_model_type="mtp"), "'mtp', which is not supported"),
        (
            speculators(speculators_model_type="dflash", sample_from_anchor=True),
            "'dspark', which is not supported",
        ),
        (
            {**ORIGINAL, "architectures": ["DFlashDraftModel"],
             "dflash_config": {"sample_from_anchor": True}},
            "'dspark', which is not supported",
        ),
        (
            {k: v for k, v in ORIGINAL.items() if k != "draft_vocab_size"}
            | {"architectures": ["EagleLlamaForCausalLM"]},
            "EAGLE-1 or EAGLE-2 draft",
        ),
    ],
)  # fmt: skip
def test_relatives_are_refused_by_name_in_one_sentence(config: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_spec(config, num_target_layers=8)
