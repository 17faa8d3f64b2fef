"""The books of the adaptive block: what drafts that fail may take of a request's time."""

from __future__ import annotations

from typing import NamedTuple

LOSS = 0.015  # share of plain decoding's time that may be lost on drafts that fail, by and by
_LOAN, _MOST_LOAN = 1.25, 2.0  # plain steps that may be lost before anything is earned
_TRUST = 6.0  # plain steps more of it, for a draft that usually doubles the speed


class _Most(NamedTuple):
    """No text loses more: whatever is longer, these plain steps or this share of its own."""

    steps: float
    share: float


# Three percent of texts of 96 tokens and more. A draft that knows how sure it is may as well wait
# for better: there of 84 and more, less what the books themselves take of a step. Once it is sure,
# of 127 and more, as copying texts whose first match failed would be decoded plainly otherwise.
_MOST, _MOST_UNSURE, _MOST_SURE = _Most(2.85, 0.03), _Most(2.3, 0.0275), _Most(3.5, 0.0275)


class Books:
    """Losses of one request, against a share of plain decoding's time and a loan.

    The loan grows with what drafts promise. A draft that knows how sure it is gets one for each
    block by itself, by what its best size promises and nothing else: bets on weak matches would
    leave none for the strong one that comes later.

    All times are in plain steps, so that they mean the same whatever else the machine does.
    """

    def __init__(self) -> None:
        """Nothing said, nothing lost."""
        self.tokens, self._debt = 0, 0.0  # said so far, by whatever round; lost on drafts
        self.left = 0  # tokens that the request has room for
        self._loan = _LOAN

    @property
    def reason(self) -> str:
        """Why no block is allowed, where none is."""
        if self._debt > 0:
            return "drafts that failed have taken as much time as they may"
        return "a block that fails would take more time than may be lost so early in the text"

    def promise(self, speed: float) -> None:
        """A draft that does not know how sure it is looks so fast; plain decoding is 1."""
        self._loan = max(self._loan, min(_MOST_LOAN, _LOAN + _lent(speed)))

    def room(self, speed: float | None = None, sure: bool = False) -> float:
        """Plain steps that a block may take so that the books balance if nothing of it is kept.

        ``speed`` is how fast it looks to a draft that knows how sure it is, ``sure`` whether it is.
        """
        loan, most = (self._loan, _MOST)
        if speed is not None:
            loan, most = _lent(speed), self._most_sure() if sure else _MOST_UNSURE
        limit = max(most.steps, most.share * self.tokens)
        return min(LOSS * self.tokens + loan, limit) - self._debt + 1

    def _most_sure(self) -> _Most:
        """No more than the share of a whole text where the request is for a shorter one."""
        whole = _MOST_SURE.share * (self.tokens + self.left)
        return _MOST_SURE._replace(steps=min(_MOST_SURE.steps, max(_MOST_UNSURE.steps, whole)))

    @staticmethod
    def wait(steps: float) -> float:
        """Plain steps, at least, until there is room for so many more."""
        return steps / max(LOSS, _MOST.share, _MOST_UNSURE.share, _MOST_SURE.share)

    def spend(self, steps: float, tokens: int) -> None:
        """A round with drafts took as long as ``steps`` plain ones, for so many tokens."""
        self._debt += steps - tokens


def _lent(speed: float) -> float:
    return _TRUST * max(0.0, speed - 1)
