"""R106: what the trainer computes and what users run are one model."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from dflash.backends.torch.draft_load import load_draft
from dflash.backends.torch.load import wrap_target
from dflash.train import blocks
from dflash.train.checkpoint import export
from dflash.train.config import DraftShape, Schedule
from dflash.train.trainer import draft_states
from tests.train.rig import MASK, Rig, make_rig, serve, walk


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rig, Path]:
    """An overfitted draft, exported as users get it."""
    folder = tmp_path_factory.mktemp("trained")
    rig = make_rig(
        folder,
        schedule=Schedule(steps=300, sequences=2, anchors=30, learning_rate=3e-3),
        shape=DraftShape(layers=2, block_size=4, taps=(0, 2), mask_token_id=MASK),
    )
    for _ in rig.trainer().run():
        pass
    rig.model.eval()
    export(folder / "draft", rig.model, rig.draft)
    return rig, folder / "draft"


def test_what_training_calls_learned_the_walk_accepts_in_full(trained: tuple[Rig, Path]) -> None:
    assert walk(trained[0]).mean_committed > 0.9 * 4


def test_an_overfitted_draft_is_served_in_full_blocks(trained: tuple[Rig, Path]) -> None:
    assert serve(*trained) > 0.9 * 4


def test_trainer_and_server_compute_the_same_logits(trained: tuple[Rig, Path]) -> None:
    rig, folder = trained
    draft = load_draft(str(folder), wrap_target(rig.target), dtype="float32", pack=False)
    conversation, anchor = rig.conversations[0], 12
    block = blocks.build([conversation.ids], [conversation.answer], [[anchor]], 4, MASK)
    features = rig.materials.features[0][0].float()[None]
    noise = rig.materials.embedding[block.inputs]
    rounded = deepcopy(rig.model)  # as the served weights are
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16().float())
        trained_rows = draft_states(rounded, features, block, noise)[0, 0]
        model = draft.model
        context = model.context_kv(model.fuse(features[:, :anchor]), torch.arange(anchor))
        served = model.block(noise, torch.arange(anchor, anchor + 4), context)[0]
        head = rig.target.get_output_embeddings()
        assert torch.allclose(head(trained_rows), head(served), atol=1e-4)
