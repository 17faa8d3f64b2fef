"""A request's options turned into one callable: the draft's, which proposes a block.

The same options as the target's on the draft's own rows, so that what the target may not say is not
drafted; then a token a row and, for the rejection rules, what that token was drawn from. Rows come
all at once from a parallel draft, and one after the other from a draft whose next row depends on
the token before (`InTurn`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from dflash.backends.torch.best_first import Grown, Ranking, grow
from dflash.backends.torch.judge import by_rejection, thrown
from dflash.backends.torch.options import make_chain
from dflash.backends.torch.rows import InTurn, Options, Rows, Shortlist, in_turn, whole
from dflash.backends.torch.rules import draw
from dflash.backends.torch.sampling import (
    Ids,
    flags,
    greedy,
    leading,
    make_picker,
    on_host,
    probabilities,
)
from dflash.backends.torch.upload import send
from dflash.core.host import CONFIDENT
from dflash.core.noise import Stream
from dflash.core.types import Request, Sampling


class _Drawn(NamedTuple):
    ids: Tensor  # [n], negative as `flags` says
    q: Tensor | None = None  # [n, V]


_Draw: TypeAlias = Callable[[Tensor, int, int], _Drawn]
"""``(rows [n, V], output position of the block, offset of the first row in it)``."""


class Proposer:
    """The draft's side of a request; one session's, as it remembers what was committed."""

    def __init__(self, request: Request) -> None:
        """One chain of options, whatever is proposed."""
        self._ways, self._request = _Proposing(request), request

    def __call__(self, rows: Rows, history: Sequence[int]) -> tuple[Ids, Tensor | None]:
        """``(rows, prompt and committed tokens)`` to ``(tokens, q [rows, V] or None)``.

        Rows are logits [n, V] or given in turn. An option may leave nothing to propose, so there
        may be fewer than n tokens.
        """
        if isinstance(rows, Shortlist):
            if self._ways.largest:
                return rows.largest(), None
            rows = whole(rows)
        chain = self._ways.chain
        if chain is not None and chain.on_host:
            return self._ways.on_host(in_turn(rows), history)
        if self._request.sampling.draft_path == "best" and not (chain and chain.in_order):
            ids = in_turn(rows).path(self._ways.options(history))
            if ids is not None:
                return ids.clamp(min=0), None
        if isinstance(rows, Tensor) and not (chain and chain.in_order):
            return self._ways.at_once(rows, history)
        return self._ways.in_order(in_turn(rows), history)

    @property
    def branches(self) -> bool:
        """Whether a tree can be proposed: not with options that look at the drafts before."""
        chain = self._ways.chain
        return chain is None or not chain.in_order

    def tree(self, rows: Rows, history: Sequence[int], nodes: int, depth: int) -> Grown:
        """The best ``nodes`` in the first ``depth`` rows. Needs `branches`; nobody waits."""
        options = None
        if self._ways.chain is not None:
            chain = self._ways.chain

            def options(row: Tensor, level: int) -> Tensor:
                return chain(row, history, (), first=level)

        rows = whole(rows) if isinstance(rows, Shortlist) else rows
        position = len(history) - len(self._request.prompt)
        ranking = Ranking(self._request.sampling, position, options)
        return grow(in_turn(rows), ranking, nodes, depth)


def make_proposer(request: Request) -> Proposer:
    """The draft's side of ``request``."""
    return Proposer(request)


class _Proposing:
    """Three ways to the same tokens: all rows at once, row after row, row after row on the host."""

    def __init__(self, request: Request) -> None:
        self.chain = make_chain(request)
        self._request = request
        self._draw = _make_draw(request.sampling)
        self._least = request.sampling.draft_p_min
        greedy_drafts = request.sampling.temperature == 0 or request.sampling.greedy_drafts
        self.largest = self.chain is None and greedy_drafts and not self._least
        """Whether each row's likeliest token is proposed, and nothing else is asked."""

    def options(self, history: Sequence[int], ids: Ids = (), first: int = 0) -> Options | None:
        """The request's options at the place after ``history`` and ``first`` of ``ids``."""
        chain = self.chain
        if chain is None:
            return None
        return lambda rows: chain(rows, history, ids, first=first)

    def at_once(self, logits: Tensor, history: Sequence[int]) -> tuple[Ids, Tensor | None]:
        """All rows of a parallel draft; nobody waits, but for a least confidence."""
        options = self.options(history)
        rows = logits if options is None else options(logits)
        sure = _confidence(rows, CONFIDENT) if self._least else None
        return self._usable(self._draw(rows, self._position(history), 0), sure)

    def in_order(self, rows: InTurn, history: Sequence[int]) -> tuple[Ids, Tensor | None]:
        """Each row with the drafts before it in its history; nobody waits, as `at_once`."""
        ids, found, sure = None, list[_Drawn](), list[Tensor]()
        for offset in range(rows.count):
            before: Ids = () if ids is None else ids
            row = rows.row(offset, before, self._each(history, before, offset))
            found.append(self._draw(row, self._position(history), offset))
            if self._least:
                sure.append(_confidence(row, rows.choices))
            drawn = found[-1].ids.clamp(min=0)
            ids = drawn if ids is None else torch.cat([ids, drawn])
        whole = _Drawn(torch.cat([one.ids for one in found]), _stacked([one.q for one in found]))
        return self._usable(whole, torch.cat(sure) if sure else None)

    def on_host(self, rows: InTurn, history: Sequence[int]) -> tuple[list[int], Tensor | None]:
        """The same on the host, after one wait, up to where the options leave nothing to say.

        Whether a place is drafted depends on the drafts before it and on its distribution, never
        on the token drawn there.
        """
        block, ids, kept = rows.to_host(), list[int](), list[_Drawn]()
        for offset in range(block.count):
            row = block.row(offset, ids, self._each(history, ids, offset))
            if self._least and not leading(_confidence(row, block.choices) >= self._least):
                break
            found = self._draw(row, self._position(history), offset)
            token = on_host(found.ids)[0]
            if token < 0:
                break
            ids.append(token)
            kept.append(found)
            if token in self._request.stop_ids:
                break
        q = _stacked([one.q for one in kept])
        return ids, None if q is None else send(q, rows.device)

    def _each(self, history: Sequence[int], ids: Ids, offset: int) -> Options | None:
        if self.chain is None or self.chain.in_order:
            return self.options(history, ids, offset)
        return self.options(history, (), offset)

    def _position(self, history: Sequence[int]) -> int:
        return len(history) - len(self._request.prompt)

    def _usable(self, drawn: _Drawn, sure: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Token 0 where a row has none, as if that were all its draft ever says; nothing from the
        first row on whose confidence is too low (a matter of its distribution, not of its draw)."""
        ids, q = drawn.ids.clamp(min=0), drawn.q
        if q is not None:
            never = torch.zeros_like(q[0])
            never[0] = 1.0
            q = torch.where((drawn.ids < 0)[:, None], never, q)
        if sure is None:
            return ids, q
        count = leading(sure >= self._least)
        return ids[:count], None if q is None else q[:count]


def _make_draw(sampling: Sampling) -> _Draw:
    if sampling.temperature == 0 or sampling.greedy_drafts:
        return lambda rows, _position, _offset: _Drawn(greedy(rows))
    if not by_rejection(sampling):
        pick = make_picker(sampling)
        return lambda rows, position, offset: _Drawn(pick(rows, position + offset))

    def drawn(rows: Tensor, position: int, offset: int) -> _Drawn:
        end = offset + rows.shape[0]
        q = probabilities(rows, sampling)
        coins = thrown(sampling, Stream.DRAFT, position, end, rows)[offset:]
        return _Drawn(flags(rows.amax(dim=-1), draw(q, coins)), q)

    return drawn


def _confidence(rows: Tensor, choices: int) -> Tensor:
    """``[n, V] -> [n]``: the likeliest token's probability among the ``choices`` likeliest."""
    best = rows.float().topk(min(choices, rows.shape[-1]), dim=-1).values
    return best.softmax(dim=-1)[:, 0].nan_to_num(0.0)


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    found = [row for row in rows if row is not None]
    return torch.cat(found) if found else None
