"""A loaded target as the rest of the package sees it, whatever array library holds it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from dflash.doctor.static import Choice, TargetFacts, check_pair, insist
from dflash.doctor.static.name import tokenizer_digest
from dflash.doctor.static.template import template_digest
from dflash.drafts.spec import DraftSpec


class Target(Protocol):
    """What backends tell of a target they loaded."""

    @property
    def name(self) -> str:
        """What the user asked for."""

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer; None if the user gave none."""

    @property
    def hidden_size(self) -> int:
        """Ht, width of a tapped state."""

    @property
    def num_layers(self) -> int:
        """Decoder layers: taps are 0 .. num_layers - 1."""

    @property
    def vocab_size(self) -> int:
        """V, rows of the head (may be more than the tokenizer has tokens)."""

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and output together."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a turn."""


def target_facts(target: Target, *, digest: bool = False) -> TargetFacts:
    """What the static checks need to know; ``digest`` also of the tokenizer's vocabulary."""
    tokenizer = target.tokenizer
    known = digest and tokenizer is not None
    return TargetFacts(
        name=target.name,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        embedding_rows=target.vocab_size,
        tokenizer_size=None if tokenizer is None else len(tokenizer),
        eos_ids=target.eos_ids,
        pad_id=getattr(tokenizer, "pad_token_id", None),
        tokenizer_digest=tokenizer_digest(tokenizer.get_vocab()) if known else None,
        template_digest=template_digest(getattr(tokenizer, "chat_template", None)),
    )


def settle(spec: DraftSpec, target: Target, choice: Choice) -> tuple[str, ...]:
    """What is odd about the pair, in sentences. Raises PairError with all that is wrong."""
    facts = target_facts(target, digest=spec.tokenizer_digest is not None)
    return insist(check_pair(spec, facts, choice), facts, choice)


def joined_ids(values: Iterable[Any]) -> frozenset[int]:
    """The ids in ``values``, each of which is an id, several, or None."""
    found: set[int] = set()
    for value in values:
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(int(i) for i in found)
