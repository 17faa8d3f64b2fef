"""Name: the target and the tokenizer the draft says it was trained for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_name(spec: DraftSpec, target: TargetFacts, _: Choice) -> Iterator[Finding]:
    """A recorded tokenizer must be the target's; a recorded name should be.

    Names of local folders and files prove nothing, so only hub ids are compared.
    """
    ours, theirs = spec.tokenizer_digest, target.tokenizer_digest
    if ours and theirs:
        if ours != theirs:
            trained = spec.target_name or "another target"
            yield Finding(
                "error",
                "name",
                f"the draft was trained for {trained} with another tokenizer (digest {ours[:12]}, "
                f"{target.name} has {theirs[:12]}): their token ids do not mean the same",
            )
        return
    if spec.target_name and _hub_id(target.name) and not _alike(spec.target_name, target.name):
        yield Finding(
            "warning",
            "name",
            f"the draft was trained for {spec.target_name}, the target is {target.name}; if "
            "acceptance is poor, use the target it was trained for",
        )


def tokenizer_digest(vocabulary: Mapping[str, int]) -> str:
    """SHA-256 over the tokens in order of their ids: equal ids, equal meanings."""
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    lines = (f"{vocabulary[token]}\t{token}\n" for token in ordered)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and "\\" not in name


def _alike(one: str, other: str) -> bool:
    """Same last part of the name, suffixes (quantisation, file type) and punctuation aside."""
    short, long = sorted((_letters(one), _letters(other)), key=len)
    return long.startswith(short)


def _letters(name: str) -> str:
    return "".join(c for c in name.rstrip("/").rsplit("/", 1)[-1].lower() if c.isalnum())
