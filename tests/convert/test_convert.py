"""Drafts survive the way to every format and back, and what cannot is said."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dflash import registry
from dflash.convert import convert, hf
from dflash.convert.folder import read_files
from dflash.convert.tensor import Tensor
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import CheckpointError, ConfigError, PairError, WeightsError
from tests.backends.drafts import save_draft, tiny_draft2
from tests.convert.drafts import (
    DIM,
    HEADS,
    HIDDEN,
    KV,
    VOCAB,
    config,
    eagle_config,
    eagle_tensors,
    random,
    save,
    v1_tensors,
)

pytestmark = pytest.mark.torch

WINDOWS: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}
TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": WINDOWS,
    "causal where sliding": {**WINDOWS, "is_causal": None},
    "causal": {"is_causal": True},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "scaled": {"nested": {"final_logit_softcapping": 30.0, "input_embedding_scale": 8.0}},
    "named": {
        "target_name": "owner/target",
        "chat_template_sha256": "c0ffee",
        "nested": {"default_block_size": 4, "acceptance_by_position": [0.7, 0.41]},
    },
}


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for part in read_files(folder).values() for name, t in part.items()}


def assert_same_tensors(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert one.keys() == two.keys()
    assert [name for name in one if not one[name].equals(two[name])] == []


def assert_same_spec(one: Path, two: Path) -> None:
    old, new = read_spec(one), read_spec(two)
    names = [field.name for field in fields(DraftSpec) if field.name != "raw"]
    assert {n: getattr(old, n) for n in names} == {n: getattr(new, n) for n in names}


@pytest.mark.parametrize("layout", ["hf", "speculators", "mlx"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_v1_draft_comes_back_bit_for_bit(tmp_path: Path, layout: str, variant: str) -> None:
    keys = {key: value for key, value in config(**VARIANTS[variant]).items() if value is not None}
    source = save(tmp_path / "source", keys, v1_tensors(), shards=2)
    there = convert(source, layout, tmp_path / "there")
    assert (there.found, there.kind) == ("hf", "dflash")
    assert (there.trial.backend, there.trial.difference) == ("torch", 0.0)
    convert(there.out, "hf", tmp_path / "back")
    assert_same_tensors(stored(source), stored(tmp_path / "back"))
    assert_same_spec(source, tmp_path / "back")
    if layout != "mlx":  # that one spells out what was left to defaults
        back = json.loads((tmp_path / "back" / "config.json").read_text())
        assert back == keys


def test_a_second_round_trip_changes_nothing_at_all(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    for name, layout, origin in (("a", "speculators", "source"), ("b", "hf", "a")):
        convert(tmp_path / origin, layout, tmp_path / name)
    convert(tmp_path / "b", "speculators", tmp_path / "c")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "c" / file).read_bytes()
        assert source.joinpath(file).stat().st_size > 0


def test_shards_stay_as_they_were_cut(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors(), shards=3)
    convert(source, "speculators", tmp_path / "out")
    before, after = read_files(source), read_files(tmp_path / "out")
    assert {f: set(part) for f, part in before.items()} == {f: set(p) for f, p in after.items()}


def test_a_speculators_config_counts_layers_by_their_inputs(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    convert(source, "speculators", tmp_path / "out")
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert made["aux_hidden_state_layer_ids"] == [1, 3]
    assert made["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert made["sliding_window_non_causal"] is True
    assert made["transformer_layer_config"]["num_hidden_layers"] == 2
    assert "dflash_config" not in made["transformer_layer_config"]


def test_the_targets_tables_come_along_and_are_left_out_again(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    tables = {
        "model.embed_tokens.weight": random(VOCAB, HIDDEN, seed=90),
        "lm_head.weight": random(VOCAB, HIDDEN, seed=91),
    }
    target = save(tmp_path / "target", TARGET, tables)
    convert(source, "speculators", tmp_path / "there", target=target)
    there = stored(tmp_path / "there")
    assert there["embed_tokens.weight"].equals(tables["model.embed_tokens.weight"])
    assert there["lm_head.weight"].equals(tables["lm_head.weight"])
    for layout in ("hf", "mlx"):
        back = convert(tmp_path / "there", layout, tmp_path / layout, target=target)
        assert_same_tensors(stored(source), stored(tmp_path / layout))
        assert back.notes == (
            "left out, as they are the target's: embed_tokens.weight, lm_head.weight",
        )
    with pytest.raises(ConfigError, match=r"refuses this draft.*embed_tokens.*target=FOLDER"):
        convert(tmp_path / "there", "mlx", tmp_path / "without")


def test_tables_that_are_not_the_targets_are_kept_and_said_to_be(tmp_path: Path) -> None:
    own = {"lm_head.weight": random(VOCAB, HIDDEN, seed=7)}
    source = save(tmp_path / "source", config(), v1_tensors(**own))
    tables = {"model.embed_tokens.weight": random(VOCAB, HIDDEN, seed=90)}
    target = save(tmp_path / "target", TARGET, tables)
    done = convert(source, "mlx", tmp_path / "out", target=target)
    assert stored(tmp_path / "out")["lm_head.weight"].equals(own["lm_head.weight"])
    assert any("has other numbers: lm_head.weight" in note for note in done.notes)
    assert any("has no place for lm_head.weight" in note for note in done.notes)


def test_the_targets_depth_is_written_where_a_draft_does_not_say_it(tmp_path: Path) -> None:
    keys = {key: value for key, value in config().items() if key != "num_target_layers"}
    source = save(tmp_path / "source", keys, v1_tensors())
    target = save(tmp_path / "target", TARGET, {})
    with pytest.raises(ConfigError, match=r"no num_target_layers.*target=FOLDER"):
        convert(source, "mlx", tmp_path / "mlx")
    silent = convert(source, "hf", tmp_path / "silent")
    assert any("num_target_layers" in note for note in silent.notes)
    for layout in ("mlx", "hf"):
        done = convert(source, layout, tmp_path / layout, target=target)
        made = json.loads((tmp_path / layout / "config.json").read_text())
        assert (made["num_target_layers"], done.notes) == (4, ())
    narrow = save(tmp_path / "narrow", {**TARGET, "hidden_size": 32}, {})
    with pytest.raises(PairError, match="32 wide with 4 layers; the draft reads 64"):
        convert(source, "hf", tmp_path / "wrong", target=narrow)


def test_options_that_upstreams_mlx_model_lacks_are_named(tmp_path: Path) -> None:
    keys = config(hidden_act="gelu", is_neox_style=False)
    done = convert(save(tmp_path / "a", keys, v1_tensors()), "mlx", tmp_path / "b")
    assert any("no place for hidden_act gelu, rope in pairs" in note for note in done.notes)


def test_an_eagle_draft_for_mlx_is_the_folder_that_its_backend_reads(tmp_path: Path) -> None:
    source = save(tmp_path / "source", eagle_config(norm_before_residual=True), eagle_tensors())
    there = convert(source, "mlx", tmp_path / "there")
    assert (there.kind, there.trial.difference) == ("eagle3", 0.0)
    assert any("knows no EAGLE-3" in note for note in there.notes)
    back = convert(tmp_path / "there", "eagle", tmp_path / "back")
    assert back.found == "eagle"
    for folder in ("there", "back"):
        assert_same_tensors(stored(source), stored(tmp_path / folder))
        assert_same_spec(source, tmp_path / folder)


@pytest.mark.parametrize("layout", ["hf", "speculators", "mlx"])
def test_a_dflash2_draft_comes_back_bit_for_bit(tmp_path: Path, layout: str) -> None:
    source = save_draft(tiny_draft2(3), tmp_path / "source")
    there = convert(source, layout, tmp_path / "there")
    assert (there.kind, there.trial.difference) == ("dflash2", 0.0)
    convert(there.out, "hf", tmp_path / "back")
    assert_same_tensors(stored(source), stored(tmp_path / "back"))
    assert_same_spec(source, tmp_path / "back")


@pytest.mark.parametrize("place", ["specforge", "top", "nowhere"])
def test_an_eagle_draft_comes_back_bit_for_bit(tmp_path: Path, place: str) -> None:
    keys = eagle_config(norm_before_residual=True)
    if place != "specforge":
        del keys["eagle_config"]
    if place == "top":
        keys["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    source = save(tmp_path / "source", keys, eagle_tensors())
    there = convert(source, "speculators", tmp_path / "there")
    assert (there.kind, there.trial.backend, there.trial.difference) == ("eagle3", "torch", 0.0)
    assert there.trial.scale > 0.1
    made = json.loads((tmp_path / "there" / "config.json").read_text())
    expected = None if place == "nowhere" else [1, 2, 3]
    assert made.get("eagle_aux_hidden_state_layer_ids") == expected
    assert any("target's name" in note for note in there.notes)
    assert "layers.0.hidden_norm.weight" in stored(tmp_path / "there")
    convert(there.out, "eagle", tmp_path / "back")
    assert_same_tensors(stored(source), stored(tmp_path / "back"))
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    wanted = eagle_config(norm_before_residual=True) if place != "nowhere" else keys
    assert back == wanted


def test_other_spellings_of_names_become_the_published_one(tmp_path: Path) -> None:
    plain = v1_tensors()
    odd = {f"model.{name}": tensor for name, tensor in plain.items()}
    parts = [odd.pop(f"model.layers.0.self_attn.{which}_proj.weight") for which in "qkv"]
    fused = np.concatenate([part.values for part in parts])
    odd["model.layers.0.self_attn.qkv_proj.weight"] = Tensor("BF16", fused)
    odd["model.rotary_emb.inv_freq"] = random(DIM // 2, dtype="F32")
    assert fused.shape == ((HEADS + 2 * KV) * DIM, HIDDEN)
    convert(save(tmp_path / "odd", config(), odd), "hf", tmp_path / "out")
    assert_same_tensors(plain, stored(tmp_path / "out"))


def test_unknown_config_keys_are_kept_and_named(tmp_path: Path) -> None:
    keys = config(flavour="sweet", nested={"depth_of_field": 3})
    done = convert(save(tmp_path / "a", keys, v1_tensors()), "speculators", tmp_path / "b")
    assert any("flavour, dflash_config.depth_of_field" in note for note in done.notes)
    convert(tmp_path / "b", "hf", tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == keys


def test_unknown_tensors_are_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    tensors = v1_tensors(**{"layers.0.self_attn.g_proj.weight": random(HIDDEN, HIDDEN)})
    source = save(tmp_path / "source", config(), tensors)
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.g_proj\.weight"):
        convert(source, "mlx", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_mask_embedding_in_a_pickle_becomes_safetensors(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    row = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5)).bfloat16()
    torch.save({"mask_token_id": 300, "embedding": row}, source / "mask_embedding.pt")
    convert(source, "hf", tmp_path / "out")
    kept = hf.read(tmp_path / "out").mask_embedding
    assert kept is not None
    assert torch.equal(torch.from_numpy(kept.floats()), row.float())


class Trap:
    """Unpickling this would create a file."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return (Path.touch, (self.place,))


def test_a_mask_embedding_that_would_run_code_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    torch.save({"embedding": Trap(tmp_path / "sprung")}, source / "mask_embedding.pt")
    with pytest.raises(WeightsError, match="can run code"):
        convert(source, "hf", tmp_path / "out")
    assert not (tmp_path / "sprung").exists()


def test_a_conversion_that_swaps_two_matrices_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    honest = hf.write

    def swapping(draft: Any, out: Path) -> None:
        gate, up = (draft.tensors[f"layers.1.mlp.{w}_proj.weight"] for w in ("gate", "up"))
        draft.tensors["layers.1.mlp.gate_proj.weight"] = up
        draft.tensors["layers.1.mlp.up_proj.weight"] = gate
        honest(draft, out)

    monkeypatch.setattr("dflash.convert.hf.write", swapping)
    with pytest.raises(WeightsError, match="another one"):
        convert(source, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_config_that_loses_a_word_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    monkeypatch.setattr("dflash.convert.speculators.to_speculators", list)  # forgets the + 1
    with pytest.raises((WeightsError, CheckpointError), match=r"taps|inputs"):
        convert(source, "speculators", tmp_path / "out")


@pytest.mark.parametrize(
    "keys, says",
    [
        ({"architectures": ["LlamaForCausalLM"], "dflash_config": None}, "is a target"),
        ({"quantization_config": {"format": "pack-quantized"}}, "quantised draft"),
    ],
)
def test_what_is_no_plain_draft_is_refused(tmp_path: Path, keys: Any, says: str) -> None:
    made = {k: v for k, v in config(**keys).items() if v is not None}
    source = save(tmp_path / "source", made, v1_tensors())
    with pytest.raises(CheckpointError, match=says):
        convert(source, "hf", tmp_path / "out")


def test_kinds_and_layouts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    v1 = save(tmp_path / "v1", config(), v1_tensors())
    with pytest.raises(CheckpointError, match="EAGLE layout is for"):
        convert(v1, "eagle", tmp_path / "out")


@pytest.mark.parametrize("kind", ["dflash", "eagle3"])
def test_the_mlx_backend_computes_from_an_mlx_folder_what_torch_does(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("mlx.core")
    made = {"dflash": (config(), v1_tensors()), "eagle3": (eagle_config(), eagle_tensors())}
    source = save(tmp_path / "source", *made[kind])
    convert(source, "mlx", tmp_path / "out")
    taps, rows = len(read_spec(source).taps), np.random.default_rng(3)
    features = rows.standard_normal((9, taps * HIDDEN)).astype(np.float32)
    block = rows.standard_normal((8, HIDDEN)).astype(np.float32)
    ours, theirs = (
        registry.DRAFT_RUNNERS.load(name).hidden_states(folder, features, block)
        for name, folder in (("mlx", tmp_path / "out"), ("torch", source))
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-5)


def test_a_folder_with_something_in_it_is_not_written_into(tmp_path: Path) -> None:
    source = save(tmp_path / "source", config(), v1_tensors())
    with pytest.raises(ConfigError, match="exists already"):
        convert(source, "hf", source)
    with pytest.raises(ConfigError, match="Known: hf"):
        convert(source, "onnx", tmp_path / "out")
