"""Token ids to text as they come, so that the pieces joined are the text of all ids.

Held back until it is certain: bytes of a character that is not complete, and text that may be the
beginning of a stop string. The result depends on the ids alone, not on how blocks cut them.

Not promised for tokenizers whose decoding takes back what it printed (clean-up of spaces).
"""

from __future__ import annotations

from collections.abc import Sequence

from dflash.core.protocols import Tokenizer

_BROKEN = "\ufffd"  # what a decoder prints for bytes that are no character, or not yet one
_WINDOW = 16  # ids decoded again at most, past the last whole character


class TextStream:
    """Turns ids into text piece by piece, and ends it before the first stop string.

    The first stop string is the one that is complete first, the longest of those that end at one
    place. That is what a reader of single characters would find.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """``stop`` holds strings that end the text and are not part of it; none is empty."""
        assert all(stop), "an empty stop string would end every text before it begins"
        self.stopped = False
        self.watching = True  # off: stop strings that are complete by now end nothing
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._joins = getattr(tokenizer, "joins_bytes", False)
        self._ids: list[int] = []  # the window: everything before it is printed
        self._printed = 0  # characters of the window's text that left it
        self._whole = 0  # ids of the window that end in a whole character
        self._held = ""  # may be the beginning of a stop string

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` make certain; "" once stopped."""
        if self.stopped or not ids:
            return ""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        certain = text.rstrip(_BROKEN)
        fresh = certain[self._printed :]
        if certain == text and self._joins:  # whatever follows prints what it prints anywhere
            self._ids, self._printed = [], 0
        else:
            self._printed = max(self._printed, len(certain))
            if certain == text:
                self._slide()
        return self._release(fresh) if self._stop else fresh

    def finish(self) -> str:
        """The rest: what was held back and will not be completed any more."""
        if self.stopped:
            return ""
        fresh = self._tokenizer.decode(self._ids)[self._printed :]
        self._printed += len(fresh)
        text = (self._release(fresh) if self._stop else fresh) + self._held
        self._held = ""
        return text

    def _slide(self) -> None:
        # A window starts at a whole character and keeps some ids before the new ones, because
        # decoders treat the first id of a text in their own way (they drop its leading space).
        if len(self._ids) > _WINDOW and self._whole:
            self._ids = self._ids[self._whole :]
            self._printed = len(self._tokenizer.decode(self._ids))
        self._whole = len(self._ids)

    def _release(self, fresh: str) -> str:
        text = self._held + fresh
        stops = self._stop if self.watching else ()
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops]
        ends = [(end, start) for end, start in found if start >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        cut = len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[cut:]
        return text[:cut]


def overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of ``stop`` that ends ``text``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
