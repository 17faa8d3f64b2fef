"""GGUF targets: the model that comes out is the one that was written, or one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from dflash import gguf_target as reader
from dflash.backends.torch.checkpoint import resolve
from dflash.backends.torch.gguf import convert
from dflash.backends.torch.load import load_target
from dflash.errors import CheckpointError

from .tiny import reference_generate, tiny_target, tiny_tokenizer
from .tiny_gguf import write_gguf

MERGE = b"\x03\0\0\0\0\0\0\0E p"  # with its length before it
IDS = torch.tensor([[5, 300, 7, 41, 99, 12, 60, 60, 3, 200, 17, 88]])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        out: torch.Tensor = model(input_ids=IDS).logits
        return out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("arch", "kind"), [("llama", "llama"), ("qwen3", "qwen3")])
def test_a_float32_file_gives_back_the_model_it_was_written_from(
    tmp_path: Path, arch: str, kind: str, tied: bool
) -> None:
    model = tiny_target(kind, tied=tied)
    file = write_gguf(tmp_path / "tiny.gguf", model, tiny_tokenizer(), arch=arch)
    target = load_target(str(file), pack=False)
    torch.testing.assert_close(logits(target.model), logits(model))
    assert target.eos_ids == {0}
    assert target.context_length == 1024


def test_a_gemma3_file_keeps_norms_windows_and_both_rope_bases(tmp_path: Path) -> None:
    model = tiny_target("gemma3", layers=6)
    del model.config.layer_types  # the file cannot say it: both sides use the family's pattern
    again = type(model)(type(model.config)(**_plain(model.config)))
    again.load_state_dict(model.state_dict())

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(1_000_000.0)

    file = write_gguf(
        tmp_path / "g.gguf", again.eval(), tiny_tokenizer(), arch="gemma3", change=change
    )
    torch.testing.assert_close(logits(load_target(str(file), pack=False).model), logits(again))


def _plain(config: Any) -> dict[str, Any]:
    keys = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim max_position_embeddings tie_word_embeddings sliding_window "
        "query_pre_attn_scalar"
    )
    return {key: getattr(config, key) for key in keys.split()}


def test_quantised_weights_are_those_of_an_independent_dequantisation(tmp_path: Path) -> None:
    model = tiny_target()
    kind = gguf.GGMLQuantizationType.Q8_0
    with torch.no_grad():  # what the file can hold, put into the model by hand
        for weight in model.parameters():
            if weight.dim() == 2:
                stored = gguf.quantize(weight.numpy(), kind)
                weight.copy_(torch.from_numpy(gguf.dequantize(stored, kind)))
    file = write_gguf(tmp_path / "q.gguf", model, tiny_tokenizer(), quant=kind)
    target = load_target(str(file), pack=False)
    torch.testing.assert_close(logits(target.model), logits(model), rtol=1e-4, atol=1e-4)
    assert reference_generate(target.model, [5, 6, 7], 20) == reference_generate(
        model, [5, 6, 7], 20
    )


def test_llama_3_rope_scaling_is_recovered_from_the_stored_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = tiny_target()
    model.config.rope_parameters = scaling
    again = type(model)(model.config).eval()
    again.load_state_dict(model.state_dict())
    plain = 1 / 500_000.0 ** (torch.arange(0, 16, 2) / 16)
    divisors = (plain / again.model.rotary_emb.inv_freq).numpy()

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(500_000.0)
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))

    file = write_gguf(tmp_path / "l3.gguf", again, tiny_tokenizer(), change=change)
    target = load_target(str(file), pack=False)
    torch.testing.assert_close(
        target.model.model.rotary_emb.inv_freq, again.model.rotary_emb.inv_freq
    )
    assert target.config.rope_parameters["factor"] == pytest.approx(8.0)


def test_the_second_start_does_not_read_the_gguf_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_target(layers=2), tiny_tokenizer())
    first = resolve(str(file))
    monkeypatch.setattr(reader, "read", None)
    assert resolve(str(file)) == first
    assert resolve(str(tmp_path)) == first, "a folder with one GGUF file means that file"
    assert sorted(first.glob("*.safetensors"))


def test_the_converted_folder_carries_no_trace_of_quantisation(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_target(layers=2), tiny_tokenizer())
    folder = convert(file)
    assert "quant" not in (folder / "config.json").read_text()
    assert (folder / "tokenizer.json").is_file()
    assert '"eos_token_id"' in (folder / "generation_config.json").read_text()


def test_each_dtype_has_its_own_conversion(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_target(layers=2), tiny_tokenizer())
    assert convert(file) != convert(file, "bfloat16")
    assert load_target(str(file), dtype="bfloat16").dtype == torch.bfloat16


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_target(layers=2), tiny_tokenizer())

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader, "write_weights", fail)
    with pytest.raises(KeyboardInterrupt):
        convert(file)
    assert list((cache / "gguf").iterdir()) == []


def _expert(writer: gguf.GGUFWriter) -> None:
    writer.add_expert_count(4)


def _longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)


def _extra(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, dtype=np.float32))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"arch": "rwkv6"}, "architecture 'rwkv6'"),
        ({"change": _expert}, "mixture of experts"),
        ({"change": _longrope}, "rope scaling 'longrope'"),
        ({"change": _extra}, "no use for: blk.0.attn_sinks.weight"),
        ({"skip": "blk.1.ffn_up.weight"}, "lacks the tensors"),
        ({"skip": "token_embd.weight"}, "token_embd.weight"),
        ({"pre": "made-up"}, "'made-up'"),
    ],
)
def test_files_we_cannot_read_right_are_refused_with_the_reason(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_target(layers=2), tiny_tokenizer(), **options)
    with pytest.raises(CheckpointError, match=words):
        resolve(str(file))


@pytest.mark.parametrize("keep", [3, 20, 300, 30_000, -2_000])
def test_a_truncated_file_is_one_clear_error(tmp_path: Path, keep: int) -> None:
    whole = write_gguf(tmp_path / "w.gguf", tiny_target(layers=2), tiny_tokenizer()).read_bytes()
    file = tmp_path / "cut.gguf"
    file.write_bytes(whole[:keep])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        resolve(str(file))


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        (
            b"for m in",
            b"\xffor m in",
            "is damaged: its metadata 'tokenizer.chat_template' cannot be read",
        ),
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0\xfflama", "is damaged"),
        (MERGE, MERGE.replace(b" ", b"_"), "is damaged: its merge"),
        (MERGE, MERGE[:-1] + b"\x01", "is damaged: its merge"),
    ],
)
def test_a_damaged_byte_of_text_is_one_clear_error(
    tmp_path: Path, good: bytes, bad: bytes, words: str
) -> None:
    file = write_gguf(tmp_path / "w.gguf", tiny_target(layers=2), tiny_tokenizer())
    whole = file.read_bytes()
    assert good in whole and len(good) == len(bad)
    file.write_bytes(whole.replace(good, bad, 1))
    with pytest.raises(CheckpointError, match=words):
        resolve(str(file))


def test_a_file_of_another_kind_is_named_as_such(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        resolve(str(file))


def test_several_gguf_files_in_a_folder_must_be_told_apart(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))


@pytest.fixture
def converted(tmp_path: Path) -> Callable[[str], Any]:
    """A tokenizer as it comes out of a file with the given pre-tokenizer."""

    def make(pre: str) -> Any:
        model = tiny_target(layers=2)
        file = write_gguf(tmp_path / f"{pre}.gguf", model, tiny_tokenizer(), pre=pre)
        return load_target(str(file)).tokenizer

    return make


def test_the_tokenizer_gives_the_ids_it_was_written_from(converted: Callable[[str], Any]) -> None:
    ours, theirs = converted("gpt-2"), tiny_tokenizer()
    for text in ("Hello there, world's 1234!", "<|start|>user\nhi<|end|>", "naïve 日本語 🙂  x"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text)
    turns = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(turns, tokenize=False) == theirs.apply_chat_template(
        turns, tokenize=False
    )
    assert (ours.eos_token_id, ours.bos_token_id) == (0, 1)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["ab", "Ġ12345", "'s", "Ġ", "ĠX", "!", "Ċ"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "ĠX", "!", "Ċ"]),
        ("llama-bpe", ["ab", "Ġ", "123", "45", "'s", "Ġ", "ĠX", "!Ċ"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "5", "'s", "Ġ", "ĠX", "!Ċ"]),
    ],
)
def test_text_is_cut_as_the_file_names_it_also_after_reloading(
    converted: Callable[[str], Any], pre: str, pieces: list[str]
) -> None:
    cut = converted(pre).backend_tokenizer.pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str("ab 12345's  X!\n")] == pieces
