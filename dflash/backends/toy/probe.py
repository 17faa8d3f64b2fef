"""The toy pair under examination: it has logits, and a draft without a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dflash.backends.toy import ToyPair
    from dflash.doctor.static.facts import Finding


class ToyProbe:
    """The Probe protocol over a ToyPair."""

    dtype = "float32"
    spec = rope_theta = None
    layers = 0

    def __init__(self, pair: ToyPair) -> None:
        """``pair`` stays as it is."""
        self._pair = pair

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V] after ``prefix``."""
        model = self._pair.model
        return model.logits(model.run(prefix))

    def findings(self) -> list[Finding]:
        """A script has nothing to check."""
        return []

    def variant(self, **changes: Any) -> ToyPair:
        """A script has no spec to change."""
        raise AssertionError(f"a toy draft has no spec, so {sorted(changes)} cannot be changed")

    def norms(self) -> Mapping[str, float]:
        """It has no weights."""
        return {}
