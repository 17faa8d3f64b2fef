"""All randomness of a request, the same on every backend: a key and a counter, and no state.

Match rule: a token is drawn as ``argmax(log p + gumbel)``, which is an exact draw from p (the
Gumbel-max trick, Gumbel 1954). When target and draft add the same noise they mostly choose alike,
while the target's choice never looks at the draft: the text depends on the seed alone, not on
blocks or load.

Rejection rules: coins from three streams that have nothing in common, keyed by the position of the
anchor and by the offset in the block. Not by output position alone: block verification looks at
coins of places it then throws away, and these may not decide anything a second time.

Only raw Philox words are used, since numpy promises that stream for good and not the ones of
``Generator``.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_WORD = 1 << 64


class Stream(IntEnum):
    """What a number is for. Streams are independent of each other."""

    MATCH = 0  # the shared noise of the match rule
    DRAFT = 1  # which token a draft proposes
    ACCEPT = 2  # whether a draft is kept
    OWN = 3  # the target's own token that ends a block


def gumbel(seed: int, sample: int, position: int, size: int) -> NDArray[np.float32]:
    """Standard Gumbel noise [size], float32, finite.

    The key is (seed, sample); ``position`` counts the tokens of the output, 0 is the first one
    after the prompt. A longer ``size`` begins with the noise of a shorter one.
    """
    uniform = coins(seed, sample, Stream.MATCH, position, size)
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise


def coins(seed: int, sample: int, stream: Stream, position: int, count: int) -> NDArray[np.float64]:
    """Uniform numbers [count] in (0, 1), float64; the i-th belongs to offset i of the block.

    ``position`` is that of the anchor's successor: the tokens of the output so far.
    """
    key = np.array([seed % _WORD, sample % _WORD], np.uint64)  # a list would pass through float64
    counter = np.array([0, position, stream, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(count) >> np.uint64(12)
    # 52 bits and a half: never 0, never rounded to 1
    uniform: NDArray[np.float64] = (words.astype(np.float64) + 0.5) * 2.0**-52
    return uniform
