"""A DFlash v1 draft made one of DFlash2: its new parts may learn first, and it may learn less."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dflash.errors import ConfigError
from dflash.train.config import DraftShape, Schedule, TrainConfig
from dflash.train.trainer import Trainer, learning_rate
from tests.train.rig import MASK, Rig, make_rig

SHAPE = DraftShape(
    layers=2, block_size=4, taps=(0, 2), mask_token_id=MASK, selector_rank=8, selector_top_k=6
)
SCHEDULE = Schedule(steps=6, sequences=2, anchors=6, learning_rate=1e-3)


def weights(rig: Rig) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in rig.model.named_parameters()}


def changed(rig: Rig, before: dict[str, torch.Tensor]) -> set[str]:
    return {n for n, value in rig.model.named_parameters() if not torch.equal(value, before[n])}


def v1_parts(rig: Rig) -> set[str]:
    return {
        name
        for name, _ in rig.model.named_parameters()
        if "_conv." not in name and "candidate_selector" not in name
    }


def test_the_selector_learns_alone_first_and_then_with_everything(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, shape=SHAPE, schedule=replace(SCHEDULE, selector_first=3))
    training, before = rig.trainer(), weights(rig)
    for record in training.run():
        moved = changed(rig, before)
        if training.step <= 3:
            assert moved and all(name.startswith("candidate_selector.") for name in moved)
            assert "entropy" not in record and record["selector"] == record["loss"]
        else:
            assert v1_parts(rig) < moved and record["entropy"] > 0


def test_what_learns_later_warms_up_then_and_joins_the_same_curve(tmp_path: Path) -> None:
    schedule = Schedule(steps=100, learning_rate=1.0, warmup=0.1, final=0.0, selector_first=50)
    config = make_rig(tmp_path, shape=SHAPE, schedule=schedule).config
    rates = [learning_rate(step, config) for step in range(100)]
    later = [learning_rate(step, config, 50) for step in range(50, 100)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert later[0] == pytest.approx(0.1 * rates[50])
    assert later[9:] == rates[59:] and rates[99] < 1e-3


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_what_the_start_brought_learns_at_its_share(tmp_path: Path, share: float) -> None:
    moved = []
    for rate in (1.0, share):
        rig = make_rig(tmp_path, shape=SHAPE)
        config = replace(rig.config, start=tmp_path, schedule=replace(SCHEDULE, start_rate=rate))
        before = weights(rig)
        for _ in Trainer(rig.model, rig.materials, config, v1_parts(rig)).run():
            pass
        after = weights(rig)
        moved.append({n: (after[n] - before[n]).abs().max().item() for n in before})
    whole, part = moved
    for name in v1_parts(rig):
        assert part[name] == 0 if share == 0 else 0 < part[name] < 0.05 * whole[name], name
    assert all(part[name] > 0.1 * whole[name] for name in set(whole) - v1_parts(rig))


def test_a_run_stopped_where_all_begin_to_learn_resumes_bitwise(tmp_path: Path) -> None:
    def make() -> tuple[Rig, Trainer]:
        rig = make_rig(tmp_path, shape=SHAPE)
        schedule = replace(SCHEDULE, selector_first=3, start_rate=0.1)
        config = replace(rig.config, start=tmp_path, schedule=schedule)
        return rig, Trainer(rig.model, rig.materials, config, v1_parts(rig))

    whole, training = make()
    for _ in training.run():
        if training.step == 3:
            training.save()
    second, resumed = make()
    resumed.restore()
    assert resumed.step == 3
    for _ in resumed.run():
        pass
    assert not changed(second, weights(whole))


def test_a_start_at_rate_zero_needs_parts_that_it_lacks(tmp_path: Path) -> None:
    schedule = replace(SCHEDULE, start_rate=0.0)
    data = (tmp_path / "text.jsonl",)
    with pytest.raises(ConfigError, match="nothing would learn"):
        TrainConfig("tiny", data, tmp_path / "out", schedule=schedule, start=tmp_path)
