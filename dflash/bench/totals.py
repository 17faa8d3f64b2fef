"""Records added up: sums first, and every rate says what it divides by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

from dflash.bench.trial import Outcome


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over answers; no figure in it is anything but a sum."""

    requests: int
    tokens: int
    decoded: int  # tokens after the prefill
    prefill: float  # seconds
    decode: float
    rounds: int
    drafted: int
    accepted: int
    committed: int  # tokens that rounds brought: those after the prefill, where rounds are known
    macro_sum: float  # of each request's committed / rounds
    macro_requests: int  # requests with a round
    histogram: tuple[int, ...]
    judged: tuple[int, ...]
    draft_seconds: float | None  # None = one of the requests did not say
    verify_seconds: float | None

    @property
    def rate(self) -> float:
        """Tokens a second after the prefill."""
        return ratio(self.decoded, self.decode)

    @property
    def micro(self) -> float:
        """Committed / rounds over everything."""
        return ratio(self.committed, self.rounds)

    @property
    def macro(self) -> float:
        """Mean over requests of their own committed / rounds."""
        return ratio(self.macro_sum, self.macro_requests)

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted."""
        return ratio(self.accepted, self.drafted)

    @property
    def unconditional(self) -> tuple[float, ...]:
        """[i]: drafts i+1 kept (so all before it, too) / rounds that judged draft i+1."""
        kept = [sum(self.histogram[place:]) for place in range(1, len(self.judged) + 1)]
        return tuple(map(ratio, kept, self.judged))

    @property
    def conditional(self) -> tuple[float, ...]:
        """[i]: the same once draft i was kept: a quotient of neighbours above."""
        whole = self.unconditional
        return tuple(
            min(1.0, ratio(now, past)) for past, now in zip((1.0, *whole), whole, strict=False)
        )

    @property
    def host_seconds(self) -> float | None:
        """Decode time that is neither drafting nor verifying."""
        if self.draft_seconds is None or self.verify_seconds is None:
            return None
        return max(0.0, self.decode - self.draft_seconds - self.verify_seconds)

    def to_json(self) -> dict[str, Any]:
        """Sums and what follows from them."""
        derived = ("rate", "micro", "macro", "acceptance_rate", "unconditional", "conditional")
        return {**asdict(self), **{n: getattr(self, n) for n in (*derived, "host_seconds")}}


def add_up(outcomes: Iterable[Outcome]) -> Totals:
    """The sums."""
    runs = list(outcomes)
    known = [run for run in runs if run.rounds]
    own = [(run.tokens - run.first) / run.rounds for run in known]
    return Totals(
        requests=len(runs),
        tokens=sum(run.tokens for run in runs),
        decoded=sum(run.tokens - run.first for run in runs),
        prefill=sum(run.prefill for run in runs),
        decode=sum(run.decode for run in runs),
        rounds=sum(run.rounds for run in runs),
        drafted=sum(run.drafted for run in runs),
        accepted=sum(run.accepted for run in runs),
        committed=sum(run.tokens - run.first for run in known),
        macro_sum=sum(own),
        macro_requests=len(own),
        histogram=_by_place([run.histogram for run in runs]),
        judged=_by_place([run.judged for run in runs]),
        draft_seconds=_known([run.draft_seconds for run in runs]),
        verify_seconds=_known([run.verify_seconds for run in runs]),
    )


def ratio(part: float, whole: float) -> float:
    """A quotient; 0 of nothing."""
    return part / whole if whole else 0.0


def _by_place(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*rows, fillvalue=0)))


def _known(values: Sequence[float | None]) -> float | None:
    return None if None in values or not values else sum(v for v in values if v is not None)
