"""Sidecars: every name there and back, and a clear refusal of what llama.cpp has no place for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from dflash.convert.gguf import gguf_name, halves_first, hf_name, write_sidecar
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError, ConfigError, PairError, WeightsError
from dflash.gguf_file import read_header
from tests.backends.gguf_files import DFLASH2, save_sidecar, tiny_weights
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf
from tests.facades.drafts import config


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return write_gguf(folder / "target.gguf", tiny_target("llama"), tiny_tokenizer())


@pytest.mark.parametrize("changes", [{}, DFLASH2], ids=["v1", "v2"])
def test_every_tensor_has_a_name_there_and_back(
    changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    weights = tiny_weights(config(**changes))
    names = {name: gguf_name(name) for name in weights}
    assert all(names.values())
    assert {hf_name(str(theirs)) for theirs in names.values()} == set(names)
    header = read_header(save_sidecar(tmp_path / "draft.gguf", target, **changes))
    assert set(header.tensors) == set(names.values())
    for name, theirs in names.items():
        assert header.tensors[str(theirs)].shape == tuple(weights[name].shape)
    assert gguf_name("layers.0.self_attn.q_proj.bias") is None


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


def test_pairs_of_a_rotated_head_become_halves() -> None:
    assert halves_first(np.arange(16), 8).tolist() == [
        *(0, 2, 4, 6, 1, 3, 5, 7),
        *(8, 10, 12, 14, 9, 11, 13, 15),
    ]
