"""A KV cache that is allocated once and rolled back by moving a number.

What it is: a transformers ``Cache`` made of layers that own ``[B, nkv, capacity, D]`` buffers.
``update`` writes at the current length and returns a view of what is valid, so nothing is copied
in decoding, and ``rollback`` only sets the length. Sliding layers keep everything and show the
last window of it: their rollback is exact at any length, before and after the window has filled.

What it is not: a ring buffer (memory grows with the context on sliding layers too), nor a cache
for recurrent or compressed layers; ``make_cache`` refuses those.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from dflash.errors import CheckpointError


class PreallocatedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one attention layer; ``window`` limits what is shown, not what is kept."""

    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int, window: int | None = None) -> None:
        """Room for ``capacity`` tokens; memory is taken at the first ``update``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.window = window
        self.is_sliding = window is not None  # transformers' masks ask for it
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate ``[B, nkv, capacity, D]`` for keys and values shaped like the first rows."""
        self.keys, self.values = (
            rows.new_empty((*rows.shape[:2], self.capacity, rows.shape[-1]))
            for rows in (key_states, value_states)
        )
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append ``[B, nkv, n, D]``; returns views of everything the new rows may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, start, end = self._first(), self.length, self.length + key_states.shape[-2]
        assert end <= self.capacity, f"cache holds {self.capacity} tokens, {end} were written"
        self.keys[:, :, start:end] = key_states
        self.values[:, :, start:end] = value_states
        self.length = end
        return self.keys[:, :, first:end], self.values[:, :, first:end]

    def _first(self) -> int:
        """Oldest row visible to the next query."""
        return 0 if self.window is None else max(0, self.length - self.window + 1)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """``(keys shown, index of the first one)`` for the next ``query_length`` rows."""
        rows = query_length if isinstance(query_length, int) else query_length.shape[0]
        first = self._first()
        return self.length - first + rows, first

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """Most tokens."""
        return self.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.20

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (transformers' convention: negative)."""
        assert tokens_to_remove <= 0, "crop takes the negative number of tokens to remove"
        self.length = max(0, self.length + tokens_to_remove)

    def copy(self) -> PreallocatedLayer:
        """An independent layer with the same tokens."""
        twin = PreallocatedLayer(self.capacity, self.window)
        if self.is_initialized:
            twin.lazy_initialization(self.keys, self.values)
            for mine, theirs in ((self.keys, twin.keys), (self.values, twin.values)):
                theirs[:, :, : self.length] = mine[:, :, : self.length]
            twin.length = self.length
        return twin

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0


class PreallocatedCache(Cache):
    """Preallocated layers of one model, moved back and forth together."""

    def __init__(self, layers: list[Any]) -> None:
        """``layers``: PreallocatedLayer, or transformers' placeholder where a layer keeps none."""
        super().__init__(layers=layers)
        self._own = [layer for layer in layers if isinstance(layer, PreallocatedLayer)]

    @property
    def length(self) -> int:
        """Tokens held by every layer."""
        return self._own[0].length

    def rollback(self, length: int) -> None:
        """Keep the first ``length`` tokens. Nothing is copied or freed."""
        assert 0 <= length <= self.length, f"rollback to {length}, cache holds {self.length}"
        for layer in self._own:
            layer.length = length

    def copy(self) -> PreallocatedCache:
        """An independent cache with the same tokens."""
        with torch.inference_mode():
            return PreallocatedCache(
                [x.copy() if isinstance(x, PreallocatedLayer) else x for x in self.layers]
            )

    def bytes(self) -> int:
        """Bytes allocated by all layers."""
        return sum(layer.bytes() for layer in self._own)


def make_cache(config: Any, capacity: int) -> PreallocatedCache:
    """An empty cache of the shape ``config`` (a transformers model config) asks for.

    Raises CheckpointError for layers that are not full or sliding attention: their state cannot
    be rolled back by moving a length.
    """
    return PreallocatedCache([_layer(layer, capacity, config) for layer in _plan(config)])


def check_cache(config: Any) -> None:
    """Raise CheckpointError if ``make_cache`` would; allocates nothing."""
    make_cache(config, 0)


def _plan(config: Any) -> list[Any]:
    """transformers' own layers for this config: the one place that knows every layer type."""
    try:
        layers: list[Any] = DynamicCache(config=config).layers
    except KeyError as error:
        raise CheckpointError(f"layer type {error} is not one transformers can cache") from error
    return layers


def _layer(plan: Any, capacity: int, config: Any) -> Any:
    kind = type(plan)
    if kind is DynamicLayer:
        return PreallocatedLayer(capacity)
    if kind is DynamicSlidingWindowLayer:
        return PreallocatedLayer(capacity, int(plan.sliding_window))
    if kind.__name__ == "DummyLayer":  # shares another layer's keys and values; keeps none
        return plan
    raise CheckpointError(
        f"targets of type {getattr(config, 'model_type', '?')!r} keep state in {kind.__name__}, "
        "which this version cannot roll back after a rejected draft. Use a target with full or "
        "sliding-window attention only (Llama, Qwen2/3, Mistral, Gemma, Phi, SmolLM, ...)"
    )
