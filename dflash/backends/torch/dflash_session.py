"""DraftSession over the DFlash v1 module: the draft's side of one growing token sequence.

Bookkeeping: ``_tokens`` is prompt plus committed tokens; its last entry is the anchor, at position
``s``. A context row exists for every position before it, either absorbed (keys and values in the
layer caches) or queued (target features waiting for the next `propose`). Invariant of every
proposal: absorbed rows == ``s``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from dflash.backends.torch.cache import ROOM
from dflash.backends.torch.dflash import DFlashDraftModel, block_mask
from dflash.backends.torch.draft_cache import LayerCache
from dflash.backends.torch.draft_fused import fused_of
from dflash.backends.torch.graph_draft import GraphBlocks
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.kinds import DraftKind
from dflash.backends.torch.memory import guard
from dflash.backends.torch.phases import mark
from dflash.backends.torch.propose import Proposer, make_proposer
from dflash.backends.torch.rows import Rows, Shortlist
from dflash.backends.torch.tables import Noise, States, Tables, short_logits
from dflash.backends.torch.upload import on_its_way
from dflash.core.types import MOST_NODES, PLAIN, Outlook, Plan, Proposal, Request, Verdict
from dflash.errors import WeightsError

CHUNK = 512  # context rows projected at a time: bounds activation memory
QUEUE_BYTES = 64 << 20  # features that may wait; past it a commit absorbs them


class DFlashSession:
    """State of one DFlash v1 draft over one growing token sequence (batch 1)."""

    def __init__(
        self,
        model: DFlashDraftModel,
        tables: Tables,
        capacity: int,  # context rows
        *,
        window: int | None = None,
    ) -> None:
        """``window`` bounds the draft's history to that many context rows; None = its own."""
        self._model, self._tables, self._window = model, tables, window
        spec, weight = model.spec, model.norm.weight
        self._fused, bounds, layers = fused_of(model), _bounds(model, window), 1
        if self._fused is not None:  # its layers are alike: one cache for all
            bounds, layers = bounds[:1], spec.num_layers
        self._caches = [
            LayerCache(
                spec, capacity, bound, device=weight.device, dtype=weight.dtype, layers=layers
            )
            for bound in bounds
        ]
        self._tokens: list[int] = []
        self._request = Request((), 0)
        self._absorbed = 0
        self._queue: list[Tensor] = []  # features [n, M*Ht] of positions from _absorbed on
        self._draw: Proposer = make_proposer(self._request)
        self._finite: Tensor | None = None
        self._noise = Noise(spec, tables, weight)
        self._rounds = 0
        self._graphs: Graphs | None = None
        self._blocks: GraphBlocks | None = None

    def replay(self, graphs: Graphs | None) -> Self:
        """Let ``graphs`` replay its blocks from now on, where they can be."""
        if graphs is not None and all(cache.bound is None for cache in self._caches):
            self._graphs = graphs
            self._blocks = GraphBlocks(self._model, self._tables, graphs, self._fused)
            if not self._held():
                self._blocks.adopt(self._caches)
        return self

    @property
    def replays(self) -> bool:
        """Whether its blocks are replayed, as far as nothing goes wrong."""
        return self._blocks is not None

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest common prefix of ``prompt`` and the rows held, at most ``most``.

        A bounded layer may have lost rows before that place. It resumes with what is left: that
        costs some acceptance until its window is full again, not another pass over the prompt.
        """
        limit = min(most, len(prompt), self._held())
        return next((i for i in range(limit) if prompt[i] != self._tokens[i]), limit)

    def begin(self, request: Request, reuse: int) -> None:
        """Start a request whose first ``reuse`` rows are held; later ones are forgotten."""
        assert reuse <= self._held(), f"{reuse} rows asked for, {self._held()} held"
        rows = self._queued()[: max(0, reuse - self._absorbed)]
        self._queue = [rows] if rows.shape[0] else []
        self._absorbed = min(self._absorbed, reuse)
        for cache in self._caches:
            cache.crop(self._absorbed)
        self._tokens, self._request = list(request.prompt), request
        self._draw = make_proposer(request)

    def outlook(self) -> Outlook:
        """A full block as soon as there is an anchor; ``lag`` is the queue's rows."""
        ready = len(self._tokens) == self._held() + 1
        most = self._model.spec.block_size - 1 if ready else 0
        tree = MOST_NODES if self._branches() else 0
        return Outlook(most=most, lag=self._held() - self._absorbed, tree=tree)

    def propose(self, plan: Plan) -> Proposal[Tensor]:
        """A token of each row, as the request draws them; or a tree of several a row.

        Does not wait, but where an option is Python's, or asks for a least confidence: then once.
        """
        depth = min(plan.depth if plan.is_tree else plan.rows, self.outlook().most)
        if depth < 1:
            return PLAIN
        began = mark(self._model.norm.weight.device)
        with torch.inference_mode():
            states = self.states(depth + 1, look := self._looks())
            if look and states.finite is not None:
                self._finite = on_its_way(states.finite)
            return self._said(self._rows(states), plan, depth, began)

    def commit(self, verdict: Verdict[Tensor], rows: int) -> None:
        """Queue the first ``rows`` feature rows and tokens of ``verdict``.

        Raises WeightsError when the draft has computed NaN or infinity.
        """
        self._check_finite()
        if not rows:
            return
        assert verdict.features is not None, "the target captures no features"
        self._queue.append(verdict.features[:rows])
        self._tokens += verdict.tokens[:rows]
        if sum(part.numel() * part.element_size() for part in self._queue) > QUEUE_BYTES:
            with torch.inference_mode():
                self._absorb()

    def fork(self) -> Self:
        """An independent session with the same rows."""
        twin = type(self)(self._model, self._tables, 0, window=self._window)
        twin._caches = [cache.copy() for cache in self._caches]
        twin._tokens, twin._request = list(self._tokens), self._request
        twin._absorbed, twin._queue = self._absorbed, list(self._queue)
        twin._draw = make_proposer(self._request)
        return twin.replay(self._graphs)

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` tokens and one block. Raises OutOfMemory."""
        with torch.inference_mode(), guard(f"making room for {capacity} tokens of the draft"):
            for cache in self._caches:
                cache.grow(capacity + ROOM, self._model.spec.block_size)

    def close(self) -> None:
        """Free everything; idempotent."""
        if self._blocks is not None:
            self._blocks.close()
        self._caches, self._queue, self._tokens, self._absorbed = [], [], [], 0

    def bytes(self) -> int:
        """Bytes of keys and values allocated now."""
        return sum(cache.bytes() for cache in self._caches)

    def _said(self, rows: Rows, plan: Plan, depth: int, began: Any) -> Proposal[Tensor]:
        """Tokens of ``rows`` as ``plan`` asks for them."""
        if plan.is_tree and self._branches():
            tree = self._draw.tree(rows, self._tokens, plan.rows, depth)
            return Proposal(tree.tokens, len(tree.tokens), tree.parents, meta=began, depth=depth)
        tokens, q = self._draw(rows, self._tokens)
        return Proposal(tokens=tokens, rows=len(tokens), q=q, meta=began)

    def _branches(self) -> bool:
        """Whether this request's drafts can be a tree."""
        return self._draw.branches

    def _held(self) -> int:
        return self._absorbed + sum(part.shape[0] for part in self._queue)

    def _queued(self) -> Tensor:
        return torch.cat(self._queue) if self._queue else torch.empty(0, 0)

    def _absorb(self) -> None:
        """Queued features to keys and values, each row once."""
        weight = self._model.norm.weight
        for part in self._queue:
            for features in (part,) if part.shape[0] <= CHUNK else torch.split(part, CHUNK):
                rows = features.shape[0]
                fitted = features if self._tables.fit is None else self._tables.fit(features)
                if self._fused is not None:
                    self._fused.absorb(self._caches[0], fitted.to(weight), self._absorbed)
                    self._absorbed += rows
                    continue
                places = self._absorbed + torch.arange(rows, device=weight.device)
                context = self._model.fuse(fitted[None].to(weight))
                for cache, (key, value) in zip(
                    self._caches, self._model.context_kv(context, places), strict=True
                ):
                    cache.append(key, value, self._absorbed)
                self._absorbed += rows
        self._queue = []
        if self._blocks is not None:
            self._blocks.wrote(self._absorbed)

    def states(self, rows: int, look: bool = True) -> States:
        """What the block of ``rows`` behind the last token computes; absorbs what is queued.

        ``look`` asks whether it is finite.
        """
        start = len(self._tokens) - 1
        assert self._held() == start, f"{self._held()} rows are there, the anchor is at {start}"
        found = self._replayed(rows)
        if found is not None:
            return found
        self._absorb()
        noise, masks = self._noise(self._tokens[-1], rows), self._masks(start, rows)
        if self._fused is not None:
            hidden = self._fused.block(self._caches[0], noise, start, masks[0])
        else:
            positions = start + torch.arange(rows, device=noise.device)
            hidden = self._model.block(noise[None], positions, self._caches, masks)[0]
        if self._blocks is not None:
            self._blocks.wrote(start + rows)
        drafted = hidden[1:]
        finite = hidden.isfinite().all() if look else None
        return States(drafted, self._logits(drafted), finite)

    def _replayed(self, rows: int) -> States | None:
        """The same from a recorded pass, if there is one or can be."""
        if self._blocks is None:
            return None
        queued = self._queued()
        if queued.shape[0] > rows:
            self._absorb()
            queued = queued[:0]
        found = self._blocks(self._caches, queued, self._tokens[-1], rows)
        if found is not None:
            self._absorbed, self._queue = self._held(), []
        return found

    def _masks(self, start: int, rows: int) -> list[Tensor | None]:
        """One mask a cache; None where every row sees everything."""
        spec, made, device = self._model.spec, {}, self._model.norm.weight.device
        masks: list[Tensor | None] = []
        for cache, kind, causal in zip(self._caches, spec.layer_types, spec.causal, strict=False):
            window = spec.sliding_window if kind == "sliding_attention" else None
            reach = cache.seen + rows
            if not causal and (window is None or reach <= window):
                masks.append(None)
                continue
            key = (causal, window, cache.seen)
            if key not in made:
                keys = start - cache.seen + torch.arange(reach, device=device)
                made[key] = block_mask(keys[-rows:], keys, causal=causal, window=window)
            masks.append(made[key])
        return masks

    def _rows(self, states: States) -> Rows:
        """What the rows say, for the proposer."""
        return states.logits

    def _logits(self, hidden: Tensor) -> Tensor | Shortlist:
        return short_logits(self._model.spec, self._tables, hidden)

    def _looks(self) -> bool:
        """Whether this round asks for finite values: 1, 2, 4, 8, ... only, as a look computes, and
        is a copy where nothing is copied beside the device's work."""
        self._rounds += 1
        return self._rounds & (self._rounds - 1) == 0

    def _check_finite(self) -> None:
        """The value is there since the verify."""
        finite, self._finite = self._finite, None
        if finite is not None and not bool(finite):
            raise WeightsError(
                "the draft computed values that are not finite, so nothing of it could be "
                "accepted. Use bfloat16 or float32 for the draft; if it already is, its weights "
                "are damaged or made for another target"
            )


def _bounds(model: DFlashDraftModel, window: int | None) -> list[int | None]:
    """Context rows each layer can see: its own window less the query's slot, or the user's."""
    spec = model.spec
    own = None if spec.sliding_window is None else spec.sliding_window - 1
    bounds = [own if kind == "sliding_attention" else None for kind in spec.layer_types]
    if window is None:
        return bounds
    return [window if bound is None else min(bound, window) for bound in bounds]


DFLASH = DraftKind(DFlashDraftModel, DFlashSession)
