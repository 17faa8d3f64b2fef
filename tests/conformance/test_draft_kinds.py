"""Both laws for each kind of draft on torch, through the front door, greedy and sampled."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

pytest.importorskip("torch")

from torch import Tensor

from dflash.backends.torch import open_pair
from dflash.backends.torch.dflash_session import DFlashSession
from dflash.config import GenerateConfig, LoadConfig
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.grammar import Grammars
from dflash.requests import make_request
from tests.conformance.backends import Backend
from tests.conformance.grid import plain
from tests.conformance.torch_backend import make
from tests.facades.drafts import MASK, save_draft

pytestmark = pytest.mark.torch

PROMPT, TOKENS, NATIVE = [71, 103, 35, 90, 120, 33, 64], 33, 8
SIZES = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}
Expected: TypeAlias = Callable[[dict[str, Any]], list[int]]
PLACES = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": {**PLACES, **SIZES},
    },
    "dflash2, sliding": {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 12,
        "dflash_config": {**PLACES, **SIZES, "conv_kernel_size": 3},
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "words": {"temperature": 1.2, "seed": 2, "no_repeat_ngram": 3},
    "held to a form": {"regex": "([a-m]{1,4}[0-9]{1,3} ){2,9}[.!?]"},
    "best path": {"draft_path": "best"},
    "least confidence": {"draft_p_min": 0.4},
}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> tuple[Backend, Path]:
    folder = tmp_path_factory.mktemp("kinds")
    return make(folder, ties=False), folder


@pytest.fixture(scope="module", params=DRAFTS)
def engine(request: pytest.FixtureRequest, rig: tuple[Backend, Path]) -> Iterator[Engine]:
    _, folder = rig
    draft = save_draft(folder / request.param, block_size=NATIVE, **DRAFTS[request.param])
    load = LoadConfig(str(folder / "target"), str(draft), device="cpu", dtype="float32")
    with Engine(open_pair(load)) as made:
        yield made


@pytest.fixture(scope="module")
def expected(rig: tuple[Backend, Path]) -> Expected:
    """The target's own text under options: whatever drafts, it is one."""
    backend, _ = rig
    known: dict[str, list[int]] = {}

    def text(options: dict[str, Any]) -> list[int]:
        if (key := repr(options)) not in known:
            config = GenerateConfig(max_tokens=TOKENS, **options)
            grammar = Grammars(backend.pair).start(config.constraint)
            asked = make_request(backend.pair, PROMPT, config, grammar=grammar)
            known[key] = plain(backend, asked)
        return known[key]

    return text


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_the_output_never_changes(
    expected: Expected, engine: Engine, options: dict[str, Any]
) -> None:
    text = expected(options)
    for size in (1, 2, 5, NATIVE, "auto"):
        found = engine.generate(PROMPT, max_tokens=TOKENS, block_size=size, **options)
        assert list(found.token_ids) == text, size


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_a_tree_changes_nothing(
    expected: Expected, engine: Engine, options: dict[str, Any]
) -> None:
    if "draft_path" in options or "draft_p_min" in options:
        with pytest.raises(ConfigError, match="weighs its own branches"):
            engine.generate(PROMPT, draft_tree=8, **options)
        return
    text = expected(options)
    for size, tree in ((2, 6), (5, 24), (None, 64), ("auto", 12), (None, "auto")):
        more: Any = {"block_size": size, "draft_tree": tree, **options}
        found = engine.generate(PROMPT, max_tokens=TOKENS, **more)
        assert list(found.token_ids) == text, (size, tree)


@pytest.mark.parametrize("tree", [0, 24])
@pytest.mark.parametrize("name", ["greedy", "seeded", "held to a form"])
@pytest.mark.parametrize("size", [2, 5, NATIVE])
def test_a_perfect_draft_is_never_wasted(
    expected: Expected,
    engine: Engine,
    name: str,
    size: int,
    tree: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = WAYS[name]
    text = [*PROMPT, *expected(options)]
    logits = DFlashSession._logits

    def knowing(self: DFlashSession, hidden: Tensor) -> Tensor:
        """Rows that know the text, before whatever the kind of draft makes of them."""
        rows = logits(self, hidden)
        for row, token in enumerate(text[len(self._tokens) :][: rows.shape[0]]):
            rows[row, token] += 1e4
        return rows

    monkeypatch.setattr(DFlashSession, "_logits", knowing)
    found = engine.generate(PROMPT, max_tokens=TOKENS, block_size=size, draft_tree=tree, **options)
    assert list(found.token_ids) == text[len(PROMPT) :]
    branches = tree and name != "held to a form"
    assert (found.stats.accepted == found.stats.drafted) is not bool(branches)
    whole, rest = divmod(len(text) - len(PROMPT) - 1, size)
    assert found.stats.rounds == whole + bool(rest)


def test_requests_one_after_the_other_leave_nothing_behind(engine: Engine) -> None:
    """Counted in tensors: resident memory is measured by bench/soak.py."""

    def tensors(requests: int) -> int:
        for seed in range(requests):
            prompt = [*PROMPT, seed + 1]
            more: Any = {"temperature": 0.8, "seed": seed, "draft_tree": 12 * (seed % 2)}
            engine.generate(prompt, max_tokens=8, **more)
        gc.collect()
        return sum(issubclass(type(found), Tensor) for found in gc.get_objects())

    before = tensors(6)
    # rounds that end a text leave features in the queue of the two that are parked
    assert tensors(24) < before + 24
