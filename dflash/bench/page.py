"""The report as one HTML file: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from dflash.bench import charts
from dflash.bench.advice import GOOD, WEAK

ENOUGH = 10  # passes behind a chance that is drawn
WORDS = {"good": "good", "fair": "between the marks", "weak": "weak", "": ""}


def render(report: Mapping[str, Any]) -> str:
    """HTML from what ``report.build`` made."""
    from jinja2 import Environment

    source = files("dflash.bench").joinpath("page.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return page.render(
        r=report,
        title=_title(report),
        tiles=_tiles(report),
        figures=_figures(report),
        good=GOOD,
        weak=WEAK,
        bar=_bar(report),
    )


def write(report: Mapping[str, Any], folder: Path) -> Path:
    """``report.html`` in ``folder``."""
    place = folder / "report.html"
    place.write_text(render(report), encoding="utf-8")
    return place


def _title(report: Mapping[str, Any]) -> str:
    pair = report["pair"]
    names = [Path(str(pair[n])).name for n in ("target", "draft") if pair.get(n)]
    return " + ".join(names) or "DFlash benchmark"


def _bar(report: Mapping[str, Any]) -> float:
    """The largest speed-up or 1: what a full bar of the tables stands for."""
    rows = [*report["rows"], *(row for group in report["sets"].values() for row in group)]
    return max([1.0, *(float(row["speedup"]["value"]) for row in rows if row["speedup"])])


def _tiles(report: Mapping[str, Any]) -> list[dict[str, str]]:
    advice, rows = report["advice"], {row["arm"]: row for row in report["rows"]}
    found = []
    if advice["speedup"] is not None:
        block = advice["block_size"]
        arm = rows.get("plain" if block == 1 else f"block {block}")
        found.append(_tile(f"{advice['speedup']:.2f}x", f"plain decoding, block {block}"))
        if arm is not None:
            found.append(_tile(f"{arm['rate']:.1f}", "tokens a second after the prefill"))
            if arm["totals"]["rounds"] and block > 1:
                found.append(_tile(f"{arm['totals']['micro']:.2f}", "tokens a verify pass (micro)"))
    if advice["acceptance"] is not None:
        share = f"{100 * advice['acceptance']:.0f} %"
        found.append(_tile(share, f"of drafts accepted: {WORDS[advice['mark']]}", advice["mark"]))
    verdict = report["verdict"]
    if verdict is not None:
        word, mark = ("lossless", "good") if verdict["lossless"] else ("differs", "weak")
        found.append(_tile(word, f"at temperature 0, {verdict['compared']} texts compared", mark))
    return found


def _tile(value: str, label: str, mark: str = "") -> dict[str, str]:
    return {"value": value, "label": label, "mark": mark}


def _figures(report: Mapping[str, Any]) -> list[dict[str, str]]:
    found = [
        _figure(
            "Speed-up over plain decoding",
            "By block size; whiskers are 95 % intervals over repeats.",
            _speedups(report),
        ),
        _figure("Where the time goes", "All texts of each arm.", _phases(report)),
    ]
    deep = _deepest(report)
    if deep is not None:
        totals = deep["totals"]
        found += [
            _figure(
                "Acceptance by position",
                f"{deep['arm']}, {totals['rounds']} verify passes.",
                charts.positions(totals["unconditional"], totals["conditional"], _sure(totals)),
            ),
            _figure(
                "What a verify pass brings",
                f"{deep['arm']}: share of passes.",
                charts.histogram(totals["histogram"]),
            ),
        ]
    by_kind = _gains(report)
    if len(by_kind) > 1:
        text = f"Block {report['advice']['block_size']} over plain decoding."
        found.append(_figure("Which text gains", text, charts.gains(by_kind)))
    if report["cost"]:
        found.append(
            _figure(
                "What a pass costs",
                "Measured beside the least time that bandwidth and arithmetic allow.",
                charts.curve(report["cost"], _bounds(report["roofline"])),
            )
        )
    return [figure for figure in found if figure["svg"]]


def _figure(title: str, caption: str, svg: str) -> dict[str, str]:
    return {"title": title, "caption": caption, "svg": svg}


def _speedups(report: Mapping[str, Any]) -> str:
    points = [
        (str(report["blocks"][row["arm"]]), row["speedup"])
        for row in report["rows"]
        if row["arm"] in report["blocks"] and row["speedup"] and row["arm"] != report["baseline"]
    ]
    return charts.speedups(points, str(report["advice"]["block_size"])) if points else ""


def _phases(report: Mapping[str, Any]) -> str:
    bars: list[tuple[str, float, float, float]] = []
    for row in report["rows"]:
        totals = row["totals"]
        if totals["host_seconds"] is not None and totals["decoded"]:
            names = ("draft_seconds", "verify_seconds", "host_seconds")
            draft, verify, host = (1e3 * totals[n] / totals["decoded"] for n in names)
            bars.append((row["arm"], draft, verify, host))
    return charts.phases(bars) if bars else ""


def _deepest(report: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The arm with the longest fixed block that drafted: it shows every place."""
    sizes: Mapping[str, Any] = report["blocks"]
    drafted: Sequence[Mapping[str, Any]] = [
        row for row in report["rows"] if row["totals"]["judged"] and sizes.get(row["arm"]) != "auto"
    ]
    return max(drafted, key=lambda row: len(row["totals"]["judged"]), default=None)


def _sure(totals: Mapping[str, Any]) -> int:
    """Places whose conditional chance rests on enough passes to be drawn."""
    kept = [totals["rounds"], *(sum(totals["histogram"][p:]) for p in range(1, 99))]
    return sum(count >= ENOUGH for count in kept[: len(totals["judged"])])


def _gains(report: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """(kind of text, speed-up) of the advised block."""
    block = report["advice"]["block_size"]
    return [
        (name, row["speedup"])
        for name, rows in report["categories"].items()
        for row in rows
        if report["blocks"].get(row["arm"]) == block > 1 and row["speedup"]
    ]


def _bounds(roofline: Mapping[str, Any] | None) -> dict[int, float]:
    passes = [] if roofline is None else roofline["passes"]
    return {one["rows"]: one["bound_ms"] for one in passes if one["phase"] == "verify"}
