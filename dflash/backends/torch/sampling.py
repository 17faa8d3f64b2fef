"""Logits to tokens, and the one wait of a round.

``make_picker`` turns the sampling options into one callable before the loop. Temperature 0 is
argmax with the lowest id on ties, never a limit of small temperatures. Above it: divide by T, cut
to top-k, softmax, keep the nucleus (tokens whose mass *before* them is below top_p), then take the
largest ``log p + gumbel`` (the Gumbel-max trick: an exact draw), with noise keyed by (seed, sample,
output position) so that a token depends neither on the block it was verified in nor on the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from dflash.core.noise import gumbel
from dflash.core.types import Sampling
from dflash.errors import WeightsError

Picker: TypeAlias = Callable[[Tensor, int], Tensor]
"""``(logits [n, V], output position of the first row) -> ids [n]``, -1 where not finite."""


def make_picker(sampling: Sampling) -> Picker:
    """The callable that picks the target's token of each row under ``sampling``."""
    if sampling.temperature == 0.0:
        return lambda logits, _position: greedy(logits)

    def pick(logits: Tensor, position: int) -> Tensor:
        scores = log_probs(logits, sampling)
        noise = [
            torch.from_numpy(gumbel(sampling.seed, sampling.sample, position + i, logits.shape[-1]))
            for i in range(logits.shape[0])
        ]
        return greedy(scores + torch.stack(noise).to(scores.device))

    return pick


def greedy(logits: Tensor) -> Tensor:
    """``[n, V] -> [n]``: argmax, lowest id on ties, -1 where the maximum is not finite."""
    best, ids = logits.max(dim=-1)
    if logits.device.type == "mps":  # only there is the first of equal maxima not promised
        every = torch.arange(logits.shape[-1], device=logits.device)
        ids = torch.where(logits == best[:, None], every, logits.shape[-1]).amin(dim=-1)
    return torch.where(best.isfinite(), ids, -1)


def log_probs(logits: Tensor, sampling: Sampling) -> Tensor:
    """``[n, V]`` log-probabilities after temperature, top-k and top-p; -inf where cut.

    Not renormalised after the nucleus cut (a constant a row, which no argmax sees).
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    scores = scores.log_softmax(dim=-1)
    if sampling.top_p < 1.0:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        mass = ordered.exp()
        cut = mass.cumsum(dim=-1) - mass >= sampling.top_p
        cut[:, 0] = False  # the likeliest token stays, whatever rounding says
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return scores


def settle(picked: Tensor, drafted: Tensor | Sequence[int]) -> tuple[list[int], int]:
    """The match rule: ``(committed tokens, accepted)`` from the target's own token at each row.

    ``picked`` is ``[rows + 1]``, ``drafted`` ``[rows]``. Drafts are kept while they equal the
    target's token; the first that does not is replaced by it. Waits for the device once.
    Raises WeightsError if a token that counts came from non-finite logits.
    """
    rows = picked.shape[0] - 1
    if isinstance(drafted, Tensor):
        both = torch.cat([picked, drafted.to(picked)]).tolist()
        own, drafts = both[: rows + 1], both[rows + 1 :]
    else:
        own, drafts = picked.tolist(), list(drafted)
    accepted = 0
    while accepted < rows and drafts[accepted] == own[accepted]:
        accepted += 1
    tokens = own[: accepted + 1]
    if min(tokens) < 0:
        raise WeightsError(
            "the target computed logits that are not finite. Its weights may be damaged, or its "
            "dtype too narrow: try --dtype float32 (or bfloat16 instead of float16)"
        )
    return tokens, accepted
