"""A pair of two loaded models: what is the same in every backend that loads models itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, Protocol, Self, TypeVar

from dflash.config import MTP, LoadConfig
from dflash.drafts.spec import DraftSpec
from dflash.errors import CLOSED, CheckpointError, EngineClosed
from dflash.hf_tokenizer import ModelTokenizer
from dflash.target_facts import Target


class Draft(Protocol):
    """What backends tell of a draft they loaded."""

    @property
    def name(self) -> str:
        """What the user asked for."""

    @property
    def spec(self) -> DraftSpec:
        """Its config."""

    @property
    def window(self) -> int | None:
        """Context rows it keeps, where the user said how many."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about the pair."""


T = TypeVar("T", bound=Target)
D = TypeVar("D", bound=Draft)


class ModelPair(ABC, Generic[T, D]):
    """The Pair protocol over a loaded target and, perhaps, a draft, less what runs them."""

    backend: str

    def __init__(self, target: T, draft: D | None = None, notes: tuple[str, ...] = ()) -> None:
        """The pair owns both from here on. ``notes`` are for the user, beside the draft's own."""
        self._notes = notes
        self._target: T | None = target
        self._draft = draft
        self.target_name = target.name
        self.draft_name = None if draft is None else draft.name
        self.tokenizer = ModelTokenizer(target.tokenizer)
        self.context_length = target.context_length
        self.vocab_size = target.vocab_size
        self.eos_ids = target.eos_ids
        self.draft_block_size = None if draft is None else draft.spec.block_size
        self.default_block_size = None if draft is None else draft.spec.default_block_size

    @classmethod
    def beside(cls, target: T, load: LoadConfig) -> Self:
        """The pair of ``target`` and the draft that ``load`` names, if any.

        Heads inside the target draft where nothing else is named; unreadable ones are a note then.
        """
        if load.draft == MTP:
            return cls(target, cls._load_heads(target, load))
        if load.draft is not None:
            return cls(target, cls._load_draft(load.draft, target, load))
        if not load.mtp or not cls._has_heads(target):
            return cls(target)
        try:
            return cls(target, cls._load_heads(target, load))
        except CheckpointError as problem:
            return cls(target, notes=(f"plain decoding: {problem}",))

    @classmethod
    @abstractmethod
    def _load_draft(cls, name: str, target: T, load: LoadConfig) -> D:
        """The draft called ``name``, with the settings of ``load``."""

    @classmethod
    @abstractmethod
    def _has_heads(cls, target: T) -> bool:
        """Whether ``target`` brings multi-token prediction heads."""

    @classmethod
    @abstractmethod
    def _load_heads(cls, target: T, load: LoadConfig) -> D:
        """These heads as a draft. Raises CheckpointError."""

    @property
    def target(self) -> T:
        """The loaded target. Raises EngineClosed once the pair is closed."""
        if self._target is None:
            raise EngineClosed(CLOSED)
        return self._target

    @property
    def draft(self) -> D | None:
        """The loaded draft; None = plain decoding only."""
        return self._draft

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is odd about this pair, in sentences for the user."""
        return self._notes if self._draft is None else (*self._notes, *self._draft.warnings)

    def close(self) -> None:
        """Drop the weights; idempotent. Memory returns once the sessions are closed too."""
        self._target = self._draft = None
