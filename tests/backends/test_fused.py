"""Fused layers: the same logits as transformers' own, or transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.backends.torch import attention, decoder, tuning
from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.features import FINAL_NORM, Taps
from dflash.backends.torch.forward import FusedForward, ModelForward, make_forward
from dflash.backends.torch.fused import FusedLayer
from dflash.backends.torch.load import LoadedTarget, load_target, wrap_target
from dflash.backends.torch.pair import TorchPair

from .tiny import LAYERS, save_target, tiny_target, tiny_tokenizer

PROMPT = [7, 300, 12, 44, 45, 500, 9, 10, 11, 3, 77]


def opened(model: Any, folder: Path, **options: Any) -> LoadedTarget:
    return load_target(str(save_target(model, tiny_tokenizer(), folder)), "cpu", **options)


def logits(model: Any, taps: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of a prompt in two chunks, a row and a block; with the features of the block."""
    forward, cache, tapped = make_forward(model), make_cache(model.config, 64), Taps(model, taps)
    with torch.inference_mode():
        rows = [forward(part, cache, 0) for part in (PROMPT, PROMPT[:5], [4])]
        rows.append(forward([5, 6, 7, 8], cache, 0, tapped))
    return torch.cat(rows), tapped.take()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fused_layers_give_the_logits_and_features_of_transformers(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    model = tiny_target(kind, dtype=getattr(torch, dtype))
    target = opened(model, tmp_path, dtype=dtype)
    assert target.fused.layers == LAYERS and not target.fused.reason
    assert isinstance(make_forward(target.model), FusedForward)
    ours, features = logits(target.model, (0, LAYERS - 1))
    theirs, expected = logits(model, (0, LAYERS - 1))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(features, expected, atol=1e-4, rtol=1e-3)


def test_scaled_rope_and_biased_products_are_fused_too(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    plain = tiny_target("llama")
    config = LlamaConfig(
        **{
            **plain.config.to_dict(),
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        }
    )
    torch.manual_seed(3)
    model = LlamaForCausalLM(config).eval()
    target = opened(model, tmp_path, dtype="float32")
    assert target.fused.layers == LAYERS
    torch.testing.assert_close(logits(target.model)[0], logits(model)[0], atol=1e-4, rtol=1e-3)


def test_transformers_own_call_runs_fused_layers_as_well(tmp_path: Path) -> None:
    model = tiny_target("llama")
    target = opened(model, tmp_path)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        ours, theirs = target.model(input_ids=ids).logits, model(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("kind", "why"), [("swa", "sliding"), ("gemma3", "Gemma3")])
def test_other_families_keep_their_layers_and_say_why(kind: str, why: str, tmp_path: Path) -> None:
    target = opened(tiny_target(kind), tmp_path)
    assert target.fused.layers == 0 and why in target.fused.reason
    assert not TorchPair(target).warnings
    assert isinstance(make_forward(target.model), ModelForward)


def test_layers_that_would_compute_something_else_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path))  # where nothing was found equal yet
    right = decoder.rotate_
    monkeypatch.setattr(decoder, "rotate_", lambda x, turns: right(x, turns.conj()))
    model = tiny_target("llama")
    target = opened(model, tmp_path)
    assert target.fused.layers == 0 and "other logits" in target.fused.reason
    (note,) = TorchPair(target).warnings
    assert "take longer" in note and torch.__version__ in note
    torch.testing.assert_close(logits(target.model)[0], logits(model)[0], atol=1e-4, rtol=1e-3)


def test_the_users_own_model_is_never_fused() -> None:
    model = tiny_target("llama")
    assert wrap_target(model).fused.reason == "the model is yours"
    assert not any(isinstance(module, FusedLayer) for module in model.modules())


def test_switched_off_with_packing(tmp_path: Path) -> None:
    assert opened(tiny_target("llama"), tmp_path, pack=False).fused.reason == "switched off"


@pytest.mark.parametrize(("kind", "long"), [("llama", 64), ("qwen3", 9999)])
def test_rows_of_any_number_behind_a_context_of_any_length(
    kind: str, long: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, without a past and with one, before and after the tables have grown, and
    before and after query heads are stacked."""
    monkeypatch.setattr(attention, "LONG", long)
    model = tiny_target(kind)
    target = opened(model, tmp_path)
    forward, cache = make_forward(target.model), make_cache(model.config, 640)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 500, (600,), generator=generator).tolist()
    sizes, start, found = (40, 7, 40, 1, 420, 33, 32, 1, 17, 9), 0, []
    for size in sizes:
        with torch.inference_mode():
            forward(ids[:3], cache, 0)  # a draft that is rejected leaves nothing behind
            cache.rollback(start)
            found.append(forward(ids[start : start + size], cache, 0))
        start += size
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([ids])).logits[0]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-3)


def test_the_state_after_the_final_norm_can_be_tapped(tmp_path: Path) -> None:
    model = tiny_target("llama")
    target = opened(model, tmp_path)
    found = []
    for one in (target.model, model):
        taps = Taps(one, (0, FINAL_NORM))
        with torch.inference_mode():
            make_forward(one)(PROMPT, make_cache(model.config, 64), 1, taps)
        found.append(taps.take())
    assert found[0] is not None and found[0].shape[0] == len(PROMPT)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-3)


def test_layers_found_equal_once_are_not_compared_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one config, whatever its weights and place; another config is compared."""
    compared: list[str] = []
    sample = tuning._sample_logits

    def counted(model: Any) -> torch.Tensor:
        compared.append(type(model.model.layers[0]).__name__)
        return sample(model)

    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "_sample_logits", counted)
    for seed, count in ((0, 2), (1, 2)):
        target = opened(tiny_target("llama", seed=seed), tmp_path / f"{seed}")
        assert target.fused.layers == LAYERS and len(compared) == count
    assert compared == ["LlamaDecoderLayer", "FusedLayer"]
    opened(tiny_target("llama"), tmp_path / "2", dtype="float64")
    opened(tiny_target("llama", layers=3), tmp_path / "3")
    assert len(compared) == 6
