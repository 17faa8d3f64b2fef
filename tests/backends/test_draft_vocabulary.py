"""A sidecar that names the tokens worth drafting: fewer rows of the head, never another text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dflash
from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.draft_weights import VOCABULARY
from dflash.backends.torch.load import load_target
from dflash.demo import DRAFT_FOLDER
from dflash.errors import WeightsError
from tests.backends.drafts import save_draft, tiny_draft
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.torch

PROMPT = [5, 77, 130, 9]
SAID = torch.arange(7, 470, 3)


def test_a_draft_says_the_tokens_of_its_sidecar_alone(tmp_path: Path) -> None:
    target = str(save_target(tiny_target(tied=True), tiny_tokenizer(), tmp_path / "t"))
    draft = save_draft(tiny_draft(), tmp_path / "d")
    save_file({"d2t": SAID - torch.arange(len(SAID))}, draft / VOCABULARY)
    loaded = load_target(target, "cpu")
    tables = load_draft(str(draft), loaded, "float32").tables
    assert tables.target_ids is not None and tables.target_ids.tolist() == SAID.tolist()
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    rows = hidden @ loaded.embedding[SAID].T
    torch.testing.assert_close(tables.head(hidden), rows, atol=1e-4, rtol=1e-4)
    options = {"max_tokens": 24, "ignore_eos": True, "reuse": False}
    with dflash.load(target, str(draft), device="cpu", profile=False) as engine:
        plain = engine.generate([5, 77, 130, 9], block_size=1, **options)
        assert (
            engine.generate([5, 77, 130, 9], block_size=4, **options).token_ids == plain.token_ids
        )


def test_a_sidecar_without_the_tensor_is_refused(tmp_path: Path) -> None:
    target = load_target(str(save_target(tiny_target(), tiny_tokenizer(), tmp_path / "t")), "cpu")
    draft = save_draft(tiny_draft(), tmp_path / "d")
    save_file({"other": SAID}, draft / VOCABULARY)
    with pytest.raises(WeightsError, match="must hold 'd2t'"):
        load_draft(str(draft), target)


def test_the_demo_draft_brings_one() -> None:
    assert (DRAFT_FOLDER / VOCABULARY).is_file()
