"""EAGLE-3 drafts on llama.cpp: what torch drafts from the same features, and faults seen before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import open_pair  # noqa: E402 - after the checks
from dflash.backends.torch import open_pair as open_torch  # noqa: E402
from dflash.config import LoadConfig  # noqa: E402
from dflash.convert import gguf, hf  # noqa: E402
from dflash.core.types import Plan, Request  # noqa: E402
from dflash.engine import Engine  # noqa: E402
from dflash.errors import CheckpointError, DFlashError, PairError, WeightsError  # noqa: E402
from dflash.gguf_file import read_header  # noqa: E402
from dflash.llama import Llama, SpecConfig, SpeculativeType  # noqa: E402
from tests.conformance.gguf_backend import EXACT  # noqa: E402

from .eagle_drafts import KEPT, save_eagle  # noqa: E402
from .gguf_files import edited  # noqa: E402
from .gguf_parity import drafts_alike  # noqa: E402
from .tiny import save_target, tiny_target, tiny_tokenizer  # noqa: E402
from .tiny_gguf import write_gguf  # noqa: E402

ROUNDS = (5, 1, 3, 7, 2, 7, 4, 7)  # rows
PROMPT = [71, 103, 35, 90, 120, 33, 64, 300, 17, 5, 411, 88]
TAPS = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}  # not the last layer's
VARIANTS: dict[str, dict[str, Any]] = {
    "the published form": TAPS,
    "a normed residual": {**TAPS, "norm_before_residual": True},
    "a norm before fc": {**TAPS, "norm_before_fc": True},
    "yarn": {
        **TAPS,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("eagle"), tiny_target("llama")
    target = write_gguf(folder / "target.gguf", model, tiny_tokenizer())
    found = {
        "target": target,
        "target folder": save_target(model, tiny_tokenizer(), folder / "target"),
    }
    for name, changes in VARIANTS.items():
        found[f"{name} folder"] = save_eagle(folder / name, **changes)
        found[name] = to_gguf(found[f"{name} folder"], folder / f"{name}.gguf", target)
    return found


def to_gguf(draft: Path, out: Path, target: Path) -> Path:
    return gguf.write(gguf.settled(hf.read(draft), target), out, target, "F32")


def pair(files: dict[str, Path], draft: Path) -> Any:
    load = LoadConfig(str(files["target"]), str(draft), threads=1, gguf=EXACT)
    return open_pair(load)


def pair_on_torch(files: dict[str, Path], name: str) -> Any:
    target, draft = (str(files[f"{key} folder"]) for key in ("target", name))
    return open_torch(LoadConfig(target, draft, dtype="float32", pack_weights=False))


@pytest.mark.parametrize("name", VARIANTS)
def test_it_drafts_as_torch_does_on_the_same_features(name: str, files: dict[str, Path]) -> None:
    drafts_alike(pair_on_torch(files, name), pair(files, files[name]), PROMPT, ROUNDS)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_a_whole_run_is_that_of_torch(options: Any, files: dict[str, Path]) -> None:
    name, asked = "the published form", {"max_tokens": 40, "block_size": 6, **options}
    with Engine(pair(files, files[name])) as engine:
        ours = engine.generate(PROMPT, **asked)
        plain = engine.generate(PROMPT, **{**asked, "block_size": 1}).token_ids
    with Engine(pair_on_torch(files, name)) as engine:
        theirs = engine.generate(PROMPT, **asked)
    assert ours.token_ids == theirs.token_ids == plain
    assert ours.stats.histogram == theirs.stats.histogram


def test_tokens_outside_its_own_vocabulary_are_never_drafted(files: dict[str, Path]) -> None:
    opened = pair(files, files["the published form"])
    asked = Request(PROMPT, 60)
    target, (draft,) = opened.open_target(256), opened.open_drafts(256)
    draft.begin(asked, 0)
    for verdict in target.prefill(asked, 0):
        draft.commit(verdict, verdict.rows)
    said = [int(token) for token in draft.propose(Plan(0, 7, 7)).tokens]
    assert len(said) == 7 and all(token % 2 == 0 and token < 2 * KEPT for token in said)
    target.close()
    draft.close()
    opened.close()


def test_a_resumed_session_and_a_fork_draft_as_fresh_ones(files: dict[str, Path]) -> None:
    name = "the published form"
    with Engine(pair(files, files[name])) as engine:
        asked: Any = {"max_tokens": 20, "block_size": 5}
        first = engine.generate(PROMPT, **asked).token_ids
        longer = [*PROMPT, *first[:9], 9, 9]
        again = engine.generate(longer, **asked)
        assert again.stats.cached_tokens
        fresh = engine.generate(longer, reuse=False, **asked)
        several: dict[int, list[int]] = {0: [], 1: []}
        for chunk in engine.stream(PROMPT, n=2, **asked):
            several[chunk.index] += chunk.token_ids
    assert again.token_ids == fresh.token_ids
    assert again.stats.histogram == fresh.stats.histogram
    assert several == {0: list(first), 1: list(first)}


def test_a_least_probability_shortens_chains(files: dict[str, Path]) -> None:
    with Engine(pair(files, files["the published form"])) as engine:
        drafted = [
            engine.generate(PROMPT, max_tokens=30, block_size=6, draft_p_min=least).stats.drafted
            for least in (0.0, 0.4, 1.0)
        ]
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_the_facade_of_llama_cpp_python_takes_it(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = SpecConfig(
        SpeculativeType.DRAFT_EAGLE3, 5, draft_model_path=str(files["the published form"])
    )
    texts = []
    for one in (None, spec):
        with Llama(
            files["target"], n_ctx=256, n_threads=1, speculative=one, verbose=one is spec
        ) as llm:
            texts.append(llm("Once", max_tokens=20)["choices"][0]["text"])
    assert texts[0] == texts[1]
    assert llm.last_speculative_stats["drafted"]
    assert "EAGLE-3 speculative decoding enabled" in capsys.readouterr().err


FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any], type[DFlashError], str]] = {
    "no taps": ({"eagle3.target_layers": None}, {}, CheckpointError, "eagle3.target_layers"),
    "two taps": ({"eagle3.target_layers": [1, 2]}, {}, CheckpointError, "1 layer and 3 taps"),
    "a tap outside": ({"eagle3.target_layers": [1, 2, 9]}, {}, PairError, "layer 9"),
    "two layers": ({"eagle3.block_count": 2}, {}, CheckpointError, "2 layers"),
    "another target's width": ({"eagle3.target_hidden_size": 32}, {}, WeightsError, "fc.weight"),
    "a missing tensor": ({}, {"blk.0.attn_norm_2.weight": None}, WeightsError, "attn_norm_2"),
    "a head of another size": ({}, {"output.weight": (9, 64)}, WeightsError, r"\(200, 64\)"),
    "another end of text": ({"tokenizer.ggml.eos_token_id": 7}, {}, PairError, "eos"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_one_error_before_llama_cpp_sees_it(
    fault: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, shapes, error, words = FAULTS[fault]
    tensors = {k: None if s is None else np.zeros(s, np.float32) for k, s in shapes.items()}
    bad = edited(files["the published form"], tmp_path / "bad.gguf", keys, tensors)
    monkeypatch.setattr("dflash.backends.gguf.pair.library", lambda: pytest.fail("it was called"))
    with pytest.raises(error, match=words):
        pair(files, bad)


def test_a_narrow_draft_without_tables_of_its_own_is_refused(
    files: dict[str, Path], tmp_path: Path
) -> None:
    file = files["the published form"]
    shapes = {
        name: tuple(32 if size == 64 else size for size in tensor.shape)
        for name, tensor in read_header(file).tensors.items()
    }
    shapes |= {"fc.weight": (32, 192), "blk.0.attn_output.weight": (32, 64)}
    shapes |= {
        f"blk.0.attn_{name}.weight": (rows, 64) for name, rows in (("q", 64), ("k", 32), ("v", 32))
    }
    tensors = {k: np.zeros(s, np.float32) for k, s in shapes.items() if k != "d2t"}
    bad = edited(file, tmp_path / "narrow.gguf", {"eagle3.embedding_length": 32}, tensors)
    with pytest.raises(PairError, match=r"needs token_embd.* of its own"):
        pair(files, bad)
