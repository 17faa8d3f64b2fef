"""The engine's options beyond those of sampling: rules, stops, several texts, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from dflash.backends.toy import EOS, ToyModel, ToyPair
from dflash.config import GenerateConfig
from dflash.engine import Engine, load
from dflash.errors import ConfigError
from dflash.ngram_pair import NgramPair
from dflash.requests import make_request

PAIR = ToyPair(draft_name="toy:test", script=(2, 0, 4))


def test_the_rule_follows_seed_and_strictness_unless_it_is_named() -> None:
    def rule(**options: Any) -> str:
        return make_request(PAIR, [1], GenerateConfig(temperature=1.0, **options)).sampling.rule

    assert rule() == "rejection"
    assert rule(seed=3) == rule(strict_mode=True) == "match"
    assert rule(rule="block") == rule(rule="block", seed=3) == "block"


def test_a_request_without_a_seed_gets_a_fresh_one_and_with_one_keeps_it() -> None:
    config = GenerateConfig()
    seeds = {make_request(PAIR, [1], config).sampling.seed for _ in range(5)}
    assert len(seeds) == 5
    assert make_request(PAIR, [1], GenerateConfig(seed=7), sample=2).sampling.seed == 7
    assert make_request(PAIR, [1], GenerateConfig(seed=7), sample=2).sampling.sample == 2


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_named_rule_with_a_seed_repeats_itself_at_the_same_block_size(rule: Any) -> None:
    settings: Any = {"max_tokens": 40, "temperature": 1.0, "rule": rule, "block_size": 5}
    with Engine(PAIR) as engine:
        one, two = (engine.generate("hi", seed=9, **settings) for _ in range(2))
        other = engine.generate("hi", seed=10, **settings)
    assert one.token_ids == two.token_ids != other.token_ids


@pytest.mark.parametrize(
    "options", [{"logit_bias": {258: 1}}, {"bad_words": [[5, 999]]}], ids=["bias", "words"]
)
def test_tokens_outside_the_vocabulary_are_refused_by_name(options: dict[str, Any]) -> None:
    with load("toy") as engine, pytest.raises(ConfigError, match="vocabulary of 258") as caught:
        engine.generate("hi", **options)
    assert next(iter(options)) in str(caught.value)


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_neither_stop_string_nor_end_of_text_ends_before_min_tokens(block_size: int) -> None:
    with Engine(PAIR) as engine:
        settings: Any = {"max_tokens": 60, "block_size": block_size}
        text = engine.generate("hi", **settings, ignore_eos=True, logit_bias={EOS: -99}).text
        stop = text[2:4]
        early = engine.generate("hi", **settings, stop=stop, logit_bias={EOS: -99})
        assert early.text == text[:2] and early.finish_reason == "stop"
        late = engine.generate(
            "hi", **settings, stop=[stop, "e"], min_tokens=9, logit_bias={EOS: -99}
        )
        assert len(late.token_ids) > 9 and late.finish_reason == "stop"
        assert text.startswith(late.text) and len(late.text) >= 8
        eager = {EOS: 99.0}
        assert len(engine.generate("hi", **settings, logit_bias=eager).token_ids) == 1
        held = engine.generate("hi", **settings, logit_bias=eager, min_tokens=7)
        assert len(held.token_ids) == 8 and held.token_ids[-1] == EOS


def test_several_texts_stream_one_after_the_other_with_a_last_chunk_each() -> None:
    with Engine(PAIR) as engine:
        chunks = list(engine.stream("hi", max_tokens=12, temperature=1.0, n=3, echo=True))
        whole = engine.generate("hi", max_tokens=12, temperature=0.0, n=3)
    assert [c.index for c in chunks] == sorted(c.index for c in chunks)
    for index in range(3):
        mine = [c for c in chunks if c.index == index]
        assert [c.stats is None for c in mine] == [True] * (len(mine) - 1) + [False]
        assert set(mine[0].sources) == {"prompt"}
    assert len({c.token_ids for c in whole.choices}) == 1, "argmax has one text"
    assert len(whole.choices) == 3 and whole.choices[0].others == ()


def test_the_prompt_of_several_texts_runs_once() -> None:
    class Counting(ToyModel):
        run_through = 0

        def after(self, state: Any, token: int) -> Any:
            Counting.run_through += 1
            return super().after(state, token)

    prompt = list(range(200))
    with Engine(ToyPair(Counting())) as engine:
        engine.generate(prompt, max_tokens=3, n=4)
    assert Counting.run_through < 2 * len(prompt)


def test_argmax_proposals_are_an_option_and_change_no_seeded_text() -> None:
    with Engine(PAIR) as engine:
        settings: Any = {"max_tokens": 30, "temperature": 0.9, "seed": 5}
        plain = engine.generate("hi", **settings, block_size=1)
        assert engine.generate("hi", greedy_drafts=True, **settings).token_ids == plain.token_ids


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_dead_end_behind_a_rejected_draft_ends_nothing(rule: Any) -> None:
    """Plain decoding never says the tokens after which nothing may follow; a draft does."""

    def guard(ids: list[int], row: Any) -> Any:
        if len(ids) > 3 and ids[-1] < 128:
            row[:] = -float("inf")
        else:
            row[:128] = -1e4
        return row

    with load("toy", "toy:random", profile=False) as engine:
        for _ in range(10):
            found = engine.generate(
                [200, 201, 202],
                max_tokens=20,
                block_size=8,
                ignore_eos=True,
                logits_processors=[guard],
                temperature=0.9,
                rule=rule,
            )
            assert len(found.token_ids) == 20 and found.stats.drafted


def test_a_look_up_beside_a_draft_that_grows_no_trees_says_so() -> None:
    class Chains(ToyPair):
        why_no_trees = None  # type: ignore[assignment] # not there

    pair = NgramPair(Chains())
    with Engine(pair) as engine, pytest.raises(ConfigError, match="judges chains"):
        engine.generate([1, 2, 3], draft_tree=8)
