from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError, ConfigError
from dflash.train import checkpoint, trainer
from dflash.train.checkpoint import export, load_state
from dflash.train.config import DraftShape, Objective, Schedule, TrainConfig
from dflash.train.interrupt import interrupts_held
from dflash.train.run import line
from tests.train.rig import MASK, make_rig


def states(rig: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in rig.model.state_dict().items()}


def test_the_loss_falls(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, schedule=Schedule(steps=60, sequences=2, anchors=16))
    records = [record["loss"] for record in rig.trainer().run()]
    assert sum(records[-10:]) < 0.7 * sum(records[:10])


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_ends_in_bitwise_the_same_weights(tmp_path: Path, stop: int) -> None:
    whole = make_rig(tmp_path / "a")
    for _ in whole.trainer().run():
        pass
    (tmp_path / "b").mkdir()
    first = make_rig(tmp_path / "b")
    training = first.trainer()
    for _ in training.run():
        if training.step == stop:
            training.save()
        if training.step == stop + 1:  # killed after the checkpoint: this step is lost
            break
    second = make_rig(tmp_path / "b")
    resumed = second.trainer()
    resumed.restore()
    assert resumed.step == stop
    for _ in resumed.run():
        pass
    ours, theirs = states(whole), states(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def _ctrl_c_raises() -> Iterator[None]:
    """As in a terminal: a job that a shell started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c_raises")
def test_ctrl_c_in_an_update_leaves_a_checkpoint_that_resumes_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_rig(tmp_path)
    for _ in whole.trainer().run():
        pass
    first = make_rig(tmp_path)
    training = first.trainer()
    update = training.optimizer.step

    def interrupted(*args: Any) -> Any:
        done = update(*args)
        if training.step == 2:
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(training.optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(training.run())
    assert training.step == 3
    training.save()
    second = make_rig(tmp_path)
    resumed = second.trainer()
    resumed.restore()
    for _ in resumed.run():
        pass
    ours, theirs = states(whole), states(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_handler_of_ctrl_c_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupts_held():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failed_export_leaves_the_former_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tmp_path)
    export(tmp_path, rig.model, rig.draft)
    before = (tmp_path / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        export(tmp_path, rig.model, rig.draft)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_an_export_in_another_number_of_files_leaves_no_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(tmp_path)
    for limit, count in ((checkpoint.SHARD_BYTES, 1), (40_000, 0), (checkpoint.SHARD_BYTES, 1)):
        monkeypatch.setattr(checkpoint, "SHARD_BYTES", limit)
        export(tmp_path, rig.model, rig.draft)
        files = [file.name for file in tmp_path.glob("model*")]
        assert (files == ["model.safetensors"]) == bool(count)
        assert not any(name.endswith(".part") for name in files)


def test_a_step_without_a_loss_is_null_in_the_log() -> None:
    assert json.loads(line({"loss": float("nan"), "rate": 0.123456789})) == {
        "loss": None,
        "rate": 0.12346,
    }


def test_resuming_another_run_or_nothing_is_refused(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    with pytest.raises(CheckpointError, match="nothing to resume"):
        rig.trainer().restore()
    rig.trainer().save()
    same: Any = {"sequences": 2, "anchors": 6, "learning_rate": 1e-3}
    other = make_rig(tmp_path, schedule=Schedule(steps=6, seed=9, **same))
    with pytest.raises(ConfigError, match=r"other settings: --seed was 0 and is 9\."):
        other.trainer().restore()
    longer = make_rig(tmp_path, schedule=Schedule(steps=9, **same))
    longer.trainer().restore()


def test_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"broken")
    training = rig.trainer()
    with pytest.raises(CheckpointError, match="damaged"):
        load_state(tmp_path, rig.model, training.optimizer, training.identity())


def test_a_step_with_an_infinite_loss_is_skipped_and_counted(tmp_path: Path) -> None:
    """R109."""
    rig = make_rig(tmp_path)
    training = rig.trainer()
    training.train_step([0, 1])
    before = states(rig)
    rig.materials.head = rig.materials.head * torch.inf
    record = training.train_step([0, 1])
    assert not math.isfinite(record["loss"]) and training.skipped_steps == 1
    assert all(torch.equal(before[name], value) for name, value in states(rig).items())
    training.save()
    resumed = make_rig(tmp_path).trainer()
    resumed.restore()
    assert resumed.skipped_steps == 1 and "skipped_steps" not in resumed.history
    assert all(torch.isfinite(value).all() for value in states(rig).values())


def test_the_mask_id_of_the_config_is_the_one_trained_with(tmp_path: Path) -> None:
    """R34: it is saved, nothing is resized, and another id gives another loss."""
    rig = make_rig(tmp_path)
    loss = rig.trainer().train_step([0, 1])["loss"]
    export(tmp_path / "draft", rig.model, rig.draft)
    assert read_spec(tmp_path / "draft").mask_token_id == MASK
    other = make_rig(tmp_path)
    other.materials.mask_id = MASK + 1
    assert other.trainer().train_step([0, 1])["loss"] != loss


def test_the_effective_decay_is_the_documented_default(tmp_path: Path) -> None:
    """R113: unset follows the block size, uniform and prefix are words, and the log shows it."""

    def config(objective: Objective, size: int) -> TrainConfig:
        shape = DraftShape(block_size=size)
        return TrainConfig("t", (Path("d"),), tmp_path, shape=shape, objective=objective)

    assert config(Objective(), 16).decay == 7.0
    assert config(Objective(), 8).decay == 4.0
    assert config(Objective(), 6).decay == 3.0
    assert config(Objective(decay="uniform"), 8).decay == "uniform"


def test_sequences_without_anchors_are_passed_over(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    silent = type(rig.conversations[0])(rig.conversations[0].ids, (False,) * 44)
    rig.materials.sequences[0] = silent
    assert rig.trainer().train_step([0])["positions"] == 0
    assert math.isfinite(rig.trainer().train_step([0, 1])["loss"])


def test_features_kept_on_disk_equal_those_computed(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, file=tmp_path / "features.bin")
    fresh, kept = rig.materials.features[1], rig.materials.features[1]
    assert torch.equal(fresh[0], kept[0]) and torch.equal(fresh[1], kept[1])


def test_the_order_is_a_function_of_the_seed_and_visits_all() -> None:
    lengths = list(range(10))
    one, two = trainer.order(lengths, 3, 0), trainer.order(lengths, 3, 0)
    first = [next(one) for _ in range(4)]
    assert first == [next(two) for _ in range(4)]
    assert sorted(index for batch in first for index in batch) == lengths


def test_a_continued_run_takes_over_the_features_it_stored(tmp_path: Path) -> None:
    file = tmp_path / "features.bin"
    first = make_rig(tmp_path, file=file).materials.features
    assert list(first.fill())[-1] == len(first.sequences)
    wanted = first[1][0].clone()
    again = make_rig(tmp_path, file=file).materials.features
    assert again.done.all() and torch.equal(again[1][0], wanted)
    other = make_rig(
        tmp_path, file=file, shape=DraftShape(2, 4, taps=(1, 2), mask_token_id=MASK)
    ).materials.features
    assert not other.done.any()
