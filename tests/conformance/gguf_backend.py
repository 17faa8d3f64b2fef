"""The gguf backend under test: a tiny random Llama as a GGUF file, and a sidecar of its own.

Plain decoding is transformers' forward pass over the same float32 weights: another implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dflash.backends.gguf import open_pair
from dflash.config import GgufOptions, LoadConfig
from tests.backends.gguf_files import save_sidecar
from tests.backends.tiny import tiny_target, tiny_tokenizer
from tests.backends.tiny_gguf import write_gguf
from tests.conformance.backends import BLOCK, Backend, Plain

EXACT = GgufOptions(type_k="f32", type_v="f32", flash_attn="off", n_batch=64, n_ubatch=32)
"""Cached values as they were computed, so that plain decoding without a cache is the same."""


def make(folder: Path, ties: bool) -> Backend:
    """Files as a user would have them."""
    model = tiny_target("llama")
    if ties:
        with torch.no_grad():
            head = model.lm_head.weight
            head[1::2] = head[::2]
    target = str(write_gguf(folder / "target.gguf", model, tiny_tokenizer()))
    draft = str(save_sidecar(folder / "draft.gguf", Path(target), block_size=BLOCK))

    def logits(tokens: Sequence[int]) -> Any:
        with torch.inference_mode():
            rows = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits
        return rows[0, -1].numpy()

    return Backend(
        "gguf",
        open_pair(LoadConfig(target, threads=1, gguf=EXACT)),
        Plain(logits),
        own=lambda: open_pair(LoadConfig(target, draft, threads=1, gguf=EXACT)),
    )
