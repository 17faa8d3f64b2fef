"""N-gram drafting on every backend: alone, and beside a draft that is right by script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dflash.backends.toy import State, ToyModel, ToyPair
from dflash.core.profile import Profile
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.ngram_pair import NgramPair
from tests.conformance.backends import SCRIPTS, SOMETIMES, Backend, Scripted, request
from tests.conformance.entries import ENTRIES, Call, Entry
from tests.conformance.test_entries import TEXT, check

GENERATE = ENTRIES[0]
PERIOD = 7
CIRCLE = [*range(PERIOD)] * 3


class Alone(Scripted):
    """The target of a backend without a model draft."""

    def __init__(self, backend: Backend, **changes: Any) -> None:
        super().__init__(backend, **changes)
        self.draft_name = self.draft_block_size = None

    def open_drafts(self, capacity: int) -> list[Any]:
        return []


def with_ngram(backend: Backend, beside: str, **changes: Any) -> Any:
    if beside == "alone":
        return NgramPair(Alone(backend, **changes))
    return NgramPair(Scripted(backend, SCRIPTS[beside], **changes))


everywhere = pytest.mark.parametrize("beside", ["alone", *SCRIPTS])


def test_a_look_up_alone_grows_no_tree(backend: Backend) -> None:
    with (
        Engine(with_ngram(backend, "alone")) as engine,
        pytest.raises(ConfigError, match=r"look-ups draft chains|judges chains"),
    ):
        engine.generate(TEXT, draft_tree=8)


@everywhere
@pytest.mark.parametrize("block_size", [3, 16, "auto"])
def test_output_is_that_of_plain_decoding(
    engine_entry: Entry, beside: str, block_size: Any, backend: Backend
) -> None:
    call = Call(TEXT * 3, block_size=block_size, max_tokens=48)
    check(engine_entry, backend, with_ngram(backend, beside), call)


@everywhere
def test_a_seed_gives_the_text_of_plain_decoding(beside: str, backend: Backend) -> None:
    call = Call(TEXT * 3, temperature=0.7, block_size=8)
    check(GENERATE, backend, with_ngram(backend, beside), call)


@everywhere
def test_a_stop_id_ends_the_text_wherever_it_stands(beside: str, backend: Backend) -> None:
    call = Call(TEXT, max_tokens=12)
    for stop in sorted(set(check(GENERATE, backend, with_ngram(backend, beside), call))):
        pair = with_ngram(backend, beside, eos_ids=frozenset({stop}))
        check(GENERATE, backend, pair, call)


@everywhere
def test_a_conversation_continues_where_it_ended(beside: str, backend: Backend) -> None:
    text = [71, 103, 35, 90] * 3
    with Engine(with_ngram(backend, beside)) as engine:
        for size in (4, 16, "auto", 4):
            answer = engine.generate(text, max_tokens=16, block_size=size).token_ids
            assert list(answer) == backend.plain.run(request(text, 16))[0]
            text += [*answer, 90, 71, 103]


OPTIONS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram": 3},
    {"frequency_penalty": 0.7, "temperature": 0.8, "seed": 5},
    {"min_tokens": 9, "logit_bias": {7: 3.0}},
]


@everywhere
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options_hold_at_every_place_of_a_looked_up_block(
    beside: str, options: dict[str, Any], backend: Backend
) -> None:
    ids = [71, 103, 35, 90] * 4
    with Engine(with_ngram(backend, beside)) as engine:
        plain = engine.generate(ids, max_tokens=30, block_size=1, reuse=False, **options)
        found = engine.generate(ids, max_tokens=30, block_size=8, reuse=False, **options)
    assert found.token_ids == plain.token_ids


def test_the_stats_say_who_drafted(backend: Backend) -> None:
    with Engine(with_ngram(backend, "always right")) as engine:
        stats = engine.generate([5, 6, 7, 8] * 4, max_tokens=40, block_size=8).stats
    ngram, scripted = stats.by_draft
    assert (ngram.draft, scripted.draft) == ("ngram", "scripted")
    assert scripted.accepted == scripted.drafted > 0
    assert ngram.drafted + scripted.drafted == stats.drafted
    assert ngram.accepted + scripted.accepted == stats.accepted
    assert scripted.rounds > 0


# --- texts that repeat themselves ----------------------------------------------------------------


class Circling(ToyModel):
    """Says 0 1 2 ... PERIOD - 1 0 1 2 ... whatever came before."""

    def after(self, state: State, token: int) -> State:
        return State(token, ((token + 1) % PERIOD,))


def circling(backend: str, folder: Path) -> Any:
    """A pair without a draft whose text runs in circles of PERIOD tokens."""
    if backend == "toy":
        return ToyPair(Circling(eos_ids=frozenset()), draft_block_size=None)
    torch = pytest.importorskip("torch")
    from dflash.backends.torch import open_pair
    from dflash.config import LoadConfig
    from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer

    model = tiny_target("llama", eos=None)
    with torch.no_grad():
        for layer in model.model.layers:  # nothing but the embedding reaches the head
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.mul_(0.01)
        for token in range(PERIOD):
            model.lm_head.weight[(token + 1) % PERIOD] = model.model.embed_tokens.weight[token]
    target = str(save_target(model, tiny_tokenizer(), folder))
    return open_pair(LoadConfig(target, device="cpu", dtype="float32"))


@pytest.fixture(scope="module")
def circle(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return NgramPair(circling(backend.name, tmp_path_factory.mktemp("circling")))


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_on_text_that_repeats_itself_nothing_is_wasted(circle: Any, block_size: int) -> None:
    limit = 1 + 3 * block_size
    options: Any = {"max_tokens": limit, "block_size": block_size, "ignore_eos": True}
    found = Engine(circle).generate(CIRCLE, **options)
    assert list(found.token_ids) == [place % PERIOD for place in range(limit)]
    assert found.stats.rounds == 3
    assert found.stats.accepted == found.stats.drafted == 3 * (block_size - 1)


def test_auto_finds_text_that_repeats_itself(circle: Any) -> None:
    engine = Engine(circle)
    engine._profile = _costs_of_rows(1.0, 0.1)
    stats = engine.generate(CIRCLE, max_tokens=120, block_size="auto", ignore_eos=True).stats
    assert stats.mean_committed > 3
    assert stats.acceptance_rate > 0.9


def test_auto_takes_the_draft_that_promises_more(backend: Backend, tmp_path: Path) -> None:
    """Where both can propose and both are right, the cheaper one; the wrong one hardly ever."""
    for script, at_most in ((SCRIPTS["never right"], 0.2), (SOMETIMES, 0.5)):
        inner: Any = Scripted(replace(backend, pair=circling(backend.name, tmp_path)), script)
        inner._backend = replace(inner._backend, plain=_Circle())
        with Engine(NgramPair(inner)) as engine:
            engine._profile = _costs_of_rows(1.0, 0.1)
            stats = engine.generate(
                CIRCLE, max_tokens=200, block_size="auto", ignore_eos=True
            ).stats
        ngram, scripted = stats.by_draft
        assert ngram.accepted == ngram.drafted
        assert scripted.rounds <= at_most * ngram.rounds, stats.by_draft


class _Circle:
    """What a circling target says next."""

    def ahead(self, asked: Any, output: Any, count: int) -> list[int]:
        last = [*asked.prompt, *output][-1]
        return [(last + 1 + place) % PERIOD for place in range(count)]


def _costs_of_rows(plain: float, row: float) -> Profile:
    """Costs as a larger model would have them: a row is a tenth of a pass."""
    profile = Profile()
    for _ in range(9):
        profile.costs.add(0, 0, plain * 1e9)
        for draft in (0, 1):
            for rows in (1, 15):
                profile.costs.add(draft, rows, (plain + row * rows) * 1e9)
    return profile
