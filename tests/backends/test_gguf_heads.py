"""Multi-token prediction heads inside a GGUF target draft on llama.cpp as on torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import open_pair  # noqa: E402 - after the checks
from dflash.backends.gguf.heads import why_no_heads  # noqa: E402
from dflash.backends.torch import open_pair as open_torch  # noqa: E402
from dflash.config import LoadConfig  # noqa: E402
from dflash.engine import Engine  # noqa: E402
from dflash.errors import ConfigError, PairError  # noqa: E402
from dflash.gguf_file import read_header  # noqa: E402
from dflash.llama import Llama, SpecConfig, SpeculativeType  # noqa: E402
from tests.conformance.gguf_backend import EXACT  # noqa: E402

from .gguf_files import save_sidecar  # noqa: E402
from .gguf_parity import drafts_alike  # noqa: E402
from .mtp_targets import save_mtp_target  # noqa: E402
from .tiny import tiny_target, tiny_tokenizer  # noqa: E402
from .tiny_gguf import write_gguf  # noqa: E402
from .tiny_qwen35 import write_qwen35  # noqa: E402

PROMPT = [71, 103, 35, 90, 120, 33, 64, 300, 17, 5, 411, 88]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    source = save_mtp_target(folder / "source")
    return {"folder": source, "target": write_qwen35(folder / "target.gguf", source)}


def load(files: dict[str, Path], draft: str | None = "mtp", mtp: bool = False) -> Any:
    return open_pair(LoadConfig(str(files["target"]), draft, threads=1, gguf=EXACT, mtp=mtp))


def load_torch(files: dict[str, Path]) -> Any:
    folder = str(files["folder"])
    return open_torch(LoadConfig(folder, "mtp", dtype="float32", pack_weights=False))


def test_they_draft_as_torch_does_on_the_same_states(files: dict[str, Path]) -> None:
    drafts_alike(load_torch(files), load(files), PROMPT, (5, 1, 3, 7, 2, 7, 4, 7))


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
def test_a_whole_run_is_that_of_torch(options: Any, files: dict[str, Path]) -> None:
    asked: Any = {"max_tokens": 40, "block_size": 6, **options}
    with Engine(load(files)) as engine:
        ours = engine.generate(PROMPT, **asked)
        plain = engine.generate(PROMPT, **{**asked, "block_size": 1}).token_ids
    with Engine(load_torch(files)) as engine:
        theirs = engine.generate(PROMPT, **asked)
    assert ours.token_ids == theirs.token_ids == plain
    assert ours.stats.histogram == theirs.stats.histogram


def test_the_facade_of_llama_cpp_python_takes_them(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for spec in (None, SpecConfig(SpeculativeType.DRAFT_MTP, 4)):
        with Llama(
            files["target"], n_ctx=128, n_threads=1, speculative=spec, verbose=spec is not None
        ) as llm:
            texts.append(llm("Once", max_tokens=20)["choices"][0]["text"])
    assert texts[0] == texts[1] and llm.last_speculative_stats["drafted"]
    said = capsys.readouterr().err
    assert "draft-mtp speculative decoding enabled, draft_n_max 4 (runs 4)" in said


def test_a_target_with_heads_uses_them_unless_told_otherwise(files: dict[str, Path]) -> None:
    for mtp, name in ((True, "mtp"), (False, None)):
        opened = load(files, None, mtp)
        assert opened.draft_name == name
        assert bool(opened.draft_block_size) is mtp
        opened.close()


def test_heads_that_cannot_draft_are_no_secret_where_nobody_asked_for_them(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dflash.backends.gguf.heads.GRAPHS", frozenset())
    opened = load(files, None, True)
    (note,) = opened.warnings
    assert note.startswith("plain decoding: llama.cpp has no graph") and "--no-mtp" in note
    assert opened.draft_name is None
    opened.close()
    quiet = load(files, None, False)
    assert quiet.warnings == ()
    quiet.close()


def test_heads_that_cannot_draft_are_one_sentence(files: dict[str, Path], tmp_path: Path) -> None:
    llama = write_gguf(tmp_path / "llama.gguf", tiny_target("llama"), tiny_tokenizer())
    with pytest.raises(ConfigError, match="has no multi-token prediction heads"):
        load({"target": llama})
    header = read_header(files["target"])
    none = replace(header, tensors={k: v for k, v in header.tensors.items() if "nextn" not in k})
    assert "its tensors lack them" in why_no_heads(none)
    several = {**header.metadata, "qwen35.nextn_predict_layers": 2, "qwen35.block_count": 6}
    assert "has 2 multi-token" in why_no_heads(replace(header, metadata=several))
    other = {
        key.replace("qwen35.", "other."): value
        for key, value in {**header.metadata, "general.architecture": "other"}.items()
    }
    assert "no graph for" in why_no_heads(replace(header, metadata=other))


def test_layers_of_heads_are_not_layers_to_tap(files: dict[str, Path], tmp_path: Path) -> None:
    taps = {"dflash_config": {"mask_token_id": 300, "target_layer_ids": [0, 3]}}
    draft = save_sidecar(tmp_path / "draft.gguf", files["target"], **taps)
    with pytest.raises(PairError, match=r"layer 4, .*4 layers.* 0 to 3"):
        load(files, str(draft))
