from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash.backends.torch.draft_load import LoadedDraft, draft_dtype, load_draft
from dflash.backends.torch.load import LoadedTarget, wrap_target
from dflash.backends.torch.pair import TorchPair
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.types import Plan, Request, Verdict
from dflash.errors import CheckpointError, ConfigError, PairError, WeightsError
from tests.backends.drafts import MIXED, save_draft, tiny_draft
from tests.backends.tiny import reference_generate, save_target, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return wrap_target(tiny_target(), tiny_tokenizer(), "tiny/target")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_draft(tiny_draft(), tmp_path / "draft")


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def change(folder: Path, **changed: Any) -> Path:
    """Replace tensors by name (dots written as double underscores); None removes."""
    state = tensors(folder)
    for key, value in changed.items():
        name = key.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    save_file(state, folder / "model.safetensors")
    return folder


def configure(folder: Path, **changed: Any) -> Path:
    made = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**made, **changed}))
    return folder


def same(draft: LoadedDraft, seed: int = 0, **changes: Any) -> bool:
    wanted = tiny_draft(seed, **changes).state_dict()
    found = draft.model.state_dict()
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def test_every_weight_is_loaded(folder: Path, target: LoadedTarget) -> None:
    draft = load_draft(str(folder), target, pack=False)
    assert same(draft)
    assert draft.warnings == ()
    assert draft.name == str(folder)
    assert draft.bytes() == sum(t.numel() * 4 for t in tensors(folder).values())
    assert not any(p.requires_grad for p in draft.model.parameters())


def test_a_model_prefix_and_rotary_tables_are_no_obstacle(
    tmp_path: Path, target: LoadedTarget
) -> None:
    folder = save_draft(tiny_draft(), tmp_path / "draft", prefix="model.")
    change(folder, model__rotary_emb__inv_freq=torch.ones(8))
    assert same(load_draft(str(folder), target, pack=False))


def test_shards_are_put_together(folder: Path, target: LoadedTarget) -> None:
    state = tensors(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load_draft(str(folder), target, pack=False))
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load_draft(str(folder), target)


def test_fused_projections_are_split(folder: Path, target: LoadedTarget) -> None:
    state = tensors(folder)
    parts = [state.pop(f"layers.0.self_attn.{which}_proj.weight") for which in "qkv"]
    state["layers.0.self_attn.qkv_proj.weight"] = torch.cat(parts)
    save_file(state, folder / "model.safetensors")
    assert same(load_draft(str(folder), target, pack=False))


def test_unknown_and_missing_tensors_are_listed_together(
    folder: Path, target: LoadedTarget
) -> None:
    change(folder, layers__0__attention_conv__base_kernel=torch.ones(2), norm__weight=None)
    with pytest.raises(WeightsError) as caught:
        load_draft(str(folder), target)
    assert "missing: norm.weight" in str(caught.value)
    assert "unknown: layers.0.attention_conv.base_kernel" in str(caught.value)


def test_a_wrong_tap_count_names_both_numbers(folder: Path, target: LoadedTarget) -> None:
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 1, 2]}
    configure(folder, dflash_config=nested)
    with pytest.raises(WeightsError, match=r"fc\.weight has 128 columns, but 3 taps of width 64"):
        load_draft(str(folder), target)


def test_a_misshapen_tensor_is_named(folder: Path, target: LoadedTarget) -> None:
    change(folder, layers__1__mlp__up_proj__weight=torch.ones(96, 32))
    with pytest.raises(WeightsError, match=r"up_proj\.weight is \[96, 32\].* makes it \[96, 64\]"):
        load_draft(str(folder), target)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(
    folder: Path, target: LoadedTarget, value: float
) -> None:
    change(folder, hidden_norm__weight=torch.full((64,), value))
    with pytest.raises(WeightsError, match=r"NaN or infinite: hidden_norm\.weight"):
        load_draft(str(folder), target)


def test_whole_numbers_are_no_weights(folder: Path, target: LoadedTarget) -> None:
    change(folder, hidden_norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(WeightsError, match=r"stored as torch\.int8: hidden_norm\.weight"):
        load_draft(str(folder), target)


def test_float16_is_refused_and_says_why(folder: Path, target: LoadedTarget) -> None:
    with pytest.raises(ConfigError, match=r"bfloat16 or float32.*float16 overflows"):
        load_draft(str(folder), target, "float16")
    assert draft_dtype(None, torch.float16) == torch.bfloat16
    assert draft_dtype(None, torch.bfloat16) == torch.bfloat16
    assert draft_dtype("float32", torch.bfloat16) == torch.float32


def test_weights_stored_in_float16_run_in_a_wider_type(folder: Path, target: LoadedTarget) -> None:
    save_file({k: v.half() for k, v in tensors(folder).items()}, folder / "model.safetensors")
    draft = load_draft(str(configure(folder, dtype="float16")), target, pack=False)
    assert draft.model.fc.weight.dtype == torch.float32
    assert "stored in float16" in draft.warnings[0]


def test_bfloat16_loads_and_keeps_its_rotary_tables_wide(
    folder: Path, target: LoadedTarget
) -> None:
    draft = load_draft(str(folder), target, "bfloat16", pack=False)
    assert draft.model.fc.weight.dtype == torch.bfloat16
    assert draft.model.rotary["full_attention"].inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_the_command_that_converts(
    folder: Path, target: LoadedTarget, name: str
) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=r"a pickle.*weights_only=True"):
        load_draft(str(folder), target)


def test_a_pickled_mask_embedding_is_never_opened(folder: Path, target: LoadedTarget) -> None:
    (folder / "mask_embedding.pt").write_bytes(b"not even a pickle")
    with pytest.raises(CheckpointError, match=r"mask_embedding\.pt, a pickle.*dflash convert"):
        load_draft(str(folder), target)
    row = torch.randn(1, 64)
    save_file({"embedding": row}, folder / "mask_embedding.safetensors")
    draft = load_draft(str(folder), target)
    assert draft.tables.mask_row is not None
    assert torch.equal(draft.tables.mask_row, row[0])
    save_file({"embedding": row[:, :5].clone()}, folder / "mask_embedding.safetensors")
    with pytest.raises(WeightsError, match="'embedding' of 64 numbers"):
        load_draft(str(folder), target)


def test_a_quantised_draft_is_refused(folder: Path, target: LoadedTarget) -> None:
    configure(folder, quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(CheckpointError, match="quantised draft"):
        load_draft(str(folder), target)


def test_a_truncated_file_is_named(folder: Path, target: LoadedTarget) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        load_draft(str(folder), target)


def test_a_target_where_a_draft_is_due_is_named(tmp_path: Path, target: LoadedTarget) -> None:
    save_target(tiny_target(), None, tmp_path)
    with pytest.raises(CheckpointError, match="is a target model"):
        load_draft(str(tmp_path), target)


@pytest.mark.parametrize("path", ["./nothing", "nothing", "/nothing/at/all", "a/b/c"])
def test_a_missing_folder_is_named(path: str, target: LoadedTarget) -> None:
    with pytest.raises(CheckpointError, match="no such draft folder"):
        load_draft(path, target)


@pytest.mark.parametrize("name", ["draft.gguf", "model.safetensors"])
def test_a_file_is_not_a_folder(tmp_path: Path, target: LoadedTarget, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="not a draft folder"):
        load_draft(str(tmp_path / name), target)


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ({"layers": 2}, {}, "layers 0 to 1"),
        ({"vocab": 300}, {}, "vocabulary of 512, the target has 300"),
        ({}, {"target_hidden_size": 32}, "of width 32, the target's are 64"),
    ],
)
def test_a_draft_for_another_target_is_refused_before_its_weights_are_read(
    folder: Path, kind: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    configure(folder, **changes)
    (folder / "model.safetensors").unlink()
    with pytest.raises(PairError, match=says):
        load_draft(str(folder), wrap_target(tiny_target(**kind), None, "tiny/other"))


def test_another_tokenizer_is_refused(folder: Path, target: LoadedTarget) -> None:
    configure(folder, target_tokenizer_sha256="0" * 64, target_name="owner/first")
    with pytest.raises(PairError, match=r"trained for owner/first.*tiny/target"):
        load_draft(str(folder), target)


def test_taps_may_be_named_or_computed(folder: Path, target: LoadedTarget) -> None:
    configure(folder, dflash_config={"mask_token_id": 3}, num_target_layers=None)
    with pytest.raises(CheckpointError, match="--taps auto"):
        load_draft(str(folder), target)
    deeper = wrap_target(tiny_target(layers=6), None, "tiny/deeper")
    assert load_draft(str(folder), deeper, taps="auto").spec.taps == (1, 3)
    assert load_draft(str(folder), target, taps=(0, 2)).spec.taps == (0, 2)


def own_tables(folder: Path, rows: int, ids: list[int] | None) -> Path:
    state = {"lm_head__weight": torch.randn(rows, 64), "embed_tokens__weight": torch.randn(512, 64)}
    if ids is not None:
        state["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
        state["t2d"] = torch.zeros(512, dtype=torch.bool)
    return change(folder, **state)


def test_tables_of_its_own_are_used(folder: Path, target: LoadedTarget) -> None:
    own_tables(folder, 512, None)
    draft = load_draft(str(folder), target)
    state = tensors(folder)
    assert torch.equal(draft.tables.embed, state["embed_tokens.weight"])
    hidden = torch.randn(3, 64)
    wanted = hidden @ state["lm_head.weight"].T
    torch.testing.assert_close(draft.tables.head(hidden), wanted)


def test_a_reduced_vocabulary_is_mapped_by_its_distances(
    folder: Path, target: LoadedTarget
) -> None:
    own_tables(folder, 4, [3, 9, 10, 500])
    draft = load_draft(str(configure(folder, draft_vocab_size=4)), target)
    assert draft.tables.target_ids is not None
    assert draft.tables.target_ids.tolist() == [3, 9, 10, 500]
    session = draft.open(20)
    session.begin(Request([1, 2, 4], 10), 0)
    session.commit(Verdict(tokens=[5], features=torch.randn(3, 128)), 3)
    tokens = torch.as_tensor(session.propose(Plan(rows=7, depth=7)).tokens).tolist()
    assert set(tokens) <= {3, 9, 10, 500}


@pytest.mark.parametrize(
    ("rows", "ids", "size", "says"),
    [
        (5, [3, 9, 10, 500], 4, r"lm_head.weight is \[5, 64\], it must be \[4, 64\]"),
        (4, [3, 3, 10, 500], 4, "distinct target ids"),
        (4, [3, 9, 10, 512], 4, "below 512"),
        (4, [-1, 9, 10, 500], 4, "below 512"),
        (4, [3, 9, 10, 500], 5, "4 entries, draft_vocab_size is 5"),
        (4, None, None, r"must be \[512, 64\] \(or come with d2t\)"),
    ],
)
def test_a_head_that_does_not_match_its_map_is_refused(
    folder: Path,
    target: LoadedTarget,
    rows: int,
    ids: list[int] | None,
    size: int | None,
    says: str,
) -> None:
    own_tables(folder, rows, ids)
    with pytest.raises(WeightsError, match=says):
        load_draft(str(configure(folder, draft_vocab_size=size)), target)


def test_a_map_alone_picks_rows_of_the_targets_head(folder: Path, target: LoadedTarget) -> None:
    change(folder, d2t=torch.tensor([3, 8]))  # target ids 3 and 9
    draft = load_draft(str(folder), target)
    hidden = torch.randn(2, 64)
    wanted = hidden @ target.head.weight[[3, 9]].T  # type: ignore[index]
    torch.testing.assert_close(draft.tables.head(hidden), wanted)


def test_a_narrower_draft_needs_tables_of_its_own(tmp_path: Path, target: LoadedTarget) -> None:
    model = tiny_draft(hidden_size=32, target_hidden_size=64)
    folder = save_draft(model, tmp_path / "draft")
    with pytest.raises(PairError, match="32 wide and borrows"):
        load_draft(str(folder), target)
    state = {"lm_head__weight": torch.randn(512, 32), "embed_tokens__weight": torch.randn(512, 32)}
    assert load_draft(str(change(folder, **state)), target).spec.hidden_size == 32


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "swa"])
@pytest.mark.parametrize("pack", [True, False])
def test_text_is_the_targets_own_whatever_the_draft(tmp_path: Path, kind: str, pack: bool) -> None:
    model = tiny_target(kind, tied=kind == "llama", pad_rows=16)
    loaded = wrap_target(model, None, "tiny/target")
    changes = {**MIXED, "vocab_size": 528, "nested": {"mask_token_id": 520}}  # a padding row
    draft = load_draft(str(save_draft(tiny_draft(**changes), tmp_path)), loaded, pack=pack)
    prompt = list(range(20, 60))
    session = TorchTargetSession(model, draft.spec.taps, 120)
    steps = decode(Request(prompt, 40), session, [draft.open(120)], Fixed(8), lambda: 0)
    found = [token for step in steps for token in step.tokens]
    assert found == reference_generate(model, prompt, 40)


def test_a_head_handed_out_as_an_embedding_works(folder: Path) -> None:
    model = tiny_target(tied=True)
    model.get_output_embeddings = model.get_input_embeddings
    loaded = wrap_target(model, None, "tiny/target")
    hidden = torch.randn(2, 64)
    wanted = hidden @ model.get_input_embeddings().weight.T
    torch.testing.assert_close(load_draft(str(folder), loaded).tables.head(hidden), wanted)


def test_a_pair_counts_the_keys_and_values_of_its_draft(folder: Path, target: LoadedTarget) -> None:
    pair = TorchPair(target, load_draft(str(folder), target, pack=False))
    assert pair.memory()["draft_kv"] == 0
    (session,) = pair.open_drafts(100)
    assert pair.memory()["draft_kv"] == session.bytes() > 0  # type: ignore[attr-defined]
