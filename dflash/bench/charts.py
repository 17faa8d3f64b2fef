"""The report's charts, as SVG text that takes its colours from the page.

Drawn by matplotlib without a display. Each colour below is a stand-in that is replaced by a CSS
variable, so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.errors import MissingBackend

INK, MUTED, GRID, SURFACE = "#010101", "#020202", "#030303", "#040404"
ONE, TWO, THREE = "#050501", "#050502", "#050503"
NAMES = {
    INK: "ink",
    MUTED: "muted",
    GRID: "grid",
    SURFACE: "surface",
    ONE: "one",
    TWO: "two",
    THREE: "three",
}
SIZE = (5.6, 3.1)  # inches; the page scales it
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dflash",
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.frameon": False,
}


def need() -> None:
    """Raise MissingBackend unless what draws and writes the page is there."""
    try:
        import jinja2
        import matplotlib
    except ImportError as problem:
        raise MissingBackend(
            f"the report needs {problem.name}: pip install 'dflash-engine[bench]', or leave out "
            "--out for a table on the terminal"
        ) from problem
    del jinja2, matplotlib


def _svg(draw: Any, size: tuple[float, float] = SIZE) -> str:
    """What ``draw(axes)`` draws."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, name in NAMES.items():
        svg = svg.replace(stand_in, f"var(--{name})")
    svg = re.sub(r"font: ([^;\"]*?)'[^;\"]*", r"font: \1inherit", svg)
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg role="img" \1', svg, count=1)


def speedups(points: Sequence[tuple[str, Mapping[str, float]]], best: str | None) -> str:
    """Over plain decoding by block size; a point is (label, value with low and high)."""

    def draw(axes: Any) -> None:
        axes.axhline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        places = range(len(points))
        fixed = [i for i in places if points[i][0] != "auto"]
        axes.plot(
            fixed, [points[i][1]["value"] for i in fixed], color=ONE, linewidth=1.6, alpha=0.45
        )
        for place, (label, point) in enumerate(points):
            colour = TWO if label == "auto" else ONE
            below, above = point["value"] - point["low"], point["high"] - point["value"]
            spread = [[max(0.0, below)], [max(0.0, above)]]
            axes.errorbar(
                place, point["value"], yerr=spread, fmt="o", color=colour, markersize=7, capsize=3
            )
            weight = "bold" if label == best else "normal"
            axes.annotate(
                f"{point['value']:.2f}x",
                (place, point["high"]),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontweight=weight,
            )
        axes.set_xticks(list(places), [label for label, _ in points])
        axes.set_xlim(-0.6, len(points) - 0.4)
        low = min([1.0, *(p["low"] for _, p in points)])
        high = max([1.0, *(p["high"] for _, p in points)])
        axes.set_ylim(max(0.0, low - 0.12 * high), high * 1.12)
        axes.annotate(
            "plain",
            (len(points) - 0.4, 1.0),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            color=MUTED,
            fontsize=8.5,
            annotation_clip=False,
        )
        axes.set_xlabel("block size")

    return _svg(draw)


def positions(unconditional: Sequence[float], conditional: Sequence[float], sure: int) -> str:
    """Chance that the draft at each place is kept; the conditional one for ``sure`` places."""

    def draw(axes: Any) -> None:
        places = list(range(1, len(unconditional) + 1))
        axes.bar(places, unconditional, color=ONE, width=0.62, label="kept (all before it, too)")
        axes.plot(
            places[:sure],
            conditional[:sure],
            color=TWO,
            marker="o",
            markersize=6,
            label="once the one before was",
        )
        for place, value in zip(places, unconditional, strict=True):
            _above(axes, place, value, f"{100 * value:.0f}")
        axes.set_ylim(0, 1.08)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25", "50", "75", "100 %"])
        axes.set_xticks(places)
        axes.set_xlabel("place in the block, the anchor not counted")
        _legend(axes, 2)

    return _svg(draw)


def histogram(counts: Sequence[int]) -> str:
    """Share of verify passes by tokens they brought."""

    def draw(axes: Any) -> None:
        whole = max(1, sum(counts))
        places = list(range(1, len(counts) + 1))
        axes.bar(places, [count / whole for count in counts], color=ONE, width=0.62)
        for place, count in zip(places, counts, strict=True):
            _above(axes, place, count / whole, f"{100 * count / whole:.0f} %")
        axes.set_ylim(0, max(counts, default=1) / whole * 1.18)
        axes.set_yticks([])
        axes.set_xticks(places)
        axes.set_xlabel("tokens a verify pass brings, its own included")

    return _svg(draw)


def phases(arms: Sequence[tuple[str, float, float, float]]) -> str:
    """Milliseconds a token by (arm, draft, verify, host)."""

    def draw(axes: Any) -> None:
        labels = [arm for arm, *_ in arms][::-1]
        left = [0.0] * len(arms)
        columns = zip(*(arm[1:] for arm in arms), strict=True)
        names = (("draft", TWO), ("verify", ONE), ("host", THREE))
        for (name, colour), column in zip(names, columns, strict=True):
            values = list(column)[::-1]
            axes.barh(
                labels, values, left=left, color=colour, height=0.6, edgecolor=SURFACE, label=name
            )
            left = [a + b for a, b in zip(left, values, strict=True)]
        for place, whole in enumerate(left):
            axes.annotate(
                f"{whole:.1f}",
                (whole, place),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
            )
        axes.grid(visible=False)
        axes.set_xlim(0, max(left, default=1) * 1.12 or 1)
        axes.set_xlabel("milliseconds a token")
        _legend(axes, 3)

    return _svg(draw, (SIZE[0], 0.9 + 0.34 * max(4, len(arms))))


def curve(blocks: Sequence[Mapping[str, float]], bounds: Mapping[int, float]) -> str:
    """What a pass costs by rows, beside the least that the machine allows."""

    def draw(axes: Any) -> None:
        rows = [int(block["block_size"]) for block in blocks]
        verify = [block["verify_ms"] for block in blocks]
        whole = [block["verify_ms"] + block["draft_ms"] for block in blocks]
        axes.plot(rows, whole, color=TWO, marker="o", markersize=5, label="verify + draft")
        axes.plot(rows, verify, color=ONE, marker="o", markersize=5, label="verify")
        known = [size for size in rows if size in bounds]
        if known:
            least = [bounds[size] for size in known]
            axes.plot(known, least, color=MUTED, linestyle=(0, (4, 3)), label="roofline (least)")
        axes.set_ylim(0, max([*whole, 1e-9]) * 1.1)
        axes.set_xticks(rows)
        axes.set_xlabel("block size (rows of a pass)")
        axes.set_ylabel("milliseconds")
        _legend(axes, 3)

    return _svg(draw)


def gains(groups: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Over plain decoding by kind of text, the largest on top."""

    def draw(axes: Any) -> None:
        ordered = sorted(groups, key=lambda group: group[1]["value"])
        for place, (_, found) in enumerate(ordered):
            value = found["value"]
            axes.plot([1.0, value], [place] * 2, color=ONE, linewidth=1.6, alpha=0.45)
            spread = [[max(0.0, value - found["low"])], [max(0.0, found["high"] - value)]]
            axes.errorbar(value, place, xerr=spread, fmt="o", color=ONE, markersize=7, capsize=3)
            axes.annotate(
                f"{value:.2f}x",
                (max(1.0, found["high"]), place),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
            )
        axes.axvline(1.0, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.grid(visible=False)
        axes.set_yticks(range(len(ordered)), [name for name, _ in ordered])
        axes.set_ylim(-0.6, len(ordered) - 0.4)
        axes.margins(x=0.14)
        axes.set_xlabel("times plain decoding")

    return _svg(draw, (SIZE[0], max(SIZE[1], 0.9 + 0.34 * len(groups))))


def _legend(axes: Any, columns: int) -> None:
    """Above the axes, where nothing is drawn."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, fontsize=8.5, borderaxespad=0.2
    )


def _above(axes: Any, place: float, value: float, text: str) -> None:
    axes.annotate(
        text, (place, value), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=8.5
    )
