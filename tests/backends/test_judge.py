"""A request's whole way of sampling on torch: draft, coins, rule, the target's own token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash.backends.torch import judge as judging
from dflash.backends.torch.judge import make_judge
from dflash.backends.torch.propose import make_proposer
from dflash.backends.torch.sampling import Ruling, probabilities, settle
from dflash.core import accept, noise
from dflash.core.noise import Stream
from dflash.core.types import Request, Sampling
from dflash.errors import WeightsError

from .laws import DRAFTED, DRAFTS, VOCAB, Experiment, row_of, target_logits

pytestmark = pytest.mark.torch

PROMPT = [3, 1, 4]
SAMPLES = 1_200  # through everything but the forward; test_rules.py has the large numbers
WAYS = {
    "rejection": Sampling(1.0, rule="rejection"),
    "block, top-p": Sampling(0.7, top_p=0.9, rule="block"),
    "match, top-k": Sampling(1.0, top_k=4),
    "argmax proposals, min-p": Sampling(1.0, min_p=0.1, rule="rejection", greedy_drafts=True),
}


def one_block(sampling: Sampling, draft: Tensor) -> Ruling:
    """Propose and judge right after the prompt, with logits from the tables."""
    request = Request(PROMPT, 20, sampling=sampling)
    logits = draft[[int(row_of(torch.zeros(1, n).long())) for n in range(DRAFTED)]]
    tokens, q = make_proposer(request)(logits, PROMPT)
    drafted = torch.as_tensor(tokens).long()
    path = [int(row_of(drafted[None, :n])) for n in range(len(drafted) + 1)]
    ruling = settle(make_judge(request)(target_logits()[path], PROMPT, drafted, q), drafted)
    assert ruling.tokens[: ruling.accepted] == drafted[: ruling.accepted].tolist()
    return ruling


def many_blocks(sampling: Sampling, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens ``[samples, n + 1]`` and how many of each row were committed, one seed a row."""
    tokens = torch.zeros(SAMPLES, DRAFTED + 1, dtype=torch.long)
    said = torch.zeros(SAMPLES, dtype=torch.long)
    for seed in range(SAMPLES):
        ruling = one_block(replace(sampling, seed=seed), draft)
        said[seed] = len(ruling.tokens)
        tokens[seed, : said[seed]] = torch.tensor(ruling.tokens)
    return tokens, said


@pytest.mark.parametrize("sampling", WAYS.values(), ids=WAYS)
def test_blocks_of_many_seeds_follow_the_targets_law(sampling: Sampling) -> None:
    made = Experiment(sampling, DRAFTS["near"](), blocks=SAMPLES)
    tokens, said = many_blocks(sampling, made.draft)
    assert (said > 1).any() and (said == 1).any()
    assert made.judged(made.filled(tokens, said)) > 1e-3


def test_options_change_the_law_of_target_and_draft_alike() -> None:
    bias = Sampling(1.2, rule="rejection", repetition_penalty=1.4, logit_bias=((2, 1.5),))
    made = Experiment(bias, DRAFTS["near"](), blocks=SAMPLES)
    logits = target_logits()[0].clone()
    for token in PROMPT:
        logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
    logits[2] += 1.5
    made.p_table = probabilities(logits[None], bias).double().expand(made.p_table.shape)
    tokens, _ = many_blocks(bias, made.draft)
    assert made.judged(tokens[:, :1]) > 1e-3


def test_the_three_streams_of_a_place_have_nothing_in_common() -> None:
    thrown = [noise.coins(7, 0, stream, 3, 4000) for stream in Stream]
    thrown += [noise.coins(7, 0, Stream.ACCEPT, 4, 4000), noise.coins(7, 1, Stream.ACCEPT, 3, 4000)]
    assert (np.abs(np.corrcoef(thrown) - np.eye(len(thrown))) < 0.06).all()
    assert (
        noise.coins(7, 0, Stream.DRAFT, 3, 9)[:4] == noise.coins(7, 0, Stream.DRAFT, 3, 4)
    ).all()


def test_a_coin_of_every_stream_decides_something_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[Stream, int, int]] = []

    def note(seed: int, sample: int, stream: Stream, position: int, count: int) -> Any:
        asked.append((stream, position, count))
        return noise.coins(seed, sample, stream, position, count)

    monkeypatch.setattr(judging, "coins", note)
    one_block(Sampling(1.0, rule="rejection"), DRAFTS["near"]())
    assert asked == [(Stream.DRAFT, 0, 2), (Stream.ACCEPT, 0, 2), (Stream.OWN, 0, 1)]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("coin", [0.0, float(np.nextafter(1.0, 0.0))])
def test_an_extreme_coin_never_says_what_the_filters_cut(
    rule: Any, coin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "coins", lambda s, n, stream, at, count: np.full(count, coin))
    sampling = Sampling(1.0, top_k=2, rule=rule)
    kept = (probabilities(target_logits(), sampling) > 0).tolist()
    for draft in DRAFTS.values():
        ruling = one_block(sampling, draft())
        for place, token in enumerate(ruling.tokens):
            row = int(row_of(torch.tensor([ruling.tokens[:place]]).long().reshape(1, -1)))
            assert kept[row][token]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_temperature_zero_is_the_argmax_under_every_rule(rule: Any) -> None:
    greedy = one_block(Sampling(), DRAFTS["near"]())
    assert one_block(Sampling(rule=rule), DRAFTS["near"]()) == greedy


def test_q_is_what_the_tokens_were_drawn_from() -> None:
    sampling = Sampling(0.8, top_k=3, rule="rejection")
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5))
    counts = torch.zeros(2, VOCAB)
    for seed in range(1000):
        request = Request(PROMPT, 9, sampling=replace(sampling, seed=seed))
        tokens, q = make_proposer(request)(logits, PROMPT)
        counts[torch.arange(2), torch.as_tensor(tokens)] += 1
    assert q is not None
    torch.testing.assert_close(q, probabilities(logits, sampling))
    assert ((counts / 1000 - q).abs() < 0.05).all()
    assert (counts[q == 0] == 0).all()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_of_a_vocabulary_without_padding_is_understood(rule: Any) -> None:
    request = Request(PROMPT, 9, sampling=Sampling(1.0, rule=rule, seed=1))
    tokens, q = make_proposer(request)(DRAFTS["near"]()[:2, : VOCAB - 1], PROMPT)
    drafted = torch.as_tensor(tokens).long()
    ruling = settle(make_judge(request)(target_logits()[:3], PROMPT, drafted, q), drafted)
    assert all(0 <= token < VOCAB for token in ruling.tokens)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_draft_without_numbers_harms_nobody(rule: Any) -> None:
    request = Request(PROMPT, 9, sampling=Sampling(1.0, rule=rule, seed=1))
    broken = torch.full((2, VOCAB), torch.nan)
    tokens, q = make_proposer(request)(broken, PROMPT)
    assert torch.as_tensor(tokens).tolist() == [0, 0]
    if q is not None:
        assert q.tolist() == [[1.0, 0, 0, 0, 0, 0]] * 2
    drafted = torch.as_tensor(tokens).long()
    ruling = settle(make_judge(request)(target_logits()[:3], PROMPT, drafted, q), drafted)
    assert all(0 <= token < VOCAB for token in ruling.tokens)


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_target_without_numbers_is_an_error_where_it_counts(rule: Any) -> None:
    request = Request(PROMPT, 9, sampling=Sampling(1.0, rule=rule, seed=1))
    logits = target_logits()[:2].clone()
    logits[0] = torch.nan
    drafted = torch.tensor([2])
    with pytest.raises(WeightsError, match="not finite"):
        settle(make_judge(request)(logits, PROMPT, drafted, None), drafted)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_device_judges_as_the_reference_with_the_same_coins(rule: Any) -> None:
    for seed in range(60):
        sampling = Sampling(1.0, rule=rule, seed=seed)
        ruling = one_block(sampling, DRAFTS["random"]())
        request = Request(PROMPT, 9, sampling=sampling)
        logits = DRAFTS["random"]()[[int(row_of(torch.zeros(1, n).long())) for n in (0, 1)]]
        tokens, q = make_proposer(request)(logits, PROMPT)
        drafted = torch.as_tensor(tokens).tolist()
        rows = [int(row_of(torch.tensor([drafted[:n]]).long().reshape(1, -1))) for n in range(3)]
        p = np.stack([accept.distribution(target_logits()[row].numpy(), sampling) for row in rows])
        assert q is not None
        accepted, own = accept.judge(drafted, p, q.double().numpy(), sampling, 0)
        assert (ruling.tokens, ruling.accepted) == ([*drafted[:accepted], own], accepted)
