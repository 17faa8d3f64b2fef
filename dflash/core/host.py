"""Blocks judged and drafted on the host, for backends whose logits lie there.

The reference rules put together: options on every row, then the rule, then log-probabilities; and
for a draft the same options on its own rows, then a token a row. Device backends have forms of
their own and are held to this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash.core import noise
from dflash.core.accept import choose, distribution, draw, follow, judge
from dflash.core.logits import changes_logits, logprob, process
from dflash.core.noise import Stream
from dflash.core.types import Logprob, Request, light
from dflash.errors import ConfigError

Rows = NDArray[np.floating]
CONFIDENT = 10  # likeliest tokens among which a draft's confidence is measured, as llama.cpp does


@light
class Ruling:
    """What the target says of a block."""

    tokens: list[int]  # accepted + 1, the last is the target's own
    accepted: int
    notes: list[Logprob] | None = None
    path: Sequence[int] = ()  # nodes accepted


class Drafted(NamedTuple):
    """What a draft says; fewer rows than were asked where the options leave nothing to say."""

    tokens: list[int]
    q: NDArray[np.float64] | None = None  # [rows, V]; None = one-hot


def rule(
    logits: Rows,  # [n + 1, V]; more rows may follow
    request: Request,
    output: Sequence[int],
    drafted: Sequence[int] = (),
    q: NDArray[np.float64] | None = None,  # [n, V]
    parents: Sequence[int] | None = None,  # [n] of a tree, judged by match; None = a chain
) -> Ruling:
    """Judge ``drafted`` after the committed ``output``. Raises ConfigError when no token is left"""
    sampling = request.sampling
    path: Sequence[int]
    if sampling.temperature > 0 and sampling.rule != "match" and parents is None:
        p, end = _distributions(logits, request, output, drafted)
        if end is not None:  # behind a draft that is rejected nobody wants a token
            drafted, q = drafted[: len(p) - 1], None if q is None else q[: len(p) - 1]
        accepted, own = judge(drafted, p, q, sampling, len(output))
        if end is not None and accepted == len(drafted):
            raise end
        path = range(accepted)
    else:
        tree = range(-1, len(drafted) - 1) if parents is None else parents
        path, own = _matched(logits, request, output, drafted, tree)
    tokens = [*(drafted[node] for node in path), own]
    notes = None
    if sampling.logprobs is not None:
        said = zip([0, *(node + 1 for node in path)], tokens, strict=True)
        notes = [logprob(logits[row], token, sampling.logprobs) for row, token in said]
    return Ruling(tokens, len(path), notes, path)


def _distributions(
    logits: Rows, request: Request, output: Sequence[int], drafted: Sequence[int]
) -> tuple[NDArray[np.float64], ConfigError | None]:
    """Of every place [n + 1, V]; where none is left for a token, up to it, a stand-in, and why.

    Raises ConfigError at the first place, which comes after committed tokens only.
    """
    found: list[NDArray[np.float64]] = []
    for place in range(len(drafted) + 1):
        try:
            row = options(logits[place], request, output, drafted[:place])
            found.append(distribution(row, request.sampling))
        except ConfigError as problem:
            if not found:
                raise
            return np.stack([*found, found[-1]]), problem
    return np.stack(found), None


def _matched(
    logits: Rows,
    request: Request,
    output: Sequence[int],
    drafted: Sequence[int],
    parents: Sequence[int],
) -> tuple[list[int], int]:
    """Nodes that equal the target's own tokens, and the one after them."""
    plain = request.sampling.temperature == 0 and not changes_logits(request)
    best = logits[: len(drafted) + 1].argmax(axis=-1).tolist() if plain else []
    before: dict[int, list[int]] = {0: []}  # row -> drafts on the way to it
    own: int = 0

    def choice(row: int) -> int:
        nonlocal own
        if row:
            before[row] = [*before[parents[row - 1] + 1], drafted[row - 1]]
        if plain:
            own = best[row]  # the lowest id on ties
        else:
            processed = options(logits[row], request, output, before[row])
            own = choose(processed, request.sampling, len(output) + len(before[row]))
        return own

    path = follow(drafted, parents, choice)
    return path, own


def propose(logits: Rows, request: Request, output: Sequence[int]) -> Drafted:
    """A token of each row of a draft's ``logits`` [n, V], drawn as the request says."""
    if request.sampling.temperature == 0 and not changes_logits(request):
        return Drafted(logits.argmax(axis=-1).tolist())
    count = len(logits)
    return propose_in_turn(
        lambda said: logits[len(said)] if len(said) < count else None, request, output
    )


def propose_in_turn(
    row_after: Callable[[list[int]], Rows | None], request: Request, output: Sequence[int]
) -> Drafted:
    """The same for rows that depend on the tokens before them.

    ``row_after`` gives the row [V] after the tokens so far, None at the end. What the target may
    not say is not drafted. It ends before a row without a token, and after a stop id where a
    grammar looks on; neither depends on what was drawn at that place.
    """
    sampling = request.sampling
    tokens: list[int] = []
    kept: list[NDArray[np.float64]] = []
    greedy = sampling.temperature == 0 or sampling.greedy_drafts
    while (raw := row_after(tokens)) is not None:
        place = len(tokens)
        row = options(raw, request, output, tokens)
        if not np.isfinite(row.max()):
            break
        if greedy:
            tokens.append(int(row.argmax()))
        elif sampling.rule == "match":
            tokens.append(choose(row, sampling, len(output) + place))
        else:
            kept.append(distribution(row, sampling))
            key = (sampling.seed, sampling.sample, Stream.DRAFT, len(output), place + 1)
            tokens.append(draw(kept[-1], float(noise.coins(*key)[-1])))
        if request.grammar is not None and tokens[-1] in request.stop_ids:
            break
    return Drafted(tokens, np.stack(kept) if kept else None)


def confidence(row: Rows) -> float:
    """The likeliest token's probability among the `CONFIDENT` likeliest of ``row`` [V]."""
    best = np.partition(row, -CONFIDENT)[-CONFIDENT:] if len(row) > CONFIDENT else row
    return float(1 / np.exp(best - best.max()).sum())


def options(row: Rows, request: Request, output: Sequence[int], draft: Sequence[int]) -> Rows:
    """``row`` [V] as the request's options change it; as it is where there are none."""
    return process(row, request, output, draft) if changes_logits(request) else row
