"""Is a difference rounding or a fault? The target alone judges, in a pass of one row.

The number of rows of a pass changes the last bits of a sum, so two tokens whose logits are closer
than that may change places. In float32 two logits within 1e-3 are a tie; in narrower formats four
steps of the format at that size are. Anything wider is a real difference.

Options are applied by their one definition, `dflash.core.logits`, whatever the backend does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import frexp, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.config import GenerateConfig, from_options
from dflash.core.accept import distribution
from dflash.core.logits import process
from dflash.core.noise import gumbel
from dflash.core.types import Request
from dflash.engine import Engine
from dflash.verify.probe import probe_of

TIE = 1e-3  # float32
STEPS = 4  # of a narrower format
SIGNIFICANT_BITS = {"bfloat16": 8, "float16": 11}
NOT_SAMPLING = ("chat_template", "system")  # keywords of a prompt


def tolerance(dtype: str, size: float) -> float:
    """Widest gap that is a tie between logits of about ``size`` in ``dtype``."""
    bits = SIGNIFICANT_BITS.get(dtype)
    if bits is None:
        return TIE
    step: float = 2.0 ** (frexp(abs(size))[1] - bits)
    return max(TIE, STEPS * step)


class Judge:
    """The target of ``engine`` under one request's options, a place of the output at a time."""

    def __init__(self, engine: Engine, settings: Mapping[str, Any] | None = None) -> None:
        """``settings`` are the keywords of ``Engine.generate`` that the texts were made with."""
        options = {k: v for k, v in (settings or {}).items() if k not in NOT_SAMPLING}
        self._engine, self._probe = engine, probe_of(engine.pair)
        self._config = from_options(GenerateConfig, options)

    def gap(
        self, prompt: Sequence[int], output: Sequence[int], one: int, other: int
    ) -> tuple[float | None, float]:
        """Distance of two tokens' logits after ``output``, and the widest one that is a tie.

        With a seed above temperature 0 the noise is part of the choice; it is in units of logits /
        temperature and scaled back. None = one of the two is forbidden there.
        """
        raw, row, request = self._rows(prompt, output)
        limit = tolerance(self._probe.dtype, max(abs(raw[one]), abs(raw[other])))
        width = float(row[one]) - float(row[other])
        sampling = request.sampling
        if sampling.temperature > 0:
            noise = gumbel(sampling.seed, sampling.sample, len(output), row.size)
            width += sampling.temperature * (float(noise[one]) - float(noise[other]))
        return (abs(width) if isfinite(width) else None), limit

    def exact(self, prompt: Sequence[int], output: Sequence[int]) -> NDArray[np.float64]:
        """The target's own probabilities [V] after ``output``."""
        _, row, request = self._rows(prompt, output)
        return distribution(row, request.sampling)

    def _rows(
        self, prompt: Sequence[int], output: Sequence[int]
    ) -> tuple[NDArray[Any], NDArray[Any], Request]:
        """Logits [V] as the target has them and after all options, and the request."""
        request = self._engine._request(list(prompt), self._config)
        if request.grammar is not None:
            request.grammar.commit(output)
        raw = self._probe.logits([*prompt, *output])
        return raw, process(raw, request, output), request
