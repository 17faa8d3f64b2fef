"""The text and the bytes of single tokens, and log-probabilities in the forms of OpenAI's API."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from dflash.core.types import Logprob

LEAST = -9999.0  # JSON has no infinity
_BYTE = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    """The alphabet of byte-level vocabularies: printable bytes stand for themselves, the others
    for characters from U+0100 on, in order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    rest = (byte for byte in range(256) if byte not in set(plain))
    return table | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


class Spelling:
    """Spells the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        """``tokenizer`` as a pair has it."""
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """What ``token`` adds to a text. Special tokens are spelt out."""
        known = getattr(self._tokenizer, "vocabulary", None)
        if known is not None:
            return bytes(known[token])
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""  # a padded row: no token has this id
        if self._is_byte_level:
            table = _byte_of()
            if all(letter in table for letter in piece):
                return bytes(table[letter] for letter in piece)
            return str(piece).encode()
        byte = _BYTE.match(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    def text_of(self, token: int) -> str:
        """The same as text; bytes that are no character show as U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    @cached_property
    def _is_byte_level(self) -> bool:
        return any(piece.startswith("\u0120") for piece in self._tokenizer.get_vocab())


class Notes:
    """Log-probabilities in the form of the completion API; offsets go on from call to call."""

    def __init__(self, spelling: Spelling, echoed: int = 0) -> None:
        """For one text, of which the first ``echoed`` characters are the prompt's."""
        self._spelling, self._offset = spelling, echoed
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def of(self, notes: Sequence[Logprob]) -> dict[str, Any]:
        """Four lists, an entry a token."""
        return {
            "tokens": [self._spelling.text_of(note.token) for note in notes],
            "token_logprobs": [max(note.logprob, LEAST) for note in notes],
            "top_logprobs": [self._by_text(note) for note in notes],
            "text_offset": [self._place(note.token) for note in notes],
        }

    def _place(self, token: int) -> int:
        """Where ``token``, the next one, begins: with its character if it is a part of one."""
        word = self._spelling.bytes_of(token)
        begun, _ = self._decoder.getstate()
        text, alone = self._decoder.decode(word), word.decode(errors="replace")
        apart = begun and text.endswith(alone)  # the character that had begun does not go on
        place = self._offset + (len(text) - len(alone) if apart else 0)
        self._offset += len(text)
        return place

    def _by_text(self, note: Logprob) -> dict[str, float]:
        """The likeliest and the token itself. Of tokens spelt alike, as parts of characters are,
        the likeliest."""
        found: dict[str, float] = {}
        for token, value in (*note.top, (note.token, note.logprob)):
            found.setdefault(self._spelling.text_of(token), max(value, LEAST))
        return found


def chat_logprobs(notes: Sequence[Logprob], spelling: Spelling) -> dict[str, Any]:
    """Log-probabilities in the form of the chat API."""
    return {"content": [_note(note, spelling) for note in notes], "refusal": None}


def _note(note: Logprob, spelling: Spelling) -> dict[str, Any]:
    top = [_spelt(token, value, spelling) for token, value in note.top]
    return {**_spelt(note.token, note.logprob, spelling), "top_logprobs": top}


def _spelt(token: int, value: float, spelling: Spelling) -> dict[str, Any]:
    spelt = spelling.bytes_of(token)
    return {
        "token": spelt.decode(errors="replace"),
        "logprob": max(value, LEAST),
        "bytes": list(spelt),
    }
