from __future__ import annotations

from pathlib import Path

import torch

from dflash.train import blocks
from dflash.train.trainer import draft_states
from tests.train.rig import make_rig


def test_anchors_are_drawn_where_the_next_token_is_an_answer() -> None:
    answer = [False] * 5 + [True] * 6
    drawn = blocks.draw_anchors(answer, 99, torch.Generator().manual_seed(0))
    assert drawn == [4, 5, 6, 7, 8, 9]


def test_labels_stop_at_the_end_of_the_answer() -> None:
    block = blocks.build(
        [[10, 11, 12, 13, 14]], [[False, True, True, False, True]], [[0, 3]], 4, 99
    )
    assert block.inputs.tolist() == [[10, 99, 99, 99, 13, 99, 99, 99]]
    assert block.labels[0].tolist()[0] == [11, 12, 13]
    assert block.valid[0].tolist() == [[True, True, False], [True, False, False]]
    assert block.positions.flatten().tolist() == [0, 1, 2, 3, 3, 4, 5, 6]


def test_a_block_sees_the_context_before_its_anchor_and_itself() -> None:
    mask = blocks.attention_mask(torch.tensor([[2, 3]]), 5, 2)[0, 0]
    assert mask.int().tolist() == [
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 0, 1, 1],
    ]
    causal = blocks.attention_mask(torch.tensor([[2]]), 3, 2, causal=True)[0, 0]
    assert causal.int().tolist() == [[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]]
    window = blocks.attention_mask(torch.tensor([[4]]), 5, 2, window=3)[0, 0]
    assert window.int().tolist() == [[0, 0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 1, 1]]


def test_no_block_sees_features_from_its_anchor_on(tmp_path: Path) -> None:
    """R107: anchors one apart; changing later features leaves a block's states as they were."""
    rig = make_rig(tmp_path)
    conversation = rig.conversations[0]
    anchors = [8, 9, 10]
    block = blocks.build([conversation.ids], [conversation.answer], [anchors], 4, 5)
    features = rig.materials.features[0][0].float()[None]
    noise = rig.materials.embedding[block.inputs]
    before = draft_states(rig.model, features, block, noise)
    changed = features.clone()
    changed[:, 9:] += 3.0
    after = draft_states(rig.model, changed, block, noise)
    assert torch.equal(before[0, 0], after[0, 0]) and torch.equal(before[0, 1], after[0, 1])
    assert not torch.allclose(before[0, 2], after[0, 2])
