"""The training objective: weighted cross-entropy over block rows, and a pull on hidden states.

Everything is computed in float32 whatever the model runs in: on near-equal distributions a bf16
loss loses a fifth of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class FrequentTokens:
    """The reduced vocabulary the loss is computed on; it never leaves the trainer.

    The vocabulary head dominates a small draft's training cost. The most frequent output tokens
    cover nearly all of the text; a label outside them is left out of the cross-entropy (it still
    counts in the hidden-state term).
    """

    kept: Tensor  # [n] target ids, ascending
    index: Tensor  # [V] place in ``kept``, or -1

    @classmethod
    def count(cls, ids: Iterable[int], vocab_size: int, size: int) -> FrequentTokens:
        """The ``size`` most frequent ids (all of the vocabulary if ``size`` is 0 or larger)."""
        counts = torch.bincount(torch.tensor(list(ids)), minlength=vocab_size)[:vocab_size]
        if size <= 0 or size >= vocab_size:
            kept = torch.arange(vocab_size)
        else:
            kept = counts.argsort(descending=True, stable=True)[:size].sort().values
        index = torch.full((vocab_size,), -1)
        index[kept] = torch.arange(len(kept))
        return cls(kept, index)


def decay_weights(rows: int, gamma: float | None) -> Tensor:
    """w_j = exp(-(j - 1) / gamma), j = 1..rows; ones if gamma is None (uniform)."""
    place = torch.arange(rows, dtype=torch.float32)
    return torch.ones(rows) if gamma is None else torch.exp(-place / gamma)


def prefix_weights(confidence: Tensor, alpha: float = 0.5) -> Tensor:
    """D-PACE weights: how much row j matters for the accepted prefix (SpecForge, speculators).

    confidence [.., K] is the draft's probability of each label. With c smoothed to
    (1 - alpha) c + alpha and P_i its running product, w_j = sum of P_i over i >= j. Detached.
    """
    smooth = (1 - alpha) * confidence.detach() + alpha
    return smooth.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


def block_loss(
    logits: Tensor,  # [n, K, kept]
    labels: Tensor,  # [n, K] places in the kept vocabulary, -1 = not in it
    valid: Tensor,  # [n, K]
    weights: Tensor | None,  # [K] fixed, or None for prefix weights
    soft: Tensor | None = None,  # [n, K, kept] target probabilities
    mix: float = 0.0,
) -> Tensor:
    """Weighted mean of (1 - mix) CE(label) + mix CE(soft target distribution)."""
    logs = F.log_softmax(logits.float(), dim=-1)
    known = valid & (labels >= 0)
    hard = -logs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    loss = hard
    if soft is not None and mix > 0:
        loss = (1 - mix) * hard - mix * (soft.float() * logs).sum(-1)
    weight = prefix_weights((-hard).exp()) if weights is None else weights.expand_as(hard)
    weight = weight * known
    return (loss * weight).sum() / weight.sum().clamp(min=1e-6)


def hidden_loss(
    hidden: Tensor,  # [n, K, H] the draft's final states
    wanted: Tensor,  # [n, K, H] the target's final states that predict the same tokens
    valid: Tensor,  # [n, K]
    weights: Tensor,  # [K]
) -> Tensor:
    """Weighted smooth-L1; states are the heads' inputs, so matching them matches the logits."""
    gap = F.smooth_l1_loss(hidden.float(), wanted.float(), reduction="none").mean(-1)
    weight = weights.expand_as(gap) * valid
    return (gap * weight).sum() / weight.sum().clamp(min=1e-6)


@dataclass(frozen=True, slots=True)
class Selected:
    """The selector's term, and what it says of candidates and of the path through them."""

    loss: Tensor  # []
    hits: Tensor  # [n, K] the best score is the label's, the label before given
    recalled: Tensor  # [n, K] the label is a candidate at all


def selector_loss(
    scores: Tensor,  # [n, K, k] of candidates, the label before each given
    candidates: Tensor,  # [n, K, k] places in the kept vocabulary
    labels: Tensor,  # [n, K] places in the kept vocabulary, -1 = not in it
    valid: Tensor,  # [n, K]
    weights: Tensor | None,  # [K] fixed, or None for prefix weights
) -> Selected:
    """Weighted mean of CE(label) over candidates; rows whose label is no candidate are left out.

    The second term of DFlash2's objective, as AutoModel and SpecForge have it.
    """
    among = (candidates == labels[..., None]) & valid[..., None]
    recalled = among.any(-1)
    logs = F.log_softmax(scores.float(), dim=-1)
    hard = -logs.masked_fill(~among, 0.0).sum(-1)
    sure = torch.where(recalled, (-hard).exp(), 0.0)
    weight = prefix_weights(sure) if weights is None else weights.expand_as(hard)
    weight = weight * recalled
    loss = (hard * weight).sum() / weight.sum().clamp(min=1e-6)
    best = scores.argmax(-1, keepdim=True)
    return Selected(loss, among.gather(-1, best)[..., 0], recalled)
