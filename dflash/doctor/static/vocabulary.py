"""Vocabulary: both sides number the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_vocabulary(spec: DraftSpec, target: TargetFacts, _: Choice) -> Iterator[Finding]:
    """The draft's vocabulary size is the target's, padded or not; a reduced one is smaller."""
    if spec.vocab_size not in (target.embedding_rows, target.tokenizer_size):
        yield Finding(
            "error",
            "vocabulary",
            f"the draft was made for a vocabulary of {spec.vocab_size}, the target has "
            f"{target.embedding_rows} embedding rows: their token ids do not mean the same",
        )
    if spec.draft_vocab_size is not None and spec.draft_vocab_size > target.embedding_rows:
        yield Finding(
            "error",
            "vocabulary",
            f"the draft's own vocabulary of {spec.draft_vocab_size} is larger than the target's "
            f"{target.embedding_rows} embedding rows",
        )
