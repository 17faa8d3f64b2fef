"""``force_dflash``: another target's draft through a projection, loudly, and never another text."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dflash.backends.torch.bridge import FILE, make_bridge
from dflash.config import LoadConfig
from dflash.drafts.spec import read_spec
from dflash.engine import Engine
from dflash.errors import PairError, WeightsError
from dflash.opening import open_pair
from tests.backends.tiny import VOCAB, reference_generate, save_target, tiny_target, tiny_tokenizer
from tests.drafts.configs import config, config2
from tests.facades.drafts import save_draft

pytestmark = pytest.mark.torch

WIDE, NARROW, OURS = 96, 32, 64
PROMPT = [5, 9, 200, 31]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tiny_target(), tiny_tokenizer(), tmp_path_factory.mktemp("target"))


def draft(folder: Path, width: int, **changes: Any) -> Path:
    return save_draft(folder / f"draft{width}", hidden_size=width, **changes)


def forced(target: Path, draft: Path, **options: Any) -> Any:
    given = {"device": "cpu", "dtype": "float32", "profile": False, "force_dflash": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are on the pair, too
        return open_pair(LoadConfig(str(target), str(draft), **{**given, **options}))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 4}])
def test_the_text_is_the_targets(
    target: Path, tmp_path: Path, width: int, sampling: dict[str, Any]
) -> None:
    with Engine(forced(target, draft(tmp_path, width))) as engine:
        found = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, block_size=6, **sampling)
        plain = engine.generate(PROMPT, max_tokens=30, ignore_eos=True, block_size=1, **sampling)
    assert found.token_ids == plain.token_ids
    assert found.stats.drafted > 0
    if not sampling:
        assert list(found.token_ids) == reference_generate(tiny_target(eos=None), PROMPT, 30)


def test_it_says_so_loudly_and_only_where_it_is_asked_for(target: Path, tmp_path: Path) -> None:
    folder = draft(tmp_path, WIDE)
    with pytest.raises(PairError, match="--force-dflash"):
        forced(target, folder, force_dflash=False)
    pair = forced(target, folder)
    assert any(message.startswith("FORCED") for message in pair.warnings)
    fitting = forced(target, draft(tmp_path, OURS))
    assert fitting.warnings == () and fitting.draft.tables.fit is None


def test_a_dflash2_draft_is_forced_too(target: Path, tmp_path: Path) -> None:
    keys = config2(hidden_size=NARROW, vocab_size=VOCAB)
    nested = keys["dflash_config"]
    folder = draft(
        tmp_path, NARROW, architectures=keys["architectures"], is_causal=False,
        dflash_config=nested, block_size=8,
    )  # fmt: skip
    with Engine(forced(target, folder)) as engine:
        found = engine.generate(PROMPT, max_tokens=20, ignore_eos=True, block_size=8)
    assert list(found.token_ids) == reference_generate(tiny_target(eos=None), PROMPT, 20)


def test_another_depth_is_a_warning_then_but_taps_outside_stay_an_error(
    target: Path, tmp_path: Path
) -> None:
    pair = forced(target, draft(tmp_path, WIDE, num_target_layers=9))
    assert any("9 layers" in message for message in pair.warnings)
    outside = {"mask_token_id": 300, "target_layer_ids": [0, 7]}
    with pytest.raises(PairError, match="taps layers"):
        forced(target, draft(tmp_path / "deep", WIDE, dflash_config=outside))


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def bridge(folder: Path, width: int) -> Any:
    spec = read_spec(config(hidden_size=width))
    return make_bridge(folder, spec, OURS, torch.device("cpu"))


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_without_a_projection_every_tap_is_cut_or_filled_up(tmp_path: Path, width: int) -> None:
    made, x = bridge(tmp_path, width), rows(3, 2 * OURS)
    fitted, same = made.features(x), min(width, OURS)
    for tap in range(2):
        assert torch.equal(
            fitted[:, tap * width : tap * width + same], x[:, tap * OURS : tap * OURS + same]
        )
        assert not fitted[:, tap * width + same : (tap + 1) * width].any()
    assert made.embedding(rows(5, OURS)).shape == (5, width)
    assert made.hidden(rows(5, width)).shape == (5, OURS)


def test_a_projection_in_the_drafts_folder_is_used(tmp_path: Path) -> None:
    matrix = rows(NARROW, OURS)
    save_file({"features": matrix, "embedding": matrix.clone()}, tmp_path / FILE)
    made, x = bridge(tmp_path, NARROW), rows(3, 2 * OURS)
    torch.testing.assert_close(made.features(x)[:, NARROW:], x[:, OURS:] @ matrix.T)
    torch.testing.assert_close(made.embedding(x[:, :OURS]), x[:, :OURS] @ matrix.T)
    assert made.hidden(rows(1, NARROW)).shape == (1, OURS)


@pytest.mark.parametrize("wrong", [{"features": (OURS, NARROW)}, {"other": (1, 1)}])
def test_a_projection_of_other_sizes_is_refused(
    tmp_path: Path, wrong: dict[str, Sequence[int]]
) -> None:
    save_file({name: rows(*shape) for name, shape in wrong.items()}, tmp_path / FILE)
    with pytest.raises(WeightsError, match=json.dumps([NARROW, OURS])[1:-1]):
        bridge(tmp_path, NARROW)
