"""llama-cpp-python's manner on GGUF files: the call forms people use, their errors, their keys."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")  # makes the tiny files
pytest.importorskip("xllamacpp")

from dflash.errors import ConfigError, EngineClosed, PairError
from dflash.llama import (
    Llama,
    SpecConfig,
    SpeculativeType,
    speculative_output_limits,
)
from tests.backends.gguf_files import DFLASH2, save_sidecar
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf

MESSAGES = [{"role": "user", "content": "How do rainbows form?"}]
DFLASH = SpeculativeType.DRAFT_DFLASH


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("llama")
    target = write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    return {
        "target": str(target),
        "v1": str(save_sidecar(folder / "v1.gguf", target)),
        "v2": str(save_sidecar(folder / "v2.gguf", target, **DFLASH2)),
    }


def llama(files: dict[str, str], draft: str | None = "v1", **options: Any) -> Llama:
    spec = None
    if draft is not None:
        spec = SpecConfig(DFLASH, 3, draft_model_path=files[draft])
    return Llama(files["target"], n_ctx=256, n_threads=1, speculative=spec, **options)


def test_the_documented_call_runs_as_it_stands(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = Llama(
        model_path=files["target"],
        n_ctx=512,
        n_batch=512,
        n_ubatch=512,
        n_gpu_layers="all",
        ctx_checkpoints=0,
        n_threads=1,
        speculative=SpecConfig(
            spec_type=SpeculativeType.DRAFT_DFLASH,
            draft_model_path=files["v2"],
            draft_n_max=7,
            draft_n_min=0,
            draft_p_min=0.0,
            draft_n_gpu_layers="all",
            draft_backend_sampling=False,
        ),
        verbose=True,
    )
    found = model.create_chat_completion(messages=MESSAGES, temperature=0.0, max_tokens=24)
    assert found["choices"][0]["message"]["content"]
    stats = model.last_speculative_stats
    assert stats["drafted"] and stats["generation_tokens_per_second"] > 0
    assert stats["accepted_draft_tokens"] / stats["drafted"] == stats["draft_token_acceptance_rate"]
    model.close()
    model.close()
    said = capsys.readouterr().err
    for words in (
        "memory estimate: target",
        "on CPU",
        "DFlash2 speculative decoding enabled",
        "draft_n_max 7 (runs 5)",
        "block_size 6, mask_token 300, target_layers [1, 3], selector_top_k 5, mrope False",
        "backend_sampling off, inactive: the selector chooses",
        "draft-dflash summary",
    ):
        assert words in said, words
    with pytest.raises(EngineClosed):
        model("again")


@pytest.mark.parametrize("draft", ["v1", "v2"])
def test_the_text_is_that_of_ordinary_decoding(draft: str, files: dict[str, str]) -> None:
    with llama(files, None) as model:
        plain = [model("Once", max_tokens=n)["choices"][0] for n in (1, 5, 30)]
    with llama(files, draft) as model:
        assert [model("Once", max_tokens=n)["choices"][0] for n in (1, 5, 30)] == plain


def test_a_stream_has_the_same_text_and_may_be_left(files: dict[str, str]) -> None:
    with llama(files) as model:
        whole = model.create_chat_completion(MESSAGES, max_tokens=24)
        parts = list(model.create_chat_completion(MESSAGES, max_tokens=24, stream=True))
        assert parts[0]["choices"][0]["delta"] == {"role": "assistant"}
        said = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
        assert said == whole["choices"][0]["message"]["content"]
        assert parts[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        for steps in range(1, 5):
            stream = model.create_completion("Once", max_tokens=24, stream=True)
            for _ in range(steps):
                next(stream)
            del stream
            again = model.create_chat_completion(MESSAGES, max_tokens=24)
            assert again["choices"] == whole["choices"]


def test_a_stream_has_the_log_probabilities_of_the_whole(files: dict[str, str]) -> None:
    with llama(files) as model:
        asked = {"max_tokens": 12, "logprobs": 2}
        whole = model.create_chat_completion(MESSAGES, **asked)
        parts = list(model.create_chat_completion(MESSAGES, stream=True, **asked))
    said = [entry for part in parts for entry in part["choices"][0]["logprobs"] or ()]
    assert [entry["token"] for entry in said] == [
        entry["token"] for entry in whole["choices"][0]["logprobs"]
    ]
    assert len(said) == whole["usage"]["completion_tokens"]


KEYS = """
    drafted verified accepted begin_calls draft_calls process_calls accept_calls generated_drafts
    accepted_drafts draft_batch_acceptance_rate accepted_draft_tokens draft_token_acceptance_rate
    mean_accepted_length acceptance_rate_per_position begin_seconds draft_seconds
    target_decode_seconds target_sync_seconds process_seconds accept_seconds checkpoint_captures
    checkpoint_restores checkpoint_verification_reuses checkpoint_native_captures
    checkpoint_native_restores checkpoint_device_captures checkpoint_device_restores
    checkpoint_native_verification_rollbacks checkpoint_buffer_bytes checkpoint_capture_seconds
    checkpoint_restore_seconds verification_steps rollbacks native_rollbacks checkpoint_rollbacks
    acceptance_rate generation_tokens generation_seconds generation_tokens_per_second
    time_to_first_token_seconds sustained_tokens sustained_seconds sustained_tokens_per_second
    decode_tokens decode_seconds decode_tokens_per_second
"""


def test_every_statistic_is_there_from_the_start(files: dict[str, str]) -> None:
    with llama(files) as model:
        before = model.last_speculative_stats
        assert set(before) == set(KEYS.split())
        assert before["acceptance_rate_per_position"] == [] and not any(before.values())
        model("Once", max_tokens=20)
        after = model.last_speculative_stats
    assert after.keys() == before.keys()
    assert after["draft_calls"] == after["verification_steps"] > 0
    assert after["generation_tokens"] == 20
    assert len(after["acceptance_rate_per_position"]) == 3
    rounds = after["draft_calls"]
    assert after["mean_accepted_length"] == pytest.approx(1 + after["accepted"] / rounds)
    assert 0 <= after["rollbacks"] <= rounds


def test_only_rounds_that_rejected_a_draft_are_rollbacks(files: dict[str, str]) -> None:
    spec = SpecConfig(SpeculativeType.NGRAM_SIMPLE, 7)
    with Llama(files["target"], n_ctx=256, n_threads=1, speculative=spec) as model:
        for tokens in (11, 13, 20):  # the last block is cut short by the limit
            found = model("Once", max_tokens=tokens, logit_bias={70: 100.0})
            stats = model.last_speculative_stats
            assert found["usage"]["completion_tokens"] == tokens
            assert stats["accepted"] == stats["drafted"] and stats["accepted"]
            assert stats["rollbacks"] == stats["native_rollbacks"] == 0
            plain = tokens - 1 - stats["accepted"] - stats["draft_calls"]
            assert plain >= 1, "nothing is looked up before anything was said twice"


def test_ngram_drafts_need_no_file(files: dict[str, str]) -> None:
    spec = SpecConfig(SpeculativeType.NGRAM_SIMPLE, 7)
    with Llama(files["target"], n_ctx=256, n_threads=1, speculative=spec) as model:
        model("Once", max_tokens=20, logit_bias={70: 100.0})
        assert model.last_speculative_stats["accepted"]


def test_images_and_audio_are_named_in_the_error(files: dict[str, str]) -> None:
    with llama(files) as model:
        text = [{"type": "text", "text": "Hello"}]
        model.create_chat_completion([{"role": "user", "content": text}], max_tokens=2)
        for kind in ("image_url", "input_audio"):
            parts = [*text, {"type": kind, kind: {}}]
            with pytest.raises(ConfigError, match=kind):
                model.create_chat_completion([{"role": "user", "content": parts}])
        with pytest.raises(ConfigError, match="must have a text"):
            model.create_chat_completion([{"role": "user", "content": [{"type": "text"}]}])


def test_text_and_ids_are_there_and_back(files: dict[str, str]) -> None:
    with llama(files, None) as model:
        ids = model.tokenize("naïve 🙂".encode())
        assert model.detokenize(ids).decode() == "naïve 🙂"
        assert model.n_ctx() == 256


def test_a_batch_too_small_for_a_verification_is_refused(files: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="n_batch must be at least 4"):
        llama(files, n_batch=3)
    with llama(files, n_batch=4) as model:
        assert model("Once upon a time there was", max_tokens=12)


def test_an_option_nobody_knows_is_refused(files: dict[str, str]) -> None:
    with llama(files, None) as model, pytest.raises(ConfigError, match="mirostat"):
        model("Once", mirostat_mode=2)


def test_two_files_that_do_not_fit_are_refused(files: dict[str, str], tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "t.gguf", tiny_target("llama", layers=2), tiny_tokenizer())
    with pytest.raises(PairError, match="layer 3"):
        Llama(str(other), speculative=SpecConfig(DFLASH, draft_model_path=files["v1"]))


def test_an_interpreter_ends_quietly_with_a_model_open(files: dict[str, str]) -> None:
    code = (
        "from dflash.llama import *\n"
        f"spec = SpecConfig(SpeculativeType.DRAFT_DFLASH, draft_model_path={files['v1']!r})\n"
        f"model = Llama({files['target']!r}, n_ctx=128, n_threads=1, speculative=spec)\n"
        "stream = model('Once', max_tokens=9, stream=True)\n"
        "next(stream)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


# --- the config -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_n_max": 0}, "draft_n_max"),
        ({"draft_n_min": -1}, "draft_n_min"),
        ({"draft_n_min": 4}, "draft_n_min"),
        ({"draft_p_split": 1.1}, "draft_p_split"),
        ({"draft_p_min": -0.1}, "draft_p_min"),
        ({"ngram_size_n": 0}, "ngram_size_n"),
        ({"ngram_min_hits": 0}, "ngram_min_hits"),
        ({"draft_model_path": None}, "draft_model_path"),
        ({"draft_n_gpu_layers": -3}, "draft_n_gpu_layers"),
        ({"draft_n_gpu_layers": "some"}, "draft_n_gpu_layers"),
        ({"draft_n_cpu_moe": -1}, "draft_n_cpu_moe"),
        ({"draft_n_threads": 0}, "draft_n_threads"),
        ({"draft_n_max": "three"}, "draft_n_max"),
        ({"draft_n_max": None}, "draft_n_max"),
        ({"ngram_size_m": 0}, "ngram_size_m"),
        ({"draft_p_split": -0.1}, "draft_p_split"),
        ({"draft_p_min": 1.1}, "draft_p_min"),
        ({"draft_n_threads_batch": 0}, "draft_n_threads_batch"),
        ({"draft_n_threads": 100_000}, "draft_n_threads must be .*, at most 512, got 100000"),
        ({"draft_n_threads_batch": 513}, "draft_n_threads_batch must be .*, at most 512, got 513"),
        ({"ngram_max_entries_per_key": 0}, "ngram_max_entries_per_key"),
        ({"draft_n_max": 2.5}, "draft_n_max"),
        ({"draft_n_min": None}, "draft_n_min"),
        ({"draft_p_min": "half"}, "draft_p_min"),
        ({"draft_n_gpu_layers": None}, "draft_n_gpu_layers"),
        ({"draft_model_path": 3}, "draft_model_path"),
        ({"ngram_size_n": True}, "ngram_size_n"),
    ],
)
def test_bad_values_are_one_value_error(changes: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"spec_type": DFLASH, "draft_model_path": "x.gguf", **changes}
    with pytest.raises(ValueError, match=rf"^SpecConfig: .*{words}"):
        SpecConfig(**given).validate()
    SpecConfig(**{**given, "spec_type": SpeculativeType.NONE}).validate()  # nothing is asked


def test_a_type_that_is_none_is_one_value_error() -> None:
    with pytest.raises(ValueError, match=r"^SpecConfig: spec_type must be .* got 'dflash'"):
        SpecConfig("dflash").validate()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_batch": "many"}, "n_batch must be a whole number"),
        ({"n_ubatch": None}, "n_ubatch must be a whole number"),
        ({"n_ctx": 1.5}, "n_ctx must be a whole number"),
        ({"n_gpu_layers": [1]}, "n_gpu_layers must be"),
        ({"ctx_checkpoints": -1}, "ctx_checkpoints must be"),
        ({"flash_attn": "on"}, "flash_attn must be True or False"),
        ({"flash_attn": []}, "flash_attn must be True or False"),
        ({"flash_attn": False, "type_v": 8}, "type_v q8_0 needs flash attention, and flash_attn"),
        ({"type_k": ["f16"]}, "type_k must be one of"),
        ({"speculative": "dflash"}, "speculative must be a SpecConfig"),
        ({"model_path": 3}, "model_path must be a path"),
        ({"n_threads": "2"}, "threads must be"),
    ],
)
def test_arguments_of_a_wrong_type_are_one_error(
    options: dict[str, Any], words: str, files: dict[str, str]
) -> None:
    given: dict[str, Any] = {"model_path": files["target"], "n_threads": 1, **options}
    with pytest.raises(ConfigError, match=words):
        Llama(**given)


def test_calls_with_a_wrong_type_are_one_error(files: dict[str, str]) -> None:
    with llama(files, None) as model:
        calls: dict[str, Any] = {
            "max_tokens must be": lambda: model("Once", max_tokens="9"),
            "text must be bytes": lambda: model.tokenize("Once"),  # type: ignore[arg-type]
            "tokens must be": lambda: model.detokenize([3, 10**9]),
            "tokens must be ids": lambda: model.detokenize("x"),  # type: ignore[arg-type]
            "messages must be": lambda: model.create_chat_completion("Once"),  # type: ignore[arg-type]
            "content must be": lambda: model.create_chat_completion(
                [{"role": "user", "content": 3}]
            ),
        }
        for words, call in calls.items():
            with pytest.raises(ConfigError, match=words):
                call()


def test_methods_without_an_engine_are_not_implemented() -> None:
    for kind in (SpeculativeType.DRAFT_SIMPLE, SpeculativeType.DRAFT_DSPARK):
        with pytest.raises(NotImplementedError, match=r"^SpecConfig: "):
            SpecConfig(kind, draft_model_path="x.gguf").validate()
    heads = SpecConfig(SpeculativeType.DRAFT_MTP)
    heads.validate()
    heads.draft_model_path = "mtp.gguf"
    with pytest.raises(NotImplementedError, match=r"^SpecConfig: .*leave draft_model_path out"):
        heads.validate()


DEFAULTS: dict[str, Any] = {
    "spec_type": SpeculativeType.NONE,
    "draft_n_max": 3,
    "draft_n_min": 0,
    "draft_p_split": 0.1,
    "draft_p_min": 0.0,
    "draft_model_path": None,
    "draft_n_gpu_layers": "auto",
    "draft_n_threads": None,
    "draft_n_threads_batch": None,
    "draft_cpu_moe": False,
    "draft_n_cpu_moe": 0,
    "draft_tensor_buft_overrides": None,
    "draft_type_k": None,
    "draft_type_v": None,
    "draft_devices": [],
    "draft_backend_sampling": True,
    "ngram_size_n": 12,
    "ngram_size_m": 48,
    "ngram_min_hits": 1,
    "ngram_max_entries_per_key": None,
    "ngram_mod_n_match": 24,
    "ngram_mod_n_max": 64,
    "ngram_mod_n_min": 48,
    "lookup_cache_dynamic": None,
    "lookup_cache_static": None,
    "draft_model_kwargs": {},
}


def test_every_field_is_there_with_its_default() -> None:
    assert asdict(SpecConfig()) == DEFAULTS
    assert [field.name for field in fields(SpecConfig)] == list(DEFAULTS), "order is positional"


def test_defaults_are_those_people_know() -> None:
    spec = SpecConfig(draft_n_threads=3)
    assert (spec.draft_n_max, spec.draft_n_min, spec.draft_p_split) == (3, 0, 0.1)
    assert spec.draft_n_threads_batch == 3
    assert spec.draft_backend_sampling and spec.draft_devices == [] and not spec.enabled()
    assert spec.max_draft_tokens() == 0
    assert SpecConfig(DFLASH, 5).max_draft_tokens() == 5 and SpecConfig(DFLASH).enabled()
    layers = [SpecConfig(draft_n_gpu_layers=n) for n in ("auto", "all", 7)]
    assert [one.resolved_draft_n_gpu_layers() for one in layers] == [-1, -2, 7]
    assert speculative_output_limits(512, 2, 7) == (16, 8)
    assert speculative_output_limits(4, 1, 7) == (4, 4)
    with pytest.raises(ValueError, match="n_draft"):
        speculative_output_limits(512, 1, 0)


def test_types_have_numbers_names_and_questions() -> None:
    assert [int(kind) for kind in SpeculativeType] == list(range(12))
    for text in ("draft-dflash", " DRAFT_DFLASH ", "dflash", "draft dflash"):
        assert SpeculativeType.from_str(text) is DFLASH
    assert SpeculativeType.from_str("ngram-k4v") is SpeculativeType.NGRAM_MAP_K4V
    assert DFLASH.to_str() == str(DFLASH) == "draft-dflash"
    assert SpeculativeType.COUNT.to_str() == "unknown"
    assert DFLASH.is_draft() and DFLASH.is_dflash() and not DFLASH.is_ngram()
    assert SpeculativeType.NGRAM_MOD.is_ngram() and SpeculativeType.NONE.is_none()
    assert SpeculativeType.DRAFT_MTP.is_mtp() and SpeculativeType.DRAFT_DSPARK.is_dspark()
    assert SpeculativeType.DRAFT_EAGLE3.is_eagle3()
    with pytest.raises(ValueError, match="Unknown speculative type"):
        SpeculativeType.from_str("medusa")


@pytest.mark.parametrize("limit", [5.0, "5", True])
def test_a_limit_is_a_whole_number(limit: Any, files: dict[str, str]) -> None:
    with llama(files, None) as model, pytest.raises(ConfigError) as problem:
        model("Once", max_tokens=limit)
    assert str(problem.value) == f"max_tokens must be a whole number, got {limit!r}"
