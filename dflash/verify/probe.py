"""What a backend shows of a pair beyond generating: logits of one row, and its draft taken apart.

The seam itself has no logits, because the loop needs none. An audit does: a tie is judged by the
target alone, and a distribution is compared with the exact one. Backends register a probe by name,
so that this package names none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dflash.core.protocols import Pair
from dflash.doctor.static.facts import Finding
from dflash.drafts.spec import DraftSpec
from dflash.registry import PROBES


class Probe(Protocol):
    """A pair under examination. It borrows the pair and its weights, and alters neither."""

    @property
    def dtype(self) -> str:
        """Number format of the target's logits."""

    @property
    def spec(self) -> DraftSpec | None:
        """Config of the model draft; None where the draft is no model."""

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""

    @property
    def rope_theta(self) -> float | None:
        """The target's base frequency; None where it has none or several."""

    def logits(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        """Logits [V] after ``prefix`` (one id or more), the last token in a pass of one row."""

    def findings(self) -> list[Finding]:
        """What the static checks say of this pair, what they let pass at load included."""

    def variant(self, **changes: Any) -> Pair:
        """The same weights under a changed spec (``taps``, ``mask_token_id``, ...). Close it."""

    def norms(self) -> Mapping[str, float]:
        """Mean weight of each of the draft's norms."""


def probe_of(pair: Pair) -> Probe:
    """The probe of the pair's backend. Raises UnknownName for a backend that has none."""
    found: Probe = PROBES.load(pair.backend)(pair)
    return found
