"""A draft on llama.cpp beside the same one on torch, both told the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dflash.core.types import Plan, Request, Sampling

GREEDY = Sampling()


def drafts_alike(
    theirs: Any,
    ours: Any,
    prompt: Sequence[int],
    rounds: Sequence[int],
    sampling: Sampling = GREEDY,
) -> None:
    """Both propose the same tokens in ``rounds`` of so many rows, after torch's own features."""
    asked = Request(prompt, 60, sampling=sampling)
    target, (their,) = theirs.open_target(256), theirs.open_drafts(256)
    (mine,) = ours.open_drafts(256)
    for draft in (their, mine):
        draft.begin(asked, 0)
    for verdict in target.prefill(asked, 0):
        _tell(their, mine, verdict, verdict.rows)
    for rows in rounds:
        proposed = [draft.propose(Plan(0, rows, rows)) for draft in (their, mine)]
        one, other = ([int(token) for token in p.tokens] for p in proposed)
        assert one == other and len(one) == rows
        verdict = target.verify(proposed[0])
        target.commit(len(verdict.tokens))
        _tell(their, mine, verdict, len(verdict.tokens))
    mine.close()
    ours.close()


def _tell(theirs: Any, ours: Any, verdict: Any, rows: int) -> None:
    theirs.commit(verdict, rows)
    ours.commit(replace(verdict, features=verdict.features.numpy()), rows)
