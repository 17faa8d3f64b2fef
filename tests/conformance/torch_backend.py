"""The torch backend under test: a tiny random Llama, and a tiny random draft of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.backends.torch import open_pair
from dflash.config import LoadConfig
from dflash.model import DFlashDraftModel
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.conformance.backends import BLOCK, Backend, Plain
from tests.facades.drafts import save_draft


def make(folder: Path, ties: bool) -> Backend:
    """A target saved and loaded as a user's would be; plain decoding recomputes everything."""
    model = tiny_target("llama")
    if ties:
        with torch.no_grad():
            head = model.lm_head.weight
            head[1::2] = head[::2]
    target = str(save_target(model, tiny_tokenizer(), folder / "target"))
    draft = str(save_draft(folder / "draft", block_size=BLOCK))

    def logits(tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            return (
                model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].numpy()
            )

    return Backend(
        "torch",
        open_pair(LoadConfig(target, device="cpu", dtype="float32")),
        Plain(logits),
        own=lambda: open_pair(LoadConfig(target, draft, device="cpu", dtype="float32")),
        objects={"target": model, "draft": DFlashDraftModel.from_pretrained(draft)},
    )
