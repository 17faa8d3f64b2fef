"""Target features for training, computed in process and kept on disk.

A sequence's features never change while a draft is trained, so each is computed once and written
to one flat file of bfloat16 (its range is float32's; float16 would overflow on some targets).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dflash.backends.torch.features import Taps


class FeatureStore:
    """Tapped hidden states and the final state of every sequence, by index."""

    def __init__(
        self,
        target: Any,  # transformers causal LM
        sequences: Sequence[Sequence[int]],
        taps: Sequence[int],
        file: Path | None,
    ) -> None:
        """``file`` None keeps nothing and computes every time."""
        self.target, self.sequences = target, sequences
        self.taps = Taps(target, tuple(taps))
        self.hidden: int = target.config.get_text_config(decoder=True).hidden_size
        self.width = (len(self.taps.layers) + 1) * self.hidden
        lengths = [len(ids) for ids in sequences]
        self.offsets = np.concatenate(([0], np.cumsum(lengths)))
        self.done = np.zeros(len(lengths), dtype=bool)
        self.store: np.memmap[tuple[int, int], np.dtype[np.int16]] | None = None
        if file is not None:
            shape = (int(self.offsets[-1]), self.width)
            self.store = np.memmap(file, dtype=np.int16, mode="w+", shape=shape)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(features [T, M*Ht], final state [T, Ht]) of one sequence, bfloat16."""
        both = self._load(index)
        return both[:, : -self.hidden], both[:, -self.hidden :]

    def _load(self, index: int) -> Tensor:
        rows = slice(self.offsets[index], self.offsets[index + 1])
        if self.store is not None and self.done[index]:
            return torch.from_numpy(self.store[rows].copy()).view(torch.bfloat16)
        both = compute(self.target, self.sequences[index], self.taps)
        if self.store is not None:
            self.store[rows] = both.view(torch.int16).numpy()
            self.done[index] = True
        return both


@torch.inference_mode()
def compute(target: Any, ids: Sequence[int], taps: Taps) -> Tensor:
    """One forward of the target's body: [T, (M + 1) * Ht] bfloat16, the normed final state last."""
    with taps.capture():
        inputs = torch.tensor([list(ids)], device=target.device)
        out = target.base_model(input_ids=inputs, use_cache=False)
    tapped = taps.take()
    assert tapped is not None, "a draft without taps has no features"
    rows = torch.cat((tapped, out.last_hidden_state[0]), dim=-1)
    return rows.to(torch.bfloat16).cpu().clone()
