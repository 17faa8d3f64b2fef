"""Weights in fewer bytes: near the plain product, no row sees another, and refused where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dflash
from dflash.backends.torch import narrow, packed
from dflash.backends.torch.load import load_target
from dflash.backends.torch.packed import PackedLinear, pack_model, why_not_narrow
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


def test_weights_stored_in_16_bits_are_packed_in_float16_by_themselves() -> None:
    needs("float16")
    plain, model = tiny_target(), tiny_target()
    with torch.no_grad():
        for one in (plain, model):
            for weight in one.parameters():
                weight.copy_(weight.bfloat16().float())
    report = pack_model(model)
    assert report.halved == report.layers == 4 * LAYERS + 3 * LAYERS + 1
    assert report.bytes == 2 * sum(
        m.in_features * m.out_features for m in plain.modules() if isinstance(m, nn.Linear)
    )
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        expected = plain(input_ids=ids).logits
        gap = (model(input_ids=ids).logits - expected).abs().max() / expected.abs().max()
    assert gap < 1e-5
    assert pack_model(tiny_target()).halved == 0, "these are not exact in float16"


def test_numbers_that_float16_cannot_hold_are_refused_or_left_alone() -> None:
    needs("float16")
    linear = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        linear.weight[0, 0] = 1e5
    assert not narrow.holds(linear.weight) and PackedLinear(linear).kind != "float16"
    with pytest.raises(WeightsError, match="--weights bfloat16"):
        PackedLinear(linear, "float16")


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
