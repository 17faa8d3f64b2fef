"""DraftSession over the DFlash v1 module: the draft's side of one growing token sequence.

Bookkeeping: ``_tokens`` is prompt plus committed tokens; its last entry is the anchor, at position
``s``. A context row exists for every position before it, either absorbed (keys and values in the
layer caches) or queued (target features waiting for the next `propose`). Nothing here is computed
before the target's one wait: MLX only writes it down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dflash.backends.mlx.dflash import DFlashModule, block_mask, transform_logits
from dflash.backends.mlx.draft_cache import LayerCache
from dflash.backends.mlx.kinds import DraftKind
from dflash.backends.mlx.propose import Drawn, certain, propose
from dflash.core.types import PLAIN, Outlook, Plan, Proposal, Request, Verdict

CHUNK = 512  # context rows projected at a time: bounds activation memory


@dataclass(frozen=True, slots=True)
class Tables:
    """Embedding and head: the target's, unless the draft brought its own."""

    embed: Callable[[Any], Any]  # ids [n] -> raw rows [n, Ht]
    head: Callable[[Any], Any]  # [n, H] -> [n, V or Vd]
    rows: int  # V, rows of the embedding
    scale: float = 1.0  # on embedding rows
    target_ids: Any = None  # [Vd] target id of each row of a reduced head
    mask_row: Any = None  # [Ht] stands for the mask token's row


class DFlashSession:
    """State of one draft over one growing token sequence (batch 1)."""

    def __init__(self, model: DFlashModule, tables: Tables, *, window: int | None = None) -> None:
        """``window`` bounds the draft's history to that many context rows; None = its own."""
        self._model, self._tables = model, tables
        self._caches = [LayerCache(bound) for bound in bounds(model, window)]
        self._tokens: list[int] = []
        self._request = Request((), 0)
        self._absorbed = 0
        self._queue: list[Any] = []  # features [n, M*Ht] of positions from _absorbed on

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and the rows held, at most ``most``."""
        limit = min(most, len(prompt), self._held())
        return next((i for i in range(limit) if prompt[i] != self._tokens[i]), limit)

    def begin(self, request: Request, reuse: int) -> None:
        """Start a request whose first ``reuse`` rows are held; later ones are forgotten."""
        assert reuse <= self._held(), f"{reuse} rows asked for, {self._held()} held"
        left = max(0, reuse - self._absorbed)
        self._queue = [mx.concatenate(self._queue)[:left]] if left else []
        self._absorbed = min(self._absorbed, reuse)
        for cache in self._caches:
            cache.crop(self._absorbed)
        self._tokens, self._request = list(request.prompt), request

    def outlook(self) -> Outlook:
        """A full block as soon as there is an anchor; ``lag`` is the queue's rows."""
        ready = len(self._tokens) == self._held() + 1
        most = self._model.spec.block_size - 1 if ready else 0
        return Outlook(most=most, lag=self._held() - self._absorbed)

    def propose(self, plan: Plan) -> Proposal[Any]:
        """A token of each row, as the request draws them.

        Waits only for options of the host, and for a least confidence.
        """
        rows = min(plan.rows, self.outlook().most)
        if rows < 1:
            return PLAIN
        self._absorb()
        start = len(self._tokens) - 1
        assert self._absorbed == start, f"{self._absorbed} rows absorbed, anchor at {start}"
        hidden = self._block(start, rows + 1)
        return self._proposal(self._draw(hidden[0, 1:], self._output()))

    def commit(self, verdict: Verdict[Any], rows: int) -> None:
        """Queue the first ``rows`` feature rows and tokens of ``verdict``."""
        if not rows:
            return
        assert verdict.features is not None, "the target captures no features"
        self._queue.append(verdict.features[:rows])
        self._tokens += verdict.tokens[:rows]

    def fork(self) -> DFlashSession:
        """An independent session with the same rows."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._caches = [cache.copy() for cache in self._caches]
        twin._tokens, twin._queue = list(self._tokens), list(self._queue)
        return twin

    def grow(self, capacity: int) -> None:
        """Nothing to do: caches make room as they fill."""

    def close(self) -> None:
        """Free everything; idempotent."""
        self._caches, self._queue, self._tokens, self._absorbed = [], [], [], 0

    def bytes(self) -> int:
        """Bytes of keys and values held now."""
        return sum(cache.bytes() for cache in self._caches)

    def _draw(self, hidden: Any, output: Sequence[int]) -> Drawn:
        """What rows [n, H] say."""
        return propose(self._logits(hidden), self._request, output)

    def _proposal(self, block: Drawn) -> Proposal[Any]:
        block = certain(block, self._request.sampling.draft_p_min)
        count = len(block.tokens)
        return Proposal(tokens=block.tokens, rows=count, q=block.q) if count else PLAIN

    def _output(self) -> list[int]:
        return self._tokens[len(self._request.prompt) :]

    def _held(self) -> int:
        return self._absorbed + sum(int(part.shape[0]) for part in self._queue)

    def _absorb(self) -> None:
        """Queued features to keys and values, each row once."""
        for part in self._queue:
            for start in range(0, part.shape[0], CHUNK):
                features = part[start : start + CHUNK][None].astype(self._model.dtype)
                pairs = self._model.context_kv(self._model.fuse(features), self._absorbed)
                for cache, (key, value) in zip(self._caches, pairs, strict=True):
                    cache.append(key, value, self._absorbed)
                self._absorbed += features.shape[1]
        self._queue = []

    def _block(self, start: int, rows: int) -> Any:
        """Final hidden states [1, rows, H] of the block at position ``start``."""
        spec = self._model.spec
        masks = [
            block_mask(
                rows,
                cache.seen,
                causal=causal,
                window=spec.sliding_window if kind == "sliding_attention" else None,
            )
            for cache, kind, causal in zip(self._caches, spec.layer_types, spec.causal, strict=True)
        ]
        context = [cache.view() for cache in self._caches]
        return self._model.block(self._noise(rows), start, context, masks)

    def _noise(self, rows: int) -> Any:
        """Embedded anchor and masks [1, rows, H]."""
        mask, tables = self._model.spec.mask_token_id, self._tables
        noise = tables.embed(mx.array([self._tokens[-1]] + [mask] * (rows - 1)))
        if tables.mask_row is not None:
            row = tables.mask_row.astype(noise.dtype)
            masks = mx.broadcast_to(row, (rows - 1, row.shape[-1]))
            noise = mx.concatenate([noise[:1], masks])
        return (noise * tables.scale)[None].astype(self._model.dtype)

    def _logits(self, hidden: Any) -> Any:
        """[rows, H] to [rows, V]; -inf outside a reduced vocabulary."""
        logits = transform_logits(self._tables.head(hidden), self._model.spec)
        ids = self._tables.target_ids
        if ids is None:
            return logits
        full = mx.full((logits.shape[0], self._tables.rows), -mx.inf, dtype=logits.dtype)
        full[:, ids] = logits
        return full


def bounds(model: DFlashModule, window: int | None) -> list[int | None]:
    """Context rows each layer can see: its own window less the query's slot, or the user's."""
    spec = model.spec
    own = None if spec.sliding_window is None else spec.sliding_window - 1
    found = [own if kind == "sliding_attention" else None for kind in spec.layer_types]
    if window is None:
        return found
    return [window if bound is None else min(bound, window) for bound in found]


DFLASH = DraftKind(DFlashModule, DFlashSession)
