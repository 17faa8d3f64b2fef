"""Log-probabilities of committed tokens, packed so that they travel with the tokens.

They are the target's own: its logits before temperature and before any option. So are OpenAI's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dflash.core.types import Logprob


def pack(logits: Tensor, tokens: Tensor, count: int) -> Tensor:
    """``[n, 2 k + 1]`` integers for ``tokens [n]``: own log-probability, k likeliest ids, theirs.

    k is ``count``, or the vocabulary where that is smaller. Numbers travel as bits of a float32.
    """
    logs = logits.float().log_softmax(dim=-1)
    values, ids = logs.topk(min(count, logs.shape[-1]), dim=-1)
    own = logs.gather(-1, tokens.clamp(min=0)[:, None])
    bits = torch.cat([own, values], dim=-1).contiguous().view(torch.int32).long()
    return torch.cat([bits[:, :1], ids, bits[:, 1:]], dim=-1)


def unpack(tokens: Sequence[int], rows: Sequence[Sequence[int]]) -> tuple[Logprob, ...]:
    """One entry for each of ``tokens``; ``rows`` may be longer."""
    return tuple(_entry(token, row) for token, row in zip(tokens, rows, strict=False))


def _entry(token: int, row: Sequence[int]) -> Logprob:
    count = len(row) // 2
    bits = np.array([row[0], *row[count + 1 :]], np.int32)
    own, *values = map(float, bits.view(np.float32))
    return Logprob(token, own, tuple(zip(row[1 : count + 1], values, strict=True)))
