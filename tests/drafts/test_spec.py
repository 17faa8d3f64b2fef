import json
from pathlib import Path
from typing import Any

import pytest

from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError, ConfigError
from tests.drafts import configs
from tests.drafts.configs import config

SLIDING = ["sliding_attention"]
FULL = ["full_attention"]


def test_flat_and_nested_keys_say_the_same() -> None:
    nested = config()
    flat = {**nested, **nested["dflash_config"]}
    del flat["dflash_config"]
    assert read_spec(flat) == read_spec(nested)


def test_a_nested_key_wins_over_a_flat_one() -> None:
    assert read_spec(config(block_size=16)).block_size == 8


def test_a_nested_block_size_is_read_and_a_silent_config_means_sixteen() -> None:
    assert read_spec(config()).block_size == 8
    assert read_spec(config(nested={"block_size": None})).block_size == 16


def test_qwen3_4b() -> None:
    spec = read_spec(configs.QWEN3_4B)
    assert (spec.taps, spec.block_size, spec.mask_token_id) == ((1, 9, 17, 25, 33), 16, 151669)
    assert spec.causal == (False,) * 5
    assert spec.window is None
    assert spec.rope_parameters["full_attention"]["rope_theta"] == 1e6
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 8, 128)
    assert spec.target_hidden_size == 2560


def test_qwen36_27b_slides_causally_and_drops_sections_of_other_position_axes() -> None:
    spec = read_spec(configs.QWEN36_27B)
    assert spec.causal == (True,) * 4 + (False,)
    assert spec.sliding_window == 2048
    assert spec.window is None  # the last layer sees everything
    for rope in spec.rope_parameters.values():
        assert rope["rope_theta"] == 1e7
        assert "mrope_section" not in rope


def test_kimi_k25_has_yarn_in_the_old_spelling() -> None:
    rope = read_spec(configs.KIMI_K25).rope_parameters["full_attention"]
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("yarn", 64.0, 50000.0)


def test_gpt_oss_has_more_layers_than_taps_and_biases() -> None:
    spec = read_spec(configs.GPT_OSS)
    assert (spec.num_layers, len(spec.taps), spec.block_size) == (8, 5, 10)
    assert spec.attention_bias


def test_gemma4_scales_embeddings_by_the_rounded_root_of_the_width_unless_told() -> None:
    spec = read_spec(configs.GEMMA4_31B)
    assert spec.softcap == 30.0
    assert spec.embedding_scale is None
    assert spec.embedding_scale_for("gemma4_text") == 73.5  # sqrt(5376) = 73.32 in bfloat16
    assert spec.embedding_scale_for("qwen3") == 1.0
    told = read_spec({**configs.GEMMA4_31B, "input_embedding_scale": 2.0})
    assert told.embedding_scale_for("gemma4_text") == 2.0


def test_muse_glimmer_slides_everywhere_without_causality() -> None:
    spec = read_spec(configs.MUSE_GLIMMER)
    assert spec.causal == (False,) * 5
    assert spec.layer_types == ("sliding_attention",) * 5
    assert spec.window == 2048


def test_ornith_has_eight_taps_for_six_layers() -> None:
    spec = read_spec(configs.ORNITH)
    assert (spec.num_layers, len(spec.taps)) == (6, 8)
    assert spec.causal == (True,) * 5 + (False,)


def test_mimo_slides_by_its_nested_keys() -> None:
    spec = read_spec(configs.MIMO)
    assert spec.layer_types == ("sliding_attention",) * 5
    assert (spec.sliding_window, spec.causal) == (1024, (False,) * 5)
    assert spec.sinks
    assert spec.value_scale == 0.707
    assert spec.rope_parameters["sliding_attention"]["partial_rotary_factor"] == 0.5


def test_speculators_store_taps_one_higher() -> None:
    spec = read_spec(configs.SPECULATORS)
    assert spec.taps == (1, 9, 17, 25, 33)
    assert (spec.block_size, spec.draft_vocab_size) == (8, 32000)
    assert spec.target_name == "Qwen/Qwen3-8B"
    assert spec.causal == (True,) * 4 + (False,)
    bidirectional = {**configs.SPECULATORS, "sliding_window_non_causal": True}
    assert read_spec(bidirectional).causal == (False,) * 5


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"nested": {"causal": False}}, (False, False)),
        ({"is_causal": True, "nested": {"causal": False}}, (True, True)),
    ],
)
def test_causality_takes_the_first_rule_that_applies(
    changes: dict[str, Any], causal: tuple[bool, ...]
) -> None:
    made = config(layer_types=SLIDING + FULL, sliding_window=8, **changes)
    assert read_spec(made).causal == causal


def test_a_window_is_forced_on_every_layer_only_when_none_slides() -> None:
    forced = {"use_swa": True, "swa_window_size": 4}
    assert read_spec(config(nested=forced)).window == 4
    mixed = config(nested=forced, layer_types=SLIDING + FULL, sliding_window=8)
    assert read_spec(mixed).sliding_window == 8
    assert read_spec(config(sliding_window=8, use_sliding_window=False)).sliding_window is None


def test_silent_layer_types_follow_the_qwen3_rule() -> None:
    made = config(use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert read_spec(made).layer_types == ("full_attention", "sliding_attention")
    assert read_spec(config(use_sliding_window=True, sliding_window=8)).window is None


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e7, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 1e7, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_theta": None, "rope_parameters": {
            "rope_theta": 1e7, "rope_type": "linear", "factor": 4}},
        {"rope_theta": None, "rope_parameters": {
            "full_attention": {"rope_theta": 1e7, "rope_type": "linear", "factor": 4},
            "sliding_attention": {"rope_theta": 1.0, "rope_type": "default"}}},
    ],
)  # fmt: skip
def test_every_rope_spelling_is_read_alike(spelling: dict[str, Any]) -> None:
    rope = read_spec(config(**spelling)).rope_parameters
    assert rope == {
        "full_attention": {
            "rope_theta": 1e7,
            "rope_type": "linear",
            "factor": 4,
            "partial_rotary_factor": 1.0,
        }
    }


def test_each_layer_type_may_have_its_own_rope() -> None:
    made = config(
        layer_types=SLIDING + FULL,
        sliding_window=8,
        rope_parameters={
            "full_attention": {"rope_theta": 1e6},
            "sliding_attention": {"rope_theta": 1e4},
        },
    )
    rope = read_spec(made).rope_parameters
    assert (rope["full_attention"]["rope_theta"], rope["sliding_attention"]["rope_theta"]) == (
        1e6,
        1e4,
    )


def test_a_missing_base_frequency_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="no rope_theta"):
        read_spec(config(rope_theta=None))


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "yarn"}, "needs factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor, high_freq_factor"),
        (
            {
                "rope_type": "llama3",
                "factor": 2.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 512,
            },
            "look exchanged",
        ),
        ("none", "must be a dict"),
    ],
)
def test_unknown_or_incomplete_rope_scaling_is_an_error(scaling: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_spec(config(rope_scaling=scaling))


def test_rope_over_several_position_axes_is_rope_over_the_text_axis() -> None:
    scaling = {"type": "mrope", "mrope_section": [16, 24, 24]}
    rope = read_spec(config(rope_scaling=scaling)).rope_parameters["full_attention"]
    assert rope == {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}


def test_rope_style_is_rotate_half_unless_said_otherwise() -> None:
    assert not read_spec(config()).rope_interleaved
    assert read_spec(config(is_neox_style=False)).rope_interleaved
    assert read_spec(config(rope_is_neox_style=False)).rope_interleaved


def test_multipliers_and_caps_are_read_from_either_place() -> None:
    nested = {"output_multiplier": 0.5, "final_logit_softcapping": 20, "input_embedding_scale": 3}
    for made in (config(nested=nested), config(**nested)):
        spec = read_spec(made)
        assert (spec.output_multiplier, spec.softcap, spec.embedding_scale) == (0.5, 20.0, 3.0)
    plain = read_spec(config(final_logit_softcapping=None))
    assert (plain.output_multiplier, plain.softcap, plain.embedding_scale) == (1.0, None, None)


@pytest.mark.parametrize("key", ["output_multiplier", "input_embedding_scale", "logit_scale"])
@pytest.mark.parametrize("value", [0, -1, "x", True])
def test_multipliers_must_be_positive(key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        read_spec(config(**{key: value}))


def test_a_missing_mask_id_is_never_guessed() -> None:
    with pytest.raises(CheckpointError, match="no mask_token_id"):
        read_spec(config(nested={"mask_token_id": None}))
    assert read_spec(config(nested={"mask_token_id": 0})).mask_token_id == 0


def test_missing_taps_name_the_formula_and_the_option_that_accepts_it() -> None:
    silent = config(nested={"target_layer_ids": None}, num_target_layers=36, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"\[1, 9, 17, 25, 33\].* --taps auto"):
        read_spec(silent)
    assert read_spec(silent, taps="auto").taps == (1, 9, 17, 25, 33)
    assert read_spec(silent, taps=[2, 4]).taps == (2, 4)


def test_the_formula_needs_a_depth_from_somewhere() -> None:
    silent = config(nested={"target_layer_ids": None}, num_target_layers=None)
    with pytest.raises(CheckpointError, match="--taps auto"):
        read_spec(silent)
    with pytest.raises(ConfigError, match="num_target_layers"):
        read_spec(silent, taps="auto")
    assert read_spec(silent, taps="auto", num_target_layers=8).taps == (1, 5)


def test_auto_leaves_configured_taps_alone() -> None:
    assert read_spec(config(), taps="auto").taps == (1, 2)


def test_auxiliary_layer_ids_are_inputs_of_layers() -> None:
    silent = config(nested={"target_layer_ids": None}, eagle_aux_hidden_state_layer_ids=[2, 3])
    assert read_spec(silent).taps == (1, 2)
    last_resort = config(nested={"target_layer_ids": None, "layer_ids": [2, 3]})
    assert read_spec(last_resort).taps == (1, 2)
    both = config(eagle_aux_hidden_state_layer_ids=[2, 3])
    assert read_spec(both).taps == (1, 2)
    with pytest.raises(CheckpointError, match="different layers"):
        read_spec(config(eagle_aux_hidden_state_layer_ids=[1, 2]))


@pytest.mark.parametrize("ids", [[1, 1], [-1, 2], [1.5], ["1"], [True]])
def test_taps_are_distinct_layer_numbers(ids: list[Any]) -> None:
    with pytest.raises(CheckpointError, match="distinct layer numbers"):
        read_spec(config(nested={"target_layer_ids": ids}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "no hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1"),
        ({"nested": {"block_size": 1}}, "block_size must be an integer of at least 2"),
        ({"nested": {"block_size": True}}, "block_size"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 2 entries"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"layer_types": SLIDING * 2}, "sliding_window is missing"),
        ({"is_causal": "yes"}, "is_causal must be true or false"),
        ({"nested": {"attention_mode": "mla"}}, "attention_mode 'mla' is not supported yet"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
        ({"num_key_value_heads": 3}, "num_attention_heads"),
        ({"nested": {"block_size": 10**9}}, "block_size must be at most 4096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 1024"),
        ({"rope_theta": "x"}, "rope_theta in the draft's rope settings must be a positive number"),
        ({"rope_theta": 10**400}, "must be a positive number"),
        ({"rope_theta": 0}, "must be a positive number, got 0"),
        ({"rope_theta": 0.5}, "rope_theta must be above 1"),
        ({"partial_rotary_factor": [1]}, "partial_rotary_factor in the draft's rope settings"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor in the draft's rope"),
    ],
)
def test_bad_values_name_the_key(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_spec(config(**changes))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"nested": {"projector_type": "domino"}}, "domino"),
        ({"nested": {"gru_hidden_dim": 64}}, "domino"),
        ({"architectures": ["Qwen3DSparkModel"]}, "dspark"),
        ({"markov_rank": 64}, "dspark"),
        ({"nested": {"sample_from_anchor": True}}, "dspark"),
        ({"architectures": ["PEagleDraftModel"]}, "peagle"),
        ({"architectures": ["MTPDraftModel"]}, "mtp"),
    ],
)
def test_siblings_are_recognised_and_refused(changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{kind}', which is not supported yet"):
        read_spec(config(**changes))


def test_speculators_siblings_are_told_by_their_model_type() -> None:
    for kind in ("dspark", "mtp", "peagle"):
        made = {**configs.SPECULATORS, "speculators_model_type": kind}
        with pytest.raises(CheckpointError, match="not supported yet"):
            read_spec(made)
    with pytest.raises(CheckpointError, match="'dspark'"):
        read_spec({**configs.SPECULATORS, "sample_from_anchor": True})


def test_a_speculators_config_needs_its_stack_and_may_leave_the_verifier_out() -> None:
    silent = {k: v for k, v in configs.SPECULATORS.items() if k != "speculators_config"}
    assert read_spec(silent).target_name is None
    nameless = {**silent, "speculators_config": {"algorithm": "dflash"}}
    assert read_spec(nameless).target_name is None
    del silent["transformer_layer_config"]
    with pytest.raises(CheckpointError, match="transformer_layer_config"):
        read_spec(silent)


def test_a_target_is_not_a_draft() -> None:
    with pytest.raises(CheckpointError, match=r"is a target model \(Qwen3ForCausalLM\)"):
        read_spec({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"})


def test_a_draft_under_a_borrowed_or_missing_name_is_told_by_its_keys() -> None:
    assert read_spec(config(architectures=["Qwen3ForCausalLM"])).kind == "dflash"
    assert read_spec(config(architectures=None)).kind == "dflash"
    flat = {**config(architectures=["Qwen3ForCausalLM"]), "mask_token_id": 3}
    del flat["dflash_config"]
    assert read_spec({**flat, "target_layer_ids": [1, 2]}).kind == "dflash"
    with pytest.raises(CheckpointError, match="is a target"):
        read_spec(flat)  # other models have mask tokens too


def test_an_unknown_architecture_says_what_is_known_and_how_to_override() -> None:
    with pytest.raises(CheckpointError, match=r"'FancyDrafter'.*\"architectures\": \[\"DFlash"):
        read_spec(config(architectures=["FancyDrafter"]))
    with pytest.raises(CheckpointError, match="neither a known draft nor a target"):
        read_spec({})
    with pytest.raises(CheckpointError, match="describes 'novel'"):
        read_spec(config(nested={"projector_type": "novel"}))
    assert read_spec(config(nested={"projector_type": "dflash"})).kind == "dflash"


def test_a_folder_and_a_file_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()), encoding="utf-8")
    assert read_spec(tmp_path) == read_spec(tmp_path / "config.json") == read_spec(config())


@pytest.mark.parametrize(("text", "says"), [("{", "JSON"), ("[]", "JSON object")])
def test_a_broken_config_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=says):
        read_spec(tmp_path)


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no config"):
        read_spec(tmp_path)
