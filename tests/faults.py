"""Faults that others had with speculative decoding, and the tests that would show them here.

Numbers are those of the project's list of reports (rows R36 to R75: configs, weights, layers, RoPE,
vocabularies, number formats, rollback, caches, windows, memory). `test_faults.py` holds every name
below against the files. A fault that cannot occur because the thing does not exist says so.
"""

from __future__ import annotations

COVERED: dict[str, tuple[str, ...]] = {
    "R37 base frequency guessed": (
        "drafts/test_spec.py::test_a_missing_base_frequency_is_an_error",
        "backends/test_dflash_module.py::"
        "test_no_scaling_means_plain_powers_of_the_base_the_config_says",
        "convert/test_gguf.py::test_a_base_frequency_is_kept_wherever_it_stands",
    ),
    "R38 RoPE scaling hard-coded": (
        "backends/test_dflash_module.py::test_scaled_frequencies_agree_with_an_independent_formula",
    ),
    "R40 tap ids guessed": (
        "drafts/test_spec.py::test_missing_taps_name_the_formula_and_the_option_that_accepts_it",
        "backends/test_dflash_load.py::test_a_wrong_tap_count_names_both_numbers",
        "backends/test_gguf_backend.py::"
        "test_a_faulty_sidecar_is_one_error_before_llama_cpp_sees_it",
    ),
    "R41 layer off by one": (
        "backends/test_torch_target.py::test_features_are_the_outputs_of_the_tapped_layer",
        "backends/test_torch_target.py::test_a_tap_outside_the_target_is_refused_when_the_session_opens",
        "drafts/test_spec_eagle3.py::test_the_same_layers_are_tapped_whatever_layout_names_them",
        "convert/test_layer_ids.py::test_the_two_eagle_lists_of_one_draft_differ_by_one",
        "convert/test_convert.py::test_a_config_that_loses_a_word_is_found_out",
    ),
    "R43 nested block size not read": (
        "drafts/test_spec.py::test_a_nested_block_size_is_read_and_a_silent_config_means_sixteen",
        "test_engine.py::test_a_block_beyond_the_draft_is_clamped_visibly",
    ),
    "R44 a draft loaded in part": (
        "backends/test_dflash_load.py::test_unknown_and_missing_tensors_are_listed_together",
        "drafts/test_spec_dflash2.py::test_a_dflash2_draft_is_told_by_name_or_by_its_keys",
        "convert/test_convert.py::test_unknown_tensors_are_refused_by_name_and_nothing_is_left",
    ),
    "R46 a sibling's name": (
        "drafts/test_spec.py::test_an_unknown_architecture_says_what_is_known_and_how_to_override",
        "drafts/test_spec_eagle3.py::test_relatives_are_refused_by_name_in_one_sentence",
    ),
    "R47 a reduced head replaced": (
        "backends/test_dflash_load.py::test_a_reduced_vocabulary_is_mapped_by_its_distances",
        "backends/test_dflash_load.py::test_a_head_that_does_not_match_its_map_is_refused",
        "backends/test_eagle3.py::test_a_head_that_does_not_match_its_map_is_refused",
        "backends/test_gguf_backend.py::test_a_reduced_vocabulary_proposes_its_own_tokens_only",
        "convert/test_gguf.py::test_a_vocabulary_of_its_own_goes_along_with_its_head",
    ),
    "R49 a tied head handed out as an embedding": (
        "backends/test_dflash_load.py::test_a_head_handed_out_as_an_embedding_works",
    ),
    "R50 a quantised head": (
        "backends/test_quantised_head.py::test_a_target_with_int8_layers_runs_beside_any_draft",
    ),
    "R52 another tokenizer": (
        "backends/test_dflash_load.py::test_another_tokenizer_is_refused",
        "drafts/test_static.py::test_a_recorded_tokenizer_decides_whatever_the_names_say",
        "convert/test_gguf.py::test_what_a_sidecar_has_no_key_for_comes_back_all_the_same",
    ),
    "R53 float16 overflows": (
        "backends/test_dflash_load.py::test_float16_is_refused_and_says_why",
        "backends/test_dflash_session.py::"
        "test_a_draft_that_computes_nan_is_named_and_not_silently_useless",
    ),
    "R55 unsupported or broken?": (
        "doctor/test_causes.py::test_a_quantised_target_is_named_and_is_no_fault",
        "doctor/test_causes.py::test_a_draft_that_knows_nothing_is_broken_without_a_cause",
    ),
    "R56 a quantised cache": ("test_faults.py::test_a_quantised_cache_cannot_be_asked_for",),
    "R58 a recurrent state emptied instead of taken back": (
        "backends/test_rollback.py::"
        "test_after_any_cut_of_a_block_the_cache_is_that_of_the_kept_tokens_alone",
        "backends/test_rollback.py::test_that_test_would_see_a_state_that_was_not_taken_back",
    ),
    "R59 look-ups on a hybrid": (
        "conformance/test_families.py::test_a_hybrid_says_the_same_with_a_lookup_and_resumes",
        "backends/test_rollback.py::test_random_blocks_leave_the_text_of_plain_decoding",
    ),
    "R61 prefixes of a hybrid": (
        "conformance/test_families.py::test_a_hybrid_says_the_same_with_a_lookup_and_resumes",
        "backends/test_rollback.py::"
        "test_the_same_prompt_resumes_at_its_last_token_and_says_the_same",
    ),
    "R62 a full window that cannot be trimmed": (
        "backends/test_torch_target_cache.py::"
        "test_rollback_is_exact_before_and_after_a_window_has_filled",
        "backends/test_torch_target_lossless.py::"
        "test_any_draft_at_any_block_leaves_the_output_as_plain_decoding_has_it",
    ),
    "R64 a draft's window without rows": (
        "backends/test_dflash_session.py::"
        "test_a_windowed_session_resumes_anywhere_with_the_history_it_has_left",
    ),
    "R65 no features after a cache hit": (
        "backends/test_dflash_session.py::"
        "test_a_second_request_that_shares_a_prefix_drafts_like_a_cold_one",
        "backends/test_dflash_session.py::test_unused_cache_rows_are_never_read",
        "backends/test_eagle3.py::test_a_resumed_session_says_what_a_fresh_one_says",
    ),
    "R67 counters never reset": (
        "conformance/test_engine_use.py::test_one_engine_serves_prompts_of_every_length_in_turn",
        "conformance/test_engine_use.py::test_one_engine_serves_threads",
    ),
    "R68 a draft that costs the prefix cache": (
        "test_engine.py::test_a_conversation_resumes_its_session",
        "conformance/test_engine_use.py::test_a_conversation_continues_where_it_ended",
    ),
    "R70 a draft's cache for the whole context": (
        "backends/test_dflash_session.py::"
        "test_after_2000_tokens_a_window_of_32_holds_at_most_window_and_block",
        "backends/test_dflash_session.py::test_sliding_layers_keep_no_more_than_they_see",
    ),
    "R71 memory that grows with requests": (
        "test_engine.py::test_few_sessions_stay_parked",
        "test_engine.py::test_a_forgotten_stream_costs_nothing_but_its_session",
        "conformance/test_draft_kinds.py::test_requests_one_after_the_other_leave_nothing_behind",
    ),
    "R73 windows run as full attention": (
        "backends/test_dflash_module.py::test_mixed_windows_agree_with_a_slow_forward_at_length_64",
        "backends/test_dflash_module.py::test_what_lies_outside_the_window_changes_nothing",
    ),
    "R74 a history shorter than trained": (
        "drafts/test_static.py::test_a_history_shorter_than_trained_is_a_warning",
    ),
}
