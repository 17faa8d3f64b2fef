"""What two runs, or a sweep beside a long run, are said to be worth."""

from __future__ import annotations

from typing import Any

from bench.repeat import chosen, twice


def report(**spans: tuple[float, float, float] | None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [{"arm": "plain", "speedup": {"value": 1, "low": 1, "high": 1}}]
    blocks: dict[str, Any] = {"plain": 1}
    for name, span in spans.items():
        arm = name.replace("_", " ")
        blocks[arm] = int(name.rpartition("_")[2])
        found = None if span is None else dict(zip(("value", "low", "high"), span, strict=True))
        rows.append({"arm": arm, "speedup": found})
    return {"baseline": "plain", "rows": rows, "blocks": blocks}


def test_two_runs_agree_where_their_intervals_meet() -> None:
    one = report(block_3=(1.4, 1.3, 1.5), block_8=None)
    table, good = twice(one, report(block_3=(1.6, 1.5, 1.7), block_8=(1.0, 0.9, 1.1)))
    assert good and "refused" in table and "plain" not in table
    assert not twice(one, report(block_3=(1.6, 1.51, 1.7), block_8=None))[1]


def test_a_sweep_is_worth_what_its_block_reaches_in_the_long_run() -> None:
    long = report(block_3=(1.4, 1.3, 1.5), block_4=(1.45, 1.4, 1.5), block_8=(1.2, 1.1, 1.3))
    assert chosen(long, [{"block_size": 3, "seconds": 90.0}])[1], "3.6 % more time"
    table, good = chosen(long, [{"block_size": 4, "seconds": 9.0}, {"block_size": 8, "seconds": 9}])
    assert not good and "20.8%" in table
    assert chosen(report(block_2=(0.8, 0.7, 0.9)), [{"block_size": 1, "seconds": 9.0}])[1]
