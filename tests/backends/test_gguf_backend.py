"""GGUF pairs on llama.cpp: files are checked before it sees them, and drafts are those of torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xllamacpp")

from dflash.backends.gguf import layout, open_pair, settings  # noqa: E402 - after the checks
from dflash.backends.gguf.library import library  # noqa: E402
from dflash.backends.gguf.queued import Limits, QueuedDraft  # noqa: E402
from dflash.backends.gguf.sidecar import read_sidecar  # noqa: E402
from dflash.backends.gguf.taps import CallbackTaps, NativeTaps  # noqa: E402
from dflash.backends.gguf.validate import depths_apart  # noqa: E402
from dflash.backends.torch import open_pair as open_torch  # noqa: E402
from dflash.config import GgufOptions, LoadConfig  # noqa: E402
from dflash.core.host import Drafted  # noqa: E402
from dflash.core.types import Plan, Request, Sampling, Verdict  # noqa: E402
from dflash.demo import demo_draft  # noqa: E402
from dflash.engine import Engine  # noqa: E402
from dflash.errors import (  # noqa: E402
    CheckpointError,
    ConfigError,
    DFlashError,
    MissingBackend,
    PairError,
    WeightsError,
)
from dflash.gguf_file import read_header  # noqa: E402
from dflash.opening import backend_of  # noqa: E402
from dflash.opening import open_pair as open_by_name  # noqa: E402

from .gguf_files import DFLASH2, edited, save_folder, save_sidecar  # noqa: E402
from .gguf_parity import drafts_alike  # noqa: E402
from .tiny import save_target, tiny_target, tiny_tokenizer  # noqa: E402
from .tiny_gguf import write_gguf  # noqa: E402

V1: dict[str, Any] = {"mask_token_id": 300, "target_layer_ids": [0, 2]}
EXACT = GgufOptions(type_k="f32", type_v="f32", flash_attn="off", n_batch=64, n_ubatch=64)
PROMPT = [71, 103, 35, 90, 120, 33, 64, 300, 17, 5, 411, 88]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny Llama and its drafts, as folders and as GGUF files."""
    folder, model = tmp_path_factory.mktemp("gguf"), tiny_target("llama")
    target = write_gguf(folder / "target.gguf", model, tiny_tokenizer())
    return {
        "target": target,
        "target folder": save_target(model, tiny_tokenizer(), folder / "target"),
        "v1": save_sidecar(folder / "v1.gguf", target),
        "v1 folder": save_folder(folder / "v1"),
        "v2": save_sidecar(folder / "v2.gguf", target, **DFLASH2),
        "v2 folder": save_folder(folder / "v2", **DFLASH2),
    }


def pair(files: dict[str, Path], draft: Path | None, **options: Any) -> Any:
    given = EXACT if not options else GgufOptions(**{**_plain(EXACT), **options})
    name = None if draft is None else str(draft)
    return open_pair(LoadConfig(str(files["target"]), name, threads=1, gguf=given))


def _plain(options: GgufOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in options.__slots__}


# --- files that llama.cpp would abort on, or load and run wrongly ---------------------------------


def other_tokens(file: Path) -> list[str]:
    texts = list(read_header(file).metadata["tokenizer.ggml.tokens"])
    texts[100], texts[101] = texts[101], texts[100]
    return texts


FAULTS: dict[str, tuple[str, dict[str, Any], dict[str, Any], type[DFlashError], str]] = {
    "no target layers": ("v1", {"dflash.target_layers": None}, {}, CheckpointError, "target_layer"),
    "a missing tensor": ("v1", {}, {"blk.1.attn_q.weight": None}, WeightsError, "blk.1.attn_q"),
    "fc of another width": ("v1", {}, {"fc.weight": (64, 100)}, WeightsError, r"fc.weight .*128"),
    "v2 without its sizes": ("v2", {"dflash.conv_group_size": None}, {}, CheckpointError, "group"),
    "v2 with too many candidates": (
        "v2",
        {"dflash.selector_top_k": 8},
        {},
        CheckpointError,
        "at least 72",
    ),
    "a smaller vocabulary": (
        "v1",
        {"tokenizer.ggml.tokens": 400},
        {},
        PairError,
        "512 tokens and the draft 400",
    ),
    "no mask token": (
        "v1",
        {"tokenizer.ggml.mask_token_id": None},
        {},
        CheckpointError,
        "mask_token_id",
    ),
    "a mask token outside": (
        "v1",
        {"tokenizer.ggml.mask_token_id": 512},
        {},
        PairError,
        "mask token 512",
    ),
    "a tap after the last layer": ("v1", {"dflash.target_layers": [1, 4]}, {}, PairError, "0 to 3"),
    "a tap far outside": ("v1", {"dflash.target_layers": [1, 99]}, {}, PairError, "layer 99"),
    "tokens in another order": ("v1", {"tokenizer.ggml.tokens": None}, {}, PairError, "token 100"),
    "another end of text": ("v1", {"tokenizer.ggml.eos_token_id": 7}, {}, PairError, "eos"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_sidecar_is_one_error_before_llama_cpp_sees_it(
    fault: str, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, keys, shapes, error, words = FAULTS[fault]
    tokens = keys.get("tokenizer.ggml.tokens", ...)
    if tokens is None:
        keys = {**keys, "tokenizer.ggml.tokens": other_tokens(files[kind])}
    elif tokens is not ...:
        texts = read_header(files[kind]).metadata["tokenizer.ggml.tokens"]
        keys = {**keys, "tokenizer.ggml.tokens": texts[:tokens]}
    tensors = {k: None if s is None else np.zeros(s, np.float32) for k, s in shapes.items()}
    bad = edited(files[kind], tmp_path / "bad.gguf", keys, tensors)
    monkeypatch.setattr("dflash.backends.gguf.pair.library", _never)
    with pytest.raises(error, match=words):
        pair(files, bad)


def test_a_file_edited_into_itself_still_runs(files: dict[str, Path], tmp_path: Path) -> None:
    same = edited(files["v1"], tmp_path / "same.gguf")
    with Engine(pair(files, same)) as engine:
        assert engine.generate(PROMPT, max_tokens=9, block_size=4).stats.drafted


@pytest.mark.parametrize("own", [False, True])
def test_a_draft_of_another_width_is_refused(
    own: bool, files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tables(tensors: dict[str, Any]) -> None:
        if own:
            tensors["embed_tokens.weight"] = np.zeros((512, 32), np.float32)
            tensors["lm_head.weight"] = np.zeros((512, 32), np.float32)

    narrow = {"hidden_size": 32, "target_hidden_size": 32}
    wide = edited(files["target"], tmp_path / "narrow.gguf", {"llama.embedding_length": 32})
    bad = save_sidecar(tmp_path / "bad.gguf", wide, edit=tables, **narrow)
    monkeypatch.setattr("dflash.backends.gguf.pair.library", _never)
    with pytest.raises(PairError, match="64 wide and the draft 32"):
        pair(files, bad)
    with pytest.raises(
        ConfigError, match=r"force_dflash: draft bad\.gguf .* 32 wide .* is 64.*torch"
    ):
        open_pair(LoadConfig(str(files["target"]), str(bad), force_dflash=True))


@pytest.mark.parametrize("draft", ["v1", "v2", None])
def test_forcing_a_draft_that_fits_changes_nothing(
    draft: str | None, files: dict[str, Path]
) -> None:
    name = None if draft is None else str(files[draft])
    load = LoadConfig(str(files["target"]), name, threads=1, gguf=EXACT)
    found = []
    for force in (False, True):
        with Engine(open_pair(replace(load, force_dflash=force))) as engine:
            assert engine.pair.warnings == ()
            one = engine.generate(PROMPT, max_tokens=9, block_size=4)
            found.append((one.token_ids, one.stats.drafted))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("architecture", "least", "most"),
    [("llama", 0, 3), ("gemma3", 1, 3), ("mimo2", 0, 4), ("nemotron_h", 0, 4), ("deepseek4", 0, 4)],
)
def test_taps_are_those_that_the_architecture_publishes(
    architecture: str, least: int, most: int, files: dict[str, Path]
) -> None:
    """After the last layer only where it is published; the embedding only without the callback."""
    header = read_header(files["target"])
    keys = {
        **header.metadata,
        "general.architecture": architecture,
        f"{architecture}.block_count": 4,
    }
    target = replace(header, metadata=keys)
    assert not list(depths_apart(target, range(least, most + 1)))
    for outside in (least - 1, most + 1):
        (said,) = depths_apart(target, [2, outside])
        assert f"layer {outside}, and" in said and f"those of {least} to {most}" in said


def test_other_files_are_named_for_what_they_are(files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        pair(files, tmp_path / "nowhere.gguf")
    with pytest.raises(CheckpointError, match="'llama' model, not a DFlash sidecar"):
        pair(files, files["target"])
    with pytest.raises(CheckpointError, match=r"a draft .dflash., not a target"):
        open_pair(LoadConfig(str(files["v1"])))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(files["target"].read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match="ends before the tensor"):
        open_pair(LoadConfig(str(cut)))
    cut.write_bytes(b"no GGUF")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_pair(LoadConfig(str(cut)))


def _never() -> None:
    raise AssertionError("llama.cpp was called")


# --- the library ----------------------------------------------------------------------------------


def test_an_unknown_version_of_the_wheel_is_refused() -> None:
    with pytest.raises(MissingBackend, match="xllamacpp=="):
        layout.check(library()._handle, "xllamacpp", "2030.1.1")


def test_a_layout_that_moved_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [("new", layout.c_size_t), *layout.ModelParams._fields_]
    monkeypatch.setattr(
        layout, "ModelParams", type("ModelParams", (layout.Structure,), {"_fields_": moved})
    )
    with pytest.raises(MissingBackend, match="not the build known"):
        package, _, version = library().name.partition(" ")
        layout.check(_Fresh(), package, version)


class _Fresh:
    """The library's two functions of defaults, unbound."""

    def __init__(self) -> None:
        import ctypes

        handle = ctypes.CDLL(str(library().path))
        self.llama_model_default_params = handle.llama_model_default_params
        self.llama_context_default_params = handle.llama_context_default_params


# --- drafts ---------------------------------------------------------------------------------------


VARIANTS: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2": DFLASH2,
    "causal": {"is_causal": True},
    "interleaved rope": {"is_neox_style": False},
    "half of a head rotated": {"partial_rotary_factor": 0.5},
    "sliding window": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "is_causal": False,
    },
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "scaled embeddings": {"dflash_config": {**V1, "input_embedding_scale": 3.0}},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
    "soft cap": {"dflash_config": {**V1, "final_logit_softcapping": 2.0}},
    "one KV head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sidecar_drafts_as_torch_does_on_the_same_features(
    variant: str, files: dict[str, Path], tmp_path: Path
) -> None:
    changes = VARIANTS[variant]
    folder = str(save_folder(tmp_path / "draft", **changes))
    ours = pair(files, save_sidecar(tmp_path / "draft.gguf", files["target"], **changes))
    theirs = open_torch(LoadConfig(str(files["target folder"]), folder, pack_weights=False))
    drafts_alike(theirs, ours, PROMPT, (5, 1, 3, 5, 2, 5, 4, 5))


@pytest.mark.parametrize("key", ["final_logit_softcapping", "logit_scale"])
def test_what_moves_logits_moves_sampled_drafts_as_on_torch(
    key: str, files: dict[str, Path], tmp_path: Path
) -> None:
    """The likeliest token stays the likeliest, so greedy drafts would not show it."""
    changes = {"dflash_config": {**V1, key: 0.3}}
    folder = str(save_folder(tmp_path / "draft", **changes))
    draft = save_sidecar(tmp_path / "draft.gguf", files["target"], **changes)
    theirs = open_torch(LoadConfig(str(files["target folder"]), folder, pack_weights=False))
    sampling = Sampling(0.7, seed=3)
    drafts_alike(theirs, pair(files, draft), PROMPT, (5, 3, 5, 5, 5), sampling)


@pytest.mark.parametrize("kind", ["v1", "v2"])
@pytest.mark.parametrize(("temperature", "path"), [(0.0, "walk"), (0.8, "walk"), (0.0, "best")])
def test_a_whole_run_is_that_of_torch(
    kind: str, temperature: float, path: str, files: dict[str, Path]
) -> None:
    options: Any = {"max_tokens": 40, "block_size": 6, "temperature": temperature, "seed": 3}
    options["draft_path"] = path
    with Engine(pair(files, files[kind])) as engine:
        ours = engine.generate(PROMPT, **options)
    load = LoadConfig(str(files["target folder"]), str(files[f"{kind} folder"]), dtype="float32")
    with Engine(open_torch(load)) as engine:
        theirs = engine.generate(PROMPT, **options)
    assert ours.token_ids == theirs.token_ids
    if kind == "v1" or not temperature:  # torch draws DFlash2's candidates in its own order
        assert ours.stats.histogram == theirs.stats.histogram


@pytest.mark.parametrize("kind", ["v1", "v2"])
def test_rejection_keeps_some_of_what_a_sampled_sidecar_proposes(
    kind: str, files: dict[str, Path]
) -> None:
    with Engine(pair(files, files[kind])) as engine:
        options: Any = {"temperature": 1.5, "rule": "rejection", "seed": 1}
        stats = engine.generate(PROMPT, max_tokens=300, block_size=6, **options).stats
    assert stats.drafted and stats.accepted


def test_a_least_probability_shortens_blocks_and_a_least_length_drops_them(
    files: dict[str, Path],
) -> None:
    for kind in ("v1", "v2"):
        drafted = []
        for options in ({}, {"draft_p_min": 0.3}, {"draft_p_min": 1.0}, {"draft_n_min": 5}):
            with Engine(pair(files, files[kind], **options)) as engine:
                found = engine.generate(PROMPT, max_tokens=30, block_size=5)
            drafted.append(found.stats.drafted)
        reason = found.stats.fallback_reason
        with Engine(pair(files, files[kind])) as engine:  # a request can ask for it, too
            found = engine.generate(PROMPT, max_tokens=30, block_size=5, draft_p_min=0.3)
        assert found.stats.drafted == drafted[1]
        assert drafted[0] > drafted[1] >= drafted[2] == drafted[3] == 0
        assert "room for 4 drafted tokens, and draft_n_min wants 5" in str(reason)


def test_a_least_probability_shortens_a_best_path_too(files: dict[str, Path]) -> None:
    drafted = []
    for least in (0.0, 0.3, 1.0):
        with Engine(pair(files, files["v2"], draft_p_min=least)) as engine:
            found = engine.generate(PROMPT, max_tokens=30, block_size=5, draft_path="best")
        drafted.append(found.stats.drafted)
    assert drafted[0] > drafted[1] >= drafted[2] == 0


def test_a_least_length_that_no_draft_reaches_is_an_error(files: dict[str, Path]) -> None:
    most = read_sidecar(read_header(files["v1"])).block_size - 1
    with pytest.raises(ConfigError, match=rf"draft_n_min is {most + 1}.*{most} tokens at most"):
        pair(files, files["v1"], draft_n_min=most + 1)
    pair(files, files["v1"], draft_n_min=most).close()


def test_auto_asks_for_as_many_drafts_as_the_least_length_wants(files: dict[str, Path]) -> None:
    most = read_sidecar(read_header(files["v1"])).block_size - 1
    with Engine(pair(files, files["v1"], draft_n_min=most)) as engine:
        stats = engine.generate(PROMPT, max_tokens=30, block_size="auto").stats
    assert most > 3 and stats.drafted, "a first block of three would never have been proposed"


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sampled_draft_is_not_thrown_away_for_a_length_that_its_tokens_decided(
    sampled: bool,
) -> None:
    """Where x is drawn with 0.5, wanted with 0.2, and ends the draft, it would come up with 0.1."""

    class Short(QueuedDraft):
        def _twin(self) -> Any:
            raise NotImplementedError

        def _take(self, rows: Any, start: int) -> None:
            """Nothing to take in."""

        def _drafted(self, rows: int, start: int) -> Drafted:
            assert rows == 3
            return Drafted([5], np.full((1, 8), 1 / 8) if sampled else None)

    class Nothing:
        def rollback(self, length: int) -> bool:
            return True

    draft = Short(lambda _: Nothing(), 32, Limits(7, n_min=2))  # type: ignore[arg-type,return-value]
    draft.begin(Request([1, 2, 3], 9), 0)
    draft.commit(Verdict([4], rows=3, features=np.zeros((3, 4), np.float32)), 3)
    assert draft.propose(Plan(0, 3, 3)).rows == int(sampled)
    assert draft.propose(Plan(0, 1, 1)).rows == 0, "known before anything is drawn"


@pytest.mark.parametrize(("asked", "found"), [(None, 7), (0, 0), (3, 3), ("all", -2)])
def test_a_drafts_layers_on_a_gpu_are_the_targets_only_where_nothing_is_said(
    asked: Any, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "Model", lambda *_, gpu_layers, **__: gpu_layers)
    load = LoadConfig("t.gguf", gguf={"n_gpu_layers": 7, "draft_n_gpu_layers": asked})
    made: Any = settings.Settings(load, library())
    assert (made.target(Path("t.gguf"), False), made.draft(Path("d.gguf"))) == (7, found)


def test_settings_are_handed_on_to_llama_cpp_as_they_are() -> None:
    options = {
        "n_batch": 96,
        "n_ubatch": 48,
        "threads_batch": 5,
        "flash_attn": "on",
        "type_k": "q8_0",
        "type_v": "bf16",
        "draft_type_k": "f32",
    }
    made = settings.Settings(LoadConfig("t.gguf", threads=3, gguf=options), library())
    params = made.params(1000)
    assert (params.n_ctx, params.n_batch, params.n_ubatch) == (1000, 96, 48)
    assert (params.n_threads, params.n_threads_batch, params.flash_attn_type) == (3, 5, 1)
    assert (params.type_k, params.type_v) == (8, 30)
    draft = made.draft_params(1000, 16)
    assert (draft.n_batch, draft.n_ubatch, draft.type_k, draft.type_v) == (16, 16, 0, 30)
    assert (draft.n_threads, draft.n_threads_batch) == (3, 5)


@pytest.mark.parametrize(
    ("options", "single", "several"),
    [
        ({}, 3, 3),
        ({"draft_threads": 2}, 2, 2),
        ({"draft_threads": 2, "draft_threads_batch": 4}, 2, 4),
        ({"threads_batch": 6, "draft_threads_batch": 1}, 3, 1),
    ],
)
def test_threads_of_the_draft_are_those_of_its_blocks_too(
    options: dict[str, int], single: int, several: int
) -> None:
    """A block has several rows, and those are computed by the threads for batches."""
    made = settings.Settings(LoadConfig("t.gguf", threads=3, gguf=options), library())
    params = made.draft_params(64, 16)
    assert (params.n_threads, params.n_threads_batch) == (single, several)


def test_what_only_llama_cpps_own_server_drafts_with_is_sent_there(
    files: dict[str, Path],
) -> None:
    header = read_header(files["v1"])
    other = {**header.metadata, "general.architecture": "gemma4-assistant"}
    with pytest.raises(CheckpointError, match=r"own assistant.*--engine llama-server"):
        read_sidecar(replace(header, metadata=other))
    with pytest.raises(ConfigError, match=r"(?s)prediction heads.*--engine +llama-server"):
        open_pair(LoadConfig(str(files["target"]), "mtp", backend="gguf"))


@pytest.mark.parametrize("stored", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_every_stored_type_loads_and_changes_no_text(
    stored: str, files: dict[str, Path], tmp_path: Path
) -> None:
    draft = save_sidecar(tmp_path / "draft.gguf", files["target"], stored=stored)
    with Engine(pair(files, None)) as engine:
        plain = engine.generate(PROMPT, max_tokens=20, block_size=1).token_ids
    with Engine(pair(files, draft)) as engine:
        found = engine.generate(PROMPT, max_tokens=20, block_size=6)
    assert found.token_ids == plain
    assert found.stats.drafted


def test_a_reduced_vocabulary_proposes_its_own_tokens_only(
    files: dict[str, Path], tmp_path: Path
) -> None:
    kept = np.arange(3, 503, 5)

    def reduce(tensors: dict[str, Any]) -> None:
        head = tiny_target("llama").lm_head.weight.detach().numpy()
        tensors["lm_head.weight"] = head[kept]
        tensors["d2t"] = kept - np.arange(len(kept))

    draft = save_sidecar(
        tmp_path / "draft.gguf", files["target"], edit=reduce, draft_vocab_size=len(kept)
    )
    with Engine(pair(files, draft)) as engine:
        plain = engine.generate(PROMPT, max_tokens=20, block_size=1).token_ids
        assert engine.generate(PROMPT, max_tokens=20, block_size=6).token_ids == plain
        lease = engine._sessions.take(PROMPT, 64)
        session = lease.drafts[0]
        assert set(session.propose(Plan(0, 5, 5)).tokens) <= set(kept.tolist())
    wrong = np.arange(100)
    wrong[1] = 0
    bad = edited(draft, tmp_path / "bad.gguf", {}, {"d2t": wrong})
    with pytest.raises(WeightsError, match="d2t does not name different tokens"):
        pair(files, bad)


@pytest.mark.parametrize("sections", [[8, 0, 0, 0], [3, 3, 2, 0]])
def test_a_sidecar_with_text_positions_of_m_rope_drafts_the_same(
    sections: list[int], files: dict[str, Path], tmp_path: Path
) -> None:
    """Text has time, height and width alike, so it turns as torch's does, which has no sections."""
    keys = {"dflash.rope.dimension_sections": sections}
    draft = edited(files["v1"], tmp_path / "mrope.gguf", keys)
    load = LoadConfig(str(files["target folder"]), str(files["v1 folder"]), pack_weights=False)
    drafts_alike(open_torch(load), pair(files, draft), PROMPT, (5, 1, 3, 5, 2, 5, 4, 5))
    with Engine(pair(files, draft)) as engine:
        plain = engine.generate(PROMPT, max_tokens=40, block_size=1)
        found = engine.generate(PROMPT, max_tokens=40, block_size=6)
    assert found.token_ids == plain.token_ids and found.stats.drafted


# --- taps -----------------------------------------------------------------------------------------


def test_the_evaluation_callback_sees_what_native_taps_see(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    for native in (True, False):
        monkeypatch.setattr("dflash.backends.gguf.taps.is_native", lambda _, n=native: n)
        opened = pair(files, files["v1"])
        context, taps = opened.open_context(200)
        assert isinstance(taps, NativeTaps if native else CallbackTaps)
        context.run(PROMPT * 3, 0, 1)
        first = taps.rows(30)
        context.run(PROMPT[:5], 36, 5)
        rows.append((first, taps.rows(3)))
        context.close()
    for one, other in zip(*rows, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_a_gemma_target_is_read_through_the_callback(tmp_path: Path) -> None:
    model, folder = tiny_target("gemma3"), tmp_path
    target = write_gguf(folder / "gemma.gguf", model, tiny_tokenizer(), arch="gemma3")
    draft = save_sidecar(folder / "draft.gguf", target)
    load = LoadConfig(str(target), str(draft), threads=1, gguf=EXACT)
    with Engine(open_pair(load)) as engine:
        plain = engine.generate(PROMPT, max_tokens=30, block_size=1)
        found = engine.generate(PROMPT, max_tokens=30, block_size=6)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted


# --- which backend --------------------------------------------------------------------------------


def test_a_gguf_target_runs_on_llama_cpp_unless_its_draft_is_a_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(draft: str | None, backend: str = "auto") -> str:
        return backend_of(LoadConfig("x.gguf", draft, backend))

    assert chosen("draft.gguf") == "gguf"
    assert chosen("folder") == chosen("folder+ngram") == "torch"
    assert chosen(None) == chosen("ngram") == chosen("mtp") == "gguf"
    assert chosen(None, "torch") == chosen("ngram", "torch") == "torch"
    monkeypatch.setattr("dflash.opening.find_spec", lambda name: name if name == "torch" else None)
    assert chosen(None) == chosen("ngram") == "torch", "no llama.cpp"
    monkeypatch.setattr("dflash.opening.find_spec", lambda _: None)
    assert chosen(None) == chosen("ngram") == "gguf"
    assert chosen("folder") == "torch"  # which will say what to install
    with pytest.raises(ConfigError, match=r"not for gguf.*convert folder --to gguf --target"):
        chosen("folder", "gguf")
    with pytest.raises(ConfigError, match=r"dflash convert demo --to gguf --out draft\.gguf"):
        chosen(str(demo_draft()), "gguf")
    with pytest.raises(ConfigError, match="not for torch"):
        chosen("draft.gguf", "torch")
    with pytest.raises(ConfigError, match="both must be of one"):
        backend_of(LoadConfig("folder", "draft.gguf"))


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "float32"},
        {"draft_dtype": "float32"},
        {"weights": "int8"},
        {"compile": True},
        {"device": "cuda"},
    ],
    ids=str,
)
def test_settings_that_torch_has_take_a_gguf_target_there(setting: dict[str, Any]) -> None:
    assert backend_of(LoadConfig("x.gguf", "ngram", **setting)) == "torch"
    assert backend_of(LoadConfig("x.gguf", "draft.gguf", **setting)) == "gguf"
    assert backend_of(LoadConfig("x.gguf", device="cpu")) == "gguf"


def test_no_backend_is_named_that_the_draft_cannot_run_on() -> None:
    with pytest.raises(ConfigError) as alone:
        open_by_name(LoadConfig("x.gguf", "draft.gguf", weights="int8"))
    assert str(alone.value).endswith("this pair runs on gguf: leave them out")
    with pytest.raises(ConfigError, match="leave them out, or add backend='torch'"):
        open_by_name(LoadConfig("x.gguf", "ngram", backend="gguf", weights="int8"))


def test_settings_of_torch_are_refused(files: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="dtype is not a setting of the gguf backend"):
        open_pair(LoadConfig(str(files["target"]), backend="gguf", dtype="float32"))


# --- tokenizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["Hello, world's 12 items:\n\n  x = 42;", "naïve 日本語 🙂", "<|start|>user\n<|end|>", ""],
)
def test_text_is_encoded_as_by_transformers(text: str, files: dict[str, Path]) -> None:
    opened, theirs = pair(files, None), tiny_tokenizer()
    ids = opened.tokenizer.encode(text)
    assert ids == theirs.encode(text, add_special_tokens=False)
    assert opened.tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    messages = [{"role": "user", "content": text}]
    assert opened.tokenizer.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    opened.close()


def test_sampling_options_reach_both_sides(files: dict[str, Path]) -> None:
    asked = Sampling(0.7, top_k=9, seed=4)
    with Engine(pair(files, files["v1"])) as engine:
        options: Any = {"temperature": 0.7, "top_k": 9, "seed": 4, "max_tokens": 20}
        texts = {engine.generate(PROMPT, block_size=b, **options).token_ids for b in (1, 3, 6)}
    assert asked.seed == 4 and len(texts) == 1
