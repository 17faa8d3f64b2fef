"""The one noise of a seeded request, the same on target, draft and every backend.

A token is drawn as ``argmax(log p + gumbel)``, which is an exact draw from p (Gumbel-max trick,
Gumbel 1954). When target and draft add the same noise they mostly choose alike, while the target's
choice never looks at the draft: the text depends on the seed alone, not on blocks or load.

Only raw Philox words are used, since numpy promises that stream for good and not the ones of
``Generator``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_WORD = 1 << 64


def gumbel(seed: int, sample: int, position: int, size: int) -> NDArray[np.float32]:
    """Standard Gumbel noise [size], float32, finite.

    The key is (seed, sample); ``position`` counts the tokens of the output, 0 is the first one
    after the prompt. A longer ``size`` begins with the noise of a shorter one.
    """
    key = np.array([seed % _WORD, sample % _WORD], np.uint64)  # a list would pass through float64
    counter = np.array([0, position, 0, 0], np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw(size) >> np.uint64(12)
    uniform = (words + 0.5) * 2.0**-52  # 52 bits and a half: never 0, never rounded to 1
    noise: NDArray[np.float32] = (-np.log(-np.log(uniform))).astype(np.float32)
    return noise
