"""A mask id that the target often says is an ordinary token of the output."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from dflash.engine import load  # noqa: E402 - after the check for torch
from dflash.model import DFlashDraftModel, dflash_generate  # noqa: E402
from tests.backends.tiny import (  # noqa: E402
    reference_generate,
    save_target,
    tiny_target,
    tiny_tokenizer,
)
from tests.facades.drafts import save_draft  # noqa: E402

PROMPT = [5, 9, 200, 31, 77, 4]


def test_nothing_is_removed_and_no_mask_is_left(tmp_path: Path) -> None:
    model = tiny_target("llama")
    plain = reference_generate(model, PROMPT, 40)
    for mask in (max(plain, key=plain.count), plain[0], plain[-1]):
        config = {"mask_token_id": mask, "target_layer_ids": [0, 2]}
        draft = save_draft(tmp_path / str(mask), dflash_config=config)
        target = save_target(model, tiny_tokenizer(), tmp_path / "target")
        with load(str(target), str(draft), device="cpu", dtype="float32") as engine:
            for block_size in (2, 6):
                found = engine.generate(
                    PROMPT, max_tokens=40, block_size=block_size, ignore_eos=True
                )
                assert list(found.token_ids) == plain
        facade = DFlashDraftModel.from_pretrained(draft)
        ids = dflash_generate(facade, model, torch.tensor([PROMPT]), 40, mask_token_id=mask)
        assert ids[0].tolist() == PROMPT + plain
