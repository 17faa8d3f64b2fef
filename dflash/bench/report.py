"""The report as data: one JSON object, which the page is drawn from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dflash.bench import protocols
from dflash.bench.advice import Advice, advise
from dflash.bench.load import Walls, loads
from dflash.bench.rows import Row, Text, make_rows, texts_of
from dflash.bench.trial import Record
from dflash.bench.verdict import Verdict

FORMAT = 1
NOT_LOSSLESS = "differs from plain decoding beyond rounding"


@dataclass(frozen=True, slots=True)
class Material:
    """What a report is made of.

    blocks   arm -> block size of our own arms, the baseline first
    others   further arms: other programs, servers
    verdict  of our own arms; None above temperature 0, and for servers
    """

    records: Sequence[Record]
    blocks: Mapping[str, int | str]
    others: Sequence[str]
    base: str
    greedy: bool
    verdict: Verdict | None = None
    sheet: Mapping[str, Any] = field(default_factory=dict)
    pair: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    walls: Walls | None = None  # times of whole sets, where several requests ran at a time
    costs: tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]] | None = None

    @property
    def arms(self) -> list[str]:
        """All of them, in order."""
        return [*self.blocks, *self.others]


def build(material: Material) -> tuple[dict[str, Any], Advice]:
    """The whole report, and its advice."""
    rows = _rows(material, material.records, material.walls)
    by_set = {name: _rows(material, group) for name, group in _groups(material, "set")}
    by_category = {name: _rows(material, group) for name, group in _groups(material, "category")}
    advice = advise(rows, {} if material.walls else by_set, material.blocks)
    roof, curve = material.costs or (None, [])
    return {
        "format": FORMAT,
        "advice": advice.to_json(),
        "sheet": dict(material.sheet),
        "pair": dict(material.pair),
        "settings": dict(material.settings),
        "baseline": material.base,
        "blocks": dict(material.blocks),
        "rows": [row.to_json() for row in rows],
        "sets": {name: [row.to_json() for row in group] for name, group in by_set.items()},
        "categories": {n: [row.to_json() for row in group] for n, group in by_category.items()},
        "verdict": None if material.verdict is None else material.verdict.to_json(),
        "protocols": _protocols(material, rows),
        "cost": list(curve),
        "roofline": roof,
        "notes": list(material.notes),
        "loads": _loads(material),
    }, advice


def _loads(material: Material) -> dict[str, Any]:
    found = {} if material.walls is None else loads(material.walls)
    return {arm: load.to_json() for arm, load in found.items()}


def _rows(material: Material, records: Iterable[Record], walls: Walls | None = None) -> list[Row]:
    texts: list[Text] = [
        text for text in texts_of(records).values() if set(material.arms) <= set(text)
    ]
    real = () if material.verdict is None else material.verdict.real
    proven = dict.fromkeys(real, NOT_LOSSLESS)
    return make_rows(
        texts, material.arms, material.base, greedy=material.greedy, proven=proven, walls=walls
    )


def _groups(material: Material, by: str) -> list[tuple[str, list[Record]]]:
    found: dict[str, list[Record]] = {}
    for record in material.records:
        name = record.category if by == "category" else record.key.set
        found.setdefault(name, []).append(record)
    return sorted(found.items())


def _protocols(material: Material, rows: Sequence[Row]) -> dict[str, Any]:
    """Upstream's definition and ours for each fixed block, on the same records."""
    outcomes: dict[str, list[Any]] = {}
    for record in material.records:
        outcomes.setdefault(record.key.arm, []).append(record.outcome)
    found = {}
    for row in rows:
        size = material.blocks.get(row.arm)
        if row.arm != material.base and isinstance(size, int) and outcomes.get(row.arm):
            theirs = protocols.upstream(outcomes[material.base], outcomes[row.arm], size)
            found[row.arm] = protocols.side_by_side(theirs, row)
    return found
