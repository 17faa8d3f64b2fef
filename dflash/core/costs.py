"""What rounds cost, from times on a machine that is not ours alone. Nothing here reads a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

PLAIN = -1  # the draft of a plain step
_SAMPLES = 9  # rounds of one size that a typical one is taken from
_TURN = 3  # rounds of a run that say what they cost beside the run before
_RECENT, _ALIKE = 5, 0.15  # rounds of a run that say how slow the machine is; less is no difference
_FIXED, _SLOPE = 1.4, 0.5  # plain steps, and more a row: the dearest block that was ever measured
_CAUGHT_UP = 5  # blocks after a pause that say what catching up costs
_GUESS, _DEAR = 0.01, 0.03  # plain steps a row, while it is unknown; that one can be charged with


class CostCurve:
    """Nanoseconds of a whole round by draft and drafted rows, at one pace of the machine.

    What a policy needs are ratios, and a machine that others use as well changes its pace within a
    text. So a run of plain steps, or of blocks, says what it costs when it begins, beside the run
    before; later on it says how slow the machine is, for all sizes alike. Otherwise plain steps
    that were last seen on a busy machine would make every block look good once it is idle again.

    Typical rounds of a size, straight lines between sizes.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._points: dict[int, dict[int, float]] = {}  # draft -> rows -> ns
        self._curves: dict[int, list[float]] = {}  # draft -> ns by rows, until a point moves
        self._kept = set[tuple[int, int]]()  # what a file says
        self._drafting, self._run = False, 0  # the kind of this run, and its rounds
        self._before = 1.0  # pace of the run before
        self._recent: deque[float] = deque(maxlen=_RECENT)  # rounds of this run / what is typical

    def add(self, draft: int, rows: int, ns: float) -> None:
        """One round; 0 rows is a plain step, whatever the draft. Less than a nanosecond is one."""
        ns = max(1.0, ns)
        if self._drafting != (rows > 0):
            self._before, self._drafting, self._run = self.pace, rows > 0, 0
            self._recent.clear()
        self._run += 1
        kind = draft if rows else PLAIN
        if rows or self._run <= _TURN:
            self._take((kind, rows), ns / self.pace)
        self._recent.append(ns / self._points[kind][rows])

    def _take(self, key: tuple[int, int], ns: float) -> None:
        """One sample more, and what is typical of them."""
        samples = self._samples.setdefault(key, deque(maxlen=_SAMPLES))
        samples.append(ns)
        typical = sorted(samples)[len(samples) // 2 if len(samples) > 2 else 0]
        points = self._points.setdefault(key[0], {})
        if points.get(key[1]) != typical or len(samples) == 2:
            points[key[1]] = typical
            self._curves.clear()

    @property
    def pace(self) -> float:
        """How many times as long as remembered a round takes now."""
        if self._run <= _TURN:  # too few to tell, and the ones that are compared with it
            return self._before
        now = sorted(self._recent)[len(self._recent) // 2]
        return now if abs(now - 1) > _ALIKE else 1.0

    def knows(self, draft: int, rows: int) -> bool:
        """Whether a round of this size was measured."""
        return rows in self._points.get(draft if rows else PLAIN, {})

    def count(self, draft: int, rows: int) -> int:
        """How many of the last rounds of this size are remembered."""
        return len(self._samples.get((draft if rows else PLAIN, rows), ()))

    def seen(self, draft: int) -> int:
        """How often the size was measured that was measured most, plain steps aside."""
        return max((self._times(draft, rows) for rows in self._points.get(draft, ())), default=0)

    def _times(self, draft: int, rows: int) -> int:
        """The same of one size; what a file says was measured twice, but weighs as much as one."""
        return max(self.count(draft, rows), 2 * ((draft, rows) in self._kept))

    def doubt(self, draft: int) -> None:
        """Let each of its sizes count as measured once."""
        for rows, ns in self._points.get(draft, {}).items():
            self._samples[draft, rows] = deque([ns], maxlen=_SAMPLES)
            self._kept.discard((draft, rows))
        self._curves.clear()

    def forget(self, draft: int) -> None:
        """What its sizes cost, as that was long ago."""
        for rows in self._points.pop(draft, {}):
            del self._samples[draft, rows]
            self._kept.discard((draft, rows))
        self._curves.clear()

    def trusts(self, draft: int, rows: int) -> bool:
        """Whether a size at least as large was measured twice, so that the first call of one is not
        taken for what it usually costs."""
        sizes = self._points.get(draft, ())
        return any(size >= rows and self._times(draft, size) > 1 for size in sizes)

    def plain(self) -> float:
        """Cost of a plain step at the pace remembered; needs ``knows(any, 0)``."""
        return self._points[PLAIN][0]

    def cost(self, draft: int, rows: int) -> float:
        """Cost of a round; needs a plain step and one size of this draft measured."""
        return self.curve(draft, rows)[rows]

    def price(self, draft: int, rows: int) -> float:
        """Plain steps that a round takes as long as; needs what ``cost`` does."""
        return self.cost(draft, rows) / self.plain()

    def steps(self, ns: float) -> float:
        """Plain steps that ``ns`` are now; needs ``knows(any, 0)``."""
        return ns / (self.pace * self.plain())

    def curve(self, draft: int, most: int) -> list[float]:
        """[rows]: cost of a round, from a plain step to at least ``most`` rows."""
        known = self._curves.get(draft)
        if known is None or len(known) <= most:
            known = self._curves[draft] = self._drawn(draft, most)
        return known

    def _drawn(self, draft: int, most: int) -> list[float]:
        """What a size measured once costs beyond the line of those measured twice is not believed:
        a first call is often slow, and a size that seems too dear never has a second one. Before
        any was measured twice, none costs more than the dearest block does.
        """
        found = self._points[draft]
        twice = {rows: ns for rows, ns in found.items() if self._times(draft, rows) > 1}
        bound = [self.plain() * (_FIXED + _SLOPE * rows) for rows in range(max(found) + 1)]
        if twice:
            bound = self._lines(twice, max(found))
        believed = {rows: min(ns, bound[rows]) for rows, ns in found.items()}
        return self._lines(believed | twice, most)

    def _lines(self, points: Mapping[int, float], most: int) -> list[float]:
        """From a plain step through the sizes, rising: fewer rows never cost more than more rows.

        What says otherwise was a disturbance. Past the last size the last line goes on at half its
        slope: a guess that is too good is tried and found out, one that is too bad never is.
        """
        least, rising = float("inf"), {}
        for rows in sorted(points, reverse=True):
            least = min(least, points[rows])
            rising[rows] = max(least, self.plain())
        curve, low, slope = [self.plain()], 0, 0.0
        for rows in sorted(points):
            slope = (rising[rows] - curve[low]) / (rows - low)
            start = curve[low]
            curve += [start + slope * step for step in range(1, rows - low + 1)]
            low = rows
        return curve + [curve[low] + slope / 2 * step for step in range(1, most - low + 1)]

    def to_json(self) -> list[list[float]]:
        """Rows of (draft, rows, ns), as a round takes now by what is believed of it.

        Nothing of a draft of which no size was measured twice, or without plain steps that were.
        """
        if self._times(PLAIN, 0) < 2:
            return []
        drafts = [draft for draft in self._points if draft != PLAIN and self.seen(draft) > 1]
        known = [[d, rows, self.cost(d, rows)] for d in drafts for rows in self._points[d]]
        return [[d, rows, ns * self.pace] for d, rows, ns in ([PLAIN, 0, self.plain()], *known)]

    @classmethod
    def from_json(cls, rows: Sequence[Sequence[float]]) -> CostCurve:
        """What ``to_json`` wrote; it is believed, and weighs as much as one measured round."""
        curve = cls()
        for draft, size, ns in rows:
            curve.add(int(draft), int(size), ns)
        curve._kept = {(int(draft), int(size)) for draft, size, _ in rows}
        return curve


class CatchUp:
    """What a row costs that a draft has to catch up, in plain steps.

    Where that is dear a draft that has paused is not asked again, so one disturbed block is none.
    """

    def __init__(self) -> None:
        """Nothing, until it was measured twice."""
        self._seen: deque[float] = deque(maxlen=_CAUGHT_UP)
        self.typical = 0.0

    def add(self, cost: float) -> None:
        """Of one block that had rows to catch up."""
        self._seen.append(max(0.0, cost))
        if len(self._seen) > 1:
            self.typical = sorted(self._seen)[(len(self._seen) - 1) // 2]

    @property
    def guess(self) -> float:
        """Where it says when to try, which harms nothing: not nothing before it was measured."""
        return self.typical if len(self._seen) > 1 else _GUESS

    def charge(self, lag: int, late: float) -> float:
        """Plain steps of a block that had ``lag`` rows to catch up and took ``late`` too long."""
        if len(self._seen) > 1:
            return self.typical * lag
        return max(0.0, min(late, _DEAR * lag))
