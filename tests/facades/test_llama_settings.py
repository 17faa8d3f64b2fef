"""`dflash.llama.Llama`: what it says beforehand, what it hands on, and how it ends."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")  # makes the tiny files
pytest.importorskip("xllamacpp")

from dflash.backends.gguf.native import Context, Model
from dflash.errors import ConfigError, DFlashError
from dflash.gguf_file import read_header
from dflash.llama import Llama, SpecConfig, SpeculativeType
from dflash.llama_options import SAMPLING
from tests.backends.eagle_drafts import save_eagle
from tests.backends.gguf_files import DFLASH2, edited, save_sidecar
from tests.backends.test_gguf_eagle import TAPS, to_gguf
from tests.backends.test_gguf_hybrid import write_hybrid
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf

DFLASH = SpeculativeType.DRAFT_DFLASH
MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target.gguf, v1.gguf, v2.gguf, mrope.gguf, hybrid.gguf and its draft, hybrid-draft.gguf."""
    made = tmp_path_factory.mktemp("llama")
    target = write_gguf(made / "target.gguf", tiny_target("llama"), tiny_tokenizer())
    v1 = save_sidecar(made / "v1.gguf", target)
    save_sidecar(made / "v2.gguf", target, **DFLASH2)
    edited(v1, made / "mrope.gguf", {"dflash.rope.dimension_sections": [3, 3, 2, 0]})
    save_sidecar(made / "hybrid-draft.gguf", write_hybrid(made / "hybrid.gguf"))
    return made


def llama(folder: Path, draft: str = "v1", target: str = "target", **options: Any) -> Llama:
    spec = SpecConfig(DFLASH, 3, draft_model_path=str(folder / f"{draft}.gguf"))
    return Llama(
        str(folder / f"{target}.gguf"),
        **{"n_ctx": 256, "n_threads": 1, "speculative": spec, **options},
    )


def estimates(said: str) -> dict[str, float]:
    found = re.findall(r"memory estimate: ([a-z ]+) ([0-9.]+) MiB", said)
    return {name: float(size) for name, size in found}


def test_the_memory_of_all_parts_is_said_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr("dflash.llama.load", stop)
    with pytest.raises(InterruptedError):
        llama(folder, n_ctx=200, type_k="f32", verbose=True)
    found = estimates(capsys.readouterr().err)
    assert list(found) == [
        *("target", "target cache", "target buffers"),
        *("sidecar", "sidecar cache", "sidecar buffers"),
    ]
    for name, file in (("target", "target.gguf"), ("sidecar", "v1.gguf")):
        assert found[name] == pytest.approx((folder / file).stat().st_size / MIB, abs=0.06)
        own = read_header(folder / file).own
        numbers = own("block_count") * own("attention.head_count_kv") * own("attention.key_length")
        assert found[f"{name} cache"] == pytest.approx(200 * numbers * (4 + 2) / MIB, abs=0.06)
    assert found["target buffers"] > 64 * 512 * 4 / MIB  # logits, at least


def test_a_hybrid_target_whose_layers_differ_can_be_verbose(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with llama(folder, "hybrid-draft", "hybrid", verbose=True) as model:
        assert model("Once", max_tokens=6)["usage"]["completion_tokens"] == 6
    found = estimates(capsys.readouterr().err)
    numbers = 2 * 2 * 16  # two layers with attention, two key heads, 16 wide
    assert found["target cache"] == pytest.approx(256 * numbers * 4 / MIB, abs=0.06)


def test_a_target_without_attention_is_estimated_without_a_cache(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = {"llama.attention.head_count": 0, "llama.attention.head_count_kv": 0}
    sizes = {"llama.attention.key_length": None, "llama.attention.value_length": None}
    edited(
        folder / "target.gguf", tmp_path / "mamba.gguf", keys | sizes
    )  # as Mamba's files have it

    def stop(*_: Any, **__: Any) -> Any:
        raise InterruptedError

    monkeypatch.setattr("dflash.llama.load", stop)
    with pytest.raises(InterruptedError):
        Llama(tmp_path / "mamba.gguf", verbose=True)
    assert estimates(capsys.readouterr().err)["target cache"] == 0


@pytest.mark.parametrize(
    ("draft", "lines"),
    [
        ("v1", ["DFlash speculative decoding", "selector_top_k 0, mrope False", "sampled on host"]),
        ("v2", ["DFlash2 speculative decoding", "selector_top_k 5, mrope False", "selector choo"]),
        ("mrope", ["DFlash speculative decoding", "target_layers [1, 3]", "mrope True"]),
    ],
)
def test_verbose_lines_name_the_variant(
    draft: str, lines: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with llama(folder, draft, verbose=True) as model:
        model("Once", max_tokens=6)
    said = capsys.readouterr().err
    for words in [
        *lines,
        "draft_n_max 3 (runs 3), draft_n_min 0, draft_p_min 0.0",
        "mask_token 300",
        "backend_sampling requested, inactive",
        *("Calls ", "Acceptance ", "Phase time ", "Checkpoint ", "Output "),
    ]:
        assert words in said, words


def test_a_field_that_nothing_reads_is_said_and_the_usual_ones_are_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = SpecConfig(DFLASH, draft_model_path=folder / "v1.gguf", draft_devices=["cuda:0"])
    llama(folder, speculative=spec).close()
    assert "SpecConfig: draft_devices=['cuda:0'] has nothing to do here" in capsys.readouterr().err
    llama(folder).close()
    assert capsys.readouterr().err == ""


def test_more_drafts_than_a_block_has_are_never_cut_silently(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = SpecConfig(DFLASH, 9, draft_model_path=folder / "v2.gguf")
    with llama(folder, speculative=spec) as model:
        said = capsys.readouterr().err
        assert said == "draft_n_max 9: this draft proposes 5 tokens at most, so it runs 5\n"
        model("Once", max_tokens=12)
        assert len(model.last_speculative_stats["acceptance_rate_per_position"]) <= 5


def test_the_models_seed_is_that_of_requests_that_name_none(folder: Path) -> None:
    with llama(folder, speculative=None) as model:
        asked: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2}
        plain = [model([71, 103], seed=seed, **asked)["choices"] for seed in (5, 6)]
        texts = {model([71, 103], **asked)["choices"][0]["text"] for _ in range(3)}
    assert plain[0] != plain[1] and len(texts) == 3
    with llama(folder, seed=5) as model:
        assert [model([71, 103], **asked)["choices"] for _ in range(2)] == [plain[0]] * 2
        assert model([71, 103], seed=6, **asked)["choices"] == plain[1]


def test_a_seed_of_minus_one_is_a_fresh_one(folder: Path) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 1.2}
    with llama(folder, seed=-1) as model:
        assert len({model([71], **asked)["choices"][0]["text"] for _ in range(3)}) == 3
    with llama(folder, seed=5) as model:
        fixed = model([71], **asked)["choices"]
        assert model([71], **asked)["choices"] == fixed
        assert len({model([71], seed=-1, **asked)["choices"][0]["text"] for _ in range(3)}) == 3


def test_looked_up_drafts_say_their_limits_and_that_no_file_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = SpecConfig(SpeculativeType.NGRAM_SIMPLE, 99, draft_model_path="draft.gguf")
    llama(folder, speculative=spec, verbose=True).close()
    said = capsys.readouterr().err
    assert "ngram-simple speculative decoding enabled, draft_n_max 99 (runs 15)" in said
    assert "SpecConfig: draft_model_path='draft.gguf' has nothing to do here" in said


def test_number_formats_may_be_ggmls_numbers(folder: Path) -> None:
    spec = SpecConfig(DFLASH, draft_model_path=folder / "v1.gguf", draft_type_k=30, draft_type_v=1)
    with llama(folder, speculative=spec, type_k=0, type_v=None) as model:
        options = model._engine.pair._settings.options  # type: ignore[attr-defined]
        formats = options.type_k, options.type_v, options.draft_type_k, options.draft_type_v
        assert formats == ("f32", "f16", "bf16", "f16")
        assert model("Once", max_tokens=6)["choices"][0]["text"]


def test_a_chat_without_a_limit_goes_on_to_its_end_and_a_completion_stops_at_16(
    folder: Path,
) -> None:
    with llama(folder, n_ctx=64) as model:
        chat = model.create_chat_completion([{"role": "user", "content": "Once"}], ignore_eos=True)
        assert chat["usage"]["total_tokens"] == 64
        assert model("Once", ignore_eos=True)["usage"]["completion_tokens"] == 16


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is freed, in order: "context", or the file of a model."""
    order: list[str] = []
    for kind in (Context, Model):
        close = kind.close

        def noted(one: Any, close: Any = close) -> None:
            order.append(one.file.name if isinstance(one, Model) else "context")
            close(one)

        monkeypatch.setattr(kind, "close", noted)
    yield order


def test_drafts_and_contexts_are_freed_before_the_target(folder: Path, closed: list[str]) -> None:
    model = llama(folder)
    model("Once", max_tokens=6)
    closed.clear()
    model.close()
    first = list(closed)
    model.close()
    assert first[-2:] == ["v1.gguf", "target.gguf"] and first.count("target.gguf") == 1
    assert set(first[:-2]) == {"context"} and len(first) >= 5, "both sessions, the lender"


@pytest.fixture(scope="module")
def drafts(folder: Path) -> dict[str, str]:
    """One of every kind of draft, and what is none."""
    keys = save_eagle(folder / "eagle", **TAPS)
    markov = {"markov_w1.weight": np.zeros((4, 4), np.float32)}
    return {
        "v1": str(folder / "v1.gguf"),
        "v2": str(folder / "v2.gguf"),
        "eagle3": str(to_gguf(keys, folder / "eagle.gguf", folder / "target.gguf")),
        "dspark": str(edited(folder / "v1.gguf", folder / "dspark.gguf", tensors=markov)),
        "anchor": str(
            edited(folder / "v1.gguf", folder / "anchor.gguf", {"dflash.sample_from_anchor": True})
        ),
        "target": str(folder / "target.gguf"),
        "folder": str(keys),
        "nothing": str(folder / "nothing.gguf"),
        **{name: name for name in ("ngram", "none", "mtp")},
        "both": f"{folder / 'v1.gguf'}+ngram",
    }


FITS = {("v1", DFLASH), ("v2", DFLASH), ("eagle3", SpeculativeType.DRAFT_EAGLE3)}


@pytest.mark.parametrize("kind", [DFLASH, SpeculativeType.DRAFT_EAGLE3])
@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("v1", "draft-eagle3 was asked for, and .*v1.gguf .* say SpeculativeType.DRAFT_DFLASH"),
        ("v2", "draft-eagle3 was asked for, and .*v2.gguf .* say SpeculativeType.DRAFT_DFLASH"),
        ("eagle3", "draft-dflash was asked for, .* say SpeculativeType.DRAFT_EAGLE3"),
        ("dspark", "is a DSpark draft"),
        ("anchor", "is a DSpark draft"),
        ("target", "is a 'llama' model"),
        ("folder", "Convert it"),
        ("nothing", "nothing.gguf"),
        ("ngram", "draft_model_path must be the sidecar's .gguf"),
        ("none", "draft_model_path must be the sidecar's .gguf"),
        ("mtp", "draft_model_path must be the sidecar's .gguf"),
        ("both", "draft_model_path must be the sidecar's .gguf"),
    ],
)
def test_a_type_and_a_file_that_disagree_are_one_error(
    draft: str, words: str, kind: SpeculativeType, folder: Path, drafts: dict[str, str]
) -> None:
    spec = SpecConfig(kind, draft_model_path=drafts[draft])
    if (draft, kind) in FITS:
        llama(folder, speculative=spec).close()
        return
    with pytest.raises(DFlashError, match=words):
        llama(folder, speculative=spec)


def test_types_that_read_no_file_say_so(
    folder: Path, drafts: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    for kind in SpeculativeType:
        spec = SpecConfig(kind, draft_model_path=drafts["v1"])
        if kind in (SpeculativeType.NONE, SpeculativeType.NGRAM_SIMPLE):
            llama(folder, speculative=spec).close()
            assert "draft_model_path=" in capsys.readouterr().err
        elif not spec.has_file:
            with pytest.raises(NotImplementedError, match="not implemented"):
                llama(folder, speculative=spec)


def test_every_argument_and_option_is_in_the_tables_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/how-to/gguf.md").read_text(encoding="utf-8")
    _, arguments, options = re.split(r"\| (?:argument of `Llama`|option of a request) \|", page)
    for name in inspect.signature(Llama).parameters:
        assert f"`{name}`" in arguments, name
    for name in (*SAMPLING, "max_tokens", "stop", "stream", "top_logprobs"):
        assert f"`{name}`" in options.partition("\n\n")[0], name


def test_what_is_not_there_is_named(folder: Path) -> None:
    for argument in ("chat_format", "use_mmap", "draft_model"):
        with pytest.raises(TypeError, match=argument):
            llama(folder, **{argument: None})
    with llama(folder) as model:
        for option in ("grammar", "logits_processor", "tools", "top_logprobs"):
            with pytest.raises(ConfigError, match=f"unknown option '{option}'"):
                model("Once", **{option: 1})
