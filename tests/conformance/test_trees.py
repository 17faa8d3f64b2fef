"""Trees of scripted candidates through the loop: both laws, wherever a backend offers trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from dflash.backends.toy import ScriptedDraft
from dflash.core.decode import decode
from dflash.core.policy import Fixed
from dflash.core.protocols import Branching
from dflash.core.types import Request, Sampling, Step
from dflash.engine import Engine
from dflash.errors import ConfigError
from tests.conformance.backends import ALWAYS, BLOCK, SCRIPTS, SOMETIMES, Backend, Scripted, request
from tests.core.test_trees import Mixed
from tests.core.toys import ticks, tokens_of

PROMPT = [71, 103, 35, 90, 120, 33, 64]
CAPACITY = 256
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 11},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "words and length": {"no_repeat_ngram": 2, "min_tokens": 9, "logit_bias": ((7, 2.0),)},
}


def run(backend: Backend, asked: Request, policy: Any, script: Sequence[int] | None) -> list[Step]:
    draft = ScriptedDraft(backend.plain.ahead, backend.pair.vocab_size, script, BLOCK - 1)
    target = backend.pair.open_target(CAPACITY)
    try:
        return list(decode(asked, target, [draft], policy, ticks()))
    finally:
        target.close()


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_every_right_candidate_is_kept_and_the_output_never_changes(
    branching: Backend, way: dict[str, Any], script: Sequence[int] | None
) -> None:
    """In each tree the right token is now the first of its siblings, now another."""
    asked = request(PROMPT, sampling=Sampling(**way), stop_ids=frozenset({3}))
    for policy in (Fixed(6, 24), Mixed([(30, 3), (0, 4), (0, 0), (9, 8), (5, 1)])):
        found = run(branching, asked, policy, script)
        assert (tokens_of(found), found[-1].finish) == branching.plain.run(asked)
        for place, step in enumerate(step for step in found if step.rows):
            right = script[place % len(script)] if script else BLOCK
            assert len(step.verdict.path) == min(right, step.plan.depth)
            assert step.verdict.drafted == step.rows
            features = step.verdict.features
            assert features is None or len(features) == len(step.verdict.tokens)


def test_a_perfect_tree_is_never_wasted(branching: Backend) -> None:
    for limit in (1, 2, 7, 8, 40):
        found = run(branching, request(PROMPT, limit), Fixed(6, 32), ALWAYS)[1:]
        whole, rest = divmod(limit - 1, 6)
        assert [len(step.tokens) for step in found] == [6] * whole + [rest] * bool(rest)
        assert all(len(step.verdict.path) == step.plan.depth for step in found)


def test_log_probabilities_are_those_along_the_path(branching: Backend) -> None:
    asked = request(PROMPT, 20, sampling=Sampling(logprobs=2))
    notes = []
    for policy in (Fixed(1), Fixed(6, 24)):
        steps = run(branching, asked, policy, SOMETIMES)
        notes.append([note for step in steps for note in step.verdict.notes or ()])
    for plain, tree in zip(*notes, strict=True):
        assert plain.token == tree.token and plain.top[0][0] == tree.top[0][0]
        assert plain.logprob == pytest.approx(tree.logprob, abs=1e-4)


@pytest.mark.parametrize("tree", [3, 16, 64, "auto"])
def test_the_engine_takes_a_tree_or_says_why_not(backend: Backend, tree: Any) -> None:
    engine = Engine(Scripted(backend, SOMETIMES))
    if not isinstance(backend.pair, Branching):
        with pytest.raises(ConfigError, match="judges chains"):
            engine.generate(PROMPT, max_tokens=8, draft_tree=tree)
        return
    asked = request(PROMPT, 40)
    for block in (None, "auto") if tree == "auto" else (None, 6, "auto"):
        found = engine.generate(PROMPT, max_tokens=40, draft_tree=tree, block_size=block)
        assert list(found.token_ids) == backend.plain.run(asked)[0]
        if tree == 16 and block == 6:
            assert found.stats.drafted > found.stats.rounds * 5
