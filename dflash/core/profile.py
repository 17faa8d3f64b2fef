"""What is known of a pair: what a round costs, and how many drafts usually survive.

Costs are shared by all requests of a pair, because a machine has one speed. Survival belongs to a
request; the pair's average is where a new request starts. Nothing here reads a clock or a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

from dflash.core.costs import CatchUp, CostCurve

_REFRESH, _FRESH = 24, 216  # rounds between two measurements of a plain step: at break-even, most
_EARLY, _DOUBLINGS = 8, 5  # rounds before the first of them; how often that doubles
_REST, _MOST_REST = 500, 8000  # rounds without a block of a draft until its costs are forgotten
_SOME = 0.5  # acceptance of a draft nobody knows anything of
_MOST = 0.98  # no estimate is more certain than this
_LIFT, _SURE, _FADE = 0.5, 8.0, 0.995  # a tree's share at first, how sure that is, and for how long


class Survival:
    """Chance that the i-th drafted token is kept once those before it were.

    Old rounds fade. Places that were seldom judged lean on the prior, corrected by how the places
    that were judged did against it.
    """

    def __init__(
        self, prior: Sequence[float] = (), weight: float = 8.0, fade: float = 0.93
    ) -> None:
        """``prior`` by place (the last one goes on) counts as ``weight`` rounds.

        Each round multiplies what is known of the places it judged by ``fade``.
        """
        self.prior = [min(_MOST, max(0.0, chance)) for chance in prior] or [_SOME]
        self._weight, self._fade = weight, fade
        self._judged: list[float] = []
        self._kept: list[float] = []

    def add(self, judged: int, kept: int, more: float = 0.0) -> None:
        """One round: ``judged`` drafts, the first ``kept`` of them right.

        ``more`` is the share of a chain's misses that a tree was thought to catch. Then a draft
        that was right counts as much as a chain's would probably have been.
        """
        own = [c / _better(c, more) for c in self.chances(judged)] if more else [1.0] * judged
        while len(self._judged) < judged:
            self._judged.append(0.0)
            self._kept.append(0.0)
        for place in range(min(judged, kept + 1)):
            self._judged[place] = self._judged[place] * self._fade + 1
            self._kept[place] = self._kept[place] * self._fade + (place < kept) * own[place]

    def relax(self, share: float) -> None:
        """Let what was seen so far count only ``share`` of what it did."""
        self._judged = [count * share for count in self._judged]
        self._kept = [count * share for count in self._kept]

    def chances(self, places: int) -> list[float]:
        """Conditional chances of the first ``places`` drafts."""
        prior, weight = self.prior, self._weight
        base = prior[:places] + prior[-1:] * (places - len(prior))
        seen = list(zip(base, self._judged, self._kept, strict=False))
        expected = sum(chance * judged for chance, judged, _ in seen)
        drift = (sum(self._kept) + weight) / (expected + weight)
        found = [
            min(_MOST, (kept + weight * min(_MOST, chance * drift)) / (judged + weight))
            for chance, judged, kept in seen
        ]
        return found + [min(_MOST, chance * drift) for chance in base[len(seen) :]]

    def committed(self, most: int, more: float = 0.0) -> list[float]:
        """[r]: tokens a round of r drafts commits on average, the target's own included.

        With ``more``: of r levels of a tree that catches so much of what a chain misses.
        """
        gains, alive = [1.0], 1.0
        for chance in self.chances(most):
            alive *= _better(chance, more)
            gains.append(gains[-1] + alive)
        return gains


def _better(chance: float, more: float) -> float:
    """A chain's chance, and the share ``more`` of what is missing."""
    return min(_MOST, chance + more * (1 - chance)) if more else chance


class Lift:
    """How much of what chains miss at a place trees catch, were they endless.

    A tree of n nodes has 1 - sqrt(3 / n) of that: one number for all of a draft's trees. (So it is
    on the demo pair: a fifth with 8 nodes, 0.28 with 16, on text of any kind.)
    """

    def __init__(self, share: float = _LIFT) -> None:
        """``share`` is where it starts."""
        self._caught, self._missed = share * _SURE, _SURE

    @property
    def share(self) -> float:
        """The estimate."""
        return min(_MOST, max(0.0, self._caught / self._missed))

    def more(self, nodes: int) -> float:
        """The same for one tree."""
        return self.share * _size(nodes)

    def add(self, chances: Sequence[float], kept: int, nodes: int) -> None:
        """One tree that kept ``kept``, where a chain has ``chances``."""
        size = _size(nodes)
        for place, chance in enumerate(chances[: kept + 1]):
            self._caught = self._caught * _FADE + (place < kept) - chance
            self._missed = self._missed * _FADE + size * (1 - chance)


def _size(nodes: int) -> float:
    return max(0.0, 1 - sqrt(3 / nodes))


class Profile:
    """Costs and usual survival of one pair; shared by its requests."""

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """``prior``: conditional acceptance by place, as a model card has it."""
        self.costs = CostCurve()
        self.stale = 0  # rounds with drafts since a plain step was last measured
        self.rounds = 0  # of all requests
        self._last: dict[int, tuple[int, int]] = {}  # draft -> round of its last block; its rest
        self._checks = 0  # times that one was, after such rounds
        self._prior = prior
        self._usual: dict[tuple[int, int], Survival] = {}
        self._lifts: dict[int, Lift] = {}
        self._catch_ups: dict[int, CatchUp] = {}
        self._ran = set[tuple[int, int]]()  # (draft, rows) of blocks, measured or catching up

    def outdated(self, gain: float) -> bool:
        """Count a round with drafts, whoever's, as requests may be short; True = a plain step is to
        be measured instead.

        ``gain`` is what drafts are thought to bring beyond plain decoding: the more, the dearer is
        a plain step. A pair that is new is checked early, as all hangs on its first few rounds.
        """
        self.stale += 1
        early = _EARLY << min(self._checks, _DOUBLINGS)
        return self.stale > min(early, _FRESH, _REFRESH * (1 + 16 * max(0.0, gain)))

    def rested(self, draft: int, graded: bool) -> None:
        """Forget the costs of a draft that has not drafted for long. Blocks measured while the
        machine was slow are affordable in no short text, so nothing else would correct them.

        One that grades itself rests where it has nothing to say: its costs are only doubted."""
        last, rest = self._last.get(draft, (0, _REST))
        if self.rounds - last > rest:
            (self.costs.doubt if graded else self.costs.forget)(draft)
            self._last[draft] = self.rounds, min(2 * rest, _MOST_REST)

    def block(self, draft: int, rows: int, ns: int, lag: int) -> float:
        """Learn from a round with drafts, ``lag`` rows of them to catch up; the plain steps it is
        to be charged with, which a disturbance does not raise."""
        spent, caught_up = self.costs.steps(ns), self.catch_up(draft)
        self._last[draft] = self.rounds, self._last.get(draft, (0, _REST))[1]
        again = (draft, rows) in self._ran  # a first call may be slow
        self._ran.add((draft, rows))
        if spent < 1:  # no block takes less: it was the plain steps that were disturbed
            self.stale = max(self.stale, _FRESH)
        if not self.costs.seen(draft):
            self.costs.add(draft, rows, ns)
            return self.costs.price(draft, rows)
        late = spent - self.costs.price(draft, rows)
        slow_first = self.costs.seen(draft) == 1 and self.costs.pace == 1 and late < 0
        if not lag or slow_first:  # even with rows to catch up it took less
            self.costs.add(draft, rows, ns)
        elif again or self.costs.trusts(draft, rows):
            caught_up.add(late / lag)
        return self.costs.price(draft, rows) + caught_up.charge(lag, late)

    def refresh(self) -> None:
        """A plain step was measured, after rounds with drafts."""
        self._checks += self.stale > 0
        self.stale = 0

    def usual(self, draft: int, grade: int, prior: Sequence[float] = ()) -> Survival:
        """The average of all requests; slow to forget. ``prior`` is what the method itself knows,
        for a beginning."""
        key = (draft, grade)
        if key not in self._usual:
            self._usual[key] = Survival(prior or self._prior, weight=10.0, fade=0.99)
        return self._usual[key]

    def lift(self, draft: int) -> Lift:
        """What trees of a draft are good for."""
        return self._lifts.setdefault(draft, Lift())

    def catch_up(self, draft: int) -> CatchUp:
        """What a pause of a draft costs."""
        return self._catch_ups.setdefault(draft, CatchUp())

    def to_json(self) -> dict[str, Any]:
        """For a file beside the pair."""
        usual = {f"{d}.{g}": known.chances(32) for (d, g), known in self._usual.items()}
        lifts = {str(draft): lift.share for draft, lift in self._lifts.items()}
        known = {int(draft) for draft, _, _ in self.costs.to_json() if draft >= 0}
        last = {draft: self._last.get(draft, (0, _REST)) for draft in known | {*self._last}}
        rests = {str(draft): [self.rounds - ago, rest] for draft, (ago, rest) in last.items()}
        return {"costs": self.costs.to_json(), "survival": usual, "trees": lifts, "rests": rests}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Profile:
        """What ``to_json`` wrote."""
        profile = cls()
        profile.costs, profile._checks = CostCurve.from_json(data["costs"]), _DOUBLINGS
        for name, chances in data["survival"].items():
            draft, grade = name.split(".")
            profile._usual[int(draft), int(grade)] = Survival(chances, weight=10.0, fade=0.99)
        for draft, (ago, rest) in data.get("rests", {}).items():
            profile._last[int(draft)] = -int(ago), int(rest)
        for draft, share in data.get("trees", {}).items():
            profile._lifts[int(draft)] = Lift(share)
        return profile
