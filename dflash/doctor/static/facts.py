"""What the checks look at, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dflash.drafts.spec import DraftSpec

ROUNDING = "rounding"
"""The check that says why passes of one row and of several may round differently."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target as its config and tokenizer describe it; no weights."""

    name: str  # what the user asked for
    hidden_size: int
    num_layers: int
    embedding_rows: int  # may be more than the tokenizer has tokens
    tokenizer_size: int | None = None
    eos_ids: frozenset[int] = frozenset()
    pad_id: int | None = None
    tokenizer_digest: str | None = None  # only where the draft recorded one
    template_digest: str | None = None  # of the chat template; None = there is none


@dataclass(frozen=True, slots=True)
class Choice:
    """What the user asked of the pair."""

    draft_name: str
    dtype: str = "float32"
    window: int | None = None  # draft_sliding_window_size
    force: bool = False  # force_dflash: another target's draft is wanted as it is


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong (error), doubtful (warning) or good to know (note), and the next step."""

    level: Literal["error", "warning", "note"]
    check: str
    message: str


Check: TypeAlias = Callable[[DraftSpec, TargetFacts, Choice], Iterable[Finding]]
