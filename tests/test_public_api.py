"""What people import and call. A change here is a change of the public interface: say it aloud."""

from __future__ import annotations

import inspect

import pytest

import dflash

NAMES = [
    "CheckpointError",
    "Chunk",
    "ConfigError",
    "DFlash2DraftModel",
    "DFlashDraftModel",
    "DFlashError",
    "DataError",
    "DownloadError",
    "Engine",
    "EngineClosed",
    "GenerateConfig",
    "Generation",
    "LoadConfig",
    "MissingBackend",
    "OutOfMemory",
    "PairError",
    "PromptError",
    "Stats",
    "UnknownName",
    "WeightsError",
    "extract_context_feature",
    "load",
    "load_and_process_dataset",
    "sample",
]
FACADE = [
    "DFlash2DraftModel",
    "DFlashDraftModel",
    "GenerationStats",
    "build_target_layer_ids",
    "dflash_generate",
    "extract_context_feature",
    "load_and_process_dataset",
    "sample",
]


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


def test_the_package_exports_exactly_these_names() -> None:
    assert dflash.__all__ == NAMES == sorted(NAMES)
    assert set(NAMES) <= set(dir(dflash))


def test_every_exported_name_is_there() -> None:
    pytest.importorskip("torch")
    for name in NAMES:
        assert getattr(dflash, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        dflash.nothing_of_the_kind  # noqa: B018 - the look-up is the test


def test_the_engine_is_called_as_documented() -> None:
    assert parameters(dflash.load) == ["target", "draft", "options"]
    common = ["self", "prompt", "chat_template", "system"]
    assert parameters(dflash.Engine.generate) == [*common, "options"]
    assert parameters(dflash.Engine.stream) == [*common, "progress", "options"]
    public = {n for n in vars(dflash.Engine) if not n.startswith("_")}
    assert public == {"close", "encode", "generate", "keep", "kept", "stream"}


def test_results_have_the_documented_fields() -> None:
    assert list(dflash.Generation.__dataclass_fields__) == [
        *("text", "token_ids", "finish_reason", "stats", "logprobs", "others")
    ]
    assert list(dflash.Chunk.__dataclass_fields__) == [
        *("text", "token_ids", "sources", "pieces", "finish_reason", "stats", "state"),
        *("logprobs", "index", "drafted"),
    ]
    assert list(dflash.Stats.__dataclass_fields__) == [
        *("prompt_tokens", "completion_tokens", "rounds", "drafted", "accepted"),
        *("mean_committed", "acceptance_rate", "acceptance_by_position", "histogram"),
        *("draft_seconds", "verify_seconds", "time_to_first_token", "tokens_per_second"),
        *("block_size", "backend", "clamped_from", "policy", "speedup", "by_draft"),
        *("cached_tokens", "judged", "conditional_acceptance", "macro_acceptance_rate"),
        *("host_seconds", "block_sizes", "block_reason", "fallback_rounds", "fallback_reason"),
        "rollbacks",
    ]


def test_options_have_the_documented_names() -> None:
    assert list(dflash.LoadConfig.__dataclass_fields__) == [
        *("target", "draft", "backend", "device", "dtype", "draft_dtype"),
        *("draft_sliding_window_size", "draft_bits", "taps", "threads", "pack_weights"),
        "trust_remote_code",
        *("profile", "force_dflash", "gguf", "mtp", "weights", "cuda_graphs", "compile"),
    ]
    assert list(dflash.GenerateConfig.__dataclass_fields__) == [
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "no_repeat_ngram", "logit_bias", "bad_words"),
        *("min_tokens", "logits_processors", "seed", "stop", "stop_token_ids", "ignore_eos"),
        *("json_schema", "regex", "grammar", "thinking_budget", "logprobs", "n", "echo"),
        *(
            "block_size",
            "draft_tokens",
            "strict_mode",
            "rule",
            "greedy_drafts",
            "draft_path",
            "draft_p_min",
        ),
        *("draft_tree", "min_acceptance_rate", "reuse"),
    ]


def test_the_facade_keeps_upstreams_names_and_arguments() -> None:
    pytest.importorskip("torch")
    from dflash import model

    assert sorted(model.__all__) == FACADE
    assert parameters(model.dflash_generate)[:9] == [
        *("model", "target", "input_ids", "max_new_tokens", "stop_token_ids", "temperature"),
        *("block_size", "mask_token_id", "return_stats"),
    ]
    assert parameters(model.build_target_layer_ids) == ["num_target_layers", "num_draft_layers"]
    assert parameters(model.extract_context_feature) == ["hidden_states", "layer_ids"]
    assert parameters(model.sample)[:2] == ["logits", "temperature"]
    assert parameters(model.DFlashDraftModel.spec_generate)[:6] == [
        *("self", "target", "input_ids", "max_new_tokens", "stop_token_ids", "temperature")
    ]
    assert list(model.GenerationStats.__dataclass_fields__) == [
        *("output_ids", "num_input_tokens", "num_output_tokens", "time_to_first_token"),
        *("time_per_output_token", "acceptance_lengths"),
    ]


def test_the_mlx_facade_keeps_upstreams_names_and_arguments() -> None:
    pytest.importorskip("mlx_lm")
    from dflash import model_mlx

    assert parameters(model_mlx.stream_generate)[:7] == [
        *("model", "draft", "tokenizer", "prompt", "block_size", "max_tokens", "temperature")
    ]
    assert parameters(model_mlx.load_draft)[:2] == ["draft_id", "sliding_window_size"]
    assert list(model_mlx.GenerationResponse.__dataclass_fields__) == [
        *("text", "tokens", "accepted", "prompt_tokens", "prompt_tps", "generation_tokens"),
        *("generation_tps", "peak_memory", "finish_reason"),
    ]


def test_errors_form_one_tree() -> None:
    errors = [
        thing for name in NAMES if name.endswith("Error") and (thing := getattr(dflash, name))
    ]
    assert all(issubclass(error, dflash.DFlashError) for error in errors)
    assert issubclass(dflash.ConfigError, ValueError)
    assert issubclass(dflash.MissingBackend, ImportError)


def test_the_package_says_that_it_is_typed() -> None:
    from importlib.resources import files

    assert files("dflash").joinpath("py.typed").is_file()


def test_the_version_is_that_of_the_distribution() -> None:
    assert dflash.__version__
    assert not dflash.__version__.startswith("unknown")
