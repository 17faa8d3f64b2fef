"""A KV cache that is allocated once and rolled back by moving a number.

What it is: a transformers ``Cache`` made of layers that own ``[B, nkv, capacity, D]`` buffers.
``update`` writes at the current length and returns a view of what is valid, so nothing is copied
in decoding, and ``rollback`` only sets the length. Sliding layers keep everything and show the
last window of it: their rollback is exact at any length, before and after the window has filled.
Recurrent layers have no length; their states (`StateLayer`) are taken back by `rollback.Rewind`.

What it is not: a ring buffer (memory grows with the context on sliding layers too), nor a cache
for compressed layers; ``make_cache`` refuses those.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
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

from dflash.backends.torch.rollback_state import StateLayer
from dflash.backends.torch.slots import Span
from dflash.backends.torch.upload import upload
from dflash.core.types import MOST_NODES
from dflash.errors import CheckpointError

ROOM = MOST_NODES  # rows past a session's capacity: a block may be written there and rolled back
SIDE_BY_SIDE = (
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
)


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
        self.adopt(
            *(
                rows.new_empty((*rows.shape[:2], self.capacity, rows.shape[-1]))
                for rows in (key_states, value_states)
            )
        )

    def adopt(self, keys: Tensor, values: Tensor) -> None:
        """Take ``[B, nkv, capacity, D]`` each as memory from now on."""
        self.keys, self.values, self.device = keys, values, keys.device
        self.capacity, self.is_initialized = keys.shape[2], True

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
        self._copy_to(twin)
        return twin

    def _copy_to(self, twin: PreallocatedLayer) -> None:
        if self.is_initialized:
            held, twin.length = (self.keys, self.values), self.length
            twin.lazy_initialization(*held)
            for mine, theirs in zip(held, (twin.keys, twin.values), strict=True):
                theirs[:, :, : self.length] = mine[:, :, : self.length]

    def gather(self, start: int, rows: Tensor) -> None:
        """Keep the first ``start`` tokens and, of those behind them, ``rows``, in that order."""
        end = start + rows.shape[0]
        for held in (self.keys, self.values):
            held[:, :, start:end] = held[:, :, start + rows]
        self.length = end

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens from now on; those held are copied."""
        self.capacity = capacity
        self._copy_to(self)

    def bytes(self) -> int:
        """Bytes allocated."""
        return self.keys.nbytes + self.values.nbytes if self.is_initialized else 0


class HybridLayer(PreallocatedLayer, StateLayer):  # type: ignore[no-untyped-call]
    """Attention and a recurrence side by side in one layer (Falcon-H1 and its like)."""

    def __init__(self, capacity: int, window: int | None, states: int) -> None:
        """As the two layers it is made of."""
        StateLayer.__init__(self, states)
        PreallocatedLayer.__init__(self, capacity, window)

    def reset(self) -> None:
        """Forget everything, keep the memory of keys and values."""
        PreallocatedLayer.reset(self)
        StateLayer.reset(self)

    def copy(self) -> HybridLayer:
        """An independent layer with the same tokens and state."""
        twin = HybridLayer(self.capacity, self.window, self.number_of_states)
        self._copy_to(twin)
        twin.conv_kernel_size = dict(self.conv_kernel_size)
        twin.restore(self.save())
        return twin

    def bytes(self) -> int:
        """Bytes allocated."""
        return PreallocatedLayer.bytes(self) + StateLayer.bytes(self)


class PreallocatedCache(Cache):
    """Preallocated layers of one model, moved back and forth together."""

    def __init__(self, layers: list[Any]) -> None:
        """``layers``: ours, or transformers' placeholder where a layer keeps nothing."""
        super().__init__(layers=layers)
        self._own = [layer for layer in layers if isinstance(layer, PreallocatedLayer)]
        self._seen = 0  # tokens, where no layer counts them
        self._whole: Tensor | None = None  # [L, 2, nkv, capacity, D], see `append`
        self.states = [layer for layer in layers if isinstance(layer, StateLayer)]

    @property
    def length(self) -> int:
        """Tokens held by every layer."""
        return self._own[0].length if self._own else self._seen

    def get_seq_length(self, *_args: Any, **_options: Any) -> int:
        """Tokens held; every layer holds as many."""
        return self.length

    def ran(self, rows: int) -> None:
        """Told after each pass, for models none of whose layers counts tokens."""
        self._seen += rows

    def rollback(self, length: int) -> None:
        """Keep keys and values of the first ``length`` tokens. Nothing is copied or freed.

        Recurrent states stay as they are: `rollback.Rewind` takes both back.
        """
        assert 0 <= length <= self.length, f"rollback to {length}, cache holds {self.length}"
        self._seen = length
        for layer in self._own:
            layer.length = length

    def append(self, rows: int, like: Tensor, heads: int) -> Span:
        """Room for ``rows`` more tokens of one sequence, which now count as held: a slot a layer.

        For models all of whose layers see everything and are alike: ``heads`` key heads as wide as
        ``like [.., D]``. Their memory is one block, so that a pass takes its views all at once.
        """
        start, whole = self.length, self.memory(like, heads)
        self.advance(rows)
        return Span(whole, 0, start, rows)

    def memory(self, like: Tensor, heads: int) -> Tensor:
        """``[L, 2, nkv, capacity, D]``: keys and values of all layers, as `append` takes them."""
        if self._whole is None:
            self.own_memory(like.new_empty(self.shape(like, heads)))
        assert self._whole is not None
        return self._whole

    def shape(self, like: Tensor, heads: int) -> tuple[int, ...]:
        """Of its memory."""
        return len(self.layers), 2, heads, self._own[0].capacity, like.shape[-1]

    def advance(self, rows: int) -> None:
        """Count ``rows`` more tokens as held, which are or will be written behind the others."""
        end = self.length + rows
        assert self._whole is not None and end <= self._whole.shape[3], (
            f"the cache has no room for {end} tokens"
        )
        for layer in self._own:
            layer.length = end
        self._seen = end

    def own_memory(self, whole: Tensor) -> None:
        """Spread ``whole`` over the layers; what they hold goes over into it."""
        for layer, (keys, values) in zip(self._own, whole[:, :, None].unbind(), strict=True):
            held = (layer.keys, layer.values) if layer.is_initialized else ()
            layer.adopt(keys, values)
            for mine, theirs in zip(held, (keys, values), strict=False):
                theirs[:, :, : layer.length] = mine[:, :, : layer.length]
        self._whole = whole

    def gather(self, start: int, rows: Sequence[int]) -> None:
        """Keep the first ``start`` tokens and, of those behind them, ``rows``, in that order.

        For caches of keys and values alone.
        """
        assert not self.states, "a recurrent state cannot be gathered"
        with torch.inference_mode():
            for layer in self._own:
                layer.gather(start, upload(rows, layer.keys.device))
        self._seen = start + len(rows)

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens in every layer."""
        with torch.inference_mode():
            if self._whole is not None:
                shape = (*self._whole.shape[:3], capacity, self._whole.shape[4])
                self.own_memory(self._whole.new_empty(shape))
                return
            for layer in self._own:
                layer.grow(capacity)

    def copy(self) -> PreallocatedCache:
        """An independent cache with the same tokens."""
        with torch.inference_mode():
            if self._whole is None:
                layers = [x.copy() if hasattr(x, "copy") else x for x in self.layers]
                twin = PreallocatedCache(layers)
            else:
                twin = PreallocatedCache([copy(layer) for layer in self._own])
                twin.own_memory(torch.empty_like(self._whole))
        twin._seen = self._seen
        return twin

    def bytes(self) -> int:
        """Bytes allocated by all layers."""
        ours = (PreallocatedLayer, StateLayer)
        return sum(layer.bytes() for layer in self.layers if isinstance(layer, ours))


def make_cache(config: Any, capacity: int) -> PreallocatedCache:
    """An empty cache of the shape ``config`` (a transformers model config) asks for.

    Raises CheckpointError for layers whose state cannot be taken back.
    """
    return PreallocatedCache([_layer(layer, capacity, config) for layer in _plan(config)])


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
    if kind.__name__ == "LinearAttentionLayer":
        return StateLayer(plan.number_of_states)
    if kind.__name__ in SIDE_BY_SIDE:
        return HybridLayer(capacity, getattr(plan, "sliding_window", None), plan.number_of_states)
    raise CheckpointError(
        f"targets of type {getattr(config, 'model_type', '?')!r} keep state in {kind.__name__}, "
        "which this version cannot roll back after a rejected draft. Use a target with full, "
        "sliding-window or linear attention (Llama, Qwen, Mistral, Gemma, Phi, SmolLM, Mamba, ...)"
    )
