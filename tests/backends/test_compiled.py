"""Compiled passes: the numbers of those that are not, and one compilation for a number of rows.

The compiler's backends "eager" (traced, then run as it stands) and "aot_eager" (also cut down to
torch's core operators) stand in for inductor, which a test has no time for. Tracing takes a fixed
time a layer, so most targets here have two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import dflash
from dflash.backends.torch import graphs as graphs_module
from dflash.backends.torch import packed
from dflash.backends.torch.compiled import TorchCompiler
from dflash.backends.torch.graph_check import open_graphs, rerun
from dflash.backends.torch.graph_target import GraphForward
from dflash.backends.torch.graphs import Graphs
from dflash.backends.torch.load import take_target
from dflash.backends.torch.pair import TorchPair
from dflash.backends.torch.probe import TorchProbe
from dflash.config import LoadConfig
from dflash.core.decode import decode
from dflash.core.policy import Fixed, Off
from dflash.core.types import Request
from dflash.errors import ConfigError
from tests.core.toys import ticks, tokens_of
from tests.drafts.configs import CONV_AND_SELECTOR
from tests.facades.drafts import MASK

from .tape import Tape
from .test_graphs import CAPACITY, Side, agree, draft_for, ids, target_of, walk
from .tiny import tiny_target

pytestmark = pytest.mark.torch

SMALL: dict[str, Any] = {  # a draft beside two layers
    "num_target_layers": 2,
    "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
}


@pytest.fixture(autouse=True)
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused and not packed, as on a GPU; short stretches of the cache."""
    monkeypatch.setattr(packed, "_why_not", lambda *_: "not in this test")
    monkeypatch.setattr(graphs_module, "SHORTEST", 32)
    counters.clear()


def compilations() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled(backend: Any = "eager", recorder: Any = rerun) -> Graphs:
    return Graphs(recorder, TorchCompiler(backend))


@pytest.mark.parametrize(
    ("kind", "backend", "layers"), [("llama", "eager", 2), ("qwen3", "aot_eager", 4)]
)
def test_compiled_passes_give_the_logits_and_features_of_direct_ones(
    kind: str, backend: str, layers: int
) -> None:
    target = target_of(kind, layers=layers)
    sides = [Side(target, how) for how in (compiled(backend), None)]
    agree(*sides, rows=ids(20), keep=1)
    walk(*sides)
    assert compilations() == 4, "one for each number of rows: 1, 4, 9, 16"


def test_lengths_rooms_and_sessions_compile_nothing_anew() -> None:
    target, graphs = target_of(layers=2), compiled()
    for seed, capacity in enumerate((CAPACITY, 90, 40, CAPACITY)):
        sides = [Side(target, how, capacity) for how in (graphs, None)]
        agree(*sides, rows=ids(9 + seed, seed), keep=1)
        for place in range(6):
            agree(*sides, rows=ids((4, 1, 3)[place % 3], place))
        assert isinstance(sides[0].forward, GraphForward)
        sides[0].forward.close()
    assert compilations() == 3


def test_what_is_compiled_can_be_replayed() -> None:
    tape = Tape()
    target = target_of(layers=2)
    sides = [Side(target, how) for how in (compiled("aot_eager", tape), None)]
    agree(*sides, rows=ids(20), keep=1)
    walk(*sides)
    assert tape.replayed > 2 * tape.recorded > 0
    assert compilations() == 4


def test_two_pairs_of_other_families_compile_side_by_side(tmp_path: Path) -> None:
    pairs = []
    for kind, backend in (("llama", "eager"), ("qwen3", "aot_eager")):
        target = target_of(kind, torch.float32, layers=2)
        draft = draft_for(target, tmp_path / kind, pack=True, is_causal=kind == "llama", **SMALL)
        pairs.append(TorchPair(target, draft).compile(replayed=False, backend=backend))
    for pair in pairs:
        assert pair.compiled() == "target and draft" and not pair.warnings
        assert pair.replayed() == "off: switched off"
        plain = text_of(TorchPair(pair.target), 1)
        assert text_of(pair, 1) == text_of(pair, 2) == plain
        made = compilations()
        assert text_of(pair, 2) == plain
        assert compilations() == made, "the second request compiles nothing"
    # at load the target for 1 and 4 rows without taps, then for 1 and 2 with them; the draft, twice
    # for each, for 2 and 6
    assert made == 2 * (2 + 2 + 2 * 2)


def text_of(pair: TorchPair, block: int) -> list[int]:
    target, drafts = pair.open_target(64), pair.open_drafts(64)
    asked = Request(ids(9), 16)
    policy: Any = Fixed(block) if drafts and block > 1 else Off()
    try:
        return tokens_of(decode(asked, target, drafts, policy, ticks()))
    finally:
        target.close()
        for draft in drafts:
            draft.close()


def fails(*_: Any) -> Any:
    raise RuntimeError("no compiler on this machine\nand more")


def adds(graph: Any, _: Any) -> Callable[..., Any]:
    return lambda *values: tuple(found + 1 for found in graph(*values))


WRONG = "a compiled pass computes something else than the pass itself"


@pytest.mark.parametrize(("backend", "why"), [(fails, "no compiler on this"), (adds, WRONG)])
def test_a_compiler_that_fails_or_errs_says_so_once_and_changes_nothing(
    backend: Any, why: str
) -> None:
    target = target_of(layers=2)
    sides = [Side(target, how) for how in (compiled(backend), None)]
    agree(*sides, rows=ids(20), keep=1)
    with pytest.warns(UserWarning, match=f"nothing is compiled any more: .*{why}") as told:
        walk(*sides)
    assert len(told) == 1


@pytest.mark.parametrize(("backend", "why"), [(fails, "no compiler on this"), (adds, WRONG)])
def test_a_pair_whose_passes_cannot_be_compiled_has_a_note_and_the_same_graphs(
    backend: Any, why: str
) -> None:
    target = target_of(dtype=torch.float32, layers=2)
    pair = TorchPair(target).compile(replayed=False, backend=backend)
    (warning,) = pair.warnings
    assert warning.startswith("nothing is compiled: ") and why in warning
    assert why in pair.compiled() and pair.compiled().startswith("off: ")
    compiler, tape = TorchCompiler(backend), Tape()
    graphs, no_graphs = open_graphs(pair.target, None, tape, compiler)
    assert graphs is not None and not no_graphs and tape.recorded == 3 and why in compiler.off


def test_a_pair_says_what_is_compiled_and_why_something_is_not(tmp_path: Path) -> None:
    target = target_of(dtype=torch.float32, layers=2)
    second = draft_for(target, tmp_path, **SMALL, **CONV_AND_SELECTOR)
    pair = TorchPair(target, second).compile(replayed=False, backend="eager")
    assert pair.runs_on()["compiled"] == "target"
    assert ("note", "compiled", "target") in [
        (found.level, found.check, found.message) for found in TorchProbe(pair).findings()
    ]
    (warning,) = pair.warnings
    assert warning.startswith("the draft is not compiled: ")
    windowed = TorchPair(take_target(tiny_target("swa"), "swa"))
    windowed.compile(replayed=False, backend="eager")
    assert windowed.compiled() == "off: sliding layers are not fused"
    assert "compiled" not in TorchPair(target).replay().runs_on()


def test_packed_weights_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target = target_of(dtype=torch.float32)
    if not target.packed.layers:
        pytest.skip("this processor packs no weights, so there is nothing to refuse")
    pair = TorchPair(target).compile(replayed=False, backend="eager")
    (warning,) = pair.warnings
    assert warning.startswith("nothing is compiled: ")


def test_compiling_is_for_cuda_and_says_so_before_anything_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match=r"^compile \(--compile\) is for CUDA, and this pair runs on cpu"
    ):
        TorchPair.open(LoadConfig("nowhere", device="cpu", compile=True))
    with pytest.raises(ConfigError, match=r"is for the torch backend.*: leave it out"):
        dflash.load("toy", compile=True)
