"""The rules of acceptance on the device, for any number of blocks at a time.

The same words as `dflash.core.accept`, which is the reference. Shapes: B blocks of n drafts over a
vocabulary V; ``p [B, n + 1, V]`` is the target's distribution at every place, ``q [B, n, V]`` the
one each draft was really drawn from (None: it was the only one that could be proposed), both
float32 or wider and normalised; coins are float64, uniform in (0, 1) and independent of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """What became of the blocks."""

    tokens: Tensor  # [B, n + 1]: accepted drafts, the target's own token, then what counts nothing
    accepted: Tensor  # [B]


Rule: TypeAlias = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Outcome]
"""``(drafted [B, n], p, q, coins [B, n], coins for the own tokens [B])``."""


def rejection(drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor) -> Outcome:
    """Speculative rejection sampling (Leviathan et al., Chen et al. 2023).

    A draft is kept where coin * q < p, so never one that the target would not say.
    """
    likely, proposed = _at(p[:, :-1], drafted), _proposed(q, drafted)
    kept = coins * proposed < likely
    accepted = kept.to(torch.long).cumprod(dim=1).sum(dim=1)
    ratio = torch.ones_like(own, dtype=p.dtype)
    return _finish(drafted, accepted, _rest(drafted, p, q, accepted, ratio), own)


def block(drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor) -> Outcome:
    """Block verification (Sun et al. 2024): as `rejection`, never fewer accepted on average.

    The last coin that succeeds decides. Without q it would gain nothing, and is rejection.
    """
    if q is None:
        return rejection(drafted, p, q, coins, own)
    running = _running(_at(p[:, :-1], drafted), _at(q, drafted))
    bars = _bars(p, q, running)
    places = torch.arange(1, drafted.shape[1] + 1, device=p.device)
    accepted = torch.where(coins < bars, places, 0).amax(dim=1) if bars.shape[1] else own.long() * 0
    ratio = running.gather(1, accepted[:, None])[:, 0]
    return _finish(drafted, accepted, _rest(drafted, p, q, accepted, ratio), own)


def draw(weights: Tensor, coins: Tensor) -> Tensor:
    """``[..., V], [...] -> [...]``: the tokens where the summed weights pass the coins.

    Never a token without weight, whatever rounding does.
    """
    wide = weights.dtype if weights.device.type == "mps" else torch.float64
    sums = weights.to(wide).cumsum(dim=-1)
    goals = coins.to(sums)[..., None] * sums[..., -1:]
    found = torch.searchsorted(sums, goals, right=True).clamp(max=weights.shape[-1] - 1)
    usable = weights.gather(-1, found) > 0
    return torch.where(usable, found, weights.argmax(dim=-1, keepdim=True))[..., 0]


def _at(weights: Tensor, tokens: Tensor) -> Tensor:
    """``[B, n, V], [B, n] -> [B, n]``."""
    return weights.gather(-1, tokens[..., None])[..., 0]


def _proposed(q: Tensor | None, drafted: Tensor) -> Tensor | float:
    return 1.0 if q is None else _at(q, drafted)


def _running(p: Tensor, q: Tensor) -> Tensor:
    """``[B, n + 1]``: the ratio min(1, ratio before * p / q), from 1 on."""
    ratios = [p.new_ones(p.shape[0])]
    for place in range(p.shape[1]):
        ratios.append((ratios[-1] * p[:, place] / q[:, place]).nan_to_num(0.0).clamp(max=1.0))
    return torch.stack(ratios, dim=1)


def _bars(p: Tensor, q: Tensor, running: Tensor) -> Tensor:
    """``[B, n]``: a coin below bar i says that the first i + 1 drafts may be kept."""
    ratio = running[:, 1:-1]
    rest = (ratio[..., None] * p[:, 1:-1] - q[:, 1:]).clamp(min=0).sum(dim=-1)
    whole = rest + 1 - ratio
    inner = torch.where(whole > 0, rest / whole, 1.0)
    return torch.cat([inner, running[:, -1:]], dim=1)[:, : q.shape[1]]


def _rest(drafted: Tensor, p: Tensor, q: Tensor | None, accepted: Tensor, ratio: Tensor) -> Tensor:
    """``[B, V]``: where the target's own token comes from; p where nothing is left by rounding."""
    blocks, count = torch.arange(p.shape[0], device=p.device), drafted.shape[1]
    here = p[blocks, accepted]
    if count == 0:
        return here
    rejected = (accepted < count)[:, None]
    place = accepted.clamp(max=count - 1)
    if q is None:
        token = drafted[blocks, place][:, None]
        rest = here.scatter(1, token, 0.0)
    else:
        rest = (ratio[:, None] * here - q[blocks, place]).clamp(min=0)
    usable = rejected & (rest.sum(dim=-1, keepdim=True) > 0)
    return torch.where(usable, rest, here)


def _finish(drafted: Tensor, accepted: Tensor, rest: Tensor, own: Tensor) -> Outcome:
    tokens = torch.cat([drafted, drafted.new_zeros(drafted.shape[0], 1)], dim=1)
    last = draw(rest, own).to(tokens)
    return Outcome(tokens.scatter(1, accepted[:, None], last[:, None]), accepted)
