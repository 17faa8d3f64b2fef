"""Sidecars: every name there and back, and a clear refusal of what llama.cpp has no place for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the check for torch

from dflash.convert import convert  # noqa: E402
from dflash.convert.gguf import write_sidecar  # noqa: E402
from dflash.convert.gguf.kinds import ARCHITECTURES  # noqa: E402
from dflash.convert.gguf.rope import halves_first, pairs_first  # noqa: E402
from dflash.convert.tensor import Tensor  # noqa: E402
from dflash.drafts.spec import read_spec  # noqa: E402
from dflash.errors import CheckpointError, ConfigError, PairError, WeightsError  # noqa: E402
from dflash.gguf_file import read_header  # noqa: E402
from tests.backends.eagle_drafts import save_eagle  # noqa: E402
from tests.backends.gguf_files import (  # noqa: E402
    DFLASH2,
    edited,
    save_folder,
    save_sidecar,
    tiny_weights,
)
from tests.backends.tiny import tiny_target, tiny_tokenizer  # noqa: E402
from tests.backends.tiny_gguf import write_gguf  # noqa: E402
from tests.convert.drafts import HIDDEN, random, save, v1_tensors  # noqa: E402
from tests.convert.drafts import config as v1_config  # noqa: E402
from tests.facades.drafts import config  # noqa: E402


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())


@pytest.mark.parametrize("changes", [{}, DFLASH2], ids=["v1", "v2"])
def test_every_tensor_has_a_name_there_and_back(
    changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    weights = tiny_weights(config(**changes))
    kind = ARCHITECTURES["dflash"]
    names = {name: kind.gguf_name(name) for name in weights}
    assert all(names.values())
    assert {kind.hf_name(str(theirs)) for theirs in names.values()} == set(names)
    header = read_header(save_sidecar(tmp_path / "draft.gguf", target, **changes))
    assert set(header.tensors) == set(names.values())
    for name, theirs in names.items():
        assert header.tensors[str(theirs)].shape == tuple(weights[name].shape)
    assert kind.gguf_name("layers.0.self_attn.q_proj.bias") is None


def test_the_metadata_says_what_the_config_said(target: Path, tmp_path: Path) -> None:
    header = read_header(save_sidecar(tmp_path / "draft.gguf", target, **DFLASH2))
    assert header.architecture == "dflash"
    found = {key: header.own(key) for key in ("target_layers", "block_size", "selector_top_k")}
    assert found == {"target_layers": [1, 3], "block_size": 6, "selector_top_k": 5}
    theirs = read_header(target)
    for key, value in theirs.metadata.items():
        if key.startswith("tokenizer."):
            assert (header.metadata[key], header.kinds[key]) == (value, theirs.kinds[key])
    assert header.metadata["tokenizer.ggml.mask_token_id"] == 300


REFUSED: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True},
    "differ in causality": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "'llama3'": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_llama_cpp_would_run_otherwise_is_refused(
    words: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"cannot become a GGUF sidecar: .*{words}"):
        save_sidecar(tmp_path / "draft.gguf", target, **REFUSED[words])


def test_the_wrong_target_is_named_with_both_numbers(target: Path, tmp_path: Path) -> None:
    for changes, words in (
        ({"hidden_size": 32}, "64 wide, the draft reads 32"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 7]}}, "taps layer 7"),
        ({"vocab_size": 500}, "512 tokens, the draft 500"),
    ):
        with pytest.raises(PairError, match=words):
            save_sidecar(tmp_path / "draft.gguf", target, **changes)
    draft = save_sidecar(tmp_path / "draft.gguf", target)
    with pytest.raises(PairError, match="so no target"):
        save_sidecar(tmp_path / "again.gguf", draft)


def test_tensors_that_are_missing_or_unknown_stop_it(target: Path, tmp_path: Path) -> None:
    keys = config()
    weights = {name: tensor.numpy() for name, tensor in tiny_weights(keys).items()}
    for change in ({"norm.weight": None}, {"layers.0.self_attn.gate.weight": np.zeros(3)}):
        tensors = {k: v for k, v in {**weights, **change}.items() if v is not None}
        with pytest.raises(WeightsError, match=next(iter(change))):
            write_sidecar(read_spec(keys), tensors, target, tmp_path / "draft.gguf")
    with pytest.raises(ConfigError, match="Q2_K"):
        write_sidecar(read_spec(keys), weights, target, tmp_path / "draft.gguf", "Q2_K")


ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "v1": {},
    "v2": DFLASH2,
    "window": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "is_causal": False,
    },
    "half rotated": {"partial_rotary_factor": 0.5, "is_causal": True},
    "pairs": {"is_neox_style": False},
    "yarn": {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    },
    "scales": {
        "dflash_config": {
            "mask_token_id": 300,
            "target_layer_ids": [2, 0],
            "input_embedding_scale": 0.7,
            "output_multiplier": 1.3,
            "final_logit_softcapping": 30.0,
        }
    },
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_a_draft_comes_back_from_a_sidecar_as_it_was(
    name: str, target: Path, tmp_path: Path
) -> None:
    folder = save_folder(tmp_path / "draft", **ROUND_TRIPS[name])
    there = convert(folder, "gguf", tmp_path / "draft.gguf", target=target)
    assert there.made == "gguf"
    assert there.trial.backend == "torch"
    back = convert(tmp_path / "draft.gguf", "hf", tmp_path / "again")
    assert back.found == "gguf"
    old, new = read_spec(folder), read_spec(tmp_path / "again")
    assert (old.taps, old.block_size, old.kind) == (new.taps, new.block_size, new.kind)
    if name != "pairs":  # those lie in another order now
        again = load_file(tmp_path / "again" / "model.safetensors")
        for tensor, values in load_file(folder / "model.safetensors").items():
            assert torch.equal(again[tensor], values)


@pytest.mark.parametrize("place", ["rope_theta", "rope_parameters"])
def test_a_base_frequency_is_kept_wherever_it_stands(
    place: str, target: Path, tmp_path: Path
) -> None:
    far = 1e7 if place == "rope_theta" else {"rope_theta": 1e7, "rope_type": "default"}
    folder = save_folder(tmp_path / "draft", **{"rope_theta": None, place: far})
    convert(folder, "gguf", tmp_path / "draft.gguf", target=target)
    assert read_header(tmp_path / "draft.gguf").own("rope.freq_base") == 1e7
    convert(tmp_path / "draft.gguf", "hf", tmp_path / "again")
    assert read_spec(tmp_path / "again").rope_parameters == read_spec(folder).rope_parameters


@pytest.mark.parametrize("layout", ["gguf", "speculators", "mlx"])
def test_a_vocabulary_of_its_own_goes_along_with_its_head(
    layout: str, target: Path, tmp_path: Path
) -> None:
    kept = np.arange(0, 480, 12)
    head = {"lm_head.weight": random(40, HIDDEN, seed=5)}
    own = {**head, "d2t": Tensor("I64", kept - np.arange(40))}
    source = save(tmp_path / "a", v1_config(draft_vocab_size=40), v1_tensors(**own))
    there = tmp_path / ("b.gguf" if layout == "gguf" else "b")
    done = convert(source, layout, there, target=None if layout == "speculators" else target)
    if layout == "mlx":
        assert any("no place for d2t, lm_head.weight" in note for note in done.notes)
    convert(there, "hf", tmp_path / "c")
    one, two = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "c"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert read_spec(tmp_path / "c").draft_vocab_size == 40


SAID: dict[str, Any] = {
    "target_name": "owner/target",
    "target_tokenizer_sha256": "beef",
    "chat_template_sha256": "c0ffee",
    "flavour": "sweet",
}
SAID_BELOW = {"default_block_size": 4, "acceptance_by_position": [0.7, 0.41], "depth_of_field": 3}


def test_what_a_sidecar_has_no_key_for_comes_back_all_the_same(
    target: Path, tmp_path: Path
) -> None:
    nested = {"mask_token_id": 300, "target_layer_ids": [0, 2], **SAID_BELOW}
    folder = save_folder(tmp_path / "draft", **SAID, dflash_config=nested)
    there = convert(folder, "gguf", tmp_path / "draft.gguf", target=target)
    assert there.trial.lost == ()
    for layout in ("hf", "mlx"):
        back = convert(tmp_path / "draft.gguf", layout, tmp_path / layout)
        assert back.trial.lost == ()
        made = json.loads((tmp_path / layout / "config.json").read_text())
        assert {key: made.get(key) for key in SAID} == SAID
        assert {key: made["dflash_config"].get(key) for key in SAID_BELOW} == SAID_BELOW
        assert made["num_target_layers"] == 4


def test_a_sidecar_of_other_makers_is_told_its_targets_depth(target: Path, tmp_path: Path) -> None:
    ours = save_sidecar(tmp_path / "ours.gguf", target)
    theirs = edited(ours, tmp_path / "theirs.gguf", {"dflash_engine.config": None})
    with pytest.raises(ConfigError, match="no num_target_layers"):
        convert(theirs, "mlx", tmp_path / "mlx")
    convert(theirs, "mlx", tmp_path / "mlx", target=target)
    made = json.loads((tmp_path / "mlx" / "config.json").read_text())
    assert made["num_target_layers"] == 4
    damaged = edited(ours, tmp_path / "damaged.gguf", {"dflash_engine.config": "{"})
    with pytest.raises(CheckpointError, match=r"dflash_engine\.config is damaged"):
        convert(damaged, "hf", tmp_path / "hf")


def test_a_window_survives_the_config_class_that_upstream_reads_with(
    target: Path, tmp_path: Path
) -> None:
    """Qwen3's drops the window unless it is also said to be used."""
    from transformers import Qwen3Config

    sidecar = save_sidecar(tmp_path / "draft.gguf", target, **ROUND_TRIPS["window"])
    convert(sidecar, "hf", tmp_path / "hf")
    assert Qwen3Config.from_pretrained(tmp_path / "hf").sliding_window == 8


@pytest.mark.parametrize("stored", ["F16", "BF16", "Q8_0", "Q4_0"])
def test_a_sidecar_may_be_smaller(stored: str, target: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "draft")
    out = tmp_path / "draft.gguf"
    trial = convert(folder, "gguf", out, target=target, stored=stored).trial
    assert trial.rounded == stored
    share = trial.difference / trial.scale  # against the weights as they were
    least = {"F16": 1e-6, "BF16": 1e-5, "Q8_0": 1e-4, "Q4_0": 1e-2}[stored]
    assert least < share < {"F16": 1e-2, "BF16": 0.05, "Q8_0": 0.1, "Q4_0": 1.0}[stored]
    assert read_header(out).tensors["fc.weight"].kind_name == stored
    assert read_header(out).tensors["output_norm.weight"].kind_name == "F32"


def test_a_rounding_that_moves_numbers_too_far_is_found_out(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    folder, honest = save_folder(tmp_path / "draft"), gguf.quantize
    monkeypatch.setattr("gguf.quantize", lambda values, kind: honest(values * 1.1, kind))
    with pytest.raises(WeightsError, match="by more than Q8_0 rounds"):
        convert(folder, "gguf", tmp_path / "x.gguf", target=target, stored="Q8_0")


def test_a_narrower_type_that_keeps_every_bit_rounds_nothing(target: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow.gguf"
    convert(save_folder(tmp_path / "draft"), "gguf", narrow, target=target, stored="F16")
    trial = convert(narrow, "gguf", tmp_path / "again.gguf", target=target, stored="F16").trial
    assert trial.rounded is None and trial.difference == 0


def test_numbers_that_float16_cannot_hold_are_named(target: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "draft")
    name = "layers.0.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] = 7e4
    save_file(tensors, folder / "model.safetensors")
    out = tmp_path / "x.gguf"
    with pytest.raises(WeightsError, match=rf"{name} .*70000, which F16 cannot hold.*BF16"):
        convert(folder, "gguf", out, target=target, stored="F16")
    assert not out.exists()


def test_a_sidecar_asks_for_its_target_and_a_name(target: Path, tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "draft")
    for options, words in (
        ({"to": "gguf", "out": tmp_path / "x.gguf"}, "name the target's .gguf file"),
        ({"to": "gguf", "out": tmp_path / "x", "target": target}, "with .gguf at the end"),
        ({"to": "hf", "out": tmp_path / "x", "stored": "F16"}, "a type is for to='gguf'"),
        ({"to": "gguf", "out": tmp_path / "x.gguf", "target": target, "stored": "Q2_K"}, "Q2_K"),
    ):
        with pytest.raises(ConfigError, match=words):
            convert(folder, **options)
    with pytest.raises(CheckpointError, match="no DFlash, DFlash2 or EAGLE-3 file"):
        convert(target, "hf", tmp_path / "y")


def test_pairs_of_a_rotated_head_become_halves() -> None:
    assert halves_first(np.arange(16), 8).tolist() == [
        *(0, 2, 4, 6, 1, 3, 5, 7),
        *(8, 10, 12, 14, 9, 11, 13, 15),
    ]
    assert pairs_first(halves_first(np.arange(16), 8), 8).tolist() == list(range(16))


@pytest.mark.parametrize("place", ["specforge", "top"])
def test_an_eagle_draft_becomes_one_file_and_comes_back(
    place: str, target: Path, tmp_path: Path
) -> None:
    """Bit for bit, and run on both sides."""
    source = save_eagle(tmp_path / "source", norm_before_residual=True)
    keys = json.loads((source / "config.json").read_text())
    if place == "top":
        del keys["eagle_config"]
        keys["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]  # inputs
        (source / "config.json").write_text(json.dumps(keys))
    there = convert(source, "gguf", tmp_path / "draft.gguf", target=target)
    assert (there.kind, there.trial.backend) == ("eagle3", "torch")
    assert there.trial.difference < 1e-5 < there.trial.scale
    header = read_header(tmp_path / "draft.gguf")
    assert header.own("target_layers") == [1, 3, 4]
    assert header.own("norm_before_residual") is True
    assert header.tensors["blk.0.attn_q.weight"].shape == (64, 128)
    back = convert(tmp_path / "draft.gguf", "eagle", tmp_path / "back")
    assert back.trial.difference == 0.0
    one, two = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "back"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_prediction_heads_in_the_target_are_no_layers_of_it(target: Path, tmp_path: Path) -> None:
    """A file counts them as blocks; an EAGLE-3 draft that names no taps reads by the depth."""
    source, taps = save_eagle(tmp_path / "source"), []
    keys = json.loads((source / "config.json").read_text())
    del keys["eagle_config"]
    (source / "config.json").write_text(json.dumps(keys))
    for blocks, heads in ((12, None), (13, 1), (13, None)):
        depth = {"llama.block_count": blocks, "llama.nextn_predict_layers": heads}
        whole = edited(target, tmp_path / f"{blocks}-{heads}.gguf", depth)
        draft = tmp_path / f"draft-{blocks}-{heads}.gguf"
        convert(source, "gguf", draft, target=whole)
        taps.append(read_header(draft).own("target_layers"))
    assert taps[0] == taps[1] != taps[2]


@pytest.mark.parametrize("changes", [{"fc_norm": True}, {"num_hidden_layers": 2}], ids=str)
def test_eagle_drafts_of_another_make_are_no_gguf_files(
    changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    source = save_eagle(tmp_path / "source", **changes)
    with pytest.raises(CheckpointError, match="cannot become a GGUF sidecar"):
        convert(source, "gguf", tmp_path / "draft.gguf", target=target)
    assert not (tmp_path / "draft.gguf").exists()


@pytest.mark.parametrize(
    "changes", [{}, {"norm_before_residual": True}, {"norm_before_fc": True}], ids=str
)
def test_llama_cpp_loads_an_eagle_file_with_every_tensor_of_it(
    changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    """It insists on every key and tensor of its own, and refuses files that hold others."""
    pytest.importorskip("xllamacpp")
    from dflash.backends.gguf.library import library
    from dflash.backends.gguf.native import Model

    source, file = save_eagle(tmp_path / "source", **changes), tmp_path / "draft.gguf"
    convert(source, "gguf", file, target=target)
    model = Model(library(), file)
    assert (model.width, model.layers, model.vocab_size) == (64, 1, 512)
    model.close()
    norm = {"blk.0.attn_norm_2.weight": None}
    with pytest.raises(CheckpointError, match="attn_norm_2"):
        Model(library(), edited(file, tmp_path / "less.gguf", tensors=norm))
    other = {"blk.0.attn_norm_3.weight": np.ones(64, np.float32)}
    with pytest.raises(CheckpointError, match="wrong number of tensors"):
        Model(library(), edited(file, tmp_path / "more.gguf", tensors=other))
    for key, words in (("target_layers", "extract_layers"), ("target_hidden_size", "hidden_size")):
        with pytest.raises(CheckpointError, match=words):
            Model(library(), edited(file, tmp_path / f"{key}.gguf", {f"eagle3.{key}": None}))
