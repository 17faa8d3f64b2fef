"""What a request's options make of logits, before temperature: the one definition, in numpy.

In this order, each at every place of a block with that place's own history (prompt, output, and the
drafts before it):

1. repetition penalty: logits of tokens of prompt and output, divided by it where above zero, else
   multiplied (Keskar et al. 2019)
2. frequency and presence penalty: subtracted for tokens of the output, the first each time they
   occurred, the second once
3. logit bias: added
4. processors of the user, in turn
5. what may not be: the end of a run of tokens that would occur again (no_repeat_ngram), the last
   token of a bad word, stop ids before min_tokens, and last what the grammar forbids

`dflash.core.accept.distribution` does the rest. Backends have their own forms of 1 to 3 and 5 and
are held to this one; a token depends neither on the block it was verified in nor on the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.core.types import Logprob, Request, Sampling
from dflash.errors import ConfigError, WeightsError

BROKEN, EMPTY = -1, -2  # stand for a token where logits are not finite, or all forbidden
NOTHING_LEFT = (
    "the options leave no token to choose: together they forbid all of them here. Usual causes: "
    "min_tokens with a grammar that has come to its end, or a processor that masks everything"
)
NOT_FINITE = (
    "the target computed logits that are not finite. Its weights may be damaged, or its dtype too "
    "narrow: try --dtype float32 (or bfloat16 instead of float16)"
)


def insist_on_tokens(tokens: Sequence[int]) -> None:
    """Raise ConfigError for EMPTY among tokens that a backend chose, WeightsError for BROKEN."""
    if min(tokens) == EMPTY:
        raise ConfigError(NOTHING_LEFT)
    if min(tokens) < 0:
        raise WeightsError(NOT_FINITE)


def changes_logits(request: Request) -> bool:
    """Whether `process` would do anything at all for ``request``."""
    s = request.sampling
    penalties = s.repetition_penalty != 1 or s.presence_penalty != 0 or s.frequency_penalty != 0
    forbidden = s.no_repeat_ngram > 0 or bool(s.bad_words) or s.min_tokens > 0
    mine = bool(s.logit_bias or s.processors) or request.grammar is not None
    return penalties or forbidden or mine


def process(
    logits: NDArray[Any],
    request: Request,
    output: Sequence[int],
    draft: Sequence[int] = (),
) -> NDArray[Any]:
    """Logits [V] after all options: a new array, float32 or wider; -inf where forbidden.

    ``output`` are the committed tokens, ``draft`` those proposed after them and before this place.
    """
    sampling, made = request.sampling, [*output, *draft]
    history = [*request.prompt, *made]
    row = penalise(logits, sampling, history, made)
    for token, bias in sampling.logit_bias:
        row[token] += row.dtype.type(bias)
    for processor in sampling.processors:
        row = run_processor(processor, history, row)
    row[list(banned(sampling, history))] = -np.inf
    if len(made) < sampling.min_tokens:
        row[[token for token in request.stop_ids if token < row.size]] = -np.inf
    mask = None if request.grammar is None else request.grammar.allow(draft)
    return row if mask is None else np.where(mask, row, row.dtype.type(-np.inf))


def penalise(
    logits: NDArray[Any], sampling: Sampling, history: Sequence[int], made: Sequence[int]
) -> NDArray[Any]:
    """A copy of ``logits`` with the three penalties, in the copy's own precision."""
    row = np.array(logits, np.promote_types(logits.dtype, np.float32))
    number = row.dtype.type
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.asarray(history, np.int64))
        factor = number(sampling.repetition_penalty)
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(np.asarray(made, np.int64), minlength=row.size).astype(row.dtype)
        present = (counts > 0).astype(row.dtype)
        row -= number(sampling.frequency_penalty) * counts
        row -= number(sampling.presence_penalty) * present
    return row


def run_processor(processor: Any, history: Sequence[int], row: NDArray[Any]) -> NDArray[Any]:
    """What ``processor`` makes of ``row``. Raises ConfigError for anything but logits."""
    sound = np.isfinite(row.max())  # asked before: a processor may write into the row
    made = processor(list(history), row)
    try:
        found = np.asarray(made, row.dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a logits processor must return {row.size} logits, one for each token; it returned "
            f"{type(made).__name__} ({error})"
        ) from error
    if found.shape != row.shape:
        raise ConfigError(
            f"a logits processor must return {row.size} logits, one for each token; it returned "
            f"an array of shape {found.shape}"
        )
    top = found.max()
    if sound and not np.isfinite(top) and top != -np.inf:
        raise ConfigError(
            "a logits processor returned NaN or infinity; only -inf, for tokens that may not be "
            "chosen, is allowed beside finite logits"
        )
    return found


def banned(sampling: Sampling, history: Sequence[int]) -> set[int]:
    """Tokens that may not come after ``history``: they would complete a run or a bad word."""
    bans = Bans(sampling)
    bans.add(history)
    return bans.after(())


class Bans:
    """`banned` for a history that grows: what is committed is indexed once."""

    def __init__(self, sampling: Sampling) -> None:
        """An empty history."""
        self._run, self._words = sampling.no_repeat_ngram, sampling.bad_words
        self._tail = max([self._run, *map(len, self._words), 1]) - 1  # tokens that decide
        self._history: list[int] = []
        self._next: dict[tuple[int, ...], set[int]] = {}  # run but for its last -> the last

    def add(self, tokens: Sequence[int]) -> None:
        """Committed tokens."""
        for token in tokens:
            if self._run and len(self._history) >= self._run - 1:
                self._next.setdefault(self._end(self._history, self._run - 1), set()).add(token)
            self._history.append(token)

    def after(self, draft: Sequence[int]) -> set[int]:
        """Tokens that may not come after the history and ``draft``."""
        text = [*self._history[max(0, len(self._history) - self._tail) :], *draft]
        found = {word[-1] for word in self._words if self._ends_with(text, word[:-1])}
        if self._run and len(self._history) + len(draft) >= self._run - 1:
            end = self._end(text, self._run - 1)
            found |= self._next.get(end, set())
            for place in range(len(text) - len(draft), len(text)):  # runs that end in the draft
                start = place - self._run + 1
                if start >= 0 and tuple(text[start:place]) == end:
                    found.add(text[place])
        return found

    @staticmethod
    def _end(tokens: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(tokens[len(tokens) - count :])

    @staticmethod
    def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
        return len(tokens) >= len(end) and list(tokens[len(tokens) - len(end) :]) == list(end)


def logprob(logits: NDArray[Any], token: int, count: int) -> Logprob:
    """What the target thought of ``token`` and of the ``count`` likeliest, by its own ``logits``.

    Neither temperature nor any other option is in it.
    """
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    logs = shifted - np.log(np.exp(shifted).sum())
    best = np.argsort(-logs, kind="stable")[:count]
    return Logprob(token, float(logs[token]), tuple((int(i), float(logs[i])) for i in best))
