"""Layers run by torch's interpreter: bit for bit what Python computes, or left to Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import dflash
from dflash.backends.torch import attention, interpreted, packed
from dflash.backends.torch.cache import PreallocatedCache, make_cache
from dflash.backends.torch.draft_fused import FusedDraft, fuse_draft
from dflash.backends.torch.features import FINAL_NORM, Taps
from dflash.backends.torch.forward import FusedForward, make_forward
from dflash.backends.torch.interpreted import reason
from dflash.backends.torch.load import LoadedTarget, load_target
from dflash.backends.torch.packed import pack_model, why_not_narrow
from dflash.backends.torch.pair import TorchPair
from dflash.backends.torch.slots import Span
from dflash.backends.torch.tree import make_branches
from tests.backends.drafts import ODDITIES, tiny_draft
from tests.backends.tiny import LAYERS, VOCAB, save_target, tiny_target, tiny_tokenizer

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    bool(packed.why_not(torch.float32, CPU)), reason="this torch has no packed form here"
)


@pytest.fixture(autouse=True)
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same library on every processor."""
    monkeypatch.setattr(packed, "on_intel", lambda: False)


def biased() -> Any:
    """Of the family whose queries, keys and values have a bias."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(3)
    keys = tiny_target().config.to_dict()
    names = [name for name in keys if name.startswith("num_") or name.endswith("_size")]
    model: Any = Qwen2ForCausalLM(Qwen2Config(**{name: keys[name] for name in names}))
    model.eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            weight.data.normal_()
    return model


MODELS = {
    "llama": tiny_target,
    "qwen3": lambda: tiny_target("qwen3"),
    "tied": lambda: tiny_target(tied=True),
    "qwen2": biased,
}


def opened(model: Any, folder: Path, **options: Any) -> LoadedTarget:
    return load_target(str(save_target(model, tiny_tokenizer(), folder)), "cpu", **options)


def both_ways(target: LoadedTarget) -> list[FusedForward]:
    """Forwards over one model: interpreted, and from Python."""
    ways = [make_forward(target.model) for _ in range(2)]
    one, other = (way for way in ways if isinstance(way, FusedForward))
    assert one.stack._interpreted is not None, reason(one.stack.layers)
    other.stack._interpreted = None
    return [one, other]


def of_layers(target: LoadedTarget) -> interpreted.Reason:
    return reason(target.model.get_decoder().layers)


@pytest.mark.parametrize("weights", [None, "bfloat16"])
@pytest.mark.parametrize("long", [64, 9999])
@pytest.mark.parametrize("kind", MODELS)
def test_every_pass_has_the_bits_of_a_pass_from_python(
    kind: str, long: int, weights: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows and many, rejected ones, more room, a tree, with query heads stacked and without:
    logits, features, keys and values."""
    if weights and (why := why_not_narrow(weights)):
        pytest.skip(why)
    monkeypatch.setattr(attention, "LONG", long)
    target = opened(MODELS[kind](), tmp_path, weights=weights)
    ways, taps = both_ways(target), (LAYERS - 1, 0, FINAL_NORM)
    caches = [make_cache(target.config, 640) for _ in ways]
    tapped = [Taps(target.model, taps) for _ in ways]
    ids = torch.randint(0, VOCAB, (600,), generator=torch.Generator().manual_seed(0)).tolist()

    def same(rows: list[int], keep: int = 0, tree: Any = None) -> None:
        found = [
            (way(rows, cache, keep, tap, tree), tap.take())
            for way, cache, tap in zip(ways, caches, tapped, strict=True)
        ]
        for one, other in zip(*found, strict=True):
            assert one is not None and torch.equal(one, other)
        assert torch.equal(*(held(cache, ways[0]) for cache in caches))

    start = 0
    with torch.inference_mode():
        for size in (40, 7, 1, 2, 3, 4, 5, 8, 16, 33, 300, 32, 1, 9):
            same(ids[:3])
            for cache in caches:
                cache.rollback(start)
            same(ids[start : start + size], keep=size % 3)
            start += size
        for cache in caches:
            cache.grow(700)
        same(ids[:8])
        same(ids[:6], tree=make_branches((-1, 0, 0, 1, -1), 3, CPU))


def held(cache: PreallocatedCache, forward: FusedForward) -> Tensor:
    """Keys and values of all layers."""
    return cache.memory(forward.like, forward.keys)[:, :, :, : cache.length]


@pytest.mark.parametrize("weights", [None, "bfloat16"])
@pytest.mark.parametrize("case", ["full", "full_causal", "sliding", "one_kv_head"])
def test_a_drafts_blocks_have_the_bits_of_blocks_from_python(
    case: str, weights: str | None
) -> None:
    if weights and (why := why_not_narrow(weights)):
        pytest.skip(why)
    model = tiny_draft(**ODDITIES[case])
    fuse_draft(model)
    pack_model(model, weights=weights)
    ways = [FusedDraft(model), FusedDraft(model)]
    assert ways[0].stack._interpreted is not None, reason(list(model.layers))
    ways[1].stack._interpreted = None
    generator, first = torch.Generator().manual_seed(0), ways[0].stack.first
    hidden = model.norm.weight.shape[0]
    memory = torch.randn(LAYERS, 2, first.keys, 90, first.head_dim, generator=generator)
    memory = memory[: len(ways[0].stack.layers)].contiguous()
    for begin, start, rows in ((0, 0, 8), (0, 33, 2), (5, 70, 8), (3, 50, 5), (0, 89, 1)):
        noise = torch.randn(rows, hidden, generator=generator)
        found = []
        for way in ways:
            span = Span(memory.clone(), begin, start, rows)
            turns = way.places.turns(start, start + rows + way.more(rows))
            with torch.inference_mode():
                found.append((way.through(noise, turns, None, span), span.whole))
        assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_what_python_goes_on_running_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = opened(tiny_target(), tmp_path / "half", dtype="bfloat16")
    assert of_layers(half) == ("states are torch.bfloat16", False)
    bare = opened(tiny_target(), tmp_path / "wide", dtype="float64")
    assert "float64" in of_layers(bare).why
    if not why_not_narrow("int8"):
        small = opened(tiny_target(), tmp_path / "int8", weights="int8")
        assert of_layers(small) == ("weights are not packed by oneDNN", False)
    monkeypatch.setattr(packed, "choose_kind", lambda dtype, out: "mkl")
    other = opened(tiny_target(), tmp_path / "mkl")
    assert "not packed by oneDNN" in of_layers(other).why
    for target in (half, bare, other):
        assert (
            TorchPair(target).interpreted().startswith("off: ") and not TorchPair(target).warnings
        )


def test_products_with_a_bias_of_their_own_are_left_to_python() -> None:
    model = tiny_draft(**ODDITIES["biased_gelu"])
    fuse_draft(model)
    pack_model(model)
    assert reason(list(model.layers)).why


def test_a_torch_that_cannot_interpret_them_is_a_note_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses() -> NoReturn:
        raise RuntimeError("torch.jit is no more\nand a trace")

    expected = logits(opened(tiny_target(), tmp_path / "a"))
    monkeypatch.setattr(interpreted, "_script", refuses)
    target = opened(tiny_target(), tmp_path / "b")
    assert torch.equal(logits(target), expected)
    (note,) = TorchPair(target).warnings
    assert "interpreter cannot: torch.jit is no more (torch" in note
    assert (
        TorchPair(target).interpreted() == "off: torch's interpreter cannot: torch.jit is no more"
    )


def test_an_interpreter_that_the_user_has_switched_off_is_no_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(opened(tiny_target(), tmp_path / "a"))
    monkeypatch.setattr(torch.jit._state._enabled, "enabled", False)  # PYTORCH_JIT=0
    target = opened(tiny_target(), tmp_path / "b")
    assert torch.equal(logits(target), expected)
    assert not TorchPair(target).warnings
    assert "PYTORCH_JIT=0" in TorchPair(target).interpreted()


def test_an_interpreter_that_gives_other_numbers_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, optimized = interpreted._script()

    def off_by_a_bit(*given: Any) -> Any:
        x, states = run(*given)
        return x, [torch.nextafter(state, state + 1) for state in states]

    expected = logits(opened(tiny_target(), tmp_path / "a"))
    monkeypatch.setattr(interpreted, "_script", lambda: (off_by_a_bit, optimized))
    target = opened(tiny_target(), tmp_path / "b")
    assert torch.equal(logits(target), expected)
    assert "other numbers" in TorchPair(target).warnings[0]


def logits(target: LoadedTarget) -> Tensor:
    with torch.inference_mode():
        return make_forward(target.model)([7, 300, 12, 44], make_cache(target.config, 16), 0)


def test_a_pair_says_what_is_interpreted_and_leaves_torch_as_it_was(tmp_path: Path) -> None:
    target = opened(tiny_target(), tmp_path)
    pair = TorchPair(target)
    assert pair.runs_on()["interpreted"] == pair.interpreted() == "target"
    logits(target)
    assert torch._C._get_graph_executor_optimize(), "it is other code's as well"
    with dflash.load(str(tmp_path), threads=1, profile=False) as engine:
        assert engine.generate([7, 8, 9], max_tokens=8).token_ids
