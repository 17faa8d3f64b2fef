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
from dflash.gguf_file import read_header
from dflash.llama import (
    Llama,
    SpecConfig,
    SpeculativeType,
    speculative_output_limits,
)
from tests.backends.gguf_files import DFLASH2, edited, save_sidecar
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


def test_log_probabilities_of_a_completion_are_four_lists(files: dict[str, str]) -> None:
    with llama(files) as model:
        asked: dict[str, Any] = {"max_tokens": 12, "logprobs": 2, "ignore_eos": True}
        whole = model("Once", **asked)["choices"][0]
        parts = [part["choices"][0] for part in model("Once", stream=True, **asked)]
        echoed = model("Once", echo=True, **asked)["choices"][0]["logprobs"]
        assert model("Once", max_tokens=3)["choices"][0]["logprobs"] is None
    found = whole["logprobs"]
    assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert {len(entries) for entries in found.values()} == {12}
    assert "".join(found["tokens"][:3]) == whole["text"][: found["text_offset"][3]]
    for said, value, top in zip(*list(found.values())[:3], strict=True):
        assert len(top) <= 2 and value == pytest.approx(top[said]) == max(top.values())
    for name in ("tokens", "text_offset"):
        said = [entry for part in parts for entry in (part["logprobs"] or {name: []})[name]]
        assert said == found[name], name
    assert echoed["text_offset"] == [len("Once") + place for place in found["text_offset"]]


def test_log_probabilities_of_a_chat_are_openais(files: dict[str, str]) -> None:
    with llama(files) as model:
        asked: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "top_logprobs": 2}
        whole = model.create_chat_completion(MESSAGES, **asked)
        parts = list(model.create_chat_completion(MESSAGES, stream=True, **asked))
        alone = model.create_chat_completion(MESSAGES, max_tokens=2, logprobs=True)
        without = model.create_chat_completion(MESSAGES, max_tokens=2)
        wrong: dict[str, dict[str, Any]] = {
            "logprobs must be True or False": {"logprobs": 2},
            "add logprobs=True": {"top_logprobs": 2},
            "top_logprobs must be": {"logprobs": True, "top_logprobs": -1},
        }
        for words, options in wrong.items():
            with pytest.raises(ConfigError, match=words):
                model.create_chat_completion(MESSAGES, **options)
    found = whole["choices"][0]["logprobs"]["content"]
    assert len(found) == whole["usage"]["completion_tokens"]
    for entry in found:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(entry["bytes"]).decode(errors="replace") == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert len(entry["top_logprobs"]) == 2
    notes = [part["choices"][0]["logprobs"] for part in parts]
    streamed = [entry["token"] for note in notes if note for entry in note["content"]]
    assert streamed == [entry["token"] for entry in found]
    assert alone["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert without["choices"][0]["logprobs"] is None


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


def test_figures_are_those_of_the_request_that_runs(files: dict[str, str]) -> None:
    counts = ("drafted", "accepted", "draft_calls", "verification_steps", "generation_tokens")
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "stream": True}
    with llama(files) as model:
        model("Once", max_tokens=40, ignore_eos=True)
        stream = model("Rain", **asked)
        assert not any(model.last_speculative_stats.values()), "of the one before nothing is left"
        for _ in range(4):
            next(stream)
        running = model.last_speculative_stats
        assert running.keys() == set(KEYS.split())
        assert 4 <= running["generation_tokens"] < 20 and running["draft_calls"] == 3
        assert running["drafted"] == 9 and len(running["acceptance_rate_per_position"]) == 3
        assert running["generation_seconds"] > running["time_to_first_token_seconds"] > 0
        stream.close()
        assert model.last_speculative_stats == running, "left where it stood"
        seen = []
        for _ in model("Rain", **asked):
            seen.append(model.last_speculative_stats)
    assert [seen[3][name] for name in counts] == [running[name] for name in counts]
    assert seen[-2]["process_calls"] == seen[-1]["process_calls"] - 1
    assert seen[-1]["generation_tokens"] == 20 and seen[-1]["draft_seconds"] > 0


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


@pytest.mark.parametrize("messages", [None, 5, "Hi", ["Hi"]])
def test_messages_that_are_none_are_named(messages: Any, files: dict[str, str]) -> None:
    with llama(files) as model, pytest.raises(ConfigError, match="messages must be a list of"):
        model.create_chat_completion(messages)


def test_text_and_ids_are_there_and_back(files: dict[str, str]) -> None:
    with llama(files, None) as model:
        ids = model.tokenize("naïve 🙂".encode())
        assert model.detokenize(ids).decode() == "naïve 🙂"
        assert model.n_ctx() == 256


def test_bytes_that_are_no_text_are_there_and_back(files: dict[str, str]) -> None:
    every = bytes(range(256)) + "naïve 🙂 ".encode() + b"\xf0\x9f a\xff\xfe b\xc3"
    with llama(files, None) as model:
        for raw in (b"a\xff", b"\xff", b"", every, every[::-1]):
            assert model.detokenize(model.tokenize(raw)) == raw
        assert model.tokenize(b"a\xff")[:1] == model.tokenize(b"a")


def test_markers_are_text_unless_they_are_asked_for(files: dict[str, str]) -> None:
    with llama(files, None) as model:
        tokenizer = model._engine.pair.tokenizer  # type: ignore[attr-defined]
        end = tokenizer.eos_token_id
        marker = tokenizer.name_of(end)
        assert marker and model.tokenize(marker, special=True) == [end]
        plain = model.tokenize(marker, True, False)
        assert plain == model.tokenize(marker) and end not in plain
        assert model.detokenize(plain) == marker
        assert model.detokenize([end]) == b""
        assert model.detokenize([end], prev_tokens=[1], special=True) == marker


def test_bytes_fall_back_and_spaces_are_taken_back_in_a_sentencepiece_vocabulary(
    files: dict[str, str], tmp_path: Path
) -> None:
    with llama(sentencepiece(files, tmp_path), None) as model:
        for raw in (
            b"aa b",
            b"a\xff",
            b"\xff\xc3a",
            b" a",
            b"a\xe2\x82 b",
            b"\xff a",
            b"a\0\xffb",
            b"",
        ):
            ids = model.tokenize(raw)
            assert ids[0] == 1 and model.detokenize(ids) == raw


def test_a_byte_that_no_token_prints_is_one_error(files: dict[str, str], tmp_path: Path) -> None:
    tokens = list(read_header(files["target"]).metadata["tokenizer.ggml.tokens"])
    for byte in "\u00ff\u0104":  # how byte-level vocabularies write 0xff and 0x04
        tokens[tokens.index(byte)] = f"never{ord(byte)}"
    made = edited(Path(files["target"]), tmp_path / "t.gguf", {"tokenizer.ggml.tokens": tokens})
    with llama({"target": str(made)}, None) as model:
        for raw, name in ((b"a\xff", "0xff"), (b"a\x04", "0x04"), (b"\xff\x04", "0xff")):
            with pytest.raises(ConfigError, match=f"byte {name} of the text would be lost"):
                model.tokenize(raw)
        assert model.detokenize(model.tokenize(b"a\x05\xfe")) == b"a\x05\xfe"


def sentencepiece(files: dict[str, str], folder: Path) -> dict[str, str]:
    """The target with another vocabulary: a few pieces, and a token for each byte."""
    size = len(read_header(files["target"]).metadata["tokenizer.ggml.tokens"])
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, 3, 3, *[6] * 256]
    words = ["\u2581", "a", "\u2581a", "b", *(f"never{i}" for i in range(size))]
    tokens += words[: size - len(tokens)]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds + [1] * (size - len(kinds)),
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.scores": [-float(i) for i in range(size)],
    }
    return {"target": str(edited(Path(files["target"]), folder / "pieces.gguf", keys))}


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
        ({"draft_backend_sampling": "x"}, "draft_backend_sampling must be True or False"),
        ({"draft_cpu_moe": 1}, "draft_cpu_moe must be True or False"),
        ({"draft_type_k": "f17"}, "draft_type_k must be one of f32, .*, got 'f17'"),
        ({"draft_type_v": 99}, "draft_type_v"),
        ({"draft_type_v": True}, "draft_type_v"),
        ({"draft_type_k": ["f16"]}, "draft_type_k"),
        ({"draft_devices": "cuda"}, "draft_devices must be a list"),
        ({"draft_model_kwargs": []}, "draft_model_kwargs must be a mapping"),
        ({"lookup_cache_static": 3}, "lookup_cache_static must be a path"),
        ({"spec_type": SpeculativeType.NGRAM_SIMPLE, "draft_model_path": 3}, "draft_model_path"),
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
        ({"n_threads": "2"}, "n_threads must be"),
        ({"n_threads": 0}, "n_threads must be"),
        ({"n_threads_batch": 0}, "n_threads_batch must be"),
        ({"seed": "x"}, "seed must be"),
        ({"seed": -2}, "seed must be"),
    ],
)
def test_arguments_of_a_wrong_type_are_one_error(
    options: dict[str, Any], words: str, files: dict[str, str]
) -> None:
    given: dict[str, Any] = {"model_path": files["target"], "n_threads": 1, **options}
    with pytest.raises(ConfigError, match=words):
        Llama(**given)


def test_a_negative_top_k_is_off(files: dict[str, str]) -> None:
    with llama(files, None) as model:
        options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
        off = [model("Hi", top_k=top_k, **options)["choices"][0]["text"] for top_k in (0, -1)]
        assert off[0] == off[1]


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
