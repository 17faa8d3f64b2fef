from __future__ import annotations

import torch

from dflash.train import losses


def test_decay_follows_the_formula_and_none_is_uniform() -> None:
    weights = losses.decay_weights(3, 4.0)
    expected = torch.tensor([1.0, 2.718281828**-0.25, 2.718281828**-0.5])
    assert torch.allclose(weights, expected, atol=1e-6)
    assert losses.decay_weights(3, None).tolist() == [1.0, 1.0, 1.0]


def test_prefix_weights_are_sums_of_smoothed_prefix_products() -> None:
    weights = losses.prefix_weights(torch.tensor([[1.0, 0.0, 1.0]]), alpha=0.5)
    assert torch.allclose(weights, torch.tensor([[1.0 + 0.5 + 0.5, 0.5 + 0.5, 0.5]]))


def test_frequent_tokens_keep_the_most_common_and_index_them() -> None:
    kept = losses.FrequentTokens.count([7, 7, 3, 3, 3, 1], vocab_size=10, size=2)
    assert kept.kept.tolist() == [3, 7] and kept.index[3] == 0 and kept.index[1] == -1
    every = losses.FrequentTokens.count([1], vocab_size=4, size=0)
    assert every.kept.tolist() == [0, 1, 2, 3]


def test_labels_outside_the_kept_tokens_and_dead_rows_weigh_nothing() -> None:
    logits = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(0))
    labels, valid = torch.tensor([[2, -1, 1]]), torch.tensor([[True, True, False]])
    loss = losses.block_loss(logits, labels, valid, torch.ones(3))
    assert torch.isclose(loss, -logits[0, 0].log_softmax(-1)[2])


def test_the_loss_keeps_its_gradient_on_near_equal_logits_in_bfloat16() -> None:
    """R110: against float64, within one percent."""
    base = torch.full((1, 1, 512), 3.0)
    labels, valid = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    grads = []
    for kind in (torch.bfloat16, torch.float64):
        logits = base.to(kind).requires_grad_()
        losses.block_loss(logits, labels, valid, torch.ones(1)).backward()
        assert logits.grad is not None
        grads.append(logits.grad.double().norm().item())
    assert abs(grads[0] / grads[1] - 1) < 0.01


def test_soft_targets_replace_part_of_the_hard_label() -> None:
    logits = torch.randn(1, 1, 5, generator=torch.Generator().manual_seed(0))
    labels, valid = torch.tensor([[1]]), torch.ones(1, 1, dtype=torch.bool)
    soft = torch.full((1, 1, 5), 0.2)
    logs = logits.log_softmax(-1)[0, 0]
    expected = 0.5 * -logs[1] + 0.5 * -logs.mean()
    loss = losses.block_loss(logits, labels, valid, torch.ones(1), soft, 0.5)
    assert torch.isclose(loss, expected)
