"""A request's options turned into one callable for the target and one for the draft.

The target's judges a block: options on every row, then the rule, then log-probabilities. The
draft's proposes: the same options on its own rows, so that what the target may not say is not
drafted, then a token a row and, for the rejection rules, what that token was drawn from.

A request without options, at temperature 0 or with a seed, comes down to the argmax of logits (and
noise), and nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.logprobs import pack
from dflash.backends.torch.options import Chain, make_chain
from dflash.backends.torch.rules import block, draw, rejection
from dflash.backends.torch.sampling import (
    Decision,
    Ids,
    flags,
    greedy,
    make_picker,
    on_host,
    probabilities,
    to_host,
)
from dflash.core.noise import Stream, coins
from dflash.core.types import Request, Sampling

Judge: TypeAlias = Callable[[Tensor, Sequence[int], Ids, Tensor | None], Decision]
"""``(logits [n + 1, V], prompt and committed tokens, drafted [n], q [n, V] or None)``."""
Proposer: TypeAlias = Callable[[Tensor, Sequence[int]], tuple[Ids, Tensor | None]]
"""``(logits [n, V], prompt and committed tokens) -> (tokens, q [rows, V] or None)``; an option may
leave nothing to propose, so there may be fewer than n tokens."""


def make_judge(request: Request) -> Judge:
    """The target's side of ``request``; one session's, as it remembers what was committed."""
    sampling, chain = request.sampling, make_chain(request)
    decide = _sampled(sampling) if by_rejection(sampling) else _matched(sampling)

    def judge(logits: Tensor, history: Sequence[int], drafted: Ids, q: Tensor | None) -> Decision:
        rows = logits if chain is None else chain(logits, history, drafted)
        decision = decide(rows, len(history) - len(request.prompt), drafted, q)
        if sampling.logprobs is None:
            return decision
        return decision._replace(notes=pack(logits, decision.tokens, sampling.logprobs))

    return judge


def by_rejection(sampling: Sampling) -> bool:
    """Whether drafts are judged by p and q. At temperature 0 every rule is the argmax."""
    return sampling.rule != "match" and sampling.temperature > 0


_Decide: TypeAlias = Callable[[Tensor, int, Ids, Tensor | None], Decision]


def _matched(sampling: Sampling) -> _Decide:
    pick = make_picker(sampling)
    return lambda rows, position, _drafted, _q: Decision(pick(rows, position))


def _sampled(sampling: Sampling) -> _Decide:
    rule = block if sampling.rule == "block" else rejection

    def decide(rows: Tensor, position: int, drafted: Ids, q: Tensor | None) -> Decision:
        ids = torch.as_tensor(drafted, device=rows.device, dtype=torch.long)
        p = probabilities(rows, sampling)[None]
        kept = _coins(sampling, Stream.ACCEPT, position, ids.shape[0], rows)[None]
        own = _coins(sampling, Stream.OWN, position, 1, rows)
        found = rule(ids[None], p, None if q is None else _padded(q, p.shape[-1])[None], kept, own)
        return Decision(flags(rows.amax(dim=-1), found.tokens[0]), found.accepted[0])

    return decide


def _padded(q: Tensor, size: int) -> Tensor:
    """``[n, V]``: a draft that does not know the padding of a target's head says none of it."""
    return q if q.shape[-1] == size else F.pad(q, (0, size - q.shape[-1]))


def _coins(sampling: Sampling, stream: Stream, position: int, count: int, like: Tensor) -> Tensor:
    thrown = torch.from_numpy(coins(sampling.seed, sampling.sample, stream, position, count))
    return (thrown.float() if like.device.type == "mps" else thrown).to(like.device)


class _Drawn(NamedTuple):
    ids: Tensor  # [n], negative as `flags` says
    q: Tensor | None = None  # [n, V]


_Draw: TypeAlias = Callable[[Tensor, int, int], _Drawn]
"""``(rows [n, V], output position of the block, offset of the first row in it)``."""


def make_proposer(request: Request) -> Proposer:
    """The draft's side of ``request``; one session's, as it remembers what was committed."""
    chain, drawn = make_chain(request), _make_draw(request.sampling)

    def propose(logits: Tensor, history: Sequence[int]) -> tuple[Ids, Tensor | None]:
        position = len(history) - len(request.prompt)
        if chain is not None and chain.on_host:
            return _walk(chain, drawn, logits, history, request)
        if chain is not None and chain.in_order:
            return _usable(_in_order(chain, drawn, logits, history, position))
        rows = logits if chain is None else chain(logits, history, ())
        return _usable(drawn(rows, position, 0))

    return propose


def _make_draw(sampling: Sampling) -> _Draw:
    if sampling.temperature == 0 or sampling.greedy_drafts:
        return lambda rows, _position, _offset: _Drawn(greedy(rows))
    if not by_rejection(sampling):
        pick = make_picker(sampling)
        return lambda rows, position, offset: _Drawn(pick(rows, position + offset))

    def drawn(rows: Tensor, position: int, offset: int) -> _Drawn:
        end = offset + rows.shape[0]
        q = probabilities(rows, sampling)
        thrown = _coins(sampling, Stream.DRAFT, position, end, rows)[offset:]
        return _Drawn(flags(rows.amax(dim=-1), draw(q, thrown)), q)

    return drawn


def _usable(drawn: _Drawn) -> tuple[Tensor, Tensor | None]:
    """Token 0 where a row has none, as if that were all its draft ever says."""
    ids, q = drawn.ids.clamp(min=0), drawn.q
    if q is not None:
        never = torch.zeros_like(q[0])
        never[0] = 1.0
        q = torch.where((drawn.ids < 0)[:, None], never, q)
    return ids, q


def _in_order(
    chain: Chain, drawn: _Draw, logits: Tensor, history: Sequence[int], position: int
) -> _Drawn:
    """Row after row, each with the drafts before it in its history; nobody waits."""
    ids = torch.empty(0, dtype=torch.long, device=logits.device)
    found: list[_Drawn] = []
    for offset in range(logits.shape[0]):
        rows = chain(logits[offset : offset + 1], history, ids, first=offset)
        found.append(drawn(rows, position, offset))
        ids = torch.cat([ids, found[-1].ids.clamp(min=0)])
    return _Drawn(torch.cat([one.ids for one in found]), _stacked([one.q for one in found]))


def _walk(
    chain: Chain, drawn: _Draw, logits: Tensor, history: Sequence[int], request: Request
) -> tuple[list[int], Tensor | None]:
    """The same on the host, after one wait, up to where the options leave nothing to say.

    Whether a place is drafted depends on the drafts before it and on its distribution, never on
    the token drawn there.
    """
    block, ids, kept = to_host(logits), list[int](), list[_Drawn]()
    for offset in range(block.shape[0]):
        rows = chain(block[offset : offset + 1], history, ids, first=offset)
        found = drawn(rows, len(history) - len(request.prompt), offset)
        token = on_host(found.ids)[0]
        if token < 0:
            break
        ids.append(token)
        kept.append(found)
        if token in request.stop_ids:
            break
    q = _stacked([one.q for one in kept])
    return ids, None if q is None else q.to(logits.device)


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    found = [row for row in rows if row is not None]
    return torch.cat(found) if found else None
