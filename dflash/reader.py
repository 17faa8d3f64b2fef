"""Steps to chunks: text that is certain, split by who made it, ended by a stop string.

A stop string ends the ids too: at the token that completes it, wherever the block would have ended,
so the ids are those of plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from dflash.core.protocols import Tokenizer
from dflash.core.text import TextStream
from dflash.core.types import Finish, Step
from dflash.results import Chunk, Piece, Source

DRAFTED: tuple[Source] = ("draft",)
OWN: tuple[Source] = ("target",)


class Reader:
    """Reads the steps of one generation, in order."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """``stop`` holds the strings that end the text, once ``min_tokens`` tokens are out."""
        self._text = TextStream(tokenizer, stop)
        self._single = bool(stop)  # where a stop string ends is a question of single tokens
        self._early = min_tokens

    def read(self, step: Step, state: str | None = None) -> tuple[Step, Chunk]:
        """The step cut at a stop string, and what it adds to the text, with the policy's state."""
        text, drafts, kept = self._text, step.accepted if step.rows else 0, 0
        pieces: list[Piece] = []
        source: Source = "target"
        for source, ids in self._runs(step.tokens, drafts):
            if self._single:
                text.watching = self._early < 1
                self._early -= 1
            if said := text.push(ids):
                pieces.append(Piece(said, source))
            kept += len(ids)
            if text.stopped:
                step = replace(step, tokens=step.tokens[:kept], finish=Finish.STOP)
                break
        if step.finish is not None and not text.stopped:
            if said := text.finish():
                pieces.append(Piece(said, source))
            if text.stopped:  # what was held back completed a stop string
                step = replace(step, finish=Finish.STOP)
        return step, _chunk(step, min(drafts, kept), pieces, state)

    def _runs(self, tokens: list[int], drafts: int) -> list[tuple[Source, list[int]]]:
        """Tokens of one source each, of which ``drafts`` come from the draft."""
        if not (drafts or self._single):
            return [("target", tokens)]
        drafted, own = tokens[:drafts], tokens[drafts:]
        parts: list[tuple[Source, list[int]]] = [("draft", drafted), ("target", own)]
        if self._single:
            return [(source, [i]) for source, ids in parts for i in ids]
        return [part for part in parts if part[1]]


def _chunk(step: Step, drafts: int, pieces: list[Piece], state: str | None) -> Chunk:
    """What ``step`` adds, of whose tokens ``drafts`` come from the draft."""
    merged = tuple(pieces)
    if len(merged) > 1:
        merged = tuple(
            Piece("".join(piece.text for piece in group), source)
            for source, group in groupby(merged, key=lambda piece: piece.source)
        )
    notes, tokens = step.verdict.notes, tuple(step.tokens)
    sources = DRAFTED * drafts + OWN * (len(tokens) - drafts)
    text = merged[0].text if len(merged) == 1 else "".join([piece.text for piece in merged])
    logprobs = None if notes is None else tuple(notes[: len(tokens)])
    drafted = step.verdict.drafted  # by place: names would be looked up, after every pass anew
    return Chunk(text, tokens, sources, merged, None, None, state, logprobs, 0, drafted)
