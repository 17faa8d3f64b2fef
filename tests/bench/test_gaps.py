"""The clock in torch's dispatcher: what it counts, and what it takes off for itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from bench import gaps  # noqa: E402 - after the check for torch
from bench.gaps import Gaps, Observer, Rounds, Seen, gap_of  # noqa: E402
from bench.parts import computes  # noqa: E402
from bench.profile import _is_operator  # noqa: E402

pytestmark = pytest.mark.torch

needs_a_compiler = pytest.mark.skipif(bool(gaps.why_not()), reason=gaps.why_not())


@pytest.fixture(scope="module")
def clock() -> Iterator[Observer]:
    with gaps.observer() as found:
        yield found


def measured(clock: Observer, step: Callable[[], object], count: int) -> Gaps:
    rounds = Rounds(clock)
    rounds.run(step, count)
    return gaps.gaps(rounds, computes)


def test_what_is_no_kernel_is_the_gap_and_the_clock_pays_for_itself() -> None:
    own = {"aten::mm": 600, "aten::empty": 50, "aten::view": 30}
    calls = {"aten::mm": 2, "aten::empty": 2, "aten::view": 1}
    seen = Seen(1000, own, calls, {"aten::mm": 2}, outer=3)
    plain, less = gap_of(seen, computes, 0), gap_of(seen, computes, 10)
    assert (plain.ms, plain.gap_ms, plain.operators) == (1000 / 1e6, 400 / 1e6, 5)
    # 5 notes, of which the products' own calls of an allocation lie in kernels
    assert less.ms == pytest.approx(950 / 1e6) and less.gap_ms == pytest.approx(370 / 1e6)


def test_a_second_copy_adds_to_the_operators_in_gaps() -> None:
    calls, inner = {"aten::mm": 2, "aten::empty": 2}, {"aten::mm": 1}
    once, twice = (
        Seen(ns, {"aten::mm": 600, "aten::empty": 9}, calls, inner, 3) for ns in (1000, 1060)
    )
    assert gaps.twin([once], [twice], computes) == pytest.approx(20), "three of four in gaps"
    assert gaps.twin([once], [once], computes) == 0


@needs_a_compiler
def test_a_second_copy_notes_beside_the_first(clock: Observer) -> None:
    x = torch.ones(4)
    with clock.watching(twice=True):
        x.neg_()
    assert clock.seen(1).calls == {"aten::neg_": 1}


@needs_a_compiler
def test_operators_are_counted_with_those_they_call(clock: Observer) -> None:
    x = torch.ones(64, 64)
    with clock.watching():
        for _ in range(3):
            x.mm(x)
        x.t()
    torch.ones(3)  # nobody looks any more
    seen = clock.seen(10**9)
    assert seen.calls["aten::mm"] == 3 and seen.calls["aten::t"] == 1 and seen.outer == 4
    assert seen.inner["aten::t"] == 1, "a transposition"
    assert "aten::ones" not in seen.calls
    assert seen.own["aten::mm"] > seen.own["aten::t"] > 0


@needs_a_compiler
def test_a_nap_between_operators_is_in_the_gap(clock: Observer) -> None:
    import time

    x = torch.ones(8)

    def step() -> object:
        x.neg_()
        time.sleep(0.005)
        return x

    found = measured(clock, step, 4)
    assert found.rounds == 4 and found.operators == 1
    assert 0.9 < found.share <= 1 and found.gap_ms > 5
    assert found.in_place_error_us > 0


def doubled(x: Tensor) -> Tensor:
    return x.neg().neg()


@needs_a_compiler
def test_a_function_that_torch_interprets_is_no_operator(clock: Observer) -> None:
    """To clock and profiler alike: what lies between its operators is a gap."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run = torch.jit.script(doubled)
    x = torch.ones(4)
    with torch.jit.optimized_execution(False):
        with clock.watching():
            run(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as watch:
            run(x)
    assert clock.seen(1).calls == {"aten::neg": 2}
    assert [event.name for event in watch.events() if _is_operator(event)] == ["aten::neg"] * 2


@needs_a_compiler
def test_a_text_that_ends_ends_the_rounds(clock: Observer) -> None:
    left = iter([torch.ones(2)] * 7)
    rounds = Rounds(clock)
    rounds.run(lambda: (torch.ones(2).neg_(), next(left, None))[1], 4)
    kinds = (len(rounds.bare), len(rounds.once), len(rounds.twice), len(rounds.more))
    assert kinds == (2, 2, 3, 2)


@needs_a_compiler
def test_one_long_product_leaves_hardly_a_gap(clock: Observer) -> None:
    x = torch.ones(400, 400)
    found = measured(clock, lambda: x.mm(x), 8)
    assert found.share < 0.2


def test_views_and_allocations_are_no_kernels() -> None:
    for name in ("aten::view", "aten::empty", "aten::as_strided", "aten::to", "aten::select"):
        assert not computes(name)
    for name in ("aten::mul_", "mkldnn::_linear_pointwise", "aten::index_select", "aten::copy_"):
        assert computes(name)
