"""Text held to a form: always valid, the draft's as well, and equal to plain constrained text."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from dflash.backends.toy import EOS, ToyModel, ToyPair
from dflash.config import LoadConfig
from dflash.core.protocols import Pair
from dflash.core.types import Plan, Proposal, Request, Sampling
from dflash.engine import Engine
from dflash.errors import ConfigError, MissingBackend
from dflash.grammar import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
REGEX = r"[0-9]{2,5}(-[a-f]{2,6}){1,3}"
EBNF = 'root ::= "(" item ("," item)* ")"\nitem ::= [x-z]+ | root'
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": REGEX},
    "grammar": {"grammar": EBNF},
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
SCRIPTS: list[Sequence[int] | None] = [None, (0,), (2, 0, 4), (1, 5)]


def is_valid(form: dict[str, Any], text: str) -> bool:
    if "json_schema" in form:
        found = json.loads(text)
        return (
            set(found) == {"name", "age", "tags"}
            and len(found["name"]) <= 8
            and 0 <= found["age"] <= 99
            and set(found["tags"]) <= {"a", "b", "cc"}
            and len(found["tags"]) <= 3
        )
    if "regex" in form:
        return re.fullmatch(REGEX, text) is not None
    return _is_list(text)


def _is_list(text: str) -> bool:
    while "(" in text[1:]:  # innermost first
        shorter = re.sub(r"\(([x-z]+)(,[x-z]+)*\)(?!$)", "x", text)
        if shorter == text:
            return False
        text = shorter
    return re.fullmatch(r"\(([x-z]+)(,[x-z]+)*\)", text) is not None


class Eager(ToyModel):
    """A toy that writes what it may write in no order, and ends soon once it may."""

    def logits(self, state: Any) -> Any:
        logits = super().logits(state)
        logits[EOS] += 4.0
        logits[[ord(c) for c in '"}])']] += 2.0  # finite strings and lists
        return logits


TOY = Eager(words=False)


def toy_pair(script: Sequence[int] | None = None) -> ToyPair:
    return ToyPair(TOY, draft_name="toy:test", script=script, draft_block_size=9)


@every_form
def test_plain_text_is_valid_and_ends_by_itself(form: dict[str, Any]) -> None:
    with Engine(ToyPair(TOY)) as engine:
        for number in range(5):
            for temperature in (0.0, 1.0):
                settings: Any = {"temperature": temperature, "seed": number, "max_tokens": 400}
                found = engine.generate(f"{number}", **settings, **form)
                assert found.finish_reason == "stop"
                assert is_valid(form, found.text), found.text


@every_form
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_blocks_give_the_text_of_plain_constrained_decoding(
    form: dict[str, Any], temperature: float, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(2):
        settings: Any = {"temperature": temperature, "seed": number, "max_tokens": 400, **form}
        with Engine(ToyPair(TOY)) as engine:
            plain = engine.generate(f"{number}", **settings)
        for script in SCRIPTS:
            with Engine(toy_pair(script)) as engine:
                for block_size in (2, 9):
                    found = engine.generate(f"{number}", block_size=block_size, **settings)
                    assert found.token_ids == plain.token_ids
                    assert found.finish_reason == plain.finish_reason
    assert capfd.readouterr() == ("", ""), "the matcher has nothing to complain about"


@every_form
def test_unseeded_text_is_valid_too(form: dict[str, Any]) -> None:
    for script in SCRIPTS:
        with Engine(toy_pair(script)) as engine:
            for rule in ("rejection", "block"):
                settings: Any = {"temperature": 1.0, "rule": rule, "max_tokens": 400}
                for choice in engine.generate("hi", n=4, **settings, **form).choices:
                    assert choice.finish_reason == "stop"
                    # xgrammar lets bytes of a lone surrogate pass as one character; decoded they
                    # are three, and longer than maxLength allows.
                    assert "\ufffd" in choice.text or is_valid(form, choice.text), choice.text


def test_a_perfect_draft_is_never_wasted_under_a_grammar() -> None:
    with Engine(toy_pair()) as engine:
        stats = engine.generate("hi", block_size=5, max_tokens=400, json_schema=SCHEMA).stats
    assert stats.acceptance_rate > 0.9, "only what would come after the end is lost"


class Illegal:
    """Right, but for one token at place 2 of each block that the form never allows."""

    def __init__(self, draft: Any, token: int) -> None:
        self._draft, self._token = draft, token

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)

    def propose(self, plan: Plan) -> Proposal[Any]:
        found = self._draft.propose(plan)
        tokens = [self._token if i == 1 else t for i, t in enumerate(found.tokens)]
        return Proposal(tokens, found.rows)


@pytest.mark.parametrize("illegal", [ord("!"), 257, EOS], ids=["text", "mask token", "end"])
def test_a_draft_that_always_breaks_the_form_breaks_nothing(
    illegal: int, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(ToyPair):
        def open_drafts(self, capacity: int) -> list[Any]:
            return [Illegal(draft, illegal) for draft in super().open_drafts(capacity)]

    pair = Broken(TOY, draft_name="toy:test", draft_block_size=9)
    with Engine(ToyPair(TOY)) as plain, Engine(pair) as engine:
        for number in range(3):
            settings: Any = {"max_tokens": 400, "json_schema": SCHEMA}
            expected = plain.generate(f"{number}", **settings)
            found = engine.generate(f"{number}", block_size=8, **settings)
            assert found.token_ids == expected.token_ids and is_valid(
                FORMS["json_schema"], found.text
            )
    assert capfd.readouterr() == ("", "")


def test_requests_with_and_without_a_form_keep_apart() -> None:
    with Engine(ToyPair(TOY)) as plain, Engine(toy_pair((3, 0))) as engine:
        for form in (FORMS["regex"], {}, FORMS["json_schema"], FORMS["regex"], {}):
            settings: Any = {"max_tokens": 60, **form}
            expected = plain.generate("hi", reuse=False, **settings)
            assert engine.generate("hi", **settings).token_ids == expected.token_ids


# -- the matcher -----------------------------------------------------------------------------------


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(ToyPair(TOY))


def test_looking_ahead_in_any_order_changes_nothing(grammars: Grammars) -> None:
    rng, text = random.Random(1), list(b'{"name":"x", "age":7, "tags":["a"]}')
    constraint = ("json_schema", json.dumps(SCHEMA))
    walked, fresh = grammars.start(constraint), grammars.start(constraint)
    assert walked is not None and fresh is not None
    for place in range(0, len(text), 3):
        ahead = text[place : place + 3]
        for _ in range(6):
            draft = ahead[: rng.randint(0, 3)] + [rng.randrange(258)] * rng.randint(0, 1)
            walked.allow(draft)
        for i in range(len(ahead) + 1):
            one, two = walked.allow(ahead[:i]), fresh.allow(ahead[:i])
            assert one is not None and two is not None
            assert (one == two).all() and one.shape == (258,)
        walked.commit(ahead)
        fresh.commit(ahead)


def test_places_after_the_end_or_after_an_illegal_draft_are_out_of_reach(
    grammars: Grammars,
) -> None:
    found = grammars.start(("regex", "ab?"))
    assert found is not None
    assert np.flatnonzero(found.allow(())).tolist() == [ord("a")]
    assert np.flatnonzero(found.allow([ord("a")])).tolist() == [ord("b"), EOS]
    assert found.allow([ord("b")]) is None
    assert found.allow([ord("a"), EOS]) is None
    assert found.allow([ord("a"), EOS, 5]) is None
    found.commit([ord("a"), EOS])
    assert found.allow(()) is None


def test_a_token_that_breaks_the_form_cannot_be_committed(grammars: Grammars) -> None:
    found = grammars.start(("regex", "ab"))
    assert found is not None
    with pytest.raises(AssertionError, match="forbids"):
        found.commit([ord("z")])


def test_one_constraint_is_compiled_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars.start(("regex", "a+"))
    monkeypatch.setattr(grammars, "_compile", None)
    one, two = grammars.start(("regex", "a+")), grammars.start(("regex", "a+"))
    assert one is not None and one is not two


@pytest.mark.parametrize(
    "options",
    [{"regex": "(a"}, {"grammar": 'root ::= ("a"'}, {"json_schema": {"type": "nonsense"}}],
)
def test_what_is_no_form_is_one_clear_error(options: dict[str, Any]) -> None:
    with Engine(ToyPair(TOY)) as engine, pytest.raises(ConfigError) as caught:
        engine.generate("hi", **options)
    assert f"this {next(iter(options))} cannot be used" in str(caught.value)
    assert ".cc:" not in str(caught.value)


def test_without_xgrammar_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with Engine(ToyPair(TOY)) as engine, pytest.raises(MissingBackend, match="pip install"):
        engine.generate("hi", regex="a")


def test_a_target_that_cannot_end_takes_no_form() -> None:
    pair = ToyPair(ToyModel(eos_ids=frozenset()))
    with Engine(pair) as engine, pytest.raises(ConfigError, match="no end-of-text token"):
        engine.generate("hi", regex="a")


def test_options_that_leave_nothing_beside_the_form_say_so() -> None:
    with Engine(ToyPair(TOY)) as engine, pytest.raises(ConfigError, match="forbid all of them"):
        engine.generate("hi", regex="ab", min_tokens=5)


# -- torch -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    pytest.importorskip("torch")
    from tests.backends.tiny import save_target, tiny_target, tiny_tokenizer
    from tests.facades.drafts import save_draft

    folder = tmp_path_factory.mktemp("pair")
    target = save_target(tiny_target(pad_rows=64), tiny_tokenizer(), folder / "target")
    yield str(target), str(save_draft(folder / "draft", block_size=8))


def open_torch(target: str, draft: str | None) -> Pair:
    from dflash.backends.torch import open_pair

    return open_pair(LoadConfig(target, draft, device="cpu", dtype="float32"))


@pytest.mark.torch
@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_model_draft_obeys_and_torch_says_the_same(folders: tuple[str, str], rule: Any) -> None:
    target, draft = folders
    settings: Any = {"max_tokens": 120, "chat_template": False, "rule": rule}
    with Engine(open_torch(target, None)) as plain, Engine(open_torch(target, draft)) as engine:
        for form in FORMS.values():
            expected = plain.generate("Once", **settings, **form)
            found = engine.generate("Once", block_size=8, **settings, **form)
            assert found.token_ids == expected.token_ids
            assert found.stats.drafted > found.stats.accepted
            warm = engine.generate("Once", block_size=8, temperature=1.0, **settings, **form)
            for text in (found, warm):
                assert text.finish_reason == "length" or is_valid(form, text.text)


@pytest.mark.torch
def test_every_drafted_token_was_allowed(folders: tuple[str, str]) -> None:
    pair = open_torch(*folders)
    target, draft = pair.open_target(256), pair.open_drafts(256)[0]
    watched, own = (Grammars(pair).start(("regex", REGEX)) for _ in range(2))
    assert watched is not None and own is not None
    request = Request(pair.tokenizer.encode("Once"), 60, pair.eos_ids, Sampling(), watched)
    draft.begin(request, 0)
    for verdict in target.prefill(request, 0):
        draft.commit(verdict, verdict.rows)
    said = list(verdict.tokens)
    for _ in range(8):
        own.commit(said)
        proposal = draft.propose(Plan(0, 7, 7))
        for place, token in enumerate(proposal.tokens):
            mask = own.allow(proposal.tokens[:place])
            assert mask is not None and mask[token]
        verdict = target.verify(proposal)
        said = verdict.tokens
        if pair.eos_ids & set(said):
            break
        target.commit(len(said))
        draft.commit(verdict, len(said))
    target.close()
    pair.close()
