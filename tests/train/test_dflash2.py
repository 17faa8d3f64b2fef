"""Training DFlash2: it starts as the v1 draft it contains, learns with two terms, and is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.backends.torch.dflash2 import DFlash2DraftModel
from dflash.drafts.spec import read_spec
from dflash.errors import ConfigError
from dflash.train import losses
from dflash.train.checkpoint import export
from dflash.train.config import DraftShape, Schedule
from dflash.train.selector import FactoredSelector, served, start_dflash2
from dflash.train.warmstart import random_start, start_from, warm_start
from tests.train.rig import MASK, Rig, make_rig, serve, walk

SHAPE = DraftShape(
    layers=2, block_size=4, taps=(0, 2), mask_token_id=MASK, selector_rank=8, selector_top_k=6
)
V1 = DraftShape(layers=2, block_size=4, taps=(0, 2), mask_token_id=MASK)


def train(rig: Rig) -> list[dict[str, float]]:
    records = list(rig.trainer().run())
    rig.model.eval()
    return records


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, list[dict[str, float]]]:
    schedule = Schedule(steps=150, sequences=2, anchors=30, learning_rate=3e-3)
    rig = make_rig(tmp_path_factory.mktemp("two"), shape=SHAPE, schedule=schedule)
    return rig, train(rig)


def test_the_two_terms_fall_and_the_labels_are_recalled(
    trained: tuple[Rig, list[dict[str, float]]],
) -> None:
    _, records = trained
    for name in ("entropy", "selector", "loss"):
        first, last = (sum(r[name] for r in part) for part in (records[:10], records[-10:]))
        assert last < 0.6 * first, name
    last = records[-1]
    assert last["candidate_recall"] >= last["recall_1"] > 0.8
    assert last["path"] > 0.8


def test_what_is_trained_is_served(
    trained: tuple[Rig, list[dict[str, float]]], tmp_path: Path
) -> None:
    rig, _ = trained
    export(tmp_path / "draft", rig.model, rig.draft)
    assert read_spec(tmp_path / "draft").kind == "dflash2"
    assert serve(rig, tmp_path / "draft") == pytest.approx(walk(rig).mean_committed, rel=0.05)


def start(rig: Rig) -> DFlash2DraftModel:
    assert isinstance(rig.model, DFlash2DraftModel)
    return rig.model


def test_it_begins_as_the_v1_draft_it_is_started_from(tmp_path: Path) -> None:
    first = make_rig(tmp_path, shape=V1, schedule=Schedule(steps=40, sequences=2, anchors=20))
    train(first)
    export(tmp_path / "v1", first.model, first.draft)
    second = make_rig(tmp_path, shape=SHAPE)
    new = start_from(second.model, tmp_path / "v1")
    assert all("conv" in name or "candidate_selector" in name for name in new)
    with torch.no_grad():
        for parameter in first.model.parameters():
            parameter.copy_(parameter.bfloat16().float())
    before, after = walk(first), walk(second)
    assert after == before
    assert before.mean_committed > 1.2


def test_a_start_of_another_shape_is_refused(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, shape=V1)
    export(tmp_path / "v1", rig.model, rig.draft)
    deeper = make_rig(tmp_path, shape=DraftShape(1, 4, (0, 2), MASK))
    with pytest.raises(ConfigError, match="another shape"):
        start_from(deeper.model, tmp_path / "v1")
    other = make_rig(tmp_path, shape=DraftShape(2, 4, (1, 2), MASK))
    with pytest.raises(ConfigError, match="taps"):
        start_from(other.model, tmp_path / "v1")


def test_a_dflash2_draft_can_be_trained_on(
    trained: tuple[Rig, list[dict[str, float]]], tmp_path: Path
) -> None:
    rig, _ = trained
    export(tmp_path / "draft", rig.model, rig.draft)
    again = make_rig(tmp_path, shape=SHAPE)
    assert start_from(again.model, tmp_path / "draft")
    assert walk(again).mean_committed == pytest.approx(walk(rig).mean_committed, rel=0.05)


def test_the_served_tables_are_the_rows_that_were_trained(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, shape=SHAPE)
    selector = start(rig).candidate_selector
    assert isinstance(selector, FactoredSelector)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    weights = dict(served(rig.model))
    assert not any("map" in name for name in weights)
    ids = torch.tensor([3, 300])
    for name, rows in (("predecessor", selector.predecessors), ("successor", selector.successors)):
        table = weights[f"candidate_selector.{name}_codebook"]
        torch.testing.assert_close(table[ids], rows(ids).detach())


def test_the_selector_term_is_the_formula_over_candidates() -> None:
    scores = torch.randn(1, 3, 2, generator=torch.Generator().manual_seed(0))
    candidates = torch.tensor([[[4, 9], [2, 7], [1, 3]]])
    labels, valid = torch.tensor([[9, 5, 1]]), torch.tensor([[True, True, True]])
    found = losses.selector_loss(scores, candidates, labels, valid, torch.tensor([1.0, 0.5, 0.25]))
    logs = scores.log_softmax(-1)[0]
    wanted = -(logs[0, 1] + 0.25 * logs[2, 0]) / 1.25  # the second label is no candidate
    torch.testing.assert_close(found.loss, wanted)
    assert found.recalled.tolist() == [[True, False, True]]
    best = scores.argmax(-1)[0].tolist()
    assert found.hits.tolist() == [[best[0] == 1, False, best[2] == 0]]


def test_rows_that_do_not_count_change_nothing() -> None:
    scores = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    candidates = torch.arange(3).expand(2, 2, 3)
    labels, valid = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 2, dtype=torch.bool)
    found = losses.selector_loss(scores, candidates, labels, valid, None)
    found.loss.backward()
    assert found.loss == 0 and scores.grad is not None and not scores.grad.any()


def test_a_new_draft_is_warm_though_it_has_convolutions(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, shape=SHAPE)
    generator: Any = torch.Generator().manual_seed(0)
    random_start(rig.model, generator)
    start_dflash2(start(rig), rig.materials.embedding, generator)
    assert warm_start(rig.model, rig.target, [c.ids for c in rig.conversations[:2]])
