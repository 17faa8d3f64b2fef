"""Log-probabilities in the form of OpenAI's completions, for tokens of any bytes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dflash.core.types import Logprob
from dflash.spelling import Notes, Spelling

WORDS = (b"a", "\u20ac".encode()[:1], "\u20ac".encode()[1:], b"\xff", "bc\u00fc".encode())


def notes_of(*tokens: int, parts: bool = False) -> list[int]:
    found = Notes(Spelling(SimpleNamespace(vocabulary=WORDS)), echoed=10)
    notes = [Logprob(token, -1.0) for token in tokens]
    groups = [[note] for note in notes] if parts else [notes]
    return [place for group in groups for place in found.of(group)["text_offset"]]


@pytest.mark.parametrize("parts", [False, True])
def test_offsets_are_those_of_the_text_where_tokens_are_parts_of_a_character(parts: bool) -> None:
    assert notes_of(0, 1, 2, 0, 4, 0, parts=parts) == [10, 11, 11, 12, 13, 16]
    assert notes_of(1, 0, 3, 0, parts=parts) == [10, 11, 12, 13], "bytes that are no character"


def test_the_token_itself_is_among_the_likeliest() -> None:
    found = Notes(Spelling(SimpleNamespace(vocabulary=WORDS)))
    drawn = [Logprob(0, -4.0, ((4, -0.1),)), Logprob(0, float("-inf"))]
    assert found.of(drawn)["top_logprobs"] == [{"bc\u00fc": -0.1, "a": -4.0}, {"a": -9999.0}]
