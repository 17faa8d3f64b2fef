"""Stacked query heads: the same attention as transformers', in every case it is used for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dflash.backends.torch import attention
from dflash.backends.torch.attention import STACKED, attend_rows, stacking_pays
from dflash.backends.torch.grouped import group_attention, grouped_attention
from dflash.backends.torch.target import TorchTargetSession
from dflash.core.types import Proposal, Request

from .tiny import tiny_target


@pytest.mark.parametrize("kind", ["llama", "qwen3", "swa", "gemma3"])
def test_blocks_of_every_size_see_what_they_saw_before(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked = []
    real = F.scaled_dot_product_attention

    def watched(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        stacked.append(query.shape[2])
        return real(query, *args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    plain, grouped = (tiny_target(kind, dtype=torch.float64) for _ in range(2))
    assert group_attention(grouped) and grouped.config._attn_implementation == STACKED
    sessions = [TorchTargetSession(model, (0, 3), 128) for model in (plain, grouped)]
    for session in sessions:
        list(session.prefill(Request(list(range(30, 50)), 60), 0))
    for rows in (0, 1, 3, 7, 15, 40):
        drafts = [(11 * i) % 512 for i in range(rows)]
        ours, theirs = (s._run([5, *drafts], keep=0) for s in reversed(sessions))
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
        for session in sessions:
            session._cache.rollback(20)
    assert {4, 8, 16, 32} <= set(stacked), "two heads a group: twice the rows"


def test_a_loaded_model_with_another_attention_keeps_it() -> None:
    model = tiny_target()
    model.set_attn_implementation("eager")
    assert not group_attention(model)
    assert model.config._attn_implementation == "eager"


def test_masks_of_single_heads_and_batches_are_left_to_transformers() -> None:
    model = tiny_target()
    layer = model.model.layers[0].self_attn
    query, key = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 5, 16)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool).tril(2)
    batch, _ = grouped_attention(layer, query, key, key, mask, scaling=0.25)
    heads, _ = grouped_attention(layer, query, key, key, mask.expand(2, 4, 3, 5), scaling=0.25)
    torch.testing.assert_close(batch, heads)


def test_a_verify_pass_of_a_grouped_model_commits_the_same_tokens() -> None:
    outputs = []
    for grouped in (False, True):
        model = tiny_target("swa")
        if grouped:
            group_attention(model)
        session = TorchTargetSession(model, (), 64)
        (verdict,) = session.prefill(Request([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 20), 0)
        out = verdict.tokens
        for _ in range(6):
            verdict = session.verify(Proposal([1, 2, 3], 3))
            session.commit(len(verdict.tokens))
            out = out + verdict.tokens
        outputs.append(out)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("rows", range(1, 17))
def test_a_fused_layers_rows_see_the_same_stacked(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "stacking_pays", lambda *_: True)
    generator = torch.Generator().manual_seed(rows)
    for length in (16, 100, 511, 512, 513, 1500):
        query = torch.randn(1, rows, 9, 64, generator=generator).transpose(1, 2)
        key, value = torch.randn(2, 1, 3, length, 64, generator=generator)
        bias = torch.full((rows, length), -torch.inf).triu_(length - rows + 1)
        found = []
        for long in (length, length + 1):
            monkeypatch.setattr(attention, "LONG", long)
            found.append(attend_rows(query, key, value, bias, 0.125))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "keys", "rows", "cores", "pays"),
    [
        *((9, 3, 8, 1, True), (9, 3, 8, 2, True), (9, 3, 16, 2, True), (9, 3, 8, 16, False)),
        *((32, 8, 8, 8, True), (32, 8, 8, 16, False)),
        *((8, 1, 4, 2, False), (8, 8, 8, 1, False)),
    ],
)
def test_rows_are_stacked_where_that_leaves_no_core_idle(
    heads: int, keys: int, rows: int, cores: int, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    assert stacking_pays(heads, keys, rows) is pays
