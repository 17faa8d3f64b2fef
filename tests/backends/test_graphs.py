"""Replayed passes: the numbers of direct ones, whatever happens to a session in between.

A tape stands in for CUDA graphs (`tape.py`). The numbers are float64, so that what differs by more
than rounding of sums in another order differs by far more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.backends.torch import graphs as graphs_module
from dflash.backends.torch import pair as pair_module
from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.draft_load import LoadedDraft, load_draft
from dflash.backends.torch.features import Taps
from dflash.backends.torch.graph_check import WRONG, open_graphs
from dflash.backends.torch.graph_target import GraphForward, make_forward
from dflash.backends.torch.graphs import Graphs, Memory, Pass
from dflash.backends.torch.load import LoadedTarget, take_target
from dflash.backends.torch.pair import TorchPair
from dflash.backends.torch.probe import TorchProbe
from dflash.backends.torch.upload import upload
from dflash.core.types import PLAIN, Request, Verdict
from dflash.errors import OutOfMemory
from tests.drafts.configs import CONV_AND_SELECTOR
from tests.facades.drafts import save_draft

from .tape import Tape
from .tiny import HIDDEN, LAYERS, tiny_target

pytestmark = pytest.mark.torch

NEAR: dict[str, float] = {"atol": 1e-9, "rtol": 1e-9}
CAPACITY = 160
SIZES = (4, 4, 1, 9, 4, 1, 1, 16, 4)


@pytest.fixture(autouse=True)
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs_module, "SHORTEST", 32)


def target_of(
    kind: str = "llama", dtype: torch.dtype = torch.float64, layers: int = LAYERS
) -> LoadedTarget:
    return take_target(tiny_target(kind, dtype=dtype, layers=layers), kind)


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    return target_of()


def ids(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed + place).randrange(500) for place in range(count)]


class Side:
    """One way of running a target: what it said so far, and where it stands."""

    def __init__(self, target: LoadedTarget, graphs: Graphs | None, capacity: int = CAPACITY):
        self.forward = make_forward(target.model, graphs)
        self.cache = make_cache(target.config, capacity)
        self.taps = Taps(target.model, (0, len(target.model.model.layers) // 2))

    def run(self, rows: Any, keep: int = 0) -> tuple[Tensor, Tensor | None]:
        with torch.inference_mode():
            return self.forward(rows, self.cache, keep, self.taps).clone(), self.taps.take()


def agree(*sides: Side, rows: list[int], keep: int = 0) -> None:
    (ours, features), (theirs, expected) = (side.run(rows, keep) for side in sides)
    torch.testing.assert_close(ours, theirs, **NEAR)
    torch.testing.assert_close(features, expected, **NEAR)


def walk(*sides: Side, end: int = CAPACITY - 16, seed: int = 0) -> None:
    """Blocks of several sizes of which a part stays, across the stretches."""
    text, choose = ids(CAPACITY, seed), random.Random(seed)
    start = sides[0].cache.length
    for place in range(200):
        size = SIZES[place % len(SIZES)]
        if start + size > end:
            return
        agree(*sides, rows=text[start : start + size])
        start += choose.randint(1, size)
        for side in sides:
            side.cache.rollback(start)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_replayed_passes_give_the_logits_and_features_of_direct_ones(kind: str) -> None:
    target, tape = target_of(kind), Tape()
    sides = [Side(target, how) for how in (Graphs(tape), None)]
    agree(*sides, rows=ids(20), keep=1)
    walk(*sides)
    assert 8 < tape.recorded <= 4 * 4, "at most one for each size and stretch"
    assert tape.replayed > 2 * tape.recorded


def test_a_pass_after_the_text_was_taken_back_sees_nothing_of_what_followed(
    target: LoadedTarget,
) -> None:
    sides = [Side(target, how) for how in (Graphs(Tape()), None)]
    agree(*sides, rows=ids(60), keep=1)
    for back in (50, 3, 0):
        for side in sides:
            side.cache.rollback(back)
        agree(*sides, rows=ids(4, seed=back))
        walk(*sides, end=back + 40, seed=back)


def test_what_is_left_behind_the_text_does_no_harm_even_if_it_is_not_a_number(
    target: LoadedTarget,
) -> None:
    sides = [Side(target, how) for how in (Graphs(Tape()), None)]
    agree(*sides, rows=ids(40), keep=1)
    agree(*sides, rows=ids(9))  # replayed: the memory is known by now
    agree(*sides, rows=ids(30), keep=1)
    for side in sides:
        with torch.inference_mode():  # what a broken draft's rows left
            side.cache.memory(torch.empty(16), 2)[:, :, :, 35:79] = torch.nan
        side.cache.rollback(35)
    agree(*sides, rows=ids(4))
    agree(*sides, rows=ids(1))


def test_a_session_that_grows_or_is_copied_goes_on_with_the_same_numbers(
    target: LoadedTarget,
) -> None:
    sides = [Side(target, how, 40) for how in (Graphs(Tape()), None)]
    agree(*sides, rows=ids(20), keep=1)
    walk(*sides, end=40)
    twins = [Side(target, how, 0) for how in (Graphs(Tape()), None)]
    for side, twin in zip(sides, twins, strict=True):
        side.cache.grow(CAPACITY)
        twin.cache = side.cache.copy()
    walk(*sides)
    walk(*twins, seed=1)


def test_sessions_in_turn_do_not_see_each_other(target: LoadedTarget) -> None:
    graphs = Graphs(Tape())
    pairs = [[Side(target, how) for how in (graphs, None)] for _ in range(2)]
    for seed, pair in enumerate(pairs):
        agree(*pair, rows=ids(20 + 9 * seed, seed), keep=1)
    for turn in range(12):
        for seed, pair in enumerate(pairs):
            agree(*pair, rows=ids(4, turn + 50 * seed))


def test_the_next_session_of_a_size_replays_what_the_last_one_recorded(
    target: LoadedTarget,
) -> None:
    tape = Tape()
    graphs, counts = Graphs(tape), []
    for seed in (0, 0, 2, 2):
        sides = [Side(target, how) for how in (graphs, None)]
        agree(*sides, rows=ids(50 - 13 * seed, seed), keep=1)
        walk(*sides, end=60, seed=seed)
        assert isinstance(sides[0].forward, GraphForward)
        sides[0].forward.close()
        counts.append(tape.recorded)
        assert graphs.bytes() == sides[0].cache.bytes()
    assert 0 < counts[0] == counts[1] < counts[2] == counts[3], "the same text records nothing new"
    graphs.close()
    assert not graphs.bytes()


def test_memory_of_another_number_format_is_not_taken_for_ones_own() -> None:
    """A draft as deep as its target, in a narrower format, leaves memory of the target's shape."""
    graphs = Graphs(Tape())
    for dtype in (torch.bfloat16, torch.float64):
        sides = [Side(target_of(dtype=dtype), how) for how in (graphs, None)]
        for side in sides:
            side.run(ids(20), 1)
            side.run(ids(4))
        ours, theirs = (side.cache.memory(torch.empty(0), 0).dtype for side in sides)
        assert ours == theirs == dtype
        sides[0].forward.close()  # type: ignore[attr-defined]


def test_no_more_passes_are_kept_than_may_be(
    target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs_module, "MOST_PASSES", 3)
    sides = [Side(target, how) for how in (Graphs(Tape()), None)]
    agree(*sides, rows=ids(20), keep=1)
    walk(*sides)
    memory = sides[0].forward._memory  # type: ignore[union-attr]
    assert memory is not None and len(memory.passes) == 3


@pytest.mark.parametrize("what", ["rows", "place"])
def test_that_these_tests_would_see_an_input_that_is_not_renewed(
    what: str, target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill, stale = Pass._fill, {"rows": 0, "place": 1}[what]

    def once(self: Pass, values: Any) -> None:
        kept = list(values)
        if hasattr(self, "outputs"):
            kept[stale] = self._inputs[stale]
        fill(self, kept)

    monkeypatch.setattr(Pass, "_fill", once)
    sides = [Side(target, how) for how in (Graphs(Tape()), None)]
    agree(*sides, rows=ids(20), keep=1)
    agree(*sides, rows=ids(4))
    with pytest.raises(AssertionError):
        agree(*sides, rows=ids(4, seed=9))


def test_that_these_tests_would_see_a_number_of_the_host_in_a_pass(
    target: LoadedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tape holds on to it, as a CUDA graph does."""
    recipe = GraphForward._recipe

    def fixed(self: GraphForward, *args: Any) -> Any:
        made = recipe(self, *args)

        def run(rows: Tensor, start: Tensor) -> Any:
            return made.function(rows, upload([int(start)], start.device))

        return made._replace(function=run)

    monkeypatch.setattr(GraphForward, "_recipe", fixed)
    sides = [Side(target, how) for how in (Graphs(Tape()), None)]
    agree(*sides, rows=ids(20), keep=1)
    agree(*sides, rows=ids(4))
    with pytest.raises(AssertionError):
        agree(*sides, rows=ids(4, seed=9))


DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "thin": {"pack": True},  # through the target's own decoder layers
    "thin and causal": {"pack": True, "is_causal": True},
    "causal": {"is_causal": True},
    "dflash2": CONV_AND_SELECTOR,
}


def draft_for(
    target: LoadedTarget, folder: Path, pack: bool = False, **changes: Any
) -> LoadedDraft:
    draft = load_draft(str(save_draft(folder, **changes)), target, "float32", pack=pack)
    assert hasattr(draft.model, "fused_context") is pack
    return draft


@pytest.mark.parametrize("kind", DRAFTS)
def test_replayed_blocks_are_those_of_a_session_that_runs_them(kind: str, tmp_path: Path) -> None:
    target, tape = target_of(dtype=torch.float32), Tape()
    draft = draft_for(target, tmp_path, **DRAFTS[kind])
    sessions = [draft.open(CAPACITY, how) for how in (Graphs(tape), None)]
    assert [session.replays for session in sessions] == [True, False]
    generator, text = torch.Generator().manual_seed(0), ids(CAPACITY)

    def go(rows: int, tokens: int) -> None:
        features = torch.randn(rows, 2 * HIDDEN, generator=generator)
        for session in sessions:
            session.commit(Verdict(tokens=text[:tokens], rows=rows, features=features), rows)

    def agreed(size: int) -> None:
        ours, theirs = (session.states(size) for session in sessions)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)

    with torch.inference_mode():
        for length in (20, 9):  # a text, then another in the same sessions
            for session in sessions:
                session.begin(Request(text[:length], 90), 0)
            go(length - 1, 0)
            for place in range(18):
                agreed((6, 6, 2, 4)[place % 4])
                agreed(5)  # proposed again, with nothing new
                go(rows := 1 + place % 6, rows)
            twins = sessions[0].fork(), sessions[1].fork()
            agreed(6)
            sessions = list(twins)
            agreed(3)
    assert 0 < tape.recorded < tape.replayed / 3


def test_a_draft_with_a_window_runs_its_blocks_itself(tmp_path: Path) -> None:
    target = target_of(dtype=torch.float32)
    draft = draft_for(target, tmp_path, layer_types=["sliding_attention"] * 2, sliding_window=8)
    assert not draft.replayable and not draft.open(64, Graphs(Tape())).replays


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_check_at_load_finds_both_models_equal(kind: str, tmp_path: Path) -> None:
    target = target_of(dtype=torch.float32)
    draft, tape = draft_for(target, tmp_path, **DRAFTS[kind]), Tape()
    graphs, why = open_graphs(target, draft, tape)
    assert graphs is not None and not why and tape.recorded == 3 + 3, "both stretches"


def test_without_cuda_nothing_is_recorded_and_nobody_is_told() -> None:
    target = target_of()
    assert open_graphs(target, None) == (None, "")
    assert "cuda_graphs" not in TorchPair(target).runs_on()


def test_a_target_without_thin_layers_runs_through_transformers() -> None:
    swa, tape = take_target(tiny_target("swa"), "swa"), Tape()
    graphs, why = open_graphs(swa, None, tape)
    assert graphs is not None and not why and not tape.recorded
    assert not isinstance(make_forward(swa.model, graphs), GraphForward)


def refuses(body: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nand more")


def forgets(body: Callable[[], None]) -> Callable[[], None]:
    return lambda: None


def shifts(body: Callable[[], None]) -> Callable[[], None]:
    """Computes what was asked the first time only."""
    left = [body]
    return lambda: left.pop()() if left else None


@pytest.mark.parametrize(
    ("recorder", "why"),
    [
        (refuses, "operation not permitted when stream is capturing"),
        (forgets, "a recorded pass computes something else than the pass itself"),
    ],
)
def test_a_device_that_cannot_record_says_so_once_and_changes_nothing(
    recorder: Any, why: str, target: LoadedTarget
) -> None:
    sides = [Side(target, how) for how in (Graphs(recorder), None)]
    agree(*sides, rows=ids(20), keep=1)
    with pytest.warns(UserWarning, match=f"CUDA graphs are off: {why}") as told:
        walk(*sides)
    assert len(told) == 1


@pytest.mark.parametrize("recorder", [refuses, forgets, shifts])
def test_the_check_at_load_gives_its_reason(recorder: Any, target: LoadedTarget) -> None:
    found, why = open_graphs(target, None, recorder)
    assert found is None and (why in WRONG.format("target") or "record" in why or "capt" in why)


def test_a_memory_is_clean_behind_what_was_written() -> None:
    tensor = torch.full((2, 1, 1, 10, 2), torch.nan)
    memory = Memory([tensor], 4)
    assert tensor[:, :, :, :4].isnan().all() and not tensor[:, :, :, 4:].any()
    tensor[:, :, :, 4:9] = torch.nan
    memory.wrote(9)
    memory.clean(6)
    assert tensor[:, :, :, :6].isnan().all() and not tensor[:, :, :, 6:].any()


def test_a_pair_says_what_is_replayed_and_warns_of_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_of(dtype=torch.float32)
    pair = TorchPair(target, draft_for(target, tmp_path, pack=True))
    monkeypatch.setattr(pair_module, "open_graphs", lambda *two: open_graphs(*two, Tape()))
    assert pair.replay().runs_on()["cuda_graphs"] == "target and draft"
    assert [finding.message for finding in TorchProbe(pair).findings()] == ["target and draft"]
    assert pair.replay(False).replayed() == "off: switched off" and not pair.warnings
    monkeypatch.setattr(pair_module, "open_graphs", lambda *two: open_graphs(*two, refuses))
    assert pair.replay().replayed().startswith("off: operation not permitted")
    (warning,) = pair.warnings
    assert warning.startswith("CUDA graphs are off: operation not permitted")
    pair.close()


def test_memory_that_waits_to_be_used_again_makes_room_for_a_new_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = TorchPair(target_of(dtype=torch.float32))
    pair._graphs = Graphs(Tape())
    session = pair.open_target(64)
    list(session.prefill(Request(ids(9), 20), 0))
    session.verify(PLAIN)
    session.close()
    assert pair._graphs.bytes()
    asked = list[str]()

    def require(what: str, *_: Any) -> None:
        asked.append(what)
        if len(asked) == 1:
            raise OutOfMemory("full")

    monkeypatch.setattr(pair_module, "require", require)
    pair.open_target(128)
    assert len(asked) == 2 and not pair._graphs.bytes()
    asked.clear()
    with pytest.raises(OutOfMemory):
        pair.open_target(128)
