"""A pair of loaded models under examination: what is the same in every backend that loads them.

Nothing here is on the way of a generation. The weights are shared, never copied.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from dflash.doctor.static import Choice, Finding, check_pair
from dflash.drafts.spec import DraftSpec
from dflash.model_pair import ModelPair
from dflash.target_facts import target_facts

P = TypeVar("P", bound=ModelPair[Any, Any])


class ModelProbe(ABC, Generic[P]):
    """The Probe protocol over a ModelPair, less what computes."""

    def __init__(self, pair: P) -> None:
        """``pair`` stays as it is, and open."""
        self._pair = pair

    @property
    def spec(self) -> DraftSpec | None:
        """Config of the draft; None without one."""
        return None if self._pair.draft is None else self._draft().spec

    @property
    def layers(self) -> int:
        """Decoder layers of the target."""
        layers: int = self._pair.target.num_layers
        return layers

    def findings(self) -> list[Finding]:
        """All static findings; those of level error would have stopped the load."""
        if self._pair.draft is None:
            return []
        draft = self._draft()
        facts = target_facts(self._pair.target, digest=draft.spec.tokenizer_digest is not None)
        return check_pair(draft.spec, facts, Choice(draft.name, self._draft_dtype(), draft.window))

    def norms(self) -> Mapping[str, float]:
        """Mean weight of each norm, by the module's name; {} without a model draft."""
        return {} if self._pair.draft is None else dict(self._norms())

    @abstractmethod
    def _draft_dtype(self) -> str:
        """Number format of the draft's weights."""

    @abstractmethod
    def _norms(self) -> Iterator[tuple[str, float]]:
        """Name and mean weight of each of the draft's norms."""

    def _draft(self) -> Any:
        assert self._pair.draft is not None, "only a pair with a draft is taken apart"
        return self._pair.draft
