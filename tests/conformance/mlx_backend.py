"""The MLX backend under test: the tiny Llama of the torch backend, and a tiny draft of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from dflash.backends.mlx import open_pair
from dflash.config import LoadConfig
from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
from tests.conformance.backends import BLOCK, Backend, Plain
from tests.facades.drafts import save_draft


def make(folder: Path, ties: bool) -> Backend:
    """A target saved and loaded as a user's would be; plain decoding recomputes everything."""
    made = tiny_target("llama")
    if ties:
        with torch.no_grad():
            head = made.lm_head.weight
            head[1::2] = head[::2]
    target = str(save_target(made, tiny_tokenizer(), folder / "target"))
    draft = str(save_draft(folder / "draft", block_size=BLOCK))
    pair = open_pair(LoadConfig(target, backend="mlx", dtype="float32"))
    model = pair.target.model

    def logits(tokens: Sequence[int]) -> Any:
        return np.array(model(mx.array([list(tokens)]))[0, -1])

    return Backend(
        "mlx",
        pair,
        Plain(logits),
        own=lambda: open_pair(LoadConfig(target, draft, backend="mlx", dtype="float32")),
        objects={"model": model, "draft": draft},
    )
