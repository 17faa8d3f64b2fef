"""One round of a block draft, replayed: queued features into the caches, the block, its logits.

As many feature rows run as the block has; those that are not there are overwritten by the block's
own rows before anything sees them. For drafts all of whose layers see the whole context: a window
moves its rows, and runs directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from dflash.backends.torch.dflash import DFlashDraftModel, KeyValue
from dflash.backends.torch.draft_cache import LayerCache
from dflash.backends.torch.draft_fused import FusedDraft
from dflash.backends.torch.graphs import Body, Graphs, Memory, Recipe, form_of, stretch
from dflash.backends.torch.slots import fixed_slots
from dflash.backends.torch.tables import States, Tables, draft_logits
from dflash.backends.torch.upload import upload

Spots: TypeAlias = Callable[[Tensor, Tensor], KeyValue]
Blocks: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class GraphBlocks:
    """The blocks of one session."""

    def __init__(
        self,
        model: DFlashDraftModel,
        tables: Tables,
        graphs: Graphs,
        fused: FusedDraft | None = None,
    ) -> None:
        """``model``, ``tables`` and ``fused`` are the session's."""
        self._model, self._tables, self._graphs = model, tables, graphs
        self._fused = fused
        self._memory: Memory | None = None
        self._like: Tensor | None = None  # features [0, M*Ht]

    def adopt(self, caches: Sequence[LayerCache]) -> None:
        """Let empty ``caches`` have memory that a closed session left, if there is some."""
        self._memory = self._graphs.take(form_of([cache.rows for cache in caches]))
        if self._memory is not None:
            for cache, rows in zip(caches, self._memory.tensors, strict=True):
                cache.rows = rows

    def __call__(
        self, caches: Sequence[LayerCache], features: Tensor, anchor: int, rows: int
    ) -> States | None:
        """The block of ``rows`` behind the caches' rows and ``features [n, M*Ht]``, n at most
        ``rows``; None = run it yourself. The states are good until the next call."""
        if features.shape[1]:
            self._like = features.new_empty(0, features.shape[1])
        if self._graphs.off or self._like is None:
            return None
        features = features if features.shape[1] else self._like
        held, queued = caches[0].end, features.shape[0]
        start = held + queued
        memory = self._memory_of(caches)
        if start + rows > memory.capacity:
            return None
        size = stretch(start + rows, memory.capacity)
        memory.clean(start + rows)
        numbers = upload([anchor, start, held], features.device)
        found = self._graphs.run(
            memory,
            (rows, size, features.shape[1], features.dtype),
            lambda: self._recipe(memory.tensors, features, rows, size),
            (numbers, features),
        )
        if found is None:
            return None
        for cache in caches:
            cache.count += queued
        return States(*found)

    def wrote(self, end: int) -> None:
        """Rows before ``end`` may have been written without this."""
        if self._memory is not None:
            self._memory.wrote(end)

    def close(self) -> None:
        """Leave the memory, and what was recorded over it, to the next session."""
        self._graphs.give_back(self._memory)
        self._memory = None

    def _recipe(self, layers: Sequence[Tensor], like: Tensor, rows: int, size: int) -> Recipe:
        spec, body = self._model.spec, self._body(layers, rows, size)

        def run(numbers: Tensor, features: Tensor) -> tuple[Tensor, ...]:
            anchor, start, held = numbers.chunk(3)
            hidden = body(features, self._noise(anchor, rows), start, held)
            logits = draft_logits(spec, self._tables, hidden[1:])
            return hidden[1:], logits, hidden.isfinite().all()

        numbers = torch.zeros(3, dtype=torch.long, device=like.device)
        return Recipe(run, (numbers, like.new_zeros(rows, like.shape[1])))

    def _body(self, layers: Sequence[Tensor], rows: int, size: int) -> Blocks:
        """Features [rows, M*Ht] from place held on, noise [1, rows, H] from start on, to states
        [rows, H]."""
        if self._fused is not None:
            return self._fused_body(self._fused, layers[0], rows, size)
        model, device = self._model, layers[0].device
        steps, keys = (torch.arange(count, device=device) for count in (rows, size))

        def run(features: Tensor, noise: Tensor, start: Tensor, held: Tensor) -> Tensor:
            at, context = start + steps, model.fuse(self._fitted(features)[None])
            places = held + steps
            for layer, (key, value) in zip(layers, model.context_kv(context, places), strict=True):
                layer.index_copy_(3, places, torch.stack((key, value), dim=1))
            behind = [_behind(layer, at, size) for layer in layers]
            masks = [_seen(at, keys, causal) for causal in model.spec.causal]
            return model.block(noise, at, behind, masks)[0]

        return run

    def _fused_body(self, fused: FusedDraft, whole: Tensor, rows: int, size: int) -> Blocks:
        causal, both = self._model.spec.causal[0], whole.flatten(1, 2)
        steps = torch.arange(rows + fused.more(rows), device=whole.device)
        keys = torch.arange(size, device=whole.device)
        turns = fused.places.table(size + steps.shape[0])
        context, block = self._compiled(fused, rows)

        def run(features: Tensor, noise: Tensor, start: Tensor, held: Tensor) -> Tensor:
            places, at = held + steps[:rows], start + steps
            (heads,) = context((features, turns.index_select(0, places)), None, ())
            both.index_copy_(2, places, heads)
            bias = fused.bias(_seen(at[:rows], keys, causal), noise)
            slots = fixed_slots(whole, at[:rows], size)
            return block((noise[0], turns.index_select(0, at)), bias, slots)[0]

        return run

    def _compiled(self, fused: FusedDraft, rows: int) -> tuple[Body, Body]:
        """What absorbs features, and what runs the block, compiled where the graphs compile."""

        def context(values: Sequence[Tensor], *_: Any) -> tuple[Tensor, ...]:
            features, turns = values
            return (fused.context(self._fitted(features), turns),)

        def block(
            values: Sequence[Tensor], bias: Tensor | None, slots: Sequence[Any]
        ) -> tuple[Tensor, ...]:
            noise, turns = values
            return (fused.through(noise, turns, bias, slots),)

        compiled = self._graphs.compiled
        return (
            compiled(("context", rows), context, ()),
            compiled(("block", rows), block, fused.stack.layers),
        )

    def _fitted(self, features: Tensor) -> Tensor:
        fit = self._tables.fit
        return (features if fit is None else fit(features)).to(self._model.norm.weight)

    def _noise(self, anchor: Tensor, rows: int) -> Tensor:
        """Embedded anchor and masks [1, rows, H]."""
        embed, mask = self._tables.embed, self._model.spec.mask_token_id
        row = embed[mask] if self._tables.mask_row is None else self._tables.mask_row
        first = embed.index_select(0, anchor)
        noise = torch.cat((first, row.to(embed).expand(rows - 1, -1)))
        return (noise * self._tables.scale)[None].to(self._model.norm.weight)

    def _memory_of(self, caches: Sequence[LayerCache]) -> Memory:
        """That of ``caches``, which may have taken other memory since the last call."""
        tensors = [cache.rows for cache in caches]
        if self._memory is None or not self._memory.under(tensors):
            self._memory = Memory(tensors, caches[0].end)
        return self._memory


def _seen(at: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """``[R, T]``: which ``keys [T]`` block rows at places ``at [R]`` see."""
    return keys <= (at[:, None] if causal else at[-1:].expand(at.shape[0])[:, None])


def _behind(layer: Tensor, at: Tensor, size: int) -> Spots:
    """A layer's context: block rows are written at ``at``, the first ``size`` rows are seen."""

    def put(key: Tensor, value: Tensor) -> KeyValue:
        layer.index_copy_(3, at, torch.stack((key, value), dim=1))
        return layer[:, 0, :, :size], layer[:, 1, :, :size]

    return put
