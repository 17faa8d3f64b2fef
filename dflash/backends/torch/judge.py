"""A request's options turned into one callable: the target's, which judges a block.

Options on every row, then the rule, then log-probabilities. The draft's callable is in
`propose.py`. A request without options, at temperature 0 or with a seed, comes down to the argmax
of logits (and noise), and nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.logprobs import pack
from dflash.backends.torch.options import Chain, make_chain
from dflash.backends.torch.rules import block, rejection
from dflash.backends.torch.sampling import (
    Decision,
    Ids,
    flags,
    make_picker,
    on_host,
    probabilities,
)
from dflash.backends.torch.tree import Branches
from dflash.backends.torch.upload import send, upload
from dflash.core.noise import Stream, coins
from dflash.core.types import Request, Sampling


class Judge(Protocol):
    """The target's side of a request."""

    def __call__(
        self,
        logits: Tensor,  # [n + 1, V]
        history: Sequence[int],  # prompt and committed tokens
        drafted: Ids = (),  # [n]
        q: Tensor | None = None,  # [n, V]
        tree: Branches | None = None,  # None = a chain
    ) -> Decision:
        """What the target says at each place. A tree is judged by the match rule, whatever the
        rule of the request: its drafts were not drawn, and for such the two have one law."""


def make_judge(request: Request) -> Judge:
    """The target's side of ``request``; one session's, as it remembers what was committed."""
    sampling, chain = request.sampling, make_chain(request)
    pick = make_picker(sampling)
    decide = _sampled(sampling) if by_rejection(sampling) else None

    def judge(
        logits: Tensor,
        history: Sequence[int],
        drafted: Ids = (),
        q: Tensor | None = None,
        tree: Branches | None = None,
    ) -> Decision:
        position = len(history) - len(request.prompt)
        if tree is not None:
            rows = logits if chain is None else _each(chain, logits, history, drafted, tree)
            decision = Decision(pick(rows, position, tree))
        else:
            rows = logits if chain is None else chain(logits, history, drafted)
            if decide is None:
                decision = Decision(pick(rows, position))
            else:
                decision = decide(rows, position, drafted, q)
        if sampling.logprobs is None:
            return decision
        return decision._replace(notes=pack(logits, decision.tokens, sampling.logprobs))

    return judge


def _each(
    chain: Chain, logits: Tensor, history: Sequence[int], drafted: Ids, tree: Branches
) -> Tensor:
    """``[n + 1, V]``: options at each node, with the drafts on the way to it; waits once."""
    ways: list[list[int]] = [[]]
    for token, parent in zip(on_host(drafted), on_host(tree.parents), strict=True):
        ways.append([*ways[parent + 1], token])
    rows = [
        chain(logits[row : row + 1], history, way, first=len(way)) for row, way in enumerate(ways)
    ]
    return torch.cat(rows)


def by_rejection(sampling: Sampling) -> bool:
    """Whether drafts are judged by p and q. At temperature 0 every rule is the argmax."""
    return sampling.rule != "match" and sampling.temperature > 0


_Decide: TypeAlias = Callable[[Tensor, int, Ids, Tensor | None], Decision]


def _sampled(sampling: Sampling) -> _Decide:
    rule = block if sampling.rule == "block" else rejection

    def decide(rows: Tensor, position: int, drafted: Ids, q: Tensor | None) -> Decision:
        ids = upload(drafted, rows.device).long()
        p = probabilities(rows, sampling)[None]
        kept = thrown(sampling, Stream.ACCEPT, position, ids.shape[0], rows)[None]
        own = thrown(sampling, Stream.OWN, position, 1, rows)
        found = rule(ids[None], p, None if q is None else _padded(q, p.shape[-1])[None], kept, own)
        return Decision(flags(rows.amax(dim=-1), found.tokens[0]), found.accepted[0])

    return decide


def _padded(q: Tensor, size: int) -> Tensor:
    """``[n, V]``: a draft that does not know the padding of a target's head says none of it."""
    return q if q.shape[-1] == size else F.pad(q, (0, size - q.shape[-1]))


def thrown(sampling: Sampling, stream: Stream, position: int, count: int, like: Tensor) -> Tensor:
    """``[count]``: the coins of a stream from an output position on, on ``like``'s device."""
    found = torch.from_numpy(coins(sampling.seed, sampling.sample, stream, position, count))
    return send(found.float() if like.device.type == "mps" else found, like.device)
