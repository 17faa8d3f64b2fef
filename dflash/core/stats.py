"""Steps added up. Counts first; every rate says what it divides by.

The prefill is apart: its token is not a round, and its time is in no rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dflash.core.types import Step

_NS = 1e9


@dataclass(frozen=True, slots=True)
class DraftShare:
    """What one of a pair's drafts did."""

    draft: str
    rounds: int  # rounds in which it was chosen
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Stats:
    """What one generation did."""

    prompt_tokens: int
    completion_tokens: int  # the one of the prefill included
    rounds: int  # passes of the target after the prefill
    drafted: int  # tokens proposed and judged
    accepted: int  # of those, kept; the target's own tokens are not in it
    mean_committed: float  # tokens committed in rounds / rounds; 0.0 without a round
    acceptance_rate: float  # accepted / drafted; 0.0 when nothing was drafted
    acceptance_by_position: tuple[float, ...]  # [i]: kept at draft i+1 / rounds that judged it
    histogram: tuple[int, ...]  # [a]: rounds that kept a drafts; plain rounds are at 0
    draft_seconds: float | None  # None = the backend cannot tell
    verify_seconds: float | None
    time_to_first_token: float  # seconds; the prompt and the first token
    tokens_per_second: float  # tokens committed in rounds / seconds of rounds; 0.0 without one
    block_size: int | None  # anchor included; None = chosen each round
    backend: str
    clamped_from: int | None  # the block size asked for, when the draft's own is smaller
    policy: str
    speedup: float | None = None  # tokens a second x measured time of a plain step; None = unknown
    by_draft: tuple[DraftShare, ...] = ()  # in the order of Plan.draft; () without a draft
    cached_tokens: int = 0  # of the prompt, taken over from an earlier request
    judged: tuple[int, ...] = ()  # [i]: rounds that judged draft i+1
    conditional_acceptance: tuple[float, ...] = ()  # [i]: kept at draft i+1 / judged it and kept i
    macro_acceptance_rate: float = 0.0  # mean over drafting rounds of accepted / drafted in each
    host_seconds: float | None = None  # of rounds, in neither draft nor verify; None = unknown
    block_sizes: tuple[tuple[int, int], ...] = ()  # (size, rounds) as run, anchor included
    block_reason: str = ""  # why `block_size` is what it is
    fallback_rounds: int = 0  # in which the policy had given drafting up, probes included
    fallback_reason: str | None = None  # why it last did, or drafted nothing at all; None = neither
    rollbacks: int = 0  # rounds that rejected a draft

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, by field name."""
        return {name: _listed(value) for name, value in asdict(self).items()}


class Recorder:
    """Adds up the steps of one generation."""

    def __init__(
        self,
        prompt_tokens: int,
        *,
        backend: str = "",
        policy: str = "",
        block_size: int | None = None,
        clamped_from: int | None = None,
        drafts: Sequence[str] = (),
    ) -> None:
        """The arguments are copied into the stats as they are; ``drafts`` are names.

        ``cached`` may be set later, once it is known.
        """
        self.cached = 0
        self._names, self._shares = tuple(drafts), [[0, 0, 0] for _ in drafts]
        self._prompt, self._backend, self._policy = prompt_tokens, backend, policy
        self._block, self._clamped = block_size, clamped_from
        self._prefilling, self._first, self._first_ns = True, 0, 0
        self._rounds = self._plain = self._committed = self._drafted = self._accepted = self._ns = 0
        self._draft_ns = self._verify_ns = 0
        self._timed = True  # every round: one unknown would make the sums a lie
        self._judged: list[int] = []
        self._histogram = [0]  # of blocks
        self._got_there: list[int] = []  # [i]: rounds that judged draft i+1 and kept all before
        self._sizes: Counter[int] = Counter()
        self._shares_kept, self._drafting, self._rollbacks = 0.0, 0, 0

    def add(self, step: Step) -> None:
        """Count one step; the first with a verdict's token ends the prefill."""
        if self._prefilling:  # until the target said its first token
            self._first, self._first_ns = len(step.tokens), self._first_ns + step.ns
            self._prefilling = not step.verdict.tokens
            return
        self._rounds += 1
        self._committed += len(step.tokens)
        self._ns += step.ns
        draft, verify = step.verdict.ns
        self._draft_ns += draft
        self._verify_ns += verify
        if draft < 0 or verify < 0:
            self._timed = False
        if step.rows:
            self._count_block(step)
        else:
            self._plain += 1

    def _count_block(self, step: Step) -> None:
        self._sizes[step.rows + 1] += 1
        self._count_share(step)
        if step.verdict.drafted:
            self._count_drafts(step)
        else:
            self._count_depth(0, 0)

    def _count_drafts(self, step: Step) -> None:
        drafted, accepted = step.verdict.drafted, step.accepted
        most = min(drafted, step.plan.depth)
        self._drafted += drafted
        self._accepted += accepted
        self._drafting += 1
        self._rollbacks += len(step.verdict.path) < most
        self._shares_kept += accepted / drafted
        self._count_depth(most, accepted)

    def _count_share(self, step: Step) -> None:
        if step.plan.draft < len(self._shares):
            share = self._shares[step.plan.draft]
            for place, more in enumerate((1, step.verdict.drafted, step.accepted)):
                share[place] += more

    def _count_depth(self, depth: int, accepted: int) -> None:
        while len(self._judged) < depth:
            self._judged.append(0)
            self._got_there.append(0)
        while len(self._histogram) <= max(depth, accepted):
            self._histogram.append(0)
        for place in range(depth):
            self._judged[place] += 1
            self._got_there[place] += accepted >= place
        self._histogram[accepted] += 1

    def _host(self) -> float | None:
        rest = self._ns - self._draft_ns - self._verify_ns
        return max(0, rest) / _NS if self._timed else None

    def stats(self) -> Stats:
        """The sums so far."""
        kept = [sum(self._histogram[place:]) for place in range(1, len(self._judged) + 1)]
        none, *some = self._histogram
        return Stats(
            prompt_tokens=self._prompt,
            completion_tokens=self._first + self._committed,
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            mean_committed=_ratio(self._committed, self._rounds),
            acceptance_rate=_ratio(self._accepted, self._drafted),
            acceptance_by_position=tuple(map(_ratio, kept, self._judged)),
            histogram=(none + self._plain, *some) if self._rounds else (),
            draft_seconds=self._draft_ns / _NS if self._timed else None,
            verify_seconds=self._verify_ns / _NS if self._timed else None,
            time_to_first_token=self._first_ns / _NS,
            tokens_per_second=_ratio(self._committed, self._ns / _NS),
            block_size=self._block,
            backend=self._backend,
            clamped_from=self._clamped,
            policy=self._policy,
            by_draft=tuple(
                DraftShare(name, *counts)
                for name, counts in zip(self._names, self._shares, strict=True)
            ),
            cached_tokens=self.cached,
            judged=tuple(self._judged),
            conditional_acceptance=tuple(map(_ratio, kept, self._got_there)),
            macro_acceptance_rate=_ratio(self._shares_kept, self._drafting),
            host_seconds=self._host(),
            block_sizes=tuple(sorted((self._sizes + Counter({1: self._plain})).items())),
            rollbacks=self._rollbacks,
        )


def _listed(value: Any) -> Any:
    return [_listed(part) for part in value] if isinstance(value, tuple) else value


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
