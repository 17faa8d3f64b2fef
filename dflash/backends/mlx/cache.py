"""The caches of a target, rolled back to any place: by trimming, by spare slots, or by replay.

Full attention trims: the length moves. A sliding window keeps more rows than it shows, so that the
ones a rejected draft pushed out are still there. A recurrent state has no length to move: the state
before a block is kept (a reference: MLX arrays do not change), put back when a draft is rejected,
and the tokens that count are run again, together with the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.lm import causal_mask, new_caches
from dflash.errors import CheckpointError

SPARE = 256  # rows that a sliding window keeps beyond what it shows
FULL = ("KVCache", "ConcatenateKVCache")
SLIDING = ("RotatingKVCache",)
RECURRENT = ("ArraysCache", "MambaCache")
State = list[Any]


class SlidingCache:
    """Keys and values of a sliding layer: shows the last ``window - 1`` rows and the new ones."""

    def __init__(self, window: int, spare: int = SPARE) -> None:
        """``window`` counts a query's own place."""
        self.window, self.spare = window, spare
        self.keys: Any = None  # [B, nkv, rows, D]
        self.values: Any = None
        self.offset = 0  # tokens run through, dropped ones included
        self.first = 0  # position of the oldest row kept

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Append ``[B, nkv, n, D]``; what the new rows may see, oldest first."""
        held, shown = self.offset - self.first, self._shown()
        if self.keys is not None and held:
            keys = mx.concatenate([self.keys[..., :held, :], keys], axis=2)
            values = mx.concatenate([self.values[..., :held, :], values], axis=2)
        self.offset += keys.shape[2] - held
        start = held - shown
        rows, kept = keys.shape[2], self.window + self.spare
        drop = rows - kept if rows > kept + self.spare else 0  # seldom, for it copies
        self.keys, self.values = keys[..., drop:, :], values[..., drop:, :]
        self.first += drop
        return keys[..., start:, :], values[..., start:, :]

    def make_mask(self, N: int, return_array: bool = False, **_: Any) -> Any:
        """For the next ``N`` rows over what will be shown; mlx-lm's names."""
        return causal_mask(N, self._shown(), self.window, always=return_array)

    def _shown(self) -> int:
        return min(self.offset - self.first, self.window - 1)

    @property
    def floor(self) -> int:
        """The least length that a rollback can reach."""
        return 0 if self.first == 0 else self.first + self.window - 1

    def trim(self, count: int) -> int:
        """Forget the last ``count`` rows."""
        self.offset -= count
        return count

    @property
    def state(self) -> Any:
        """Arrays, for evaluation."""
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)


class Caches:
    """The caches of one model, moved together; ``length`` tokens are in all of them."""

    def __init__(self, model: Any, layers: list[Any] | None = None) -> None:
        """Empty ones for ``model``. Raises CheckpointError for a kind that cannot roll back."""
        self.layers = [_ours(plan) for plan in new_caches(model)] if layers is None else layers
        parts = [part for layer in self.layers for part in _parts(layer)]
        self._recurrent = [part for part in parts if type(part).__name__ in RECURRENT]
        self._rows = [part for part in parts if type(part).__name__ not in RECURRENT]
        self.length = 0

    @property
    def replays(self) -> bool:
        """Whether a rollback puts a state back and leaves tokens to run again."""
        return bool(self._recurrent)

    @property
    def floor(self) -> int:
        """The least length that trimming can reach."""
        return max((part.floor for part in self._rows if isinstance(part, SlidingCache)), default=0)

    def snapshot(self) -> State:
        """The recurrent states as they are now."""
        return [list(part.cache) for part in self._recurrent]

    def restore(self, length: int, state: State) -> None:
        """Back to ``length``, where ``state`` was taken."""
        self.trim(length)
        for part, kept in zip(self._recurrent, state, strict=True):
            part.cache = list(kept)

    def trim(self, length: int) -> None:
        """Forget rows at ``length`` and after; recurrent states stay as they are."""
        for part in self._rows:
            if self.length > length:
                part.trim(self.length - length)
        self.length = length

    def arrays(self) -> list[Any]:
        """Everything held, for evaluation."""
        return [a for part in (*self._rows, *self._recurrent) for a in _arrays(part)]

    def bytes(self) -> int:
        """Bytes held."""
        return sum(int(array.nbytes) for array in self.arrays())

    def copy(self) -> Caches:
        """Independent caches with the same contents; what is not written to again is shared."""
        twin = Caches(None, [_copy(layer) for layer in self.layers])
        twin.length = self.length
        return twin


def _ours(plan: Any) -> Any:
    """A cache that can be rolled back, for the one that mlx-lm would use."""
    name = type(plan).__name__
    if name in FULL or name in RECURRENT:
        return plan
    if name in SLIDING and not getattr(plan, "keep", 0):
        return SlidingCache(int(plan.max_size))
    if name == "CacheList":
        plan.caches = tuple(_ours(part) for part in plan.caches)
        return plan
    raise CheckpointError(
        f"this target keeps state in mlx-lm's {name}, which cannot be rolled back after a rejected "
        "draft. Use a target with full, sliding-window or gated-delta layers (Llama, Qwen 3 to "
        "3.8, Gemma 3, Mistral, ...)"
    )


def _parts(layer: Any) -> Sequence[Any]:
    return tuple(layer.caches) if type(layer).__name__ == "CacheList" else (layer,)


def _copy(layer: Any) -> Any:
    twin = copy(layer)
    for name in ("keys", "values"):  # mlx-lm writes into these: each cache needs its own
        if getattr(layer, name, None) is not None:
            setattr(twin, name, mx.array(getattr(layer, name)))
    if type(layer).__name__ == "CacheList":
        twin.caches = tuple(_copy(part) for part in layer.caches)
    elif type(layer).__name__ in RECURRENT:
        twin.cache = list(layer.cache)
    return twin


def _arrays(part: Any) -> list[Any]:
    if type(part).__name__ in RECURRENT:
        return [array for array in part.cache if array is not None]
    held = (getattr(part, "keys", None), getattr(part, "values", None))
    return [array for array in held if array is not None]
