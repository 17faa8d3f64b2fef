"""A draft over fused decoder layers proposes what its module proposes, or is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.backends.torch import decoder, draft_load
from dflash.backends.torch.decoder import DecoderLayer
from dflash.backends.torch.dflash import Layer
from dflash.backends.torch.draft_fused import fuse_draft, sample_states, why_not
from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.load import load_target
from dflash.backends.torch.packed import pack_model
from dflash.core.types import Plan
from tests.backends.drafts import MIXED, ODDITIES, save_draft, tiny_draft, tiny_draft2
from tests.backends.test_dflash_session import Text, tokens
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.torch

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
ALIKE = ("full", "full_causal", "sliding", "sliding_bidirectional", "window_of_one")
FUSED: dict[str, dict[str, Any]] = {
    **{name: ODDITIES[name] for name in (*ALIKE, "biased_gelu", "one_kv_head")},
    "linear rope": {"rope_parameters": LINEAR},
}


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("case", FUSED)
def test_a_fused_draft_proposes_what_its_module_does(case: str, window: int | None) -> None:
    """Through commits, short blocks, a fork, more room and another request on the same rows."""
    module, twin = tiny_draft(**FUSED[case]), tiny_draft(**FUSED[case])
    before = sample_states(twin)
    assert why_not(twin) == ""
    fuse_draft(twin)
    if window:
        assert pack_model(twin).layers
    assert not any(isinstance(part, Layer) for part in twin.modules())
    torch.testing.assert_close(sample_states(twin), before, atol=1e-4, rtol=1e-4)
    text, other = Text(module), Text(twin)
    one, two = (owner.open(40, window=window) for owner in (text, other))
    for owner, session in ((text, one), (other, two)):
        owner.start(session, 5)
        session.grow(300)
    anchor = 5
    for kept, rows in ((1, 7), (8, 7), (3, 1), (2, 2), (8, 4), (1, 7)):
        plan = Plan(rows=rows, depth=rows)
        assert tokens(one, plan) == tokens(two, plan) == tokens(two.fork(), plan)
        for owner, session in ((text, one), (other, two)):
            owner.go(session, anchor, kept)
        anchor += kept
    for owner, session in ((text, one), (other, two)):
        owner.start(session, 120, reuse=10)
    assert tokens(one) == tokens(two)
    assert one.bytes() == two.bytes()


def test_drafts_of_another_form_keep_their_layers_and_say_why() -> None:
    assert "dflash2" in why_not(tiny_draft2())
    assert "differ" in why_not(tiny_draft(**MIXED))
    for case in ("sinks", "interleaved", "partial"):
        found = [options for name, options in ODDITIES.items() if case in name]
        assert found and all(why_not(tiny_draft(**options)) for options in found)


def test_a_draft_whose_fused_states_differ_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(str(save_target(tiny_target(), tiny_tokenizer(), tmp_path / "t")), "cpu")
    folder = str(save_draft(tiny_draft(), tmp_path / "d"))
    assert isinstance(load_draft(folder, target).model.layers[0], DecoderLayer)
    right = decoder.rotate_
    monkeypatch.setattr(decoder, "rotate_", lambda x, turns: right(x, turns.conj()))
    monkeypatch.setattr(draft_load, "draft_form", lambda asked, target: None)
    loaded = load_draft(folder, target)
    kept = loaded.model
    assert isinstance(kept.layers[0], Layer)
    assert any("takes longer" in warning for warning in loaded.warnings)
    torch.testing.assert_close(sample_states(kept), sample_states(tiny_draft()))
