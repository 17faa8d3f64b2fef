"""The engine over the toy pair: every form of a call, and what it never does."""

from __future__ import annotations

import gc
import json
import threading
import warnings

import numpy as np
import pytest

import dflash
from dflash import blocks
from dflash.backends.toy import ToyModel, ToyPair, ToyTarget
from dflash.config import GenerateConfig
from dflash.engine import Engine, load
from dflash.errors import (
    CheckpointError,
    ConfigError,
    DownloadError,
    EngineClosed,
    PromptError,
    UnknownName,
)
from tests.drafts.configs import config

DRAFTS = ["toy:oracle", "toy:script:1,3,0,7", "toy:random"]


@pytest.fixture
def engine():
    with load("toy", "toy:script:1,3,0,2") as engine:
        yield engine


def test_text_ids_and_sources_of_a_stream_are_those_of_the_whole(engine):
    chunks = list(engine.stream("hello", max_tokens=50))
    whole = engine.generate("hello", max_tokens=50)
    assert "".join(c.text for c in chunks) == whole.text
    assert tuple(i for c in chunks for i in c.token_ids) == whole.token_ids
    sources = [s for c in chunks for s in c.sources]
    assert len(sources) == len(whole.token_ids) == 50
    assert sources.count("draft") == whole.stats.accepted > 0
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.finish_reason == "length"
    assert chunks[-1].stats is not None and chunks[0].stats is None
    for chunk in chunks:
        assert "".join(piece.text for piece in chunk.pieces) == chunk.text


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_changes_no_id(draft, temperature):
    options = {"max_tokens": 60, "temperature": temperature, "seed": 11}
    with load("toy") as plain, load("toy", draft) as fast:
        for prompt in ("a", "tell me more", "x" * 200):
            expected = plain.generate(prompt, **options)
            for block_size in (None, 1, 2, 5, 16):
                found = fast.generate(prompt, block_size=block_size, **options)
                assert found.token_ids == expected.token_ids
                assert found.text == expected.text
                assert found.finish_reason == expected.finish_reason


def test_a_prompt_may_be_text_messages_or_ids(engine):
    text = "assistant: "
    ids = engine.encode(text, chat_template=False)
    expected = engine.generate(ids, max_tokens=20).token_ids
    forms = [tuple(ids), np.array(ids), np.array([ids]), [np.int64(i) for i in ids]]
    for form in forms:
        assert engine.generate(form, max_tokens=20).token_ids == expected
    assert engine.generate(text, chat_template=False, max_tokens=20).token_ids == expected
    message = [{"role": "user", "content": "hi"}]
    assert engine.encode(message) == engine.encode("hi")
    assert engine.encode("hi", system="be brief") == engine.encode(
        [{"role": "system", "content": "be brief"}, *message]
    )


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "empty"),
        ("  \n ", "empty"),
        ([], "empty"),
        ([{"role": "user", "content": " "}], "empty"),
        ([{"role": "user"}], "content"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": "x"}, "y"], "role"),
        ([[1, 2], [3, 4]], "one sequence"),
        ([1, "a"], "token ids"),
        ([-5], "token ids"),
        ([999999], "vocabulary"),
        (5, "int"),
        (None, "NoneType"),
        ({"a": 1}, "dict"),
        (b"hi", "bytes"),
        ("caf\udce9", "not UTF-8"),
        ([{"role": "user", "content": "caf\udce9"}], "not UTF-8"),
        ([{"role": "robot", "content": "x"}], "unknown role 'robot'"),
        ("x" * 5000, "context"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_at_the_call(engine, prompt, words):
    with pytest.raises(PromptError, match=words):
        engine.stream(prompt)


def test_a_system_message_without_a_template_is_refused(engine):
    with pytest.raises(PromptError, match="system"):
        engine.stream("x", chat_template=False, system="be brief")
    with pytest.raises(PromptError, match="system message must be text, not int"):
        engine.stream("x", system=5)


def test_arguments_are_checked_before_the_first_chunk_is_asked_for(engine):
    with pytest.raises(ConfigError, match="temperature"):
        engine.stream("hello", temperature=-1)
    with pytest.raises(ConfigError, match="Did you mean 'temperature'"):
        engine.stream("hello", temperatur=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("max_tokens", range(20))
def test_exactly_max_tokens_come_out(max_tokens):
    with load("toy", "toy:oracle") as engine:
        found = engine.generate("hello", max_tokens=max_tokens, ignore_eos=True)
    assert len(found.token_ids) == max_tokens
    assert found.finish_reason == "length"
    assert found.stats.completion_tokens == max_tokens


def test_the_answer_ends_where_the_context_does():
    pair = ToyPair(draft_name="toy:oracle", context_length=64)
    with Engine(pair) as engine:
        found = engine.generate([1] * 50, max_tokens=1000, ignore_eos=True)
        assert len(found.token_ids) == 14
        assert found.finish_reason == "length"
        with pytest.raises(PromptError, match="holds 64"):
            engine.stream([1] * 64)
        assert len(engine.generate([1] * 63, max_tokens=5).token_ids) == 1


@pytest.mark.parametrize("form", [int, lambda i: [i], lambda i: (i, 500), np.array, lambda i: {i}])
def test_stop_ids_of_every_form_end_the_text_inside_a_block(form):
    with load("toy", "toy:oracle") as engine:
        full = engine.generate("hello", max_tokens=40, ignore_eos=True)
        for place in (0, 3, 7, 8, 9, 17):
            stop = full.token_ids[place]
            found = engine.generate("hello", max_tokens=40, stop_token_ids=form(stop))
            end = full.token_ids.index(stop) + 1
            assert found.token_ids == full.token_ids[:end]
            assert found.finish_reason == "stop"


@pytest.mark.parametrize("block_size", [1, 2, 8, 16])
def test_a_stop_string_cuts_text_and_ids_where_plain_decoding_would(block_size):
    with load("toy", "toy:oracle") as engine:
        full = engine.generate("hello", max_tokens=60, ignore_eos=True)
        stop = full.text[17:20]
        plain = engine.generate("hello", max_tokens=60, stop=stop, block_size=1)
        found = engine.generate("hello", max_tokens=60, stop=stop, block_size=block_size)
        assert found.text == full.text[: full.text.index(stop)]
        assert found.token_ids == plain.token_ids
        assert len(found.token_ids) == found.stats.completion_tokens
        assert found.finish_reason == "stop"
        assert stop not in found.text


def test_a_seed_gives_the_same_text_and_another_seed_another(engine):
    def run(seed):
        return engine.generate("hello", max_tokens=60, temperature=1.0, seed=seed).token_ids

    assert run(3) == run(3)
    assert len({run(seed) for seed in range(5)}) == 5


def test_without_a_seed_every_answer_is_drawn_anew(engine):
    answers = {engine.generate("hi", max_tokens=60, temperature=1.0).token_ids for _ in range(4)}
    assert len(answers) > 1


# --- block sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "size", "policy"),
    [
        ({}, 8, "fixed"),
        ({"block_size": 4}, 4, "fixed"),
        ({"draft_tokens": 4}, 5, "fixed"),
        ({"block_size": 16}, 16, "fixed"),
        ({"block_size": 1}, 1, "off"),
        ({"draft_tokens": 0}, 1, "off"),
        ({"min_acceptance_rate": 0.0}, 5, "floor"),
        ({"min_acceptance_rate": 0.0, "draft_tokens": 7}, 8, "floor"),
        ({"min_acceptance_rate": 0.0, "block_size": 1}, 1, "off"),
    ],
)
def test_the_block_size_asked_for_is_the_one_played(engine, options, size, policy):
    stats = engine.generate("hello", max_tokens=40, **options).stats
    assert (stats.block_size, stats.policy, stats.clamped_from) == (size, policy, None)
    assert len(stats.acceptance_by_position) == (size - 1 if size > 1 else 0)


def test_a_block_beyond_the_draft_is_clamped_visibly(engine):
    with pytest.warns(UserWarning, match="block size 99 .* native 16"):
        stats = engine.generate("hello", max_tokens=40, block_size=99).stats
    assert (stats.block_size, stats.clamped_from) == (16, 99)
    assert stats.block_reason == "the draft's native size; 99 was asked for"


def test_auto_is_adaptive(engine):
    chosen = blocks.choose("auto", engine.pair)
    assert (chosen.name, chosen.block_size) == ("adaptive", None)
    stats = engine.generate("hello", max_tokens=60, block_size="auto").stats
    assert (stats.policy, stats.block_size, stats.completion_tokens) == ("adaptive", None, 60)
    assert stats.block_reason == "chosen each round by measured time"
    assert sum(rounds for _, rounds in stats.block_sizes) == stats.rounds


def test_auto_changes_no_id(engine):
    options = {"max_tokens": 80, "temperature": 0.7, "seed": 3}
    with load("toy") as plain:
        expected = plain.generate("hello", **options).token_ids
    for _ in range(3):  # every request knows more of the costs than the one before
        assert engine.generate("hello", block_size="auto", **options).token_ids == expected


def test_a_block_under_the_floor_is_given_up_and_the_chunks_say_so():
    with load("toy", "toy:script:0") as engine:
        chunks = list(engine.stream("hello", max_tokens=60, min_acceptance_rate=0.3))
        plain = engine.generate("hello", max_tokens=60, block_size=1)
    states = [chunk.state for chunk in chunks]
    assert states[0] == "prefill"
    assert "speculating" in states and "fallback" in states
    assert states[-1] == "done"
    assert states.index("speculating") < states.index("fallback")
    assert [i for chunk in chunks for i in chunk.token_ids] == list(plain.token_ids)
    assert chunks[-1].stats.drafted < 40
    assert chunks[-1].stats.fallback_rounds > 20
    assert "drafts accepted" in chunks[-1].stats.fallback_reason


def test_the_speed_is_measured_against_plain_steps_where_there_were_any(engine):
    assert engine.generate("hello", max_tokens=40, block_size=4).stats.speedup is None
    stats = engine.generate("hello", max_tokens=40, min_acceptance_rate=0.1).stats
    assert stats.speedup > 0
    assert engine.generate("hello", max_tokens=40, block_size=4).stats.speedup > 0


def test_a_draft_without_a_default_is_played_automatically():
    pair = ToyPair(draft_name="toy:oracle", default_block_size=None, draft_block_size=6)
    silent, auto = blocks.choose(None, pair), blocks.choose("auto", pair)
    assert (silent.name, silent.block_size) == (auto.name, auto.block_size)


def test_without_a_draft_decoding_is_plain():
    with load("toy") as engine:
        stats = engine.generate("hello", max_tokens=20).stats
    assert (stats.policy, stats.block_size, stats.drafted) == ("off", 1, 0)
    assert stats.rounds == 19


# --- sessions ------------------------------------------------------------------------------------


class Counting(ToyPair):
    """A toy pair that remembers what it opened."""

    def __init__(self, **more):
        super().__init__(draft_name="toy:oracle", **more)
        object.__setattr__(self, "opened", [])

    def open_target(self, capacity):
        session = Session(self.model, self.chunk)
        self.opened.append((capacity, session))
        return session


class Session(ToyTarget):
    """Counts prompt rows, and breaks when told to."""

    rows = 0
    broken = False
    closed = False
    grown = 0

    def grow(self, capacity):
        self.grown = capacity

    def prefill(self, request, reuse):
        for verdict in super().prefill(request, reuse):
            self.rows += verdict.rows
            yield verdict

    def verify(self, proposal):
        if self.broken:
            raise RuntimeError("cable pulled")
        return super().verify(proposal)

    def close(self):
        self.closed = True
        super().close()


def test_a_conversation_resumes_its_session():
    pair = Counting()
    with Engine(pair) as engine:
        first = engine.encode("hello", chat_template=False)
        answer = engine.generate(first, max_tokens=20, ignore_eos=True)
        longer = [*first, *answer.token_ids, *engine.encode("and?", chat_template=False)]
        fresh = engine.generate(longer, max_tokens=20, reuse=False)
        rows = pair.opened[0][1].rows
        again = engine.generate(longer, max_tokens=20)
        assert again.token_ids == fresh.token_ids
        assert len(pair.opened) == 2
        assert sum(s.rows for _, s in pair.opened) < rows + 2 * len(longer)


def test_a_session_whose_call_raised_is_closed_and_the_next_call_works():
    pair = Counting()
    with Engine(pair) as engine:
        expected = engine.generate("hello", max_tokens=20).token_ids
        session = pair.opened[0][1]
        session.broken = True
        with pytest.raises(RuntimeError, match="cable"):
            engine.generate("hello", max_tokens=20)
        assert session.closed
        assert engine.generate("hello", max_tokens=20).token_ids == expected
        assert len(pair.opened) == 2


def test_an_abandoned_stream_leaves_a_session_that_can_go_on():
    pair = Counting()
    with Engine(pair) as engine:
        whole = engine.generate("hello", max_tokens=40, reuse=False).token_ids
        stream = engine.stream("hello", max_tokens=40)
        next(stream)
        next(stream)
        stream.close()
        assert not any(session.closed for _, session in pair.opened)
        assert engine.generate("hello", max_tokens=40).token_ids == whole


def test_prompts_of_any_length_in_turn_on_one_engine():
    with load("toy", "toy:script:2,0,5") as engine, load("toy") as plain:
        for length in (40, 5, 40, 1, 300, 2):
            prompt = [65] * length
            expected = plain.generate(prompt, max_tokens=30, reuse=False)
            assert engine.generate(prompt, max_tokens=30).token_ids == expected.token_ids


def test_progress_shows_each_part_of_a_long_prompt():
    with load("toy", "toy:oracle") as engine:
        prompt = [65] * 300  # the toy runs 64 at a time
        plain = list(engine.stream(prompt, max_tokens=9, reuse=False))
        shown = list(engine.stream(prompt, max_tokens=9, reuse=False, progress=True))
    assert [chunk.token_ids for chunk in shown[:4]] == [()] * 4 and shown[4].token_ids
    assert not any(chunk.text for chunk in shown[:4])
    assert [chunk.token_ids for chunk in shown[4:]] == [chunk.token_ids for chunk in plain]


def test_a_chunk_says_how_much_was_drafted():
    with load("toy", "toy:script:2,0,5") as engine:
        chunks = list(engine.stream("hi", max_tokens=30, block_size=8))
        stats = chunks[-1].stats
    assert sum(chunk.drafted for chunk in chunks) == stats.drafted
    assert all(chunk.sources.count("draft") <= chunk.drafted for chunk in chunks)


def test_few_sessions_stay_parked():
    pair = Counting()
    with Engine(pair) as engine:
        for i in range(12):
            engine.generate([i] * 20, max_tokens=5)
        alive = [session for _, session in pair.opened if not session.closed]
        assert len(alive) <= 2


def test_sessions_have_room_for_what_was_asked_and_not_for_the_whole_context():
    pair = Counting()
    with Engine(pair) as engine:
        engine.generate([1] * 30, max_tokens=10)
        engine.generate([2] * 30, max_tokens=900)
    capacities = [capacity for capacity, _ in pair.opened]
    assert capacities == [512, 1024]


def test_a_text_that_outgrows_its_sessions_moves_and_is_not_run_again():
    pair = Counting()
    with Engine(pair) as engine:
        engine.generate([1] * 500, max_tokens=10)
        engine.generate([1] * 500, max_tokens=900)
    ((capacity, session),) = pair.opened
    assert (capacity, session.grown) == (512, 2048)
    assert session.rows == 501  # the second prompt was held but for the one token that must run


def test_streams_may_be_read_in_turns(engine):
    prompts = ["one", "two", "three"]
    expected = [engine.generate(p, max_tokens=30, reuse=False).text for p in prompts]
    streams = [engine.stream(p, max_tokens=30) for p in prompts]
    texts = ["", "", ""]
    live = [0, 1, 2]
    while live:
        for i in list(live):
            chunk = next(streams[i], None)
            if chunk is None:
                live.remove(i)
            else:
                texts[i] += chunk.text
    assert texts == expected


def test_threads_on_one_engine_do_not_mix():
    with load("toy", "toy:script:1,3,0") as engine:
        prompts = [f"prompt {i}" for i in range(8)]
        expected = [engine.generate(p, max_tokens=40, reuse=False).token_ids for p in prompts]
        wrong = []

        def run(i):
            for _ in range(5):
                if engine.generate(prompts[i], max_tokens=40).token_ids != expected[i]:
                    wrong.append(i)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_closing_during_a_stream_raises_one_documented_error(engine):
    stream = engine.stream("hello", max_tokens=100)
    next(stream)
    engine.close()
    with pytest.raises(EngineClosed, match="while this text"):
        list(stream)
    with pytest.raises(EngineClosed, match="load a new one"):
        engine.generate("hello")
    engine.close()


def test_a_forgotten_stream_costs_nothing_but_its_session(engine):
    stream = engine.stream("hello", max_tokens=100)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate("hello", max_tokens=5).finish_reason == "length"


# --- load ----------------------------------------------------------------------------------------


def test_the_first_of_endless_answers_comes_at_once(engine):
    stream = engine.stream("hello", n=10**12, max_tokens=3)
    assert next(stream).index == 0
    assert next(chunk.index for chunk in stream if chunk.index) == 1


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(UnknownName, match=r"Known: .*torch, toy"):
        load("toy", backend="jax")


def test_a_draft_that_cannot_be_loaded_is_an_error():
    with pytest.raises(ConfigError, match="toy:oracle"):
        load("toy", "toy:nothing")


def test_a_draft_without_a_target_must_name_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**config(), "target_name": None}))
    with pytest.raises(ConfigError, match=r"does not say which target.*target=NAME"):
        load(draft=str(tmp_path))
    with pytest.raises(ConfigError, match="target='toy'"):
        load(draft="toy:oracle")


@pytest.mark.parametrize("name", ["/nowhere", "./nowhere", "nowhere", "~/no/where"])
def test_a_draft_alone_that_is_not_there_is_said_to_be_missing(name):
    with pytest.raises(CheckpointError, match=r"no such draft folder: .*nowhere|no/where"):
        load(draft=name)


def test_a_hub_id_alone_is_fetched_to_see_its_target(monkeypatch):
    from dflash import opening

    with pytest.raises(DownloadError, match=r"owner/draft.*HF_HUB_OFFLINE"):
        load(draft="owner/draft")
    monkeypatch.setattr(opening, "hub_config", lambda name: {**config(), "target_name": "toy"})
    assert opening.pair_names(None, "owner/draft") == ("toy", "owner/draft")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"target": 5}, "target must be a path or a hub id, got int"),
        ({"target": "toy", "draft": 5}, "draft must be a path or a hub id, got int"),
        ({"target": "toy", "profile": "x"}, "profile must be True or False, got 'x'"),
        ({"target": "toy", "pack_weights": 1}, "pack_weights must be True or False"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(given, words):
    with pytest.raises(ConfigError, match=words):
        load(**given)


def test_a_processor_must_be_callable(engine):
    with pytest.raises(ConfigError, match="logits_processors must be callables"):
        engine.stream("hello", logits_processors=3)


def test_nothing_named_is_the_demo_pair(monkeypatch):
    from dflash import demo
    from dflash.opening import pair_names

    monkeypatch.setattr(demo, "demo_target", lambda: "T")
    monkeypatch.setattr(demo, "demo_draft", lambda: "D")
    assert pair_names(None, None) == ("T", "D")
    assert pair_names("demo", None) == ("T", "D")
    assert pair_names(None, "none") == ("T", "none")
    assert pair_names("demo", "none") == ("T", "none")
    assert pair_names("x", "demo") == ("x", "D")
    assert pair_names("x", None) == ("x", None)
    assert pair_names(None, "ngram") == ("T", "ngram")
    assert pair_names(None, "demo+ngram") == ("T", "D+ngram")
    assert pair_names("x", "none+ngram") == ("x", "ngram")
    assert pair_names("x", "y+ngram") == ("x", "y+ngram")


def test_the_public_names_are_lazy_and_complete():
    assert dflash.load is load
    assert dflash.GenerateConfig is GenerateConfig
    assert sorted(dflash.__all__) == dflash.__all__
    assert set(dflash.__all__) <= set(dir(dflash))
    with pytest.raises(AttributeError, match="no_such_name"):
        dflash.no_such_name  # noqa: B018 - the access is the test


def test_no_warning_leaves_an_ordinary_call(engine):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate("hello", max_tokens=10)


def test_a_target_that_ends_by_itself_says_stop():
    with Engine(ToyPair(model=ToyModel(), draft_name="toy:oracle")) as engine:
        found = engine.generate("hello", max_tokens=2000)
    if found.finish_reason == "stop":
        assert found.token_ids[-1] in engine.pair.eos_ids
        assert len(found.text) < len(found.token_ids)
