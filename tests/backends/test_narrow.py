"""Weights in fewer bytes: near the plain product, no row sees another, and refused where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dflash
from dflash.backends.torch import narrow, packed
from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.load import load_target
from dflash.backends.torch.packed import PackedLinear, why_not_narrow
from dflash.config import LoadConfig
from dflash.errors import ConfigError, WeightsError
from tests.facades.drafts import save_draft

from .tiny import LAYERS, save_target, tiny_target, tiny_tokenizer

PROMPT = [5, 7, 300, 20, 41, 99, 3]


def needs(form: str) -> None:
    if reason := why_not_narrow(form):
        pytest.skip(reason)


@pytest.mark.parametrize("form", narrow.WEIGHTS)
@pytest.mark.parametrize(("width", "out"), [(64, 96), (576, 192), (96, 517)])
def test_a_row_comes_out_the_same_whatever_stands_beside_it(
    form: str, width: int, out: int
) -> None:
    needs(form)
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(width, out)
    layer = PackedLinear(linear, form)
    assert layer.bytes == width * out * narrow.BYTES[form]
    x = torch.randn(1, 17, width, generator=generator)
    with torch.inference_mode():
        expected, whole = linear(x), layer(x)
        gap = (whole - expected).abs().max() / expected.abs().max()
        assert 0 < gap < narrow.TOLERANCE[form]
        x[:, 9:] *= 1e4  # a neighbour a shared scale would bow to
        assert torch.equal(layer(x)[:, :9], whole[:, :9])
        for rows in (1, 2, 3, 5, 8):
            torch.testing.assert_close(layer(x[:, :rows]), whole[:, :rows], rtol=1e-5, atol=1e-5)


def test_numbers_that_float16_cannot_hold_are_refused() -> None:
    needs("float16")
    linear = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        linear.weight[0, 0] = 1e5
    with pytest.raises(WeightsError, match="--weights bfloat16"):
        PackedLinear(linear, "float16")


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_beside_float32_is_rounded_where_the_processor_is_made_for_it(
    tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its head too, where the target's can be had; not if somebody asks for float32."""
    needs("bfloat16")
    target = load_target(
        str(save_target(tiny_target(tied=tied), tiny_tokenizer(), tmp_path / "t")), "cpu"
    )
    folder = str(save_draft(tmp_path / "d"))
    kinds = {}
    for native, dtype in ((True, None), (True, "float32"), (False, None)):
        monkeypatch.setattr(narrow, "fast_bfloat16", lambda native=native: native)
        draft = load_draft(folder, target, dtype)
        layers = [m for m in draft.model.modules() if isinstance(m, PackedLinear)]
        kinds[native, dtype] = {layer.kind for layer in layers}
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            gap = (draft.tables.head(x) - target.head(x)).abs().max()
        assert (gap > 0) == (tied and (native, dtype) == (True, None)) and gap < 0.1
    assert kinds.pop((True, None)) == {"bfloat16"}
    assert not any("bfloat16" in found for found in kinds.values())


@pytest.mark.parametrize("form", narrow.WEIGHTS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_the_draft_never_changes_the_text_of_a_rounded_target(
    form: str, kind: str, tmp_path: Path
) -> None:
    needs(form)
    target = str(save_target(tiny_target(kind), tiny_tokenizer(), tmp_path / "target"))
    draft = str(save_draft(tmp_path / "draft"))
    with dflash.load(target, draft=draft, weights=form, device="cpu", profile=False) as engine:
        assert engine.pair.runs_on()["weights"] == form
        options = {"max_tokens": 40, "ignore_eos": True, "reuse": False}
        plain = engine.generate(PROMPT, block_size=1, **options)
        for block in (2, 6):
            assert engine.generate(PROMPT, block_size=block, **options).token_ids == plain.token_ids
        size = engine.pair.memory()["target"]
    with dflash.load(target, draft="none", device="cpu", profile=False) as engine:
        assert size < engine.pair.memory()["target"]


def test_int8_keeps_the_head_in_16_bits(tmp_path: Path) -> None:
    needs("int8")
    needs("float16")
    target = load_target(
        str(save_target(tiny_target(), tiny_tokenizer(), tmp_path)), "cpu", weights="int8"
    )
    assert getattr(target.head, "kind", None) == "float16"
    kinds = {m.kind for m in target.model.modules() if isinstance(m, PackedLinear)}
    assert kinds == {"int8", "float16"} and target.fused.layers == LAYERS


def test_int8_asks_for_the_heads_16_bits_where_the_head_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs("int8")
    asked = []

    def why_not(form: str, *where: Any) -> str:
        asked.append((form, *where))
        return "no such operator on this device" if form == "float16" else ""

    monkeypatch.setattr(packed, "why_not_narrow", why_not)
    folder = str(save_target(tiny_target(), tiny_tokenizer(), tmp_path))
    target = load_target(folder, "cpu", weights="int8")
    assert getattr(target.head, "kind", None) == "int8"
    assert set(asked) == {(form, torch.float32, packed.CPU) for form in ("int8", "float16")}


def test_what_cannot_be_had_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_target(tiny_target(), tiny_tokenizer(), tmp_path))
    with pytest.raises(ConfigError, match=r"weights must be .*int8"):
        LoadConfig(folder, weights="int3")
    assert LoadConfig(folder, weights="bf16").weights == "bfloat16"
    with pytest.raises(ConfigError, match="pack_weights"):
        load_target(folder, "cpu", pack=False, weights="int8")
    monkeypatch.setattr(packed, "why_not_narrow", lambda *given: "no such operator")
    with pytest.raises(ConfigError, match="no such operator"):
        load_target(folder, "cpu", weights="int8")


def test_a_form_that_computes_something_else_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed.narrow, "narrow", lambda weight, form: lambda x: x @ weight.T * 1.2)
    assert "differs" in packed._wrong_result(torch.float32, "int8")
