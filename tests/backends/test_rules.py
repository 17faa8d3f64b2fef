"""The device rules leave the target's law, in bulk; broken copies of them do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dflash.backends.torch import rules
from dflash.backends.torch.rules import Outcome, Rule, block, draw, rejection
from dflash.core import accept
from dflash.core.types import Sampling

from .laws import BLOCKS, DRAFTED, DRAFTS, VOCAB, Experiment, target_logits

pytestmark = pytest.mark.torch

RULES: dict[str, Rule] = {"rejection": rejection, "block": block}
LEAST, NEVER = 1e-3, 1e-6
FILTERS: dict[str, dict[str, Any]] = {
    "temperature 0.3": {"temperature": 0.3},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 1.0": {"temperature": 1.0},
    "temperature 1.5": {"temperature": 1.5},
    "top-p": {"temperature": 1.5, "top_p": 0.8},
    "top-k": {"temperature": 1.5, "top_k": 3},
    "min-p": {"temperature": 1.5, "min_p": 0.2},
}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
every_draft = pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
every_filter = pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)


@every_rule
@every_draft
@every_filter
def test_blocks_follow_the_targets_law(
    rule: Rule, draft: Callable[[], Tensor], options: dict[str, Any]
) -> None:
    tokens, _ = (made := Experiment(Sampling(**options), draft())).run(rule)
    assert tokens.shape[0] == BLOCKS >= 50_000
    assert made.judged(tokens) > LEAST


@every_rule
@every_draft
def test_drafts_that_are_the_only_ones_proposed_need_no_q(
    rule: Rule, draft: Callable[[], Tensor]
) -> None:
    tokens, _ = (made := Experiment(Sampling(1.0, top_p=0.95), draft())).run(rule, one_hot=True)
    assert made.judged(tokens) > LEAST


def test_block_verification_keeps_at_least_as_many_and_the_oracle_loses_none() -> None:
    for make in DRAFTS.values():
        one, two = (
            float(Experiment(Sampling(1.0), make()).run(rule)[1].double().mean())
            for rule in (rejection, block)
        )
        assert two > one - 0.01
        if make is DRAFTS["oracle"]:
            assert one == two == DRAFTED
        if make is DRAFTS["near"]:
            assert two > one + 0.01


# -- conditioned on rejection ----------------------------------------------------------------------


def second_best() -> tuple[Tensor, Tensor]:
    """The target after the prompt, and the draft that always says its second-best token."""
    p = target_logits()[0].double().softmax(-1)
    return p, p.sort(descending=True).indices[1]


@every_rule
@pytest.mark.parametrize("told", [True, False], ids=["q", "no q"])
def test_a_rejected_second_best_token_leaves_exactly_the_rest(rule: Rule, told: bool) -> None:
    p, token = second_best()
    made = Experiment(Sampling(1.0), target_logits())
    drafted = token.expand(BLOCKS, 1)
    q = torch.nn.functional.one_hot(drafted, VOCAB).double() if told else None
    found = rule(drafted, p.expand(BLOCKS, 2, VOCAB), q, made.coins(BLOCKS, 1), made.coins(BLOCKS))
    rejected = found.tokens[found.accepted == 0, 0]
    assert rejected.shape[0] == pytest.approx(float(1 - p[token]) * BLOCKS, rel=0.05)
    assert not (rejected == token).any()
    rest = p.clone()
    rest[token] = 0
    assert first_p(rejected, rest / rest.sum()) > LEAST


@every_rule
@every_draft
def test_what_follows_a_rejected_first_draft_is_the_residual(
    rule: Rule, draft: Callable[[], Tensor]
) -> None:
    made = Experiment(Sampling(1.2), draft())
    p, q = made.p_table[0], made.q_table[0]
    tokens, accepted = made.run(rule)
    if draft is DRAFTS["oracle"]:
        assert (accepted > 0).all()
        return
    rest = (p - q).clamp(min=0)
    assert first_p(tokens[accepted == 0, 0], rest / rest.sum()) > LEAST


def first_p(tokens: Tensor, law: Tensor) -> float:
    made = Experiment(Sampling(1.0), target_logits(), blocks=1)
    made.p_table = law.expand(made.p_table.shape)
    return made.judged(tokens[:, None])


# -- the same test sees what is wrong --------------------------------------------------------------


def without_residual(
    drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor
) -> Outcome:
    """A rejected draft is replaced by any token of the target."""
    accepted = rejection(drafted, p, q, coins, own).accepted
    last = draw(p[torch.arange(p.shape[0]), accepted], own)
    tokens = torch.cat([drafted, last[:, None]], dim=1).scatter(1, accepted[:, None], last[:, None])
    return Outcome(tokens, accepted)


def swapped(drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor) -> Outcome:
    """p and q change places."""
    assert q is not None
    return rejection(drafted, torch.cat([q, p[:, -1:]], dim=1), p[:, :-1], coins, own)


def eager(drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor) -> Outcome:
    """Coins a little too low."""
    return rejection(drafted, p, q, coins * 0.9, own)


def reused(drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor) -> Outcome:
    """The coin that rejected also draws the target's own token."""
    return rejection(drafted, p, q, coins, coins[:, 0])


def block_with_one_ratio(
    drafted: Tensor, p: Tensor, q: Tensor | None, coins: Tensor, own: Tensor
) -> Outcome:
    """Block verification that forgets its running ratio in the residual."""
    accepted = block(drafted, p, q, coins, own).accepted
    rest = rules._rest(drafted, p, q, accepted, torch.ones_like(own))
    return rules._finish(drafted, accepted, rest, own)


@pytest.mark.parametrize("broken", [without_residual, swapped, eager, reused, block_with_one_ratio])
def test_broken_copies_of_the_rules_are_rejected(broken: Rule) -> None:
    tokens, _ = (made := Experiment(Sampling(1.0), DRAFTS["random"]())).run(broken)
    assert made.judged(tokens) < NEVER


@pytest.mark.parametrize("told", [True, False], ids=["q", "no q"])
def test_a_residual_that_is_missing_is_seen_after_a_rejection(told: bool) -> None:
    p, token = second_best()
    made = Experiment(Sampling(1.0), target_logits())
    q = torch.nn.functional.one_hot(token.expand(BLOCKS, 1), VOCAB).double() if told else None
    coins = made.coins(BLOCKS, 1), made.coins(BLOCKS)
    found = without_residual(token.expand(BLOCKS, 1), p.expand(BLOCKS, 2, VOCAB), q, *coins)
    rest = p.clone()
    rest[token] = 0
    assert first_p(found.tokens[found.accepted == 0, 0], rest / rest.sum()) < NEVER


def first_tokens(made: Experiment, way: str) -> Tensor:
    """First tokens when a source or an end is chosen after something was drawn, or before."""
    p, q, other = made.p_table[0], made.q_table[0], DRAFTS["random"]()[0].double().softmax(-1)
    many = made.blocks
    one, two = (
        draw(q.expand(many, -1), made.coins(many)),
        draw(other.expand(many, -1), made.coins(many)),
    )
    first = torch.ones(many, dtype=torch.bool)
    judged = first.clone()
    if way == "stops when the drawn token is unlikely":
        judged = q[one] > 0.2
    elif way == "takes the other source after seeing the first":
        first = q[one] > 0.2
    elif way == "keeps what two sources agree on":
        judged = one == two
    elif way == "chooses the source by a coin of its own":
        first = made.coins(many) < 0.5
    elif way == "stops by the largest probability":
        judged = (q.max() > 0.9).expand(many)
    drafted = torch.where(first, one, two)[:, None]
    proposed = torch.where(first[:, None], q, other)[:, None]
    found = rejection(
        drafted, p.expand(many, 2, -1), proposed, made.coins(many, 1), made.coins(many)
    )
    own = draw(p.expand(many, -1), made.coins(many))
    return torch.where(judged, found.tokens[:, 0], own)


BIASED = [
    "stops when the drawn token is unlikely",
    "takes the other source after seeing the first",
    "keeps what two sources agree on",
]
EXACT = ["chooses the source by a coin of its own", "stops by the largest probability", "fixed"]


@pytest.mark.parametrize("way", [*BIASED, *EXACT])
def test_nothing_drawn_may_choose(way: str) -> None:
    made = Experiment(Sampling(1.0), DRAFTS["near"]())
    found = made.judged(first_tokens(made, way)[:, None])
    assert found < NEVER if way in BIASED else found > LEAST


# -- edges -----------------------------------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("coin", [0.0, np.nextafter(1.0, 0.0)], ids=["zero", "nearly one"])
@pytest.mark.parametrize("told", [True, False], ids=["q", "no q"])
def test_a_token_the_target_never_says_is_never_said(rule: Rule, coin: float, told: bool) -> None:
    p = torch.tensor([0.0, 0.6, 0.0, 0.4, 0.0])
    for token in range(5):
        drafted = torch.tensor([[token, token]])
        q = torch.full((1, 2, 5), 0.2) if told else None
        thrown = torch.full((1, 2), coin, dtype=torch.float64)
        found = rule(drafted, p.expand(1, 3, 5), q, thrown, thrown[:, 0])
        said = found.tokens[0, : int(found.accepted) + 1]
        assert (p[said] > 0).all()


@pytest.mark.parametrize("coin", [0.0, 0.3, np.nextafter(1.0, 0.0), 1.0])
@pytest.mark.parametrize("size", [3, 50_000])
def test_a_draw_never_takes_a_token_without_weight(coin: float, size: int) -> None:
    weights = torch.zeros(1, size)
    weights[0, size // 2] = 1e-30
    assert draw(weights, torch.tensor([coin], dtype=torch.float64)).tolist() == [size // 2]


@every_rule
def test_a_plain_step_draws_from_the_target(rule: Rule) -> None:
    made = Experiment(Sampling(1.0), target_logits())
    p = made.p_table[0].expand(BLOCKS, 1, VOCAB)
    nothing = torch.zeros(BLOCKS, 0)
    for q in (None, torch.zeros(BLOCKS, 0, VOCAB)):
        found = rule(nothing.long(), p, q, nothing.double(), made.coins(BLOCKS))
        assert not found.accepted.any()
        assert made.judged(found.tokens) > LEAST


@every_rule
def test_equal_distributions_lose_nothing(rule: Rule) -> None:
    p = torch.rand(500, 4, 9, generator=torch.Generator().manual_seed(1)).softmax(-1)
    made = Experiment(Sampling(1.0), target_logits())
    drafted = draw(p[:, :3], made.coins(500, 3))
    found = rule(drafted, p, p[:, :3], made.coins(500, 3), made.coins(500))
    assert (found.accepted == 3).all()


@every_rule
@pytest.mark.parametrize("told", [True, False], ids=["q", "no q"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_block_is_judged_as_the_reference_does(
    rule: Rule, told: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(4)
    p = torch.rand(300, 5, 7, generator=generator, dtype=torch.float64).pow(3)
    q = torch.rand(300, 4, 7, generator=generator, dtype=torch.float64).pow(3)
    p, q = (x / x.sum(-1, keepdim=True) for x in (p, q))
    drafted = torch.randint(0, 7, (300, 4), generator=generator)
    coins = torch.rand(300, 4, generator=generator, dtype=torch.float64)
    own = torch.rand(300, generator=generator, dtype=torch.float64)
    found = rule(drafted, p.to(dtype), q.to(dtype) if told else None, coins, own)
    name = "block" if rule is block and told else "rejection"
    hot = torch.nn.functional.one_hot(drafted, 7).double()
    for i in range(300):
        accepted, rest = getattr(accept, name)(
            drafted[i].tolist(), p[i].numpy(), (q if told else hot)[i].numpy(), coins[i].tolist()
        )
        assert int(found.accepted[i]) == accepted
        expected = [*drafted[i, :accepted].tolist(), accept.draw(rest, float(own[i]))]
        assert found.tokens[i, : accepted + 1].tolist() == expected
