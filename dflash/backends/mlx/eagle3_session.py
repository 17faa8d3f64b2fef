"""DraftSession over the EAGLE-3 module in MLX: chains, one token a step, none of them waited for.

Bookkeeping as in `dflash_session`, with one difference: the row of position P has read token P + 1
too. So a row that was absorbed before a token that turned out otherwise must be absorbed again, and
`holds` offers one row less where the next token is not the same.

Rows of a chain are written behind the absorbed ones and forgotten when the chain ends: the next
round has the target's own features for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.dflash import KeyValue, block_mask
from dflash.backends.mlx.dflash_session import CHUNK, DFlashSession
from dflash.backends.mlx.draft_cache import LayerCache
from dflash.backends.mlx.eagle3 import Eagle3Module
from dflash.backends.mlx.kinds import DraftKind
from dflash.backends.mlx.propose import Drawn, confidence, drawn, joined
from dflash.core.types import PLAIN, Plan, Proposal


class Eagle3Session(DFlashSession):
    """State of one EAGLE-3 draft over one growing token sequence (batch 1).

    Options that change logits are the target's alone: what it may not say is drafted in vain.
    """

    _model: Eagle3Module

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Rows that are there for ``prompt``, at most ``most``; see the module's first lines."""
        known = min(len(prompt), len(self._tokens))
        common = next((i for i in range(known) if prompt[i] != self._tokens[i]), known)
        limit = min(most, common, self._held())
        return limit - 1 if 0 < limit == common <= self._absorbed else limit

    def propose(self, plan: Plan) -> Proposal[Any]:
        """A chain of tokens; waits only for a least confidence, at its end."""
        rows = min(plan.rows, self.outlook().most)
        if rows < 1:
            return PLAIN
        normed, state = self._catch_up()
        start = len(self._tokens) - 1
        assert self._absorbed == start, f"{self._absorbed} rows absorbed, anchor at {start}"
        kept, self._caches = self._caches, [_for_a_chain(cache) for cache in self._caches]
        sampling, position = self._request.sampling, len(self._output())
        parts = list[Drawn]()
        for place in range(rows):
            if place:
                normed, state = self._step(parts[-1].tokens, state, start + place - 1)
            row = self._logits(normed[0])
            sure = confidence(row) if sampling.draft_p_min else None
            parts.append(drawn(row, sampling, position, place)._replace(sure=sure))
        self._caches = kept
        for cache in self._caches:
            cache.crop(start)
        return self._proposal(joined(parts))

    def _step(self, tokens: Any, state: Any, start: int) -> tuple[Any, Any]:
        """Rows from position ``start`` on: tokens [n] one position on, states [1, n, H]."""
        embedded = (self._tables.embed(tokens) * self._tables.scale)[None]
        context = [Writing(cache, start) for cache in self._caches]
        masks = self._seen(tokens.shape[0])
        return self._model.rows(embedded.astype(self._model.dtype), state, start, context, masks)

    def _catch_up(self) -> tuple[Any, Any]:
        """Queued features into the caches, each row once; the newest row's [1, 1, H] pair."""
        queued, self._queue = mx.concatenate(self._queue), []
        bounded = any(cache.bound is not None for cache in self._caches)
        size = self._model.spec.block_size if bounded else CHUNK
        pair: tuple[Any, Any] = None, None  # replaced: there is a row
        for at in range(0, queued.shape[0], size):
            features, first = queued[at : at + size], self._absorbed
            ids = self._tokens[first + 1 : first + 1 + features.shape[0]]
            state = self._model.fuse(features[None].astype(self._model.dtype))
            pair = self._step(mx.array(ids, dtype=mx.int32), state, first)
            self._absorbed += len(ids)
        normed, state = pair
        return normed[:, -1:], state[:, -1:]

    def _seen(self, rows: int) -> list[Any]:
        """One mask a layer; None where a row alone sees all there is."""
        spec, masks = self._model.spec, list[Any]()
        for cache, kind in zip(self._caches, spec.layer_types, strict=True):
            window = spec.sliding_window if kind == "sliding_attention" else None
            alone = rows == 1 and (window is None or cache.seen < window)
            mask = None if alone else block_mask(rows, cache.seen, causal=True, window=window)
            masks.append(mask)
        return masks


@dataclass(frozen=True, slots=True)
class Writing:
    """A cache that keeps the rows it is shown."""

    cache: LayerCache
    start: int

    def __call__(self, key: Any, value: Any) -> KeyValue:
        """Everything seen and the new rows behind it: a pair of [1, nkv, T + n, D]."""
        before = self.cache.view()
        self.cache.append(key, value, self.start)
        if before is None:
            return key, value
        held_keys, held_values = before
        keys = mx.concatenate([held_keys, key], axis=2)
        return keys, mx.concatenate([held_values, value], axis=2)


def _for_a_chain(cache: LayerCache) -> LayerCache:
    """Where a chain may write: behind the rows, but for a window, which would lose its oldest."""
    return cache if cache.bound is None else cache.copy()


EAGLE3 = DraftKind(Eagle3Module, Eagle3Session)
