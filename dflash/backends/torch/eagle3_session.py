"""DraftSession over the EAGLE-3 module: chains, one token a step.

Bookkeeping as in `dflash_session`, with one difference: the row of position P has read token P + 1
too. So a row that was absorbed before a token that turned out otherwise must be absorbed again, and
`holds` offers one row less where the next token is not the same.

Rows of a chain are written behind the absorbed ones and forgotten when the chain ends: the next
round has the target's own features for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from dflash.backends.torch.best_first import Beam, Candidates, Ranking
from dflash.backends.torch.dflash import Context, block_mask
from dflash.backends.torch.dflash_session import CHUNK, DFlashSession
from dflash.backends.torch.draft_cache import LayerCache
from dflash.backends.torch.eagle3 import Eagle3DraftModel
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.kinds import DraftKind
from dflash.backends.torch.phases import mark
from dflash.backends.torch.rows import Options, whole
from dflash.backends.torch.sampling import Ids, to_host
from dflash.backends.torch.upload import on_its_way, upload
from dflash.core.host import CONFIDENT
from dflash.core.types import MOST_NODES, PLAIN, Plan, Proposal

WIDEST = 8  # nodes of a level that a tree goes on from, as EAGLE-2's


class Eagle3Session(DFlashSession):
    """State of one EAGLE-3 draft over one growing token sequence (batch 1)."""

    _model: Eagle3DraftModel  # type: ignore[assignment]

    def replay(self, graphs: Graphs | None) -> Self:  # noqa: ARG002
        """A chain runs row after row, directly."""
        return self

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Rows that are there for ``prompt``, at most ``most``; see the module's first lines."""
        known = min(len(prompt), len(self._tokens))
        common = next((i for i in range(known) if prompt[i] != self._tokens[i]), known)
        limit = min(most, common, self._held())
        return limit - 1 if 0 < limit == common <= self._absorbed else limit

    def propose(self, plan: Plan) -> Proposal[Tensor]:
        """A chain of tokens, or a tree grown level by level.

        Does not wait, but where an option is Python's: then once a token.
        """
        depth = min(plan.depth if plan.is_tree else plan.rows, self.outlook().most)
        if depth < 1:
            return PLAIN
        began = mark(self._model.norm.weight.device)
        with torch.inference_mode():
            normed, state = self._catch_up()
            start = len(self._tokens) - 1
            assert self._absorbed == start, f"{self._absorbed} rows absorbed, anchor at {start}"
            kept, self._caches = self._caches, [_for_a_chain(cache) for cache in self._caches]
            found = self._said(self._chain(depth, normed, state, start), plan, depth, began)
            self._caches = kept
            if self._looks():
                self._finite = on_its_way(normed.isfinite().all())
            for cache in self._caches:
                cache.crop(start)
        return found

    def step(
        self, tokens: Tensor, state: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:  # each [1, n, H]
        """Rows from position ``start`` on: tokens [n] one position on, states [1, n, H]."""
        positions = start + torch.arange(tokens.shape[0], device=state.device)
        context = [Growing(cache, start) for cache in self._caches]
        return self._run(tokens, state, positions, context, self._seen(start, positions))

    def level(
        self, tokens: Tensor, state: Tensor, position: int, seen: Tensor
    ) -> tuple[Tensor, Tensor]:  # each [1, n, H]
        """Rows that stand side by side: ``seen [n, m]`` says which of the last m rows, their own
        included, each sees beside all before these."""
        before = self._caches[0].seen + tokens.shape[0] - seen.shape[1]
        mask = torch.cat([seen.new_ones(seen.shape[0], before), seen], dim=1)
        positions = torch.full(tokens.shape, position, device=state.device)
        context = [Growing(cache, cache.end) for cache in self._caches]
        return self._run(tokens, state, positions, context, [mask] * len(context))

    def _run(
        self,
        tokens: Tensor,
        state: Tensor,
        positions: Tensor,
        context: Sequence[Context],
        masks: Sequence[Tensor | None],
    ) -> tuple[Tensor, Tensor]:
        weight = self._model.norm.weight
        embedded = (self._tables.embed[tokens] * self._tables.scale)[None].to(weight)
        normed, state = self._model(embedded, state, positions, context, masks)
        return normed, state

    def _chain(self, count: int, normed: Tensor, state: Tensor, start: int) -> Chain:
        return Chain(self, count, normed, state, start)

    def _branches(self) -> bool:
        """Not where a window moves with every row."""
        whole = all(cache.bound is None for cache in self._caches)
        return whole and super()._branches()

    def fuse(self, features: Tensor) -> Tensor:
        """Tapped states [.., M*Ht] to the states that rows read [.., H]."""
        fit = self._tables.fit
        return self._model.fuse(features if fit is None else fit(features))

    def logits(self, normed: Tensor) -> Tensor:
        """[n, H] to [n, V]."""
        return whole(self._logits(normed))

    def _absorb(self) -> None:
        """What a full queue asks for; the newest row stays, a chain begins with it."""
        whole = torch.cat(self._queue)
        self._queue = [whole[-1:]]
        if whole.shape[0] > 1:
            self._take(whole[:-1])

    def _catch_up(self) -> tuple[Tensor, Tensor]:
        """Queued features into the caches, each row once; the newest row's [1, 1, H] pair."""
        queued, self._queue = torch.cat(self._queue), []
        return self._take(queued)

    def _take(self, queued: Tensor) -> tuple[Tensor, Tensor]:
        weight = self._model.norm.weight
        bounded = any(cache.bound is not None for cache in self._caches)
        pair: tuple[Tensor, Tensor] = (weight, weight)  # replaced: there is a row
        for features in torch.split(queued, self._model.spec.block_size if bounded else CHUNK):
            first, rows = self._absorbed, features.shape[0]
            tokens = self._tokens[first + 1 : first + 1 + rows]
            ids = upload(tokens, weight.device)
            pair = self.step(ids, self.fuse(features[None].to(weight)), first)
            self._absorbed += rows
        normed, state = pair
        return normed[:, -1:], state[:, -1:]

    def _seen(self, start: int, positions: Tensor) -> list[Tensor | None]:
        """One mask a layer; None where a row alone sees all there is."""
        spec, masks = self._model.spec, list[Tensor | None]()
        for cache, kind in zip(self._caches, spec.layer_types, strict=True):
            window = spec.sliding_window if kind == "sliding_attention" else None
            seen = cache.seen
            if positions.shape[0] == 1 and (window is None or seen < window):
                masks.append(None)
                continue
            keys = start - seen + torch.arange(seen + positions.shape[0], device=positions.device)
            masks.append(block_mask(positions, keys, causal=True, window=window))
        return masks


@dataclass(frozen=True, slots=True)
class Growing:
    """A cache that keeps the rows it is shown."""

    cache: LayerCache
    start: int

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Everything seen and the new rows behind it: a pair of [1, nkv, T + n, D] views."""
        shown = self.cache(key, value)
        if self.cache.bound is not None:  # its rows may move when more come in
            shown = shown[0].clone(), shown[1].clone()
        self.cache.append(key, value, self.start)
        return shown


def _for_a_chain(cache: Any) -> Any:
    """Where a chain may write: behind the rows, but for a window, which would lose its oldest."""
    return cache if cache.bound is None else cache.copy()


class Chain:
    """Rows in turn: each is run once the token before it is drawn."""

    choices = CONFIDENT

    def __init__(
        self, session: Eagle3Session, count: int, normed: Tensor, state: Tensor, start: int
    ) -> None:
        """``normed`` and ``state`` [1, 1, H] are the row before the anchor's position."""
        self.count, self.device = count, normed.device
        self._session, self._start = session, start
        self._normed, self._state = normed, state
        self._host = False
        self._seen = torch.empty(1, 0, dtype=torch.bool, device=self.device)  # [n, rows of levels]

    def row(self, offset: int, ids: Ids, options: Options | None) -> Tensor:
        """``[1, V]`` of the token after ``ids``; asked for once, in order."""
        if offset:
            last = upload(ids[-1:], self.device).long()
            place = self._start + offset - 1
            self._normed, self._state = self._session.step(last, self._state, place)
        return self._said(self._normed[0], options)

    def _said(self, row: Tensor, options: Options | None) -> Tensor:
        """[1, H] to [1, V], where it is wanted."""
        logits = self._session.logits(row)
        logits = to_host(logits) if self._host else logits
        return logits if options is None else options(logits)

    def path(self, options: Options | None) -> Tensor | None:  # noqa: ARG002
        """Only token after token."""
        return None

    @property
    def widest(self) -> int:
        """Each level is a pass, and its rows stay until the tree is whole."""
        return max(1, min(WIDEST, MOST_NODES // max(1, self.count - 1)))

    def after(self, level: int, beam: Beam | None, ranking: Ranking, most: int) -> Candidates:
        """The likeliest tokens after each node, which is run for it."""
        if beam is not None:
            above = self._seen[beam.above]
            own = torch.eye(above.shape[0], dtype=torch.bool, device=self.device)
            self._seen = torch.cat([above, own], dim=1)
            state = self._state[:, beam.above]
            place = self._start + level - 1
            self._normed, self._state = self._session.level(beam.tokens, state, place, self._seen)
        rows = ranking.prepared(self._session.logits(self._normed[0]), level)
        logs, ids = ranking.logs(rows, level).topk(min(most, rows.shape[-1]))
        return Candidates(ids, logs)

    def to_host(self) -> Chain:
        """The same; each row is fetched when it is there."""
        self._host = True
        return self


EAGLE3 = DraftKind(Eagle3DraftModel, Eagle3Session)
