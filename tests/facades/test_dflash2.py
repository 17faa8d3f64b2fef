"""Upstream's second class: the same calls on a DFlash2 draft, and neither takes the other's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import dflash
from dflash.errors import ConfigError
from dflash.model import DFlash2DraftModel, DFlashDraftModel
from dflash.speculative import SpeculativeDecoder
from tests.backends.tiny import reference_generate, tiny_target
from tests.drafts.configs import CONV_AND_SELECTOR
from tests.facades.drafts import MASK, save_draft

pytestmark = pytest.mark.torch

PROMPT = [5, 9, 200, 31]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    nested = {"mask_token_id": MASK, "target_layer_ids": [0, 2], **CONV_AND_SELECTOR}
    return save_draft(
        tmp_path / "second", architectures=["DFlash2DraftModel"], is_causal=False,
        dflash_config=nested, block_size=8,
    )  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_it_generates_as_the_first_class_does(folder: Path, temperature: float) -> None:
    draft, target = DFlash2DraftModel.from_pretrained(folder), tiny_target(eos=None)
    ids = torch.tensor([PROMPT])
    torch.manual_seed(3)
    found = draft.spec_generate(target, ids, 20, [], temperature)
    torch.manual_seed(3)
    again = draft.spec_generate(target, ids, 20, [], temperature, block_size=1)
    assert torch.equal(found, again)
    if not temperature:
        assert found[0, 4:].tolist() == reference_generate(target, PROMPT, 20)


def test_each_class_refuses_the_others_drafts(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use DFlash2DraftModel"):
        DFlashDraftModel.from_pretrained(folder)
    with pytest.raises(ConfigError, match="use DFlashDraftModel"):
        DFlash2DraftModel.from_pretrained(save_draft(tmp_path / "first"))


def test_it_has_upstreams_names(folder: Path) -> None:
    draft: Any = dflash.DFlash2DraftModel.from_pretrained(folder)
    names = set(draft.state_dict())
    assert {"candidate_selector.predecessor_codebook", "layers.0.mlp_conv.base_kernel"} <= names
    assert (draft.block_size, draft.mask_token_id) == (8, MASK)


def test_a_decoder_takes_it_beside_a_model(folder: Path) -> None:
    draft, target = DFlash2DraftModel.from_pretrained(folder), tiny_target(eos=None)
    with SpeculativeDecoder(target, draft) as decoder:
        found = decoder.generate(PROMPT, max_tokens=20, ignore_eos=True)
    assert list(found) == reference_generate(target, PROMPT, 20)
