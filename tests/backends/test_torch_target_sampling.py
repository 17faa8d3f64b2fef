"""Logits to tokens on torch: the same words as the reference rules in numpy."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from dflash.backends.torch.sampling import (
    BROKEN,
    EMPTY,
    Decision,
    greedy,
    log_probs,
    make_picker,
    settle,
)
from dflash.core.accept import choose, distribution
from dflash.core.types import Sampling
from dflash.errors import ConfigError, WeightsError

SETTINGS = [
    Sampling(temperature=0.3, seed=1),
    Sampling(temperature=1.0, seed=2, sample=3),
    Sampling(temperature=1.5, top_k=5, seed=3),
    Sampling(temperature=0.7, top_p=0.6, seed=4),
    Sampling(temperature=1.0, top_k=20, top_p=0.8, seed=5),
    Sampling(temperature=1.0, top_k=1000, top_p=1e-9, seed=6),
    Sampling(temperature=1.0, min_p=0.3, seed=7),
    Sampling(temperature=1.4, top_k=30, top_p=0.9, min_p=0.05, seed=8),
]


def rows(count: int = 6, vocab: int = 64) -> torch.Tensor:
    return torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 2


@pytest.mark.parametrize("sampling", SETTINGS)
def test_probabilities_are_those_of_the_reference(sampling: Sampling) -> None:
    ours = log_probs(rows(), sampling).exp().double()
    ours = ours / ours.sum(dim=-1, keepdim=True)
    for row, logits in zip(ours.numpy(), rows().numpy(), strict=True):
        np.testing.assert_allclose(row, distribution(logits, sampling), atol=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS])
def test_picked_tokens_are_those_of_the_reference(sampling: Sampling) -> None:
    picked = make_picker(sampling)(rows(), 10).tolist()
    expected = [choose(row, sampling, 10 + i) for i, row in enumerate(rows().numpy())]
    assert picked == expected


def test_a_row_is_picked_alike_alone_and_in_a_block() -> None:
    pick = make_picker(Sampling(temperature=1.0, seed=9))
    block = pick(rows(), 5).tolist()
    assert block == [int(pick(rows()[i : i + 1], 5 + i)[0]) for i in range(6)]


def test_seed_sample_and_position_each_change_what_is_drawn() -> None:
    logits = torch.zeros(1, 1000)

    def drawn(seed: int, sample: int, position: int) -> int:
        sampling = Sampling(temperature=1.0, seed=seed, sample=sample)
        return int(make_picker(sampling)(logits, position)[0])

    tokens = {drawn(1, 0, 0), drawn(2, 0, 0), drawn(1, 1, 0), drawn(1, 0, 1)}
    assert len(tokens) == 4 and drawn(1, 0, 0) == drawn(1, 0, 0)


def test_samples_follow_the_distribution() -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 2.0]])
    sampling = [Sampling(temperature=1.3, seed=seed) for seed in range(4000)]
    counts = Counter(int(make_picker(s)(logits, 0)[0]) for s in sampling)
    expected = distribution(logits[0].numpy(), sampling[0]) * 4000
    chi = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in range(4))
    assert chi < 16.3, "p < 0.001 with three degrees of freedom"


def test_equal_maxima_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 50_000)
    logits[1, [7, 40_000]] = 1.0
    assert greedy(logits).tolist() == [0, 7, 0]


def test_masked_tokens_do_not_make_a_row_unusable() -> None:
    logits = torch.full((1, 8), -torch.inf)
    logits[0, 5] = 0.0
    assert greedy(logits).tolist() == [5]


def test_drafts_are_kept_up_to_the_first_that_differs() -> None:
    own = torch.tensor([4, 5, 6, 7])
    assert settle(Decision(own), [4, 5, 6])[:2] == ([4, 5, 6, 7], 3)
    assert settle(Decision(own), [4, 9, 6])[:2] == ([4, 5], 1)
    assert settle(Decision(own), torch.tensor([1, 5, 6]))[:2] == ([4], 0)
    assert settle(Decision(own[:1]), ())[:2] == ([4], 0)


def test_a_rule_that_counted_itself_is_believed() -> None:
    decision = Decision(torch.tensor([4, 9, 0, 0]), torch.tensor(1))
    assert settle(decision, [4, 5, 6])[:2] == ([4, 9], 1)
    assert settle(decision, torch.tensor([4, 5, 6]))[:2] == ([4, 9], 1)


def test_a_bad_row_counts_only_if_it_was_reached() -> None:
    assert settle(Decision(torch.tensor([4, -1])), [9])[:2] == ([4], 0)
    with pytest.raises(WeightsError, match="not finite"):
        settle(Decision(torch.tensor([4, -1])), [4])
    with pytest.raises(ConfigError, match="forbid all"):
        settle(Decision(torch.tensor([4, -2])), [4])


def test_the_largest_is_the_first_of_any_width_and_damage_shows() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (1, 255, 256, 257, 1000):
        logits = torch.randint(-3, 4, (6, width), generator=generator).float()  # many ties
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert greedy(logits).tolist() == expected
    logits = torch.randn(3, 700, generator=generator)
    logits[0, 400], logits[1, 699], logits[2] = float("nan"), float("inf"), -torch.inf
    assert greedy(logits).tolist() == [BROKEN, BROKEN, EMPTY]
