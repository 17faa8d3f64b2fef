"""A gguf pair under examination: logits of one row. Its draft is not taken apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dflash.doctor.static.facts import ROUNDING, Finding

if TYPE_CHECKING:
    from dflash.backends.gguf.pair import GgufPair


class GgufProbe:
    """The Probe protocol over a GgufPair; the checks of its files were made at load."""

    dtype = "float32"
    spec = None

    def __init__(self, pair: GgufPair) -> None:
        """``pair`` stays as it is, and open."""
        self._pair = pair

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        return self._pair.model.layers

    @property
    def rope_theta(self) -> float | None:
        """The target's base frequency; None where the file does not say."""
        theta = self._pair.header.own("rope.freq_base")
        return None if theta is None else float(theta)

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V] after ``prefix``; its last token is run alone."""
        context, _ = self._pair.open_context(len(prefix), taps=False)
        try:
            for start in range(0, len(prefix) - 1, context.most):
                rows = prefix[start : min(start + context.most, len(prefix) - 1)]
                context.run(rows, start, 0)
            context.run(prefix[-1:], len(prefix) - 1, 1)
            found: NDArray[np.float32] = context.logits(1)[0].copy()
            return found
        finally:
            context.close()

    def findings(self) -> list[Finding]:
        """What may part texts; what the validator let pass has nothing else to be said against."""
        why = self._pair.why_rows_differ
        return [Finding("note", ROUNDING, why)] if why else []

    def variant(self, **changes: Any) -> GgufPair:
        """A sidecar's spec is in its file."""
        raise AssertionError(f"a GGUF draft cannot be changed in place: {sorted(changes)}")

    def norms(self) -> Mapping[str, float]:
        """The weights stay with llama.cpp."""
        return {}
