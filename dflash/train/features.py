"""Target features for training, computed in process and kept on disk.

A sequence's features never change while a draft is trained, so each is computed once, in batches of
like length, and written to one flat file of bfloat16 (its range is float32's; float16 would
overflow on some targets). Equal sequences share their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dflash.backends.torch.features import Taps

BATCH_TOKENS = 4096  # of one forward while filling, padding included


class FeatureStore:
    """Tapped hidden states and the final state of every sequence, by index."""

    def __init__(
        self,
        target: Any,  # transformers causal LM
        sequences: Sequence[Sequence[int]],
        taps: Sequence[int],
        file: Path | None,
    ) -> None:
        """``file`` None keeps nothing and computes a sequence every time it is asked for."""
        self.target = target
        self.taps = Taps(target, tuple(taps))
        self.hidden: int = target.config.get_text_config(decoder=True).hidden_size
        self.width = (len(self.taps.layers) + 1) * self.hidden
        places: dict[tuple[int, ...], int] = {}
        self.index = [places.setdefault(tuple(ids), len(places)) for ids in sequences]
        self.sequences = list(places)
        self.offsets = np.cumsum([0, *map(len, self.sequences)])
        self.done = np.zeros(len(self.sequences), dtype=bool)
        self.store: np.memmap[tuple[int, int], np.dtype[np.int16]] | None = None
        self.seal: Path | None = None
        if file is not None:
            self.seal = file.with_suffix(".sha256")
            self._open(file)

    def _open(self, file: Path) -> None:
        """Take over a complete file of the same text and target, or begin a new one."""
        assert self.seal is not None, "a stored run has a seal"
        shape = (int(self.offsets[-1]), self.width)
        kept = self.seal.is_file() and self.seal.read_text(encoding="utf-8") == self._digest()
        kept = kept and file.is_file() and file.stat().st_size == 2 * shape[0] * shape[1]
        self.done[:] = kept
        if not kept:
            self.seal.unlink(missing_ok=True)
        mode: Literal["r+", "w+"] = "r+" if kept else "w+"
        self.store = np.memmap(file, dtype=np.int16, mode=mode, shape=shape)

    def _digest(self) -> str:
        """What the features are a function of."""
        whole = (self.taps.layers, self.sequences, self.target.config.to_json_string())
        return sha256(repr(whole).encode()).hexdigest()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """(features [T, M*Ht], final state [T, Ht]) of one sequence, bfloat16."""
        place = self.index[index]
        if not self.done[place]:
            both = compute(self.target, [self.sequences[place]], self.taps)[0]
            self._keep(place, both)
        else:
            assert self.store is not None, "only a stored sequence is done"
            rows = self.store[self.offsets[place] : self.offsets[place + 1]]
            both = torch.from_numpy(rows.copy()).view(torch.bfloat16)
        return both[:, : -self.hidden], both[:, -self.hidden :]

    def fill(self) -> Iterator[int]:
        """Compute and store what is missing; yields the number of sequences done so far."""
        if self.store is None:
            return
        missing = [place for place in range(len(self.sequences)) if not self.done[place]]
        missing.sort(key=lambda place: len(self.sequences[place]))
        while missing:
            size = max(1, BATCH_TOKENS // len(self.sequences[missing[-1]]))
            part, missing = missing[-size:], missing[:-size]
            computed = compute(self.target, [self.sequences[p] for p in part], self.taps)
            for place, both in zip(part, computed, strict=True):
                self._keep(place, both)
            yield int(self.done.sum())
        if self.seal is not None and self.done.all():
            self.seal.write_text(self._digest(), encoding="utf-8")

    def _keep(self, place: int, both: Tensor) -> None:
        if self.store is not None:
            rows = slice(self.offsets[place], self.offsets[place + 1])
            self.store[rows] = both.view(torch.int16).numpy()
            self.done[place] = True


@torch.inference_mode()
def compute(target: Any, sequences: Sequence[Sequence[int]], taps: Taps) -> list[Tensor]:
    """One forward of the target's body: a [T, (M + 1) * Ht] bfloat16 each, the final state last.

    Sequences are padded on the right: under causal attention nothing before the padding sees it.
    """
    longest = max(map(len, sequences))
    padded = [[*ids, *[ids[-1]] * (longest - len(ids))] for ids in sequences]
    with taps.capture():
        out = target.base_model(
            input_ids=torch.tensor(padded, device=target.device), use_cache=False
        )
    states = torch.cat((*taps.states(), out.last_hidden_state), dim=-1).to(torch.bfloat16).cpu()
    return [states[row, : len(ids)].clone() for row, ids in enumerate(sequences)]
