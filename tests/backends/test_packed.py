"""Prepacked linear layers: the same results, the originals gone, and a reason where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dflash.backends.torch import packed, products
from dflash.backends.torch.gated import GatedLinear
from dflash.backends.torch.load import load_target, wrap_target
from dflash.backends.torch.packed import PackedLinear, choose_kind, pack_model, why_not
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.types import PLAIN, Proposal, Request

from .tiny import save_target, tiny_target, tiny_tokenizer

CPU = torch.device("cpu")
PROMPT = [5, 7, 300, 20, 41, 99, 3]

needs_packing = pytest.mark.skipif(
    bool(why_not(torch.float32, CPU)), reason="this torch has no packed form on this processor"
)


@needs_packing
@pytest.mark.parametrize("kind", ["mkl", "onednn"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "out"), [(64, 96), (576, 192), (33, 517)])
def test_a_packed_layer_computes_what_the_plain_one_does(
    width: int, out: int, bias: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "choose_kind", lambda dtype, out: kind)
    torch.manual_seed(0)
    plain = nn.Linear(width, out, bias=bias)
    layer = PackedLinear(plain)
    with torch.inference_mode():
        for rows in (*range(1, 18), 100, 513):
            x = torch.randn(1, rows, width)
            expected = plain(x)
            gap = (layer(x) - expected).abs().max() / expected.abs().max()
            assert gap < 1e-5, f"{rows} rows"
        assert layer(torch.empty(1, 0, width)).shape == (1, 0, out)
        strided = torch.randn(1, 8, 2 * width)[..., :width]
        torch.testing.assert_close(layer(strided), plain(strided), rtol=1e-5, atol=1e-5)


@needs_packing
def test_plain_steps_and_blocks_of_a_packed_model_agree_with_the_unpacked_one() -> None:
    plain, model = tiny_target("qwen3"), tiny_target("qwen3")
    report = pack_model(model)
    assert report.layers == 4 * 7 + 1 and not report.reason
    with torch.inference_mode():
        for rows in (1, 2, 8, 16):
            ids = torch.tensor([[(i * 37) % 512 for i in range(rows)]])
            expected = plain(input_ids=ids).logits
            gap = (model(input_ids=ids).logits - expected).abs().max() / expected.abs().max()
            assert gap < 1e-5
    sessions = [TorchTargetSession(m, (1,), 64) for m in (plain, model)]
    outputs = []
    for session in sessions:
        (verdict,) = session.prefill(Request(PROMPT, 20), 0)
        tokens = list(verdict.tokens)
        for proposal in (PLAIN, Proposal([1, 2, 3, 4, 5, 6, 7], 7), PLAIN):
            verdict = session.verify(proposal)
            session.commit(len(verdict.tokens))
            tokens += verdict.tokens
        outputs.append(tokens)
    assert outputs[0] == outputs[1]


@needs_packing
def test_a_tied_head_is_packed_as_a_copy_and_the_table_stays() -> None:
    model = tiny_target(tied=True)
    table = model.model.embed_tokens.weight.clone()
    pack_model(model)
    assert isinstance(model.lm_head, PackedLinear)
    assert torch.equal(model.get_input_embeddings().weight, table)
    assert {n for n, _ in model.named_parameters() if "norm" not in n} == {
        "model.embed_tokens.weight"
    }


@needs_packing
def test_bfloat16_layers_have_a_packed_form_of_their_own() -> None:
    reason = why_not(torch.bfloat16, CPU)
    plain, model = tiny_target(dtype=torch.bfloat16), tiny_target(dtype=torch.bfloat16)
    report = pack_model(model)
    assert report.reason == reason
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        gap = (model(input_ids=ids).logits - plain(input_ids=ids).logits).abs().max()
    assert gap < 0.1


def test_other_devices_and_dtypes_keep_their_layers_and_say_why() -> None:
    assert "needs no packing" in why_not(torch.float32, torch.device("cuda"))
    assert "no packed form" in why_not(torch.float64, CPU)
    model = tiny_target(dtype=torch.float64)
    report = pack_model(model)
    assert report.layers == 0 and "float64" in report.reason
    assert type(model.lm_head) is nn.Linear


@needs_packing
@pytest.mark.parametrize("wrong", [("onednn", "mkl"), ("onednn_gate",), ("plus",)])
def test_a_torch_whose_packed_product_is_wrong_is_found_out(
    wrong: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plain product, the gated one, or the one that something is added to."""
    multiply, plus = 1.01 if "onednn" in wrong else 1.0, 1.01 if "plus" in wrong else 1.0
    both = lambda w: (lambda x: x @ w.T * multiply, lambda x, y: y * plus + x @ w.T)  # noqa: E731
    monkeypatch.setattr(packed, "on_intel", lambda: False)
    monkeypatch.setattr(products, "onednn", both)
    if "onednn_gate" in wrong:
        monkeypatch.setattr(products, "onednn_gate", lambda w: lambda x: x @ w[: len(w) // 2].T)
    assert "differs" in why_not(torch.float32, CPU)


@needs_packing
def test_products_in_the_forms_of_a_layer_are_the_plain_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control of the test above, and any shape and number of rows."""
    for intel in (False, True):
        monkeypatch.setattr(packed, "on_intel", lambda intel=intel: intel)
        assert why_not(torch.float32, CPU) == ""
        plain = nn.Linear(32, 512, bias=False).requires_grad_(False)
        for layer in (plain, GatedLinear(plain, torch.nn.functional.silu)):
            made = PackedLinear(layer)
            for shape in ((1, 32), (3, 32), (2, 5, 32), (1, 2, 32)):
                x, y = torch.randn(shape), layer(torch.randn(shape))
                torch.testing.assert_close(made(x), layer(x), atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(made.plus(x, y), layer(x) + y, atol=1e-5, rtol=1e-5)


def test_a_torch_without_the_operators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert why_not(torch.bfloat16, CPU) == "this torch lacks mkldnn._reorder_linear_weight"


def test_the_library_is_chosen_by_rule_so_that_results_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chosen(intel: bool) -> list[str]:
        monkeypatch.setattr(packed, "on_intel", lambda: intel)
        return [choose_kind(torch.float32, out) for out in (192, 576, 960, 1536, 49152)]

    assert chosen(False) == ["onednn"] * 5
    assert chosen(True) == ["onednn", "onednn", "mkl", "mkl", "mkl"], "padding would cost memory"
    assert choose_kind(torch.bfloat16, 1536) == "onednn"


def test_the_users_own_model_is_never_packed() -> None:
    model = tiny_target()
    target = wrap_target(model, tiny_tokenizer())
    assert target.packed.layers == 0 and target.packed.reason
    assert type(model.lm_head) is nn.Linear


def test_packing_can_be_switched_off_at_load(tmp_path: Path) -> None:
    folder = save_target(tiny_target(), tiny_tokenizer(), tmp_path)
    target = load_target(str(folder), "cpu", pack=False)
    assert target.packed.reason == "switched off"
    assert type(target.head) is nn.Linear
