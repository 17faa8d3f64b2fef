"""Trees on torch: who may stand in one pass, which tree a draft makes, and what runs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from heapq import nlargest
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dflash.backends.torch.best_first import STEP, Grown, Ranking, grow
from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.dflash2 import CandidateSelector
from dflash.backends.torch.dflash2_session import SelectorRows
from dflash.backends.torch.eagle3_session import WIDEST
from dflash.backends.torch.forward import make_forward
from dflash.backends.torch.load import load_target, wrap_target
from dflash.backends.torch.propose import make_proposer
from dflash.backends.torch.rows import Parallel
from dflash.backends.torch.tree import make_branches
from dflash.backends.torch.tree_check import why_no_trees
from dflash.core.accept import follow
from dflash.core.noise import gumbel
from dflash.core.types import Outlook, Plan, Request, Sampling
from dflash.drafts.spec import read_spec
from tests.drafts.configs import config2

from .eagle_drafts import save_eagle
from .families import FAMILIES, HYBRIDS, family
from .test_eagle3 import SLIDING, features, fresh, load, proposed, text, told
from .tiny import save_target, tiny_target, tiny_tokenizer

pytestmark = pytest.mark.torch

PARENTS = [-1, -1, 0, 1, 0, 2, 5, 3]
DEPTH = 4


def paths(tree: Grown) -> set[tuple[int, ...]]:
    """The tokens on the way to each node."""
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    ways: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        assert parent < len(ways), "a node comes after its parent"
        ways.append((*(ways[parent] if parent >= 0 else ()), token))
    assert len(set(ways)) == len(ways), "no path twice"
    return set(ways)


def test_rows_of_a_tree_see_their_own_branch_and_stand_at_their_depth() -> None:
    tree = make_branches(PARENTS, DEPTH, torch.device("cpu"))
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 3]
    for row in range(len(PARENTS) + 1):
        seen, at = {row, 0}, row
        while at:
            at = PARENTS[at - 1] + 1
            seen.add(at)
        assert set(tree.seen[row].nonzero()[:, 0].tolist()) == seen


@pytest.mark.parametrize("fused", [False, True])
def test_a_tree_in_one_pass_gives_the_logits_of_its_paths_and_keeps_one(
    fused: bool, tmp_path: Path
) -> None:
    model = tiny_target("qwen3")
    if fused:
        save_target(model, tiny_tokenizer(), tmp_path)
        model = load_target(str(tmp_path), "cpu", "float32").model
    forward, plain = make_forward(model), make_forward(tiny_target("qwen3"))
    prompt, tokens = text(9), [5, 9, 77, 12, 300, 41, 8, 200]
    cache = make_cache(model.config, 64)
    tree = make_branches(PARENTS, DEPTH, torch.device("cpu"))
    with torch.inference_mode():
        forward(prompt, cache, 1)
        found = forward([4, *tokens], cache, 0, tree=tree)
        for row in range(len(tokens) + 1):
            way = [node for node in range(row) if tree.seen[row, node + 1]]
            ids = [*prompt, 4, *(tokens[node] for node in way)]
            alone = plain(ids, make_cache(model.config, 64), 1)[0]
            assert torch.allclose(found[row], alone, atol=1e-4)
        cache.gather(len(prompt), [0, 1, 3, 6])  # anchor and the path 0, 2, 5
        after = forward([33], cache, 1)
        ids = [*prompt, 4, 5, 77, 41, 33]
        assert torch.allclose(after, plain(ids, make_cache(model.config, 64), 1), atol=1e-4)


def test_families_judge_trees_or_say_why_not() -> None:
    reasons = {name: why_no_trees(family(name)) for name in FAMILIES}
    for name, reason in reasons.items():
        if name in HYBRIDS:
            assert "recurrent" in reason, name
    assert "windows know no branches" in why_no_trees(tiny_target("gemma3"))
    assert [name for name, reason in reasons.items() if not reason] == ["qwen3_moe"], reasons
    assert not any(why_no_trees(tiny_target(name)) for name in ("llama", "qwen3"))


def test_a_model_whose_logits_differ_in_a_tree_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative control: positions that count rows, where they should count levels."""
    model = tiny_target("llama")
    plain = type(model).forward

    @wraps(plain)
    def deaf(self: Any, *args: Any, position_ids: Any = None, **more: Any) -> Any:
        return plain(self, *args, **more)

    assert why_no_trees(model) == ""
    monkeypatch.setattr(type(model), "forward", deaf)
    assert "other logits for a tree" in why_no_trees(model)
    model.set_attn_implementation("eager")
    monkeypatch.setattr(type(model), "forward", plain)
    assert why_no_trees(model) == ""


def best_paths(scores: dict[tuple[int, ...], float], nodes: int) -> set[tuple[int, ...]]:
    return set(nlargest(nodes, scores, key=scores.__getitem__))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, seed=9)], ids=["0", "0.7"])
@pytest.mark.parametrize("nodes", [1, 5, 12, 40])
def test_rows_that_know_nothing_of_each_other_make_the_best_tree_there_is(
    sampling: Sampling, nodes: int
) -> None:
    """Held against every path there is, with the noise the target will add."""
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(nodes)) * 2
    position = 6
    scores: dict[tuple[int, ...], float] = {}
    for level in range(3):
        for path in product(range(5), repeat=level + 1):
            worth = 0.0
            for place, token in enumerate(path):
                row = logits[place].clone()
                if sampling.temperature:
                    noise = torch.from_numpy(gumbel(9, 0, position + place, 5))
                    row = (row / 0.7).log_softmax(-1) * 0.7 + 0.7 * noise
                worth += float(row.log_softmax(-1)[token]) - STEP
            scores[path] = worth
    tree = grow(Parallel(logits), Ranking(sampling, position), nodes, 3)
    assert paths(tree) == best_paths(scores, nodes)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_tree_holds_what_the_draft_would_have_proposed_as_a_chain(temperature: float) -> None:
    """An oracle's chain is in it, so a perfect draft is not wasted on a tree."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 3
    sampling = Sampling(temperature, seed=2)
    proposer = make_proposer(Request([1, 2], 9, sampling=sampling))
    chain, _ = proposer(logits, [1, 2, 3])
    tree = proposer.tree(logits + 0.0, [1, 2, 3], 48, 6)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    said = torch.as_tensor(chain).tolist()
    path = follow(tokens, parents, lambda row: [*said, -1][depth[row - 1]])
    assert len(path) >= 2
    sure = logits.clone()
    for place, token in enumerate(said):
        sure[place, token] += 1e4
    tree = proposer.tree(sure, [1, 2, 3], 12, 6)
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        depth[node] = depth[parent] + 1
    path = follow(tokens, parents, lambda row: [*said, -1][depth[row - 1]])
    assert [tokens[node] for node in path] == said


def selector_rows() -> SelectorRows:
    spec = read_spec(config2(nested={"selector_top_k": 3}))
    generator = torch.Generator().manual_seed(4)
    selector = CandidateSelector(spec)
    for weight in selector.parameters():
        weight.requires_grad_(False).normal_(0, 0.7, generator=generator)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return SelectorRows(
        selector, some(3, spec.hidden_size), some(3, spec.vocab_size), torch.tensor([7])
    )


def test_candidates_of_a_selector_make_the_best_tree_there_is() -> None:
    rows = selector_rows()
    scores: dict[tuple[int, ...], float] = {(): 0.0}
    for level in range(3):
        for path in [path for path in scores if len(path) == level]:
            row = rows.row(level, list(path), None)[0]
            for token in row.isfinite().nonzero()[:, 0].tolist():
                scores[*path, token] = scores[path] + float(row.log_softmax(-1)[token]) - STEP
    del scores[()]
    for nodes in (1, 4, 11, 39):
        tree = grow(rows, Ranking(Sampling(), 0), nodes, 3)
        assert paths(tree) == best_paths(scores, nodes)


def test_options_that_look_at_the_drafts_make_chains() -> None:
    for sampling, branches in (
        (Sampling(logit_bias=((3, 1.0),), min_tokens=4), True),
        (Sampling(presence_penalty=0.5), False),
        (Sampling(no_repeat_ngram=2), False),
    ):
        assert make_proposer(Request([1], 9, sampling=sampling)).branches is branches


def test_fixed_options_count_at_every_place_of_a_tree() -> None:
    logits = torch.zeros(3, 9)
    logits[:, 4], logits[:, 5] = 3, 2
    request = Request([1], 9, frozenset({4}), Sampling(bad_words=((5,),), min_tokens=2))
    tree = make_proposer(request).tree(logits, [1, 6], 30, 3)
    ways = paths(tree)
    assert not any(5 in way for way in ways)
    assert not any(4 in way[:1] for way in ways), "one token is said: none may end before the third"
    assert any(way[1:] and way[1] == 4 for way in ways)


def test_levels_of_an_eagle_tree_are_what_its_chain_says_along_each_path(tmp_path: Path) -> None:
    draft = load(save_eagle(tmp_path))
    tokens, rows = text(9), features(9)
    proposal = fresh(draft, tokens, rows).propose(Plan(0, 14, 3))
    assert proposal.parents is not None and proposal.depth == 3
    tree = Grown(torch.as_tensor(proposal.tokens), torch.as_tensor(proposal.parents))
    found = paths(tree)
    assert max(map(len, found)) > 1, "a tree with one level shows nothing"
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    expected: dict[tuple[int, ...], float] = {}
    for _ in range(3):
        level: dict[tuple[int, ...], float] = {}
        for path, worth in beam.items():
            for token, log in said_after(draft, tokens, rows, path):
                level[*path, token] = worth + log - STEP
        beam = {path: level[path] for path in best_paths(level, WIDEST)}
        expected |= beam
    assert found == best_paths(expected, 14)


def said_after(
    draft: Any, tokens: list[int], rows: Tensor, path: Sequence[int]
) -> list[tuple[int, float]]:
    """The likeliest tokens after ``path``, each run alone as a chain runs it."""
    session = fresh(draft, tokens, rows)
    with torch.inference_mode():
        normed, state = session._catch_up()
        for place, token in enumerate(path):
            normed, state = session.step(torch.tensor([token]), state, len(tokens) - 1 + place)
        logs = session.logits(normed[0])[0].log_softmax(-1).topk(14)
    return list(zip(logs.indices.tolist(), logs.values.tolist(), strict=True))


def test_a_tree_leaves_an_eagle_session_as_a_chain_does(tmp_path: Path) -> None:
    draft = load(save_eagle(tmp_path))
    after = []
    for plan in (Plan(0, 4, 4), Plan(0, 20, 4)):
        session = fresh(draft, text(9), features(12))
        session.propose(plan)
        told(session, text(12), features(12), 8)
        after.append(proposed(session))
    assert after[0] == after[1]


def test_drafts_say_whether_they_know_trees(tmp_path: Path) -> None:
    whole, windowed = load(save_eagle(tmp_path / "a")), load(save_eagle(tmp_path / "b", **SLIDING))
    assert whole.why_no_trees() == "" and "window" in windowed.why_no_trees()
    outlook: Outlook = fresh(whole, text(9), features(9)).outlook()
    assert outlook.tree == 64
    assert fresh(windowed, text(9), features(9)).outlook().tree == 0
    assert windowed.open(64).propose(Plan(0, 9, 3)).rows == 0
    chain = fresh(windowed, text(9), features(9)).propose(Plan(0, 9, 3))
    assert chain.parents is None and chain.rows == 3


def test_a_users_own_model_judges_trees_too() -> None:
    assert why_no_trees(wrap_target(tiny_target("llama", tied=True)).model) == ""
