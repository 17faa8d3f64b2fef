"""Target features for training, computed in process and kept on disk.

A sequence's features never change while a draft is trained, so each is computed once and written
to one flat file of bfloat16 (its range is float32's; float16 would overflow on some targets).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FeatureStore:
    """Tapped hidden states and the final state of every sequence, by index."""

    def __init__(
        self,
        target: PreTrainedModel,
        sequences: Sequence[Sequence[int]],
        taps: Sequence[int],
        file: Path | None,
    ) -> None:
        """``file`` None keeps nothing and computes every time."""
        self.target, self.sequences, self.taps = target, sequences, tuple(taps)
        self.hidden: int = target.config.get_text_config().hidden_size
        self.width = (len(self.taps) + 1) * self.hidden
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
def compute(target: PreTrainedModel, ids: Sequence[int], taps: Sequence[int]) -> Tensor:
    """One forward of the target body: [T, (M + 1) * Ht] bfloat16, the last part after its norm."""
    inputs = torch.tensor([list(ids)], device=target.device)
    out = target.base_model(input_ids=inputs, output_hidden_states=True, use_cache=False)
    # hidden_states[l + 1] is the output of decoder layer l; the last entry is already normed, and
    # no tap of a DFlash draft names the last layer
    rows = [out.hidden_states[layer + 1][0] for layer in taps] + [out.last_hidden_state[0]]
    return torch.cat(rows, dim=-1).to(torch.bfloat16).cpu().clone()
