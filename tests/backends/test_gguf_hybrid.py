"""A hybrid target (short convolutions between attention layers) forgets rejected drafts exactly.

Its convolution state has no positions to drop: llama.cpp keeps a snapshot a token, and where it has
none the cache is emptied and fed again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("torch")  # the tiny tokenizer's folder needs it
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import open_pair
from dflash.backends.gguf.native import Context
from dflash.backends.gguf.probe import GgufProbe
from dflash.config import LoadConfig
from dflash.core.types import Proposal, Request
from dflash.engine import Engine
from tests.conformance.backends import SCRIPTS, Backend, Plain, Scripted
from tests.conformance.gguf_backend import EXACT

from .gguf_files import save_sidecar
from .tiny import VOCAB, tiny_tokenizer
from .tiny_gguf import _write_tokenizer

WIDTH, WIDE, HEADS, KV, DIM, LAYERS = 64, 96, 4, 2, 16, 4
ATTENTION = (1, 3)  # the other layers are convolutions
PROMPT = [71, 103, 35, 90, 120, 33, 64]


def write_hybrid(file: Path) -> Path:
    """A seeded random LFM2."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(file, "lfm2")
    writer.add_block_count(LAYERS)
    writer.add_context_length(1024)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([KV if i in ATTENTION else 0 for i in range(LAYERS)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_shortconv_l_cache(3)
    writer.add_rope_freq_base(10000.0)
    _write_tokenizer(writer, tiny_tokenizer(), "gpt-2")

    def matrix(name: str, rows: int, columns: int) -> None:
        values = 2 * rng.standard_normal((rows, columns)) / columns**0.5
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def norm(name: str, size: int) -> None:
        values = 1 + 0.1 * rng.standard_normal(size)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    matrix("token_embd", VOCAB, WIDTH)
    norm("token_embd_norm", WIDTH)
    for i in range(LAYERS):
        for name in ("attn_norm", "ffn_norm"):
            norm(f"blk.{i}.{name}", WIDTH)
        matrix(f"blk.{i}.ffn_gate", WIDE, WIDTH)
        matrix(f"blk.{i}.ffn_up", WIDE, WIDTH)
        matrix(f"blk.{i}.ffn_down", WIDTH, WIDE)
        if i in ATTENTION:
            for name, rows in (("q", HEADS * DIM), ("k", KV * DIM), ("v", KV * DIM)):
                matrix(f"blk.{i}.attn_{name}", rows, WIDTH)
            matrix(f"blk.{i}.attn_output", WIDTH, HEADS * DIM)
            norm(f"blk.{i}.attn_q_norm", DIM)
            norm(f"blk.{i}.attn_k_norm", DIM)
        else:
            matrix(f"blk.{i}.shortconv.conv", WIDTH, 3)
            matrix(f"blk.{i}.shortconv.in_proj", 3 * WIDTH, WIDTH)
            matrix(f"blk.{i}.shortconv.out_proj", WIDTH, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    file = write_hybrid(tmp_path_factory.mktemp("hybrid") / "target.gguf")

    def load(draft: str | None = None) -> Any:
        return open_pair(LoadConfig(str(file), draft, threads=1, gguf=EXACT))

    pair = load()
    assert pair.model.recurrent
    draft = save_sidecar(file.with_name("draft.gguf"), file)
    plain = Plain(lambda tokens: GgufProbe(pair).logits(tokens))
    return Backend("gguf", pair, plain, own=lambda: load(str(draft)))


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_the_text_is_that_of_plain_decoding(script: Any, hybrid: Backend) -> None:
    plain = hybrid.plain.run(Request(PROMPT, 40))[0]
    for size in (2, 5, 16):
        with Engine(Scripted(hybrid, script)) as engine:
            found = engine.generate(PROMPT, max_tokens=40, block_size=size)
        assert list(found.token_ids) == plain


@pytest.mark.parametrize("kept", range(1, 8))
def test_every_acceptance_length_is_rewound_exactly(kept: int, hybrid: Backend) -> None:
    plain = hybrid.plain.run(Request(PROMPT, 30))[0]
    target = hybrid.pair.open_target(256)
    list(target.prefill(Request(PROMPT, 30), 0))
    assert target.verify(Proposal(plain[1:8], 7)).tokens == plain[1:9]
    target.commit(kept)
    again = target.verify(Proposal(plain[1 + kept : 8 + kept], 7))
    assert again.tokens == plain[1 + kept : 9 + kept]
    target.close()


def test_without_a_rewind_the_text_would_be_another(
    hybrid: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hybrid.plain.run(Request(PROMPT, 40))[0]

    def half(context: Context, length: int) -> bool:
        """Says it is done, and the state is that of another text."""
        context.clear()
        return length > 0

    monkeypatch.setattr(Context, "rollback", half)
    with Engine(Scripted(hybrid, (2, 0, 5))) as engine:
        found = engine.generate(PROMPT, max_tokens=40, block_size=8)
    assert list(found.token_ids) != plain


def test_a_memory_without_snapshots_is_fed_again(
    hybrid: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = hybrid.plain.run(Request(PROMPT, 40))[0]
    monkeypatch.setattr(Context, "rollback", lambda *_: False)
    with Engine(Scripted(hybrid, (2, 0, 5))) as engine:
        found = engine.generate(PROMPT, max_tokens=40, block_size=8)
    assert list(found.token_ids) == plain


def test_a_conversation_resumes_or_starts_over_but_never_guesses(hybrid: Backend) -> None:
    with Engine(Scripted(hybrid, (3, 0))) as engine:
        text = list(PROMPT)
        for _ in range(3):
            answer = engine.generate(text, max_tokens=12, block_size=4).token_ids
            assert list(answer) == hybrid.plain.run(Request(text, 12))[0]
            text += [*answer, 9, 9]
        shorter = text[:9]
        answer = engine.generate(shorter, max_tokens=12, block_size=4).token_ids
        assert list(answer) == hybrid.plain.run(Request(shorter, 12))[0]


def test_a_draft_reads_a_hybrid_target(hybrid: Backend) -> None:
    plain = hybrid.plain.run(Request(PROMPT, 30))[0]
    with Engine(hybrid.own()) as engine:
        found = engine.generate(PROMPT, max_tokens=30, block_size=6)
    assert list(found.token_ids) == plain
    assert found.stats.drafted
