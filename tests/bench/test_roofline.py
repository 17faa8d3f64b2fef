"""The bound of a pass, and that the ceilings are measured at all."""

from __future__ import annotations

import pytest

import dflash
from dflash.bench import roofline
from dflash.bench.roofline import Ceilings, reached

TOP = Ceilings(bytes_per_second=10e9, flops_per_second=100e9, device="cpu", dtype="float32")


def test_a_pass_takes_at_least_the_longer_of_reading_and_computing() -> None:
    memory = {"target": 400_000_000, "draft": 40_000_000}  # 100 M and 10 M weights
    one, many, draft = reached(
        TOP, memory, [("verify", 1, 80.0), ("verify", 64, 160.0), ("draft", 8, 8.0)]
    )
    assert (one.by, one.bound_ms, one.share) == ("memory", pytest.approx(40.0), pytest.approx(0.5))
    assert (many.by, many.bound_ms) == ("arithmetic", pytest.approx(128.0))
    assert many.gigaflops == pytest.approx(80.0)
    assert draft.gigabytes_per_second == pytest.approx(5.0)


def test_passes_without_weights_or_time_have_no_bound() -> None:
    assert reached(TOP, {"target": 0}, [("verify", 1, 80.0), ("draft", 4, 1.0)]) == []


def test_ceilings_are_measured_where_the_pair_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "COPIED", 1 << 20)
    monkeypatch.setattr(roofline, "SIZE", 64)
    with dflash.load("toy", "toy:oracle") as engine:
        found = roofline.ceilings(engine.pair)
    assert found.bytes_per_second > 1e7 and found.flops_per_second > 1e6
    assert (found.device, found.dtype) == ("cpu", "float32")
