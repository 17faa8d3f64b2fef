"""The thin forward of a target, replayed: verify passes and plain steps of a few rows.

Prompts, trees and everything else run directly, over the same cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dflash.backends.torch.attention import MOST_ROWS
from dflash.backends.torch.cache import PreallocatedCache
from dflash.backends.torch.features import Taps
from dflash.backends.torch.forward import Forward, FusedForward
from dflash.backends.torch.forward import make_forward as direct_forward
from dflash.backends.torch.graphs import Graphs, Memory, Recipe, stretch
from dflash.backends.torch.slots import fixed_slots
from dflash.backends.torch.tree import Branches
from dflash.backends.torch.upload import upload


class GraphForward:
    """The Forward protocol over one session's cache."""

    def __init__(self, direct: FusedForward, graphs: Graphs) -> None:
        """``direct`` runs what is not replayed."""
        self._direct, self._graphs = direct, graphs
        self._memory: Memory | None = None
        self.device = direct.device

    def __call__(
        self,
        rows: Sequence[int] | Tensor,
        cache: PreallocatedCache,
        keep: int,
        taps: Taps | None = None,
        tree: Branches | None = None,
    ) -> Tensor:
        """Logits ``[n, V]`` of the last ``keep`` rows (0 = all), good until the next call."""
        memory = self._memory_of(cache)
        if tree is None and not keep and len(rows) <= MOST_ROWS:
            logits = self._replayed(rows, cache, memory, taps)
            if logits is not None:
                return logits
        logits = self._direct(rows, cache, keep, taps, tree)
        memory.wrote(cache.length)
        return logits

    def close(self) -> None:
        """Leave the memory, and what was recorded over it, to the next session."""
        self._graphs.give_back(self._memory)
        self._memory = None

    def _replayed(
        self,
        rows: Sequence[int] | Tensor,
        cache: PreallocatedCache,
        memory: Memory,
        taps: Taps | None,
    ) -> Tensor | None:
        start, count = cache.length, len(rows)
        size = stretch(start + count, memory.capacity)
        memory.clean(start + count)
        tapped = () if taps is None else taps.layers

        def recipe() -> Recipe:
            return self._recipe(memory.tensors[0], count, size, taps if tapped else None)

        values = (upload(rows, self.device), upload([start], self.device))
        found = self._graphs.run(memory, (count, size, tapped), recipe, values)
        if found is None:
            return None
        cache.advance(count)
        if taps is not None and tapped:
            taps.fill(found[1])
        return found[0]

    def _recipe(self, whole: Tensor, count: int, size: int, taps: Taps | None) -> Recipe:
        direct, own = self._direct, None if taps is None else taps.twin()
        steps = torch.arange(count + direct.more(count), device=self.device)
        turns = direct.places.table(size + steps.shape[0])

        def body(
            values: Sequence[Tensor], bias: Tensor | None, slots: Sequence[Any]
        ) -> tuple[Tensor, ...]:
            ids, turned = values
            x = direct.through(ids, turned, bias, slots, own)
            logits = direct.logits(x)[:count]
            features = None if own is None else own.take()
            return (logits,) if features is None else (logits, features)

        key = "target", count, () if taps is None else taps.layers
        rows = self._graphs.compiled(key, body, direct.stack.layers)

        def run(ids: Tensor, start: Tensor) -> tuple[Tensor, ...]:
            at = start + steps
            here = at[:count]
            bias = direct.places.bias_at(here, size)
            return rows((ids, turns.index_select(0, at)), bias, fixed_slots(whole, here, size))

        ids = torch.zeros(count, dtype=torch.long, device=self.device)
        return Recipe(run, (ids, ids.new_zeros(1)))

    def _memory_of(self, cache: PreallocatedCache) -> Memory:
        """That of ``cache``, which may have taken other memory since the last call."""
        direct = self._direct
        if not cache.length and self._memory is None:
            form = cache.shape(direct.like, direct.keys), direct.like.dtype
            self._memory = self._graphs.take((form,))
            if self._memory is not None:
                cache.own_memory(self._memory.tensors[0])
        tensors = (cache.memory(direct.like, direct.keys),)
        if self._memory is None or not self._memory.under(tensors):
            self._memory = Memory(tensors, cache.length)
        return self._memory


def make_forward(model: Any, graphs: Graphs | None = None) -> Forward:
    """The shortest way through ``model``, replayed by ``graphs`` where it can be."""
    forward = direct_forward(model)
    if graphs is not None and isinstance(forward, FusedForward):
        return GraphForward(forward, graphs)
    return forward
