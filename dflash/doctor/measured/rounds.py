"""Rounds of a pair, one by one: the same loop as everywhere, without text or policy around it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.protocols import DraftSession, Pair
from dflash.core.types import Request, Step
from dflash.errors import PromptError


def rounds(
    pair: Pair,
    prompt: Sequence[int],
    tokens: int,
    block_size: int,
    drafts: Sequence[DraftSession[Any]] | None = None,
) -> Iterator[Step]:
    """Greedy rounds after the prefill, until ``tokens`` are there or the text ends.

    Blocks are whole: there is room for one more than is asked for, as far as the context goes.
    ``drafts`` replace the pair's own. Raises PromptError when the context is too short.
    """
    room = pair.context_length - len(prompt)
    if room < 2:
        raise PromptError(
            f"a prompt has {len(prompt)} tokens and the context holds {pair.context_length}, the "
            "answer included: shorten it"
        )
    request = Request(list(prompt), min(tokens + block_size, room), pair.eos_ids)
    capacity = len(prompt) + request.max_tokens
    target = pair.open_target(capacity)
    own = pair.open_drafts(capacity) if drafts is None else list(drafts)
    try:
        there = 0
        for step in decode(request, target, own, Fixed(block_size), time.perf_counter_ns):
            if there:  # the first token is the prefill's
                yield step
            there += len(step.tokens)
            if there >= tokens:
                return
    finally:
        for session in [*reversed(own), target]:
            session.close()
