"""The text and the bytes of single tokens, as log-probabilities and /tokenize show them."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import Any

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
