"""From records to the rows of the report: which texts count, and what each arm made of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dflash.bench import guards
from dflash.bench.paired import Ratio, compared
from dflash.bench.totals import Totals, add_up, ratio
from dflash.bench.trial import Key, Outcome, Record

Text = dict[str, list[Outcome]]  # arm -> repeats of one turn of one prompt
DIFFERS = "texts differ"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm on one group of texts."""

    arm: str
    texts: int  # that count: the arm wrote what the baseline wrote, and a speed says something
    left_out: dict[str, int]  # why others do not -> how many
    rate: float  # tokens/s after the prefill, over the texts that are sound in themselves
    speedup: Ratio  # over the baseline
    refused: str | None  # why the speed-up may not be shown
    spread: float  # of the arm's repeats, see guards.spread
    totals: Totals  # all records of the arm in this group
    lossy: bool = False  # it is refused because it differs from plain decoding

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        mine = {n: getattr(self, n) for n in ("arm", "texts", "left_out", "rate", "refused")}
        return {
            **mine,
            "spread": self.spread,
            "speedup": None if self.refused else asdict(self.speedup),
            "totals": self.totals.to_json(),
        }


def texts_of(records: Iterable[Record]) -> dict[tuple[str, str, int], Text]:
    """(set, prompt, turn) -> what each arm answered, repeats in order."""
    found: dict[tuple[str, str, int], Text] = {}
    for record in sorted(records, key=_place):
        key = record.key
        text = found.setdefault((key.set, key.prompt, key.turn), {})
        text.setdefault(key.arm, []).append(record.outcome)
    return found


def _place(record: Record) -> tuple[str, str, int, int]:
    key: Key = record.key
    return key.set, key.prompt, key.turn, key.repeat


def make_rows(
    texts: Sequence[Text],
    arms: Sequence[str],
    base: str,
    *,
    greedy: bool,
    proven: Mapping[str, str],
    walls: Mapping[str, Sequence[Any]] | None = None,
) -> list[Row]:
    """A row per arm over texts that all arms answered.

    ``greedy``: at temperature 0 only equal texts are compared; above it, times per token.
    ``proven`` names arms whose speed-up is refused already, and why. ``walls``, where requests
    ran beside each other: arm -> the times of the whole set, which decide instead.
    """
    rows = [_row(texts, arm, base, greedy, proven.get(arm)) for arm in arms]
    return rows if walls is None else [_by_wall(row, base, walls) for row in rows]


def _by_wall(row: Row, base: str, walls: Mapping[str, Sequence[Any]]) -> Row:
    """``row`` with throughput and speed-up by the wall clock."""
    mine = walls[row.arm]
    found = compared([walls] if row.texts else [], row.arm, base, per_token=True)
    noise = max(guards.spread([[one.decode for one in walls[arm]]]) for arm in (row.arm, base))
    refused = row.refused if row.lossy else _refusal(found, row.left_out, noise)
    rate = ratio(sum(one.tokens for one in mine), sum(one.decode for one in mine))
    return replace(row, rate=rate, speedup=found, refused=refused, spread=noise)


def _row(texts: Sequence[Text], arm: str, base: str, greedy: bool, refused: str | None) -> Row:
    why = [_left_out(text, arm, base, greedy) for text in texts]
    good = [text for text, reason in zip(texts, why, strict=True) if reason is None]
    sound = [t for t, reason in zip(texts, why, strict=True) if reason in (None, DIFFERS)]
    reasons = dict(Counter(reason for reason in why if reason is not None))
    found = compared(good, arm, base, per_token=not greedy)
    times = [[run.decode for run in text[arm]] for text in good]
    spread = guards.spread(times)
    noise = max(spread, guards.spread(_times(good, base)))
    lossy = refused is not None
    refused = refused or _refusal(found, reasons, noise)
    decoded = sum(run.tokens - run.first for text in sound for run in text[arm])
    spent = sum(run.decode for text in sound for run in text[arm])
    everything = add_up(run for text in texts for run in text[arm])
    rate = ratio(decoded, spent)
    return Row(arm, len(good), reasons, rate, found, refused, spread, everything, lossy)


def _times(texts: Sequence[Text], arm: str) -> list[list[float]]:
    return [[run.decode for run in text[arm]] for text in texts]


def _refusal(found: Ratio, reasons: Mapping[str, int], noise: float) -> str | None:
    if not found.texts:
        most = max(reasons, key=reasons.__getitem__) if reasons else "no text"
        return f"no text counts: {most}"
    if (said := guards.noise(noise)) is not None:
        return said
    if found.spread > guards.UNSURE:
        wide = f"{found.low:.2f} to {found.high:.2f}"
        return f"noisy machine: the speed-up is somewhere in {wide}"
    return None


def _left_out(text: Text, arm: str, base: str, greedy: bool) -> str | None:
    """Why this text says nothing of the arm's speed-up; None = it counts."""
    for name in dict.fromkeys((base, arm)):
        run = text[name][0]
        reason = guards.fault(run.said, run.tokens - run.first, run.decode)
        if reason is not None and (name == base or not greedy or run.said == text[base][0].said):
            return reason
    if greedy and len({run.said for name in (base, arm) for run in text[name]}) > 1:
        return DIFFERS
    return None
