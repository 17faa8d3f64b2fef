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


class Reader:
    """Reads the steps of one generation, in order."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        """``stop`` holds the strings that end the text, once ``min_tokens`` tokens are out."""
        self._text = TextStream(tokenizer, stop)
        self._single = bool(stop)  # where a stop string ends is a question of single tokens
        self._early = min_tokens

    def read(self, step: Step, state: str | None = None) -> tuple[Step, Chunk]:
        """The step cut at a stop string, and what it adds to the text, with the policy's state."""
        pieces: list[Piece] = []
        kept = 0
        for source, ids in self._runs(step):
            self._text.watching = self._early < len(ids)
            self._early -= len(ids)
            pieces.append(Piece(self._text.push(ids), source))
            kept += len(ids)
            if self._text.stopped:
                step = replace(step, tokens=step.tokens[:kept], finish=Finish.STOP)
                break
        if step.finish is not None and not self._text.stopped:
            pieces.append(Piece(self._text.finish(), pieces[-1].source if pieces else "target"))
            if self._text.stopped:  # what was held back completed a stop string
                step = replace(step, finish=Finish.STOP)
        return step, _chunk(step, pieces, state)

    def _runs(self, step: Step) -> list[tuple[Source, list[int]]]:
        drafts, own = step.tokens[: step.accepted], step.tokens[step.accepted :]
        parts: list[tuple[Source, list[int]]] = [("draft", drafts), ("target", own)]
        if self._single:
            return [(source, [i]) for source, ids in parts for i in ids]
        return [part for part in parts if part[1]]


def _chunk(step: Step, pieces: Sequence[Piece], state: str | None) -> Chunk:
    merged = tuple([piece for piece in pieces if piece.text])
    if len(merged) > 1:
        merged = tuple(
            Piece("".join(piece.text for piece in group), source)
            for source, group in groupby(merged, key=lambda piece: piece.source)
        )
    drafts, notes = step.accepted, step.verdict.notes
    sources: list[Source] = ["draft"] * drafts
    sources += ["target"] * (len(step.tokens) - drafts)
    return Chunk(
        text="".join([piece.text for piece in merged]),
        token_ids=tuple(step.tokens),
        sources=tuple(sources),
        pieces=merged,
        state=state,
        logprobs=None if notes is None else tuple(notes[: len(step.tokens)]),
        drafted=step.verdict.drafted,
    )
