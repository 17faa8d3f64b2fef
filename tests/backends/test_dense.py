"""Targets built from their files without transformers' model class: the same bits, or its class."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.backends.torch import tuning
from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.dense import DenseModel
from dflash.backends.torch.forward import make_forward
from dflash.backends.torch.load import LoadedTarget, load_target
from dflash.backends.torch.pair import TorchPair
from dflash.backends.torch.tree_check import why_no_trees
from dflash.config import LoadConfig
from dflash.errors import CheckpointError, WeightsError

from .tiny import LAYERS, save_target, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.torch

PROMPT = [7, 300, 12, 44, 45, 500, 9, 10, 11, 3, 77]
HEAVY = ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))  # where nothing was compared yet


def saved(model: Any, folder: Path) -> str:
    return str(save_target(model, tiny_tokenizer(), folder))


def opened(folder: str, **options: Any) -> LoadedTarget:
    return load_target(folder, "cpu", whole=False, **options)


def logits(target: LoadedTarget) -> torch.Tensor:
    forward, cache = make_forward(target.model), make_cache(target.config, 64)
    with torch.inference_mode():
        return torch.cat([forward(rows, cache, 0) for rows in (PROMPT, PROMPT[:8], [4])])


def biased() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    config = {**tiny_target("llama").config.to_dict(), "attention_bias": True}
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**config, "rope_parameters": rope}))
    return model.eval()


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (tiny_target, "float32"),
        (lambda: tiny_target("qwen3", tied=True, pad_rows=3), "float64"),
        (biased, "bfloat16"),
    ],
)
def test_a_built_target_has_the_bits_of_one_that_transformers_loaded(
    make: Any, dtype: str, tmp_path: Path
) -> None:
    folder = saved(make(), tmp_path / "target")
    whole = load_target(folder, "cpu", dtype)
    for start in ("first", "second"):
        built = opened(folder, dtype=dtype)
        assert isinstance(built.model, DenseModel) and built.fused.layers == LAYERS, start
        assert torch.equal(logits(built), logits(whole))
        for fact in ("eos_ids", "context_length", "vocab_size", "dtype", "packed", "fused"):
            assert getattr(built, fact) == getattr(whole, fact), fact
        assert built.config.model_type == whole.config.model_type
        assert built.tokenizer.encode("a text") == whole.tokenizer.encode("a text")
        assert type(built.tokenizer) is type(whole.tokenizer)
        assert not why_no_trees(built.model)


def test_the_second_start_imports_neither_model_classes_nor_compilers(tmp_path: Path) -> None:
    folder = saved(tiny_target(), tmp_path / "target")
    opened(folder)
    script = (
        "import sys; from dflash.backends.torch.pair import TorchPair;"
        "from dflash.config import LoadConfig;"
        f"pair = TorchPair.open(LoadConfig({folder!r}, device='cpu'));"
        "pair.tokenizer.encode('a text');"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert found.stdout.strip() == "[]"


def test_tensors_that_nobody_asked_for_or_that_are_not_there_are_left_to_transformers(
    tmp_path: Path,
) -> None:
    opened(saved(tiny_target(), tmp_path / "noted"))
    more = Path(saved(tiny_target(), tmp_path / "more"))
    tensors = load_file(more / "model.safetensors")
    beside = {**tensors, "model.heads.0.weight": torch.zeros(2)}
    save_file(beside, more / "model.safetensors", metadata={"format": "pt"})
    target = opened(str(more))
    assert not isinstance(target.model, DenseModel) and target.fused.layers == LAYERS
    tensors.pop("model.norm.weight")
    save_file(tensors, more / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        opened(str(more))


def test_what_cannot_be_read_of_an_earlier_start_is_found_out_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, counted = saved(tiny_target(), tmp_path / "target"), list[str]()
    sample = tuning._sample_logits

    def count(model: Any) -> torch.Tensor:
        counted.append(type(model).__name__)
        return sample(model)

    monkeypatch.setattr(tuning, "_sample_logits", count)
    opened(folder)
    assert counted == ["LlamaForCausalLM", "DenseModel"]
    opened(folder)
    assert len(counted) == 2
    (note,) = (tmp_path / "cache" / "checked").iterdir()
    whole = note.read_text()
    for damaged in (whole[:40], whole.replace('"eps": 1e-', '"eps": 2e-'), "[" * 9999, "{}"):
        assert damaged != whole
        note.write_text(damaged)
        before = len(counted)
        assert isinstance(opened(folder).model, DenseModel) and len(counted) == before + 2
        assert note.read_text() == whole


def test_a_generation_config_that_cannot_be_read_is_passed_over_as_transformers_does(
    tmp_path: Path,
) -> None:
    folder = saved(tiny_target(), tmp_path / "target")
    opened(folder)
    for damaged in ("{", "\xff"):
        (Path(folder) / "generation_config.json").write_text(damaged, encoding="latin-1")
        assert opened(folder).eos_ids == load_target(folder, "cpu").eos_ids
    (Path(folder) / "generation_config.json").write_text("[]")
    for start in (opened, load_target):
        with pytest.raises(CheckpointError):
            start(folder)


def test_a_pair_is_opened_so_and_other_families_are_not(tmp_path: Path) -> None:
    for kind, built in (("llama", True), ("swa", False)):
        folder = saved(tiny_target(kind), tmp_path / kind)
        for _ in range(2):
            pair = TorchPair.open(LoadConfig(folder, device="cpu"))
            assert isinstance(pair.target.model, DenseModel) is built
            pair.close()
