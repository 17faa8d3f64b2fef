"""Trees of drafts: the walk by exact sums on a tiny vocabulary, and both laws on the strict toy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.backends.toy import ScriptedDraft, ToyTarget
from dflash.backends.toy.draft import among_others
from dflash.core.accept import follow, match
from dflash.core.policy import Fixed
from dflash.core.protocols import Policy
from dflash.core.types import Outlook, Plan, Proposal, Request, Sampling
from dflash.verify.sampling import audit
from tests.core.test_accept import Law, Rows, V, distance, rows, target_law
from tests.core.test_decode import ids, requests, scripts
from tests.core.test_rejection import MODEL, SAMPLES, DrawingDraft, exact, run
from tests.core.toys import ANYTHING, Drawn, plain, scripted, steps, tokens_of

Walk = Callable[[Sequence[int], Sequence[int], Callable[[int], int]], list[int]]
TREES = {
    "a chain": ([0, 1], [-1, 0]),
    "siblings": ([2, 0], [-1, -1]),
    "every token there is": ([1, 0, 2], [-1, -1, -1]),
    "a path beside a leaf": ([1, 0, 2], [-1, -1, 1]),
    "two levels of two": ([0, 1, 2, 0], [-1, -1, 0, 0]),
    "branches below branches": ([0, 2, 1, 1], [-1, -1, 0, 1]),
    "one token twice": ([1, 1, 0], [-1, -1, 1]),
}


def prefix_of(row: int, drafted: Sequence[int], parents: Sequence[int]) -> tuple[int, ...]:
    """Drafts on the way to a row; row 0 is the anchor's."""
    if row == 0:
        return ()
    return (*prefix_of(parents[row - 1] + 1, drafted, parents), drafted[row - 1])


def law_of(
    walk: Walk, target: Rows, drafted: Sequence[int], parents: Sequence[int], length: int
) -> tuple[Law, float]:
    """Law of the first ``length`` tokens after one tree, mean accepted.

    The target's own token after every node is drawn beforehand, in every way there is.
    """
    places = [prefix_of(row, drafted, parents) for row in range(len(drafted) + 1)]
    law: dict[tuple[int, ...], float] = defaultdict(float)
    mean = 0.0
    for choices in product(range(V), repeat=len(places)):
        chance = float(
            np.prod([target(prefix)[own] for prefix, own in zip(places, choices, strict=True)])
        )
        path = walk(drafted, parents, choices.__getitem__)
        said = (*(drafted[node] for node in path), choices[path[-1] + 1 if path else 0])
        mean += chance * len(path)
        rest = target_law(lambda tail, s=said: target(s + tail), length - len(said))  # type: ignore[misc]
        for tail, more in rest.items():
            law[said + tail] += chance * more
    return law, mean


@pytest.mark.parametrize("drafted, parents", TREES.values(), ids=TREES)
@pytest.mark.parametrize("zeros", [False, True], ids=["dense", "target cut by top-k"])
def test_the_walk_leaves_the_targets_law(
    drafted: list[int], parents: list[int], zeros: bool
) -> None:
    for seed in range(3):
        target = rows(seed, zeros=zeros)
        law, mean = law_of(follow, target, drafted, parents, 3)
        assert distance(law, target_law(target, 3)) < 1e-12
        reached = {prefix_of(row + 1, drafted, parents) for row in range(len(drafted))}
        chances = [
            np.prod([target(prefix[:n])[prefix[n]] for n in range(len(prefix))])
            for prefix in reached
        ]
        assert mean <= sum(chances) + 1e-12
        if len(reached) == len(drafted):  # no token twice
            assert mean == pytest.approx(sum(chances))


def any_child(
    drafted: Sequence[int], parents: Sequence[int], choice: Callable[[int], int]
) -> list[int]:
    """A wrong walk: where no child is the target's token, it takes the last one all the same."""
    path: list[int] = []
    while nodes := [n for n, parent in enumerate(parents) if parent == (path or [-1])[-1]]:
        own = choice((path or [-1])[-1] + 1)
        path.append(next((n for n in nodes if drafted[n] == own), nodes[-1]))
    return path


def anywhere(
    drafted: Sequence[int], parents: Sequence[int], choice: Callable[[int], int]
) -> list[int]:
    """A wrong walk: the next node of the right token, whoever its parent is."""
    path: list[int] = []
    for node, token in enumerate(drafted):
        if token == choice((path or [-1])[-1] + 1):
            path.append(node)
    return path


@pytest.mark.parametrize("wrong", [any_child, anywhere])
def test_a_wrong_walk_changes_the_law(wrong: Walk) -> None:
    """Negative controls: the sums above would notice."""
    drafted, parents = TREES["branches below branches"]
    law, _ = law_of(wrong, rows(0), drafted, parents, 5)
    assert distance(law, target_law(rows(0), 5)) > 0.005


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_on_a_chain_the_walk_is_the_match_rule(drafted: list[int], choices: list[int]) -> None:
    chain = range(-1, len(drafted) - 1)
    assert follow(drafted, chain, choices.__getitem__) == list(range(match(drafted, choices)))


@given(st.lists(ids, min_size=1, max_size=7), st.integers(1, 40), st.integers(0, 9))
def test_scripted_trees_have_each_token_once_among_its_siblings(
    chain: list[int], more: int, turn: int
) -> None:
    tokens, parents = among_others(chain, len(chain) + more, ANYTHING.vocab_size, turn)
    assert len(chain) <= len(tokens) <= len(chain) + more
    path = follow(
        tokens, parents, lambda row: chain[len(prefix_of(row, tokens, parents)) % len(chain)]
    )
    assert [tokens[node] for node in path] == chain
    for parent in set(parents):
        siblings = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
        assert len(siblings) == len(set(siblings))


class Mixed(Drawn):
    """Moves of (nodes, depth): trees, chains and plain steps in turn."""

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        self.asked.append(most)
        nodes, depth = self.moves[(len(self.asked) - 1) % len(self.moves)]
        depth = min(depth, most, outlooks[0].most)
        return Plan(0, max(nodes, depth), depth) if depth > 0 else Plan()


mixtures = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 15)), min_size=1, max_size=6)


def run_law(request: Request, script: list[int] | None, policy: Policy) -> None:
    """Output, and that as many drafts are kept as the script says, whatever branches there are."""
    target, draft = ToyTarget(ANYTHING, 8), scripted(ANYTHING, script)
    run = list(steps(request, target, [draft], policy))
    assert (tokens_of(run), run[-1].finish) == plain(ANYTHING, request)
    rounds = [step for step in run if step.rows]
    for place, step in enumerate(rounds):
        right = script[place % len(script)] if script else 99
        kept = min(right, step.plan.depth)
        assert len(step.verdict.path) == kept
        assert step.accepted == min(kept, len(step.tokens))
        assert step.verdict.drafted == step.rows <= max(step.plan.rows, step.plan.depth)
    held = len(request.prompt) + max(len(tokens_of(run)), 1) - 1
    assert target.holds([*request.prompt, *tokens_of(run)], 999) == held


@given(requests, scripts, mixtures)
def test_output_and_acceptance_are_right_whatever_the_tree(
    request: Request, script: list[int], moves: list[tuple[int, int]]
) -> None:
    run_law(request, script, Mixed(moves))


@given(requests, st.integers(2, 16), st.integers(1, 64))
def test_a_perfect_tree_is_never_wasted(request: Request, block_size: int, tree: int) -> None:
    request = replace(request, stop_ids=frozenset())
    target, draft = ToyTarget(ANYTHING), scripted(ANYTHING)
    run = list(steps(request, target, [draft], Fixed(block_size, tree)))[1:]
    assert all(len(step.verdict.path) == step.plan.depth for step in run)
    whole, rest = divmod(max(request.max_tokens - 1, 0), block_size)
    assert [len(step.tokens) for step in run] == [block_size] * whole + [rest] * bool(rest)


def test_a_fixed_tree_is_a_chain_where_it_has_no_more_nodes_or_a_draft_knows_none() -> None:
    assert Fixed(8, 24).plan(99, [Outlook(7, tree=64)]) == Plan(0, 24, 7)
    assert Fixed(8, 24).plan(99, [Outlook(7, tree=10)]) == Plan(0, 10, 7)
    assert Fixed(8, 24).plan(2, [Outlook(7, tree=64)]) == Plan(0, 24, 2)
    assert Fixed(8, 5).plan(99, [Outlook(7, tree=64)]) == Plan(0, 7, 7)
    assert Fixed(8, 24).plan(99, [Outlook(7)]) == Plan(0, 7, 7)
    assert Fixed(8, 24).plan(0, [Outlook(7, tree=64)]) == Plan()


def test_the_toy_is_strict_about_trees() -> None:
    target = ToyTarget(ANYTHING)
    list(target.prefill(Request([1, 2], 9), 0))
    with pytest.raises(AssertionError, match="after its parent"):
        target.verify(Proposal([1, 2], 2, [1, -1]))


class Candidates(DrawingDraft):
    """Draws chains from a slanted copy of the target; its trees are what that finds likeliest."""

    def propose(self, plan: Plan) -> Proposal[Any]:
        if not plan.is_tree:
            return super().propose(plan)
        output = self._history[len(self._request.prompt) :]
        history = [*self._request.prompt, *output]
        ScriptedDraft.propose(self, plan)  # its books
        tokens: list[int] = []
        parents: list[int] = []
        for parent in (-1, 0, 1):
            way = [] if parent < 0 else [tokens[parent]]
            row = MODEL.logits(MODEL.run([*history, *way]))
            tokens += np.argsort(-row - np.roll(row, 1))[:2].tolist()
            parents += [parent, parent]
        return Proposal(tokens, len(tokens), parents, meta=0, depth=2)


class Turns(Drawn):
    """A tree, a chain, a plain step, by nothing that was drawn."""

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        self.asked.append(most)
        rows, depth = ((6, 2), (3, 3), (6, 2), (0, 0))[len(self.asked) % 4]
        return Plan(0, rows, depth) if depth <= most else Plan()


def test_trees_among_drawn_chains_follow_the_targets_law() -> None:
    """Under rejection, where trees are judged by the match rule and its noise."""
    trees = 0

    def sample(number: int) -> list[int]:
        nonlocal trees
        sampling = Sampling(0.9, rule="rejection", seed=number)
        found = list(run(sampling, 0.5, Turns([]), Candidates))
        trees += sum(len(step.verdict.path) for step in found if step.plan.is_tree)
        return tokens_of(found)

    result = audit("trees", sample, exact(Sampling(0.9, rule="rejection")), SAMPLES, depth=3)
    assert result.passed, result
    assert trees > SAMPLES / 4
