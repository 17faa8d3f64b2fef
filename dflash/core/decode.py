"""The loop: propose, verify, commit. The only one in the package; every surface runs it.

It sees integers and sessions, never an array. It opens and closes nothing: whoever leased the
sessions parks or closes them, so a reader who walks away between two steps leaves them whole.
Method: speculative decoding (Leviathan et al. 2023) with the draft and the rule behind a seam.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from dflash.core.protocols import DraftSession, Policy, TargetSession
from dflash.core.types import PLAIN, PLAIN_STEP, Finish, Plan, Request, Step, Verdict

A = TypeVar("A")


def decode(
    request: Request,
    target: TargetSession[A],
    drafts: Sequence[DraftSession[A]],
    policy: Policy,
    clock: Callable[[], int],
    reuse: int = 0,
) -> Iterator[Step]:
    """Steps of one generation: one per chunk of the prompt, then one per round.

    ``clock`` counts nanoseconds. ``reuse`` is how many tokens of the prompt every session already
    holds. One ``next()`` is one pass of the target, and nothing is half done at a ``yield``.
    """
    for draft in drafts:
        draft.begin(request, reuse)
    left, start = request.max_tokens, clock()
    for verdict in target.prefill(request, reuse):  # a chunk each; only the last has a token
        for draft in drafts:
            draft.commit(verdict, verdict.rows)
        step = cut(verdict, PLAIN_STEP, 0, request, left, clock() - start)
        left -= len(step.tokens)
        yield step
        start = clock()  # the reader's time is not ours
    while step.finish is None:
        plan = policy.plan(left - 1, [draft.outlook() for draft in drafts])
        proposal = drafts[plan.draft].propose(plan) if plan.rows else PLAIN
        verdict = target.verify(proposal)  # the one wait
        step = cut(verdict, plan, proposal.rows, request, left, clock() - start)
        kept = len(step.tokens)
        left -= kept
        target.commit(kept)  # finished or not: the state stays fit for the next turn
        for draft in drafts:  # chosen or not
            draft.commit(verdict, kept)
        policy.observe(step)
        yield step
        start = clock()


def cut(verdict: Verdict[A], plan: Plan, rows: int, request: Request, left: int, ns: int) -> Step:
    """The step of ``verdict``: what fits in ``left`` tokens, ended by the first stop id."""
    tokens = verdict.tokens if len(verdict.tokens) <= left else verdict.tokens[:left]
    if not request.stop_ids.isdisjoint(tokens):
        end = next(place for place, token in enumerate(tokens, 1) if token in request.stop_ids)
        return Step(tokens[:end], plan, rows, verdict, ns, Finish.STOP)
    full = len(tokens) == left and bool(verdict.tokens)  # a chunk of the prompt ends nothing
    return Step(tokens, plan, rows, verdict, ns, Finish.LENGTH if full else None)
