"""The rules of acceptance in reference form: numpy, one block, no state.

Letters: p [n+1, V] is the target's distribution at every place of a block, q [n, V] the one each
drafted token was drawn from, both after all options; d [n] are the drafted tokens.
Every rule here leaves the target's distribution exactly as it is. Rules that do not, do not exist.

Backends have their own device forms; these say what is right. The coins and the choice of the last
token come from outside, so that tests can enumerate them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dflash.core import noise
from dflash.core.logits import NOTHING_LEFT
from dflash.core.noise import Stream
from dflash.core.types import Sampling
from dflash.errors import ConfigError

Floats = NDArray[np.float64]


def distribution(logits: NDArray[np.floating], sampling: Sampling) -> Floats:
    """What ``sampling`` makes of processed ``logits`` [V]: probabilities [V], float64.

    Order: temperature, top-k, softmax, top-p over tokens whose mass before them is below it, then
    min-p over tokens that have at least that share of the best one's probability. Tokens equal to
    the k-th best stay, so that order of ids does not matter there. Raises ConfigError when no token
    is left.
    """
    if np.max(logits) == -np.inf:
        raise ConfigError(NOTHING_LEFT)
    if sampling.temperature == 0:
        best: Floats = np.eye(1, logits.size, int(np.argmax(logits)))[0]
        return best
    scaled = logits.astype(np.float64) / sampling.temperature
    if 0 < sampling.top_k < scaled.size:
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    weights: Floats = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    if sampling.top_p < 1:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[1:][before[1:] >= sampling.top_p]] = 0  # the best one always stays
        weights /= weights.sum()
    if sampling.min_p > 0:
        weights[weights < sampling.min_p * weights.max()] = 0
        weights /= weights.sum()
    return weights


def choose(logits: NDArray[np.floating], sampling: Sampling, position: int) -> int:
    """The target's own token at output ``position``, for the seed of ``sampling``.

    ``logits`` [V] are processed ones. Raises ConfigError when no token is left.
    """
    p = distribution(logits, sampling)
    if sampling.temperature == 0:
        return int(np.argmax(p))  # the lowest id on ties
    with np.errstate(divide="ignore"):
        scores = np.log(p) + noise.gumbel(sampling.seed, sampling.sample, position, p.size)
    return int(np.argmax(scores))


def draw(weights: Floats, coin: float) -> int:
    """The token where the summed ``weights`` [V] pass ``coin``; never one that has none."""
    sums = np.cumsum(weights)
    token = int(np.searchsorted(sums, coin * sums[-1], side="right"))
    return min(token, int(np.flatnonzero(weights)[-1]))  # rounding may reach the very end


def own_choice(weights: Floats, sampling: Sampling, position: int) -> int:
    """The target's own token at the end of a block whose first place is output ``position``."""
    coin = noise.coins(sampling.seed, sampling.sample, Stream.OWN, position, 1)[0]
    return draw(weights, float(coin))


def match(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """Drafts kept by the match rule: those before the first that differs from ``choices`` [n+1].

    Exact for any way of drafting, because what is committed are the target's own choices
    (greedy: its argmax; else its samples). Chance to keep a draft: p(d).
    """
    pairs = enumerate(zip(drafted, choices, strict=False))
    return next((place for place, (draft, own) in pairs if draft != own), len(drafted))


def follow(
    drafted: Sequence[int], parents: Sequence[int], choice: Callable[[int], int]
) -> list[int]:
    """Nodes of a tree kept by the match rule, from the anchor on.

    Node i drafts the token ``drafted[i]`` after those on the way from the anchor to
    ``parents[i]`` (-1: right after the anchor). ``choice(0)`` is the target's own token after the
    anchor and ``choice(i + 1)`` the one after node i; it is asked for along the path only. The
    child that equals it is next, and where there is none the path ends. Exact for any tree and any
    way of drafting, for the same reason as `match`: a chain is a tree without branches. Chance to
    go on: the sum of p over the children's tokens. (EAGLE's walk over candidates without
    replacement, and the walk of block diffusion trees, arXiv 2604.12989, are this law.)
    """
    path: list[int] = []
    here = -1
    while True:
        own = choice(here + 1)
        nodes = (node for node, parent in enumerate(parents) if parent == here)
        found = next((node for node in nodes if drafted[node] == own), None)
        if found is None:
            return path
        path.append(found)
        here = found


def residual(p: Floats, q: Floats) -> Floats:
    """Where a token of the target comes from once a draft is rejected: max(p - q, 0), normalised.

    Where p and q are equal nothing is ever rejected but by rounding; then it is p.
    """
    rest: Floats = np.maximum(p - q, 0)
    total = rest.sum()
    return rest / total if total > 0 else p


def rejection_bars(drafted: Sequence[int], p: Floats, q: Floats) -> Floats:
    """Bars [n] for ``rejection``: a coin below bar i keeps draft i (Leviathan, Chen 2023)."""
    places, tokens = np.arange(len(drafted)), list(drafted)
    bars: Floats = np.minimum(1.0, p[places, tokens] / q[places, tokens])
    return bars


def rejection(
    drafted: Sequence[int], p: Floats, q: Floats, coins: Sequence[float]
) -> tuple[int, Floats]:
    """Speculative rejection sampling: (accepted, distribution of the target's own token [V]).

    ``coins`` [n] are uniform in [0, 1) and independent of the drafts. The first failure ends it.
    """
    kept = np.asarray(coins) < rejection_bars(drafted, p, q)
    accepted = len(drafted) if kept.all() else int(np.argmin(kept))
    if accepted == len(drafted):
        return accepted, p[accepted]
    return accepted, residual(p[accepted], q[accepted])


def block_bars(drafted: Sequence[int], p: Floats, q: Floats) -> tuple[Floats, Floats]:
    """Bars [n] for ``block`` and the running ratio P [n+1] (Sun et al. 2024, P[0] = 1)."""
    count = len(drafted)
    running, bars = np.ones(count + 1), np.empty(count)
    for place, token in enumerate(drafted):
        running[place + 1] = min(1.0, running[place] * p[place, token] / q[place, token])
    for place in range(1, count):
        ratio = running[place]
        rest = np.maximum(ratio * p[place] - q[place], 0).sum()
        whole = rest + 1 - ratio
        bars[place - 1] = rest / whole if whole > 0 else 1.0
    bars[count - 1 :] = running[count:]
    return bars, running


def block(
    drafted: Sequence[int], p: Floats, q: Floats, coins: Sequence[float]
) -> tuple[int, Floats]:
    """Block verification: as ``rejection``, and never fewer accepted on average.

    The last coin that succeeds decides, not the first that fails, so each coin may be used once.
    """
    bars, running = block_bars(drafted, p, q)
    wins = np.flatnonzero(np.asarray(coins) < bars)
    accepted = int(wins[-1]) + 1 if wins.size else 0
    if accepted == len(drafted):
        return accepted, p[accepted]
    return accepted, residual(running[accepted] * p[accepted], q[accepted])


def judge(
    drafted: Sequence[int], p: Floats, q: Floats | None, sampling: Sampling, position: int
) -> tuple[int, int]:
    """(accepted, the target's own token) by the rule of ``sampling``, one that is not match.

    ``position`` is that of the first draft in the output. Without q [n, V] every draft was the only
    one its draft could have proposed: it is kept with probability p(d), by rejection.
    """
    rule = block if sampling.rule == "block" and q is not None else rejection
    if q is None:
        q = np.zeros((len(drafted), p.shape[1]))
        q[range(len(drafted)), list(drafted)] = 1
    thrown = noise.coins(sampling.seed, sampling.sample, Stream.ACCEPT, position, len(drafted))
    accepted, rest = rule(drafted, p, q, thrown.tolist())
    return accepted, own_choice(rest, sampling, position)
