"""The books of the adaptive block: what drafts that fail may take of a request's time."""

from __future__ import annotations

LOSS = 0.015  # share of plain decoding's time that may be lost on drafts that fail
_LOAN, _MOST_LOAN = 1.25, 2.5  # plain steps that may be lost before anything is earned
_TRUST = 4.0  # plain steps more of it, for a draft that usually doubles the speed
_SURE_LOAN = 4.0  # at most, for a block that looks fast to a draft which knows how sure it is


class Books:
    """Losses of one request, against a share of plain decoding's time and a loan.

    The loan grows with what drafts promise. A draft that knows how sure it is gets one for each
    block by itself: what lost on a weak match may be won back on a strong one, not on a weak one.

    All times are in plain steps, so that they mean the same whatever else the machine does.
    """

    def __init__(self) -> None:
        """Nothing said, nothing lost."""
        self.tokens, self._debt = 0, 0.0  # said so far, by whatever round; lost on drafts
        self._loan = _LOAN

    @property
    def reason(self) -> str:
        """Why no block is allowed, where none is."""
        if self._debt > 0:
            return "drafts that failed have taken as much time as they may"
        return "a block that fails would take more time than may be lost so early in the text"

    def promise(self, speed: float) -> None:
        """A draft that does not know how sure it is looks so fast; plain decoding is 1."""
        self._loan = max(self._loan, min(_MOST_LOAN, _lent(speed)))

    def room(self, sure: float | None = None) -> float:
        """Plain steps that a block may take so that the books balance if nothing of it is kept.

        ``sure`` is how fast it looks to a draft that knows how sure it is.
        """
        loan = self._loan if sure is None else min(_SURE_LOAN, _lent(sure))
        return LOSS * self.tokens - self._debt + loan + 1

    def spend(self, steps: float, tokens: int) -> None:
        """A round with drafts took as long as ``steps`` plain ones, for so many tokens."""
        self._debt += steps - tokens


def _lent(speed: float) -> float:
    return _LOAN + _TRUST * max(0.0, speed - 1)
