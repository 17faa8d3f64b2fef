"""The rules of acceptance, proven by adding up every way a block can go, on tiny vocabularies."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.core.accept import (
    Floats,
    block,
    block_bars,
    choose,
    distribution,
    judge,
    match,
    rejection,
    rejection_bars,
    residual,
)
from dflash.core.types import Sampling

V = 3
Rule = Callable[[Sequence[int], Floats, Floats, Sequence[float]], tuple[int, Floats]]
Law = Mapping[tuple[int, ...], float]
Rows = Callable[[tuple[int, ...]], Floats]  # a distribution [V] for every prefix


def rejection_heights(drafted: Sequence[int], p: Floats, q: Floats) -> Floats:
    return rejection_bars(drafted, p, q)


def block_heights(drafted: Sequence[int], p: Floats, q: Floats) -> Floats:
    return block_bars(drafted, p, q)[0]


RULES: dict[str, tuple[Rule, Callable[..., Floats]]] = {
    "rejection": (rejection, rejection_heights),
    "block": (block, block_heights),
}


def rows(seed: int, sharpness: float = 1.0, zeros: bool = False) -> Rows:
    """A random model: a distribution for every prefix, the same one each time it is asked."""

    def row(prefix: tuple[int, ...]) -> Floats:
        rng = np.random.default_rng([seed, len(prefix), *prefix])
        p = rng.dirichlet([sharpness] * V)
        if zeros:
            p[rng.integers(V)] = 0
        return p / p.sum()

    return row


def target_law(target: Rows, length: int) -> dict[tuple[int, ...], float]:
    law = {(): 1.0}
    for _ in range(length):
        law = {
            (*prefix, token): chance * target(prefix)[token]
            for prefix, chance in law.items()
            for token in range(V)
        }
    return law


def coins(heights: Floats) -> Iterator[tuple[float, list[float]]]:
    """Every outcome of independent coins against their bars: (chance, one coin of each kind)."""
    for wins in product((True, False), repeat=len(heights)):
        chance = np.prod([h if win else 1 - h for win, h in zip(wins, heights, strict=True)])
        if chance > 0:
            pairs = zip(wins, heights, strict=True)
            yield float(chance), [h / 2 if win else (1 + h) / 2 for win, h in pairs]


def committed_law(
    target: Rows, draft: Rows, length: int, rule: Rule, heights: Callable[..., Floats]
) -> tuple[dict[tuple[int, ...], float], float]:
    """Law of the first ``length + 1`` tokens after one block of ``length`` drafts, mean accepted.

    What a block leaves open is filled by the target, as later rounds would.
    """
    law: dict[tuple[int, ...], float] = defaultdict(float)
    mean = 0.0
    for drafted, drawn in target_law(draft, length).items():  # the draft's own law
        if drawn == 0:
            continue
        p = np.array([target(drafted[:n]) for n in range(length + 1)])
        q = np.array([draft(drafted[:n]) for n in range(length)])
        for chance, thrown in coins(heights(drafted, p, q)):
            accepted, last = rule(drafted, p, q, thrown)
            mean += drawn * chance * accepted
            assert last.sum() == pytest.approx(1)
            for token in np.flatnonzero(last):
                start = (*drafted[:accepted], int(token))
                rest = target_law(lambda tail, s=start: target(s + tail), length - accepted)
                for tail, more in rest.items():
                    law[start + tail] += drawn * chance * float(last[token]) * more
    return law, mean


def distance(one: Law, other: Law) -> float:
    return max(abs(one.get(key, 0) - other.get(key, 0)) for key in {*one, *other})


def one_hot(draft: Rows) -> Rows:
    return lambda prefix: np.eye(V)[int(np.argmax(draft(prefix)))]


def blind(draft: Rows) -> Rows:
    """A parallel draft: what it says at a place does not depend on what it drew before."""
    return lambda prefix: draft((0,) * len(prefix))


DRAFTS: dict[str, Callable[[int], Rows]] = {
    "a random draft": lambda seed: rows(seed + 1000),
    "a parallel draft": lambda seed: blind(rows(seed + 1000)),
    "a greedy draft": lambda seed: one_hot(rows(seed + 1000)),
    "a sharp draft": lambda seed: rows(seed + 1000, 0.1),
    "a draft that never says one token": lambda seed: rows(seed + 1000, zeros=True),
    "the target itself": rows,
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", DRAFTS)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "target cut by top-k"])
def test_the_rule_leaves_the_targets_law(rule: str, kind: str, length: int, zeros: bool) -> None:
    for seed in range(10 if length < 3 else 3):
        target, draft = rows(seed, zeros=zeros), DRAFTS[kind](seed)
        if zeros and kind == "the target itself":
            draft = target
        law, mean = committed_law(target, draft, length, *RULES[rule])
        assert distance(law, target_law(target, length + 1)) < 1e-12
        if kind == "the target itself":
            assert mean == pytest.approx(length)


def test_block_verification_keeps_at_least_as_many_and_rejection_more_than_match() -> None:
    gained = 0.0
    for seed in range(6):
        target, draft = rows(seed), rows(seed + 1000)
        by_block = committed_law(target, draft, 3, *RULES["block"])[1]
        by_rejection = committed_law(target, draft, 3, *RULES["rejection"])[1]
        by_match = 0.0  # kept as far as two independent draws agree
        for depth in (1, 2, 3):
            drawn = target_law(draft, depth)
            by_match += sum(p * drawn[prefix] for prefix, p in target_law(target, depth).items())
        assert by_block >= by_rejection - 1e-12
        assert by_rejection >= by_match - 1e-12
        gained += by_block - by_rejection
    assert gained > 0.02


@pytest.mark.parametrize("drafted", [[], [5, 7]])
def test_a_draft_without_a_distribution_takes_a_row_a_token_and_no_square(
    drafted: list[int],
) -> None:
    words = 20_000  # whose square would be 3 GiB
    p = np.full((len(drafted) + 1, words), 1 / words)
    tracemalloc.start()
    try:
        accepted, own = judge(drafted, p, None, Sampling(1.0, rule="rejection", seed=3), 0)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 <= accepted <= len(drafted) and 0 <= own < words
    assert most < 20 * p.nbytes


def test_one_hot_rejection_is_the_match_rule() -> None:
    for seed in range(20):
        p, token = rows(seed)(()), seed % V
        bar = rejection_bars([token], p[None], np.eye(V)[[token]])[0]
        assert bar == pytest.approx(p[token])
        rest = np.where(np.arange(V) == token, 0, p)
        assert residual(p, np.eye(V)[token]) == pytest.approx(rest / rest.sum())


def without_residual(*args: Any) -> tuple[int, Floats]:
    accepted, _ = rejection(*args)
    return accepted, args[1][accepted]


def swapped(drafted: Any, p: Floats, q: Floats, thrown: Any) -> tuple[int, Floats]:
    kept = np.asarray(thrown) < rejection_bars(drafted, q, p[: len(drafted)])
    accepted = len(drafted) if kept.all() else int(np.argmin(kept))
    return accepted, p[accepted] if accepted == len(drafted) else residual(p[accepted], q[accepted])


@pytest.mark.parametrize("broken", [without_residual, swapped])
def test_the_enumeration_sees_a_broken_rule(broken: Rule) -> None:
    def heights(drafted: Sequence[int], p: Floats, q: Floats) -> Floats:
        first = (q, p[: len(drafted)]) if broken is swapped else (p, q)
        return rejection_bars(drafted, *first)

    law, _ = committed_law(rows(1), rows(1001), 2, broken, heights)
    assert distance(law, target_law(rows(1), 3)) > 0.01


# -- nothing drawn may choose ----------------------------------------------------------------------

P = np.array([0.5, 0.3, 0.2])
Q, OTHER = np.array([0.3, 0.2, 0.5]), np.array([0.6, 0.3, 0.1])
Proposals = list[tuple[float, int | None, Floats]]  # (chance, token or none, what it is judged by)


def first_token_law(proposals: Proposals) -> Floats:
    """Law of the next token when a proposal is made and judged by rejection."""
    law = np.zeros(V)
    for chance, token, q in proposals:
        if token is None:
            law += chance * P
            continue
        for odds, thrown in coins(rejection_bars([token], P[None], q[None])):
            accepted, last = rejection([token], np.array([P, P]), q[None], thrown)
            law += chance * odds * (np.eye(V)[token] if accepted else last)
    return law


def fixed() -> Proposals:
    return [(Q[x], x, Q) for x in range(V)]


def stop_when_the_distribution_is_flat() -> Proposals:
    return [(Q[x], x if Q.max() > 0.6 else None, Q) for x in range(V)]


def choose_the_source_before_drawing() -> Proposals:
    return [(0.4 * Q[x], x, Q) for x in range(V)] + [(0.6 * OTHER[x], x, OTHER) for x in range(V)]


def stop_when_the_drawn_token_is_unlikely() -> Proposals:
    return [(Q[x], x if Q[x] > 0.25 else None, Q) for x in range(V)]


def take_the_other_source_after_seeing_the_first() -> Proposals:
    found: Proposals = []
    for x in range(V):
        if Q[x] > 0.25:
            found.append((Q[x], x, Q))
        else:
            found += [(Q[x] * OTHER[y], y, OTHER) for y in range(V)]
    return found


def keep_what_two_sources_agree_on() -> Proposals:
    return [(Q[x] * OTHER[y], x if x == y else None, Q) for x, y in product(range(V), repeat=2)]


@pytest.mark.parametrize(
    "way", [fixed, stop_when_the_distribution_is_flat, choose_the_source_before_drawing]
)
def test_choosing_before_drawing_is_exact(way: Callable[[], Proposals]) -> None:
    assert first_token_law(way()) == pytest.approx(P, abs=1e-12)


@pytest.mark.parametrize(
    "way",
    [
        stop_when_the_drawn_token_is_unlikely,
        take_the_other_source_after_seeing_the_first,
        keep_what_two_sources_agree_on,
    ],
)
def test_choosing_after_drawing_is_biased(way: Callable[[], Proposals]) -> None:
    """Negative controls: these may never appear in a draft or a policy."""
    law = first_token_law(way())
    assert law.sum() == pytest.approx(1)
    assert np.abs(law - P).max() > 0.02


# -- the match rule and the target's own choice ----------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=7))
def test_match_keeps_the_common_beginning(drafted: list[int], choices: list[int]) -> None:
    drafted = drafted[: max(len(choices) - 1, 0)]
    kept = match(drafted, choices)
    assert drafted[:kept] == choices[:kept]
    assert kept == len(drafted) or drafted[kept] != choices[kept]


def test_a_right_draft_after_a_wrong_one_is_not_kept() -> None:
    assert match([1, 9, 3, 4], [1, 2, 3, 4, 5]) == 1


LOGITS = np.array([1.0, 3.0, 3.0, 2.0, -1.0], np.float32)


def test_temperature_zero_is_the_lowest_of_the_best() -> None:
    assert choose(LOGITS, Sampling(), 0) == 1
    assert distribution(LOGITS, Sampling()).tolist() == [0, 1, 0, 0, 0]


def test_temperature_divides_the_logits() -> None:
    odds = np.exp(LOGITS / 0.5)
    assert distribution(LOGITS, Sampling(0.5)) == pytest.approx(odds / odds.sum(), rel=1e-6)


def test_top_k_keeps_the_k_best_and_what_equals_the_last_of_them() -> None:
    assert np.flatnonzero(distribution(LOGITS, Sampling(1.0, top_k=3))).tolist() == [1, 2, 3]
    assert np.flatnonzero(distribution(LOGITS, Sampling(1.0, top_k=1))).tolist() == [1, 2]
    assert np.count_nonzero(distribution(LOGITS, Sampling(1.0, top_k=99))) == 5


def test_top_p_keeps_tokens_until_the_mass_before_them_reaches_p() -> None:
    # the two best have .397 each, the third .146
    assert np.flatnonzero(distribution(LOGITS, Sampling(1.0, top_p=0.39))).tolist() == [1]
    assert np.flatnonzero(distribution(LOGITS, Sampling(1.0, top_p=0.40))).tolist() == [1, 2]
    assert np.flatnonzero(distribution(LOGITS, Sampling(1.0, top_p=0.8))).tolist() == [1, 2, 3]
    assert np.flatnonzero(distribution(LOGITS, Sampling(1.0, top_p=1e-9))).tolist() == [1]


@given(
    st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=9),
    st.floats(0.05, 5),
    st.integers(0, 9),
    st.floats(0.01, 1),
)
def test_what_is_left_is_a_distribution_that_has_the_best_token(
    values: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.array(values, np.float32)
    p = distribution(logits, Sampling(temperature, top_k, top_p))
    assert p.sum() == pytest.approx(1)
    assert (p >= 0).all()
    # two logits a hair apart have one probability, and then the lower id is the best of them
    assert logits[int(np.argmax(p))] == pytest.approx(float(logits.max()), abs=1e-6)
    assert p.max() > 0


def test_choices_follow_the_distribution() -> None:
    sampling = Sampling(0.8, top_p=0.95, seed=3)
    counts = np.bincount([choose(LOGITS, sampling, n) for n in range(20_000)], minlength=5)
    p = distribution(LOGITS, sampling)
    kept = p > 0
    assert counts[~kept].sum() == 0
    expected = p[kept] * counts.sum()
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 16.3  # chi-square, p = 0.001, 3 df


def test_the_same_seed_and_place_give_the_same_choice() -> None:
    sampling = Sampling(1.0, seed=5)
    one = [choose(LOGITS, sampling, n) for n in range(50)]
    assert one == [choose(LOGITS, sampling, n) for n in range(50)]
    assert one != [choose(LOGITS, replace(sampling, sample=1), n) for n in range(50)]
