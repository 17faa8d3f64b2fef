"""Any pair with drafting by look-up added to it, alone or beside the pair's own draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dflash.config import NO_DRAFT, join_draft
from dflash.core.protocols import Branching, DraftSession, Pair
from dflash.drafts.ngram import BLOCK_SIZE, NgramDraft


class NgramPair:
    """The Pair protocol over ``inner``, which keeps all that is not about drafts.

    The look-up comes first among the drafts: it costs nothing and often has nothing to say, so a
    policy that takes the first that can propose leaves the rest to the model.
    """

    default_block_size = None  # what suits the model draft alone says nothing of the two together

    def __init__(self, inner: Pair) -> None:
        """``inner`` is closed with this pair."""
        self.inner = inner
        self.draft_name = join_draft(inner.draft_name or NO_DRAFT, True)
        self.draft_block_size = max(BLOCK_SIZE, inner.draft_block_size or 1)

    def open_drafts(self, capacity: int) -> list[DraftSession[Any]]:
        """The look-up, then the drafts of ``inner``."""
        return [NgramDraft(), *self.inner.open_drafts(capacity)]

    @property
    def why_no_trees(self) -> Callable[[], str]:
        """The inner pair's, if it has one; a look-up alone drafts chains."""
        if self.inner.draft_block_size is None:
            return lambda: "look-ups draft chains, and there is no other draft"
        if not isinstance(self.inner, Branching):
            return lambda: f"the {self.inner.backend} backend judges chains"
        return self.inner.why_no_trees

    def __getattr__(self, name: str) -> Any:
        """Everything else is the inner pair's."""
        if name == "inner":  # not set yet: a copy or an unpickling in progress
            raise AttributeError(name)
        return getattr(self.inner, name)
