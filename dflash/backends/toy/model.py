"""The fake language model: logits from a chain of hashes, and its own oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dflash.core.accept import choose
from dflash.core.logits import process
from dflash.core.types import Request

Ahead = Callable[[Request, Sequence[int], int], Sequence[int]]
"""(request, output so far, count) -> the next ``count`` tokens, as far as they are known."""

EOS = 256
_SPACE = 32
_64 = (1 << 64) - 1
_WORDS = (
    *("a", "the", "old", "dry", "blue", "tree", "river", "stone", "bird", "light", "house"),
    *("morning", "water", "road", "went", "came", "saw", "found", "and", "under", "over", "into"),
)


class State(NamedTuple):
    """One row of the toy's cache, and of its features: what it knows after a token."""

    chain: int  # hash of every token so far, 64 bits
    rest: tuple[int, ...]  # what is left to write of the present word


@dataclass(frozen=True)
class ToyModel:
    """The fake language model. Ids 0..255 are bytes, 256 ends the text, 257 is the mask."""

    vocab_size: int = 258
    eos_ids: frozenset[int] = frozenset({EOS})
    words: bool = True  # readable; off: any token may follow any other
    ties: bool = False  # every even id has a twin with equal logits, right after it

    def after(self, state: State, token: int) -> State:
        """The state after one more token (splitmix64 over the chain and the token)."""
        word = (state.chain ^ (token + 1) * 0xBF58476D1CE4E5B9) & _64
        word = (word ^ word >> 30) * 0x94D049BB133111EB & _64
        chain = word ^ word >> 31
        if not self.words:
            return State(chain, ())
        on_track = state.rest[:1] == (token,)
        rest = state.rest[1:] if on_track else () if token == _SPACE else (_SPACE,)
        return State(chain, rest or self._next_word(chain))

    def logits(self, state: State) -> NDArray[np.float32]:
        """Logits [V], float32, of the place after ``state``."""
        key = np.array([state.chain, 0], np.uint64)
        raw = np.random.Philox(key=key).random_raw(self.vocab_size)
        logits = (raw >> np.uint64(40)).astype(np.float32) / np.float32(1 << 22)  # 0..4
        logits[[token for token in self.eos_ids if token < logits.size]] -= 1.5
        if state.rest:
            logits[state.rest[0]] += 10
        if self.ties:
            logits[1::2] = logits[: logits.size - 1 : 2]
        return logits

    def ahead(self, request: Request, output: Sequence[int], count: int) -> list[int]:
        """What plain decoding would say next: the oracle."""
        state = self.run([*request.prompt, *output])
        tokens: list[int] = []
        for position in range(len(output), len(output) + count):
            row = process(self.logits(state), request, output, tokens)
            tokens.append(choose(row, request.sampling, position))
            state = self.after(state, tokens[-1])
        return tokens

    def run(self, tokens: Sequence[int]) -> State:
        """The state after ``tokens``, from the beginning."""
        state = State(0x9E3779B97F4A7C15, ())
        for token in tokens:
            state = self.after(state, token)
        return state

    def _next_word(self, chain: int) -> tuple[int, ...]:
        place = chain % (3 * len(_WORDS))  # one word in 66 is the end
        return (EOS,) if place == 0 else (*_WORDS[place % len(_WORDS)].encode(), _SPACE)


def common(left: Sequence[int], right: Sequence[int], most: int) -> int:
    """Length of the common beginning, at most ``most``."""
    pairs = enumerate(zip(left[:most], right[:most], strict=False))
    whole = min(len(left), len(right), most)
    return next((place for place, (one, other) in pairs if one != other), whole)
