"""Logits to tokens, and the one wait of a round.

``make_picker`` turns the sampling options into one callable before the loop. Temperature 0 is
argmax with the lowest id on ties, never a limit of small temperatures. Above it: divide by T, cut
to top-k, softmax, keep the nucleus (tokens whose mass *before* them is below top_p), drop what has
less than min_p of the best one's probability. The match rule then takes the largest ``log p +
gumbel`` (the Gumbel-max trick: an exact draw), with noise keyed by (seed, sample, output position)
so that a token depends neither on the block it was verified in nor on the draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.logprobs import unpack
from dflash.backends.torch.upload import send
from dflash.core.accept import follow, match
from dflash.core.logits import BROKEN, EMPTY, insist_on_tokens
from dflash.core.noise import gumbel
from dflash.core.types import Logprob, Sampling

Ids: TypeAlias = Tensor | Sequence[int]

if TYPE_CHECKING:
    from dflash.backends.torch.tree import Branches


class Picker(Protocol):
    """How tokens are chosen."""

    def __call__(self, logits: Tensor, position: int, tree: Branches | None = None) -> Tensor:
        """Rows ``[n, V]`` from output ``position`` on, one a position or those of a tree, to ids
        ``[n]``, negative as `flags` says."""


STRETCH = 256  # logits in which a maximum is looked for at a time


class Decision(NamedTuple):
    """What the device decided of a block, before anybody waited for it."""

    tokens: Tensor  # [n + 1], negative as `flags` says
    accepted: Tensor | None = None  # []; None = as far as the drafts equal ``tokens``
    notes: Tensor | None = None  # [n + 1, 2 k + 1], as `logprobs.pack` made them


class Ruling(NamedTuple):
    """The same on the host."""

    tokens: list[int]  # accepted + 1
    accepted: int
    notes: tuple[Logprob, ...] | None = None
    path: Sequence[int] = ()  # drafts accepted


def make_picker(sampling: Sampling) -> Picker:
    """The callable that picks the target's token of each row under ``sampling``."""
    if sampling.temperature == 0.0:
        return lambda logits, position, tree=None: greedy(logits)  # noqa: ARG005

    def pick(logits: Tensor, position: int, tree: Branches | None = None) -> Tensor:
        scores = log_probs(logits, sampling)
        count = logits.shape[0] if tree is None else tree.most + 1
        noise = send(noise_rows(sampling, position, count, logits.shape[-1]), scores.device)
        return greedy(scores + (noise if tree is None else noise[tree.depths]))

    return pick


def noise_rows(sampling: Sampling, position: int, count: int, size: int) -> Tensor:
    """``[count, size]``: the noise of output ``position`` and those after it, on the host."""
    rows = [gumbel(sampling.seed, sampling.sample, position + i, size) for i in range(count)]
    return torch.stack([torch.from_numpy(row) for row in rows])


def greedy(logits: Tensor) -> Tensor:
    """``[n, V] -> [n]``: argmax, lowest id on ties, negative as `flags` says."""
    return flags(*largest(logits))


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, V]`` to the maxima [n] and the first place of each [n]."""
    if logits.is_cpu:
        return _by_stretches(logits)
    best, ids = logits.max(dim=-1)
    if logits.device.type == "mps":  # only there is the first of equal maxima not promised
        every = torch.arange(logits.shape[-1], device=logits.device)
        ids = torch.where(logits == best[:, None], every, logits.shape[-1]).amin(dim=-1)
    return best, ids


def _by_stretches(logits: Tensor) -> tuple[Tensor, Tensor]:
    """First the stretch, then the place in it: on a CPU a maximum alone is found 15 times as fast
    as one with its place.
    """
    rows, size = logits.shape
    if over := size % STRETCH:
        logits = F.pad(logits, (0, STRETCH - over), value=-torch.inf)
    stretches = logits.reshape(rows, -1, STRETCH)
    best, which = stretches.amax(dim=-1).max(dim=-1)
    found = stretches[torch.arange(rows), which].max(dim=-1).indices
    return best, torch.add(found, which, alpha=STRETCH)


def flags(best: Tensor, ids: Tensor) -> Tensor:
    """``ids [n]``, but EMPTY where the largest logit ``best [n]`` is -inf, BROKEN where it is
    infinite or NaN."""
    broken = (best < torch.inf).logical_not_()  # of NaN nothing is true
    return ids.masked_fill(broken, BROKEN).masked_fill_(best == -torch.inf, EMPTY)


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """``[n, V]``: what a token is drawn from; temperature is above 0."""
    return log_probs(logits, sampling).softmax(dim=-1)


def log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """``[n, V]`` log-probabilities after temperature, top-k, top-p and min-p; -inf where cut.

    Not renormalised after the cuts of top-p and min-p (a constant a row, which no argmax sees).
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    nothing = scores.amax(dim=-1, keepdim=True) == -torch.inf  # all forbidden: not a broken row
    scores = scores.log_softmax(dim=-1).masked_fill(nothing, -torch.inf)
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.exp()
        cut = mass.cumsum(dim=-1) - mass >= sampling.top_p
        cut[:, 0] = False  # the likeliest token stays, whatever rounding says
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if sampling.min_p > 0.0:
        least = scores.amax(dim=-1, keepdim=True) + log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def settle(decision: Decision, drafted: Ids, parents: Ids | None = None) -> Ruling:
    """The tokens to commit of a block with ``drafted [n]``. Waits for the device once.

    By the match rule (no ``accepted``) drafts are kept while they equal the target's own token; the
    first that does not is replaced by it. ``parents [n]`` are those of a tree. Raises WeightsError
    if a token that counts came from logits that are not finite, ConfigError if the options had left
    none.
    """
    parts = [decision.tokens]
    if decision.accepted is not None:
        parts.append(decision.accepted[None])
    else:
        parts += [ids.to(decision.tokens) for ids in (drafted, parents) if isinstance(ids, Tensor)]
    if decision.notes is not None:
        parts.append(decision.notes.flatten())
    own, *more = _fetch(parts)
    notes = more.pop() if decision.notes is not None else []
    path: Sequence[int]
    if decision.accepted is not None:
        path = range(more[0][0])
    else:
        drafts = more.pop(0) if isinstance(drafted, Tensor) else drafted
        nodes = more.pop(0) if isinstance(parents, Tensor) else parents
        if nodes is None:
            path = range(match(drafts, own))
        else:
            path = follow(drafts, nodes, own.__getitem__)
    rows = [0, *(node + 1 for node in path)]
    said = [own[row] for row in rows]
    insist_on_tokens(said)
    if decision.notes is None:
        return Ruling(said, len(path), path=path)
    width = decision.notes.shape[1]
    table = [notes[row * width : (row + 1) * width] for row in rows]
    return Ruling(said, len(path), unpack(said, table), path)


def _fetch(parts: Sequence[Tensor]) -> list[list[int]]:
    """Several vectors in one transfer: the wait of a round."""
    whole = (torch.cat(list(parts)) if len(parts) > 1 else parts[0]).tolist()
    ends = list(accumulate(part.numel() for part in parts))
    return [whole[end - part.numel() : end] for part, end in zip(parts, ends, strict=True)]


def on_host(ids: Ids) -> list[int]:
    """Token ids as plain integers. Waits where they are on a device."""
    return ids.tolist() if isinstance(ids, Tensor) else list(ids)


def leading(held: Tensor) -> int:
    """``[n]`` to how many are true before the first that is not. Waits."""
    return int(held.long().cumprod(dim=0).sum().item())


def to_host(rows: Tensor) -> Tensor:
    """Rows in the host's memory. Waits where they are on a device."""
    return rows.cpu()


def to_numpy(rows: Tensor) -> NDArray[Any]:
    """Rows as numpy, for options that are Python's. Waits where they are on a device."""
    found: NDArray[Any] = to_host(rows).numpy()
    return found
