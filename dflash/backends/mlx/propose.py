"""Logits of a draft's rows to drafted tokens, in MLX's own operations.

Nothing here is computed before the target's one wait, but for a least confidence and for requests
whose options change logits: those wait once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from dflash.backends.mlx.sampling import Ids, as_list, draw, log_probs, picked, to_numpy
from dflash.core.host import CONFIDENT
from dflash.core.host import propose as propose_on_host
from dflash.core.logits import changes_logits
from dflash.core.noise import Stream, coins
from dflash.core.types import Request, Sampling


class Drawn(NamedTuple):
    """What the rows of a block say, perhaps not computed yet."""

    tokens: Ids  # [n]
    q: Any = None  # [n, V] each token was drawn from; None = it was the only one
    sure: Any = None  # [n], see `confidence`; None = nobody asked


def propose(logits: Any, request: Request, output: Sequence[int]) -> Drawn:
    """A token of each row of ``logits`` [n, V], drawn as the request says.

    An option may leave nothing to say, so there may be fewer.
    """
    sampling = request.sampling
    sure = confidence(logits) if sampling.draft_p_min else None
    if changes_logits(request):
        found = propose_on_host(to_numpy(logits), request, output)
        q = None if found.q is None else mx.array(found.q.astype(np.float32))
        return Drawn(found.tokens, q, None if sure is None else sure[: len(found.tokens)])
    if sampling.draft_path == "best":  # rows that know nothing of each other
        return Drawn(mx.argmax(logits, axis=-1).astype(mx.int32))
    return drawn(logits, sampling, len(output))._replace(sure=sure)


def drawn(logits: Any, sampling: Sampling, position: int, offset: int = 0) -> Drawn:
    """`propose` for rows ``offset`` and later of the block at output ``position``, options aside.

    Never waits.
    """
    if sampling.temperature == 0 or sampling.greedy_drafts:
        return Drawn(mx.argmax(logits, axis=-1).astype(mx.int32))
    if sampling.rule == "match":
        return Drawn(mx.maximum(picked(logits, sampling, position + offset), 0))
    q = mx.softmax(log_probs(logits, sampling), axis=-1)
    end = offset + logits.shape[0]
    thrown = coins(sampling.seed, sampling.sample, Stream.DRAFT, position, end)[offset:]
    return Drawn(draw(q, mx.array(thrown.astype(np.float32))).astype(mx.int32), q)


def confidence(rows: Any, choices: int = CONFIDENT) -> Any:
    """``[n, V] -> [n]``: the likeliest token's probability among the ``choices`` likeliest."""
    best = mx.topk(rows.astype(mx.float32), min(choices, rows.shape[-1]), axis=-1)
    return mx.softmax(best, axis=-1).max(axis=-1)


def joined(parts: Sequence[Drawn]) -> Drawn:
    """Rows drawn one after the other as one block."""

    def column(values: list[Any]) -> Any:
        return None if values[0] is None else mx.concatenate(values)

    tokens, q, sure = zip(*parts, strict=True)
    return Drawn(*(column(list(values)) for values in (tokens, q, sure)))


def certain(block: Drawn, least: float) -> Drawn:
    """The rows before the first that is less sure than ``least``; waits where any could be.

    That is a matter of a row's distribution, never of the token drawn from it.
    """
    if block.sure is None:
        return block
    low = as_list(block.sure < least)
    count = low.index(True) if True in low else len(low)
    return Drawn(block.tokens[:count], None if block.q is None else block.q[:count])
