"""The two laws at every public entry point, on every backend."""

from __future__ import annotations

import pytest

from dflash.core.types import Finish
from tests.conformance.backends import SCRIPTS, Backend, Own, Scripted
from tests.conformance.entries import Call, Entry
from tests.core.test_text import cut_at

TEXT = "Once upon a time"
every_script = pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)


def check(entry: Entry, backend: Backend, pair: Scripted, call: Call) -> list[int]:
    """Runs ``call`` and compares all that comes back with plain decoding; returns the tokens."""
    request = entry.request(pair, call)
    tokens, finish = backend.plain.run(request)
    decode = pair.tokenizer.decode
    text = cut_at(decode(tokens), call.stop)
    if text != decode(tokens):
        whole = range(len(tokens) + 1)
        ends = next(n for n in whole if cut_at(decode(tokens[:n]), call.stop) != decode(tokens[:n]))
        tokens, finish = tokens[:ends], Finish.STOP
    found = entry.run(pair, call)
    if found.tokens is not None:
        assert found.tokens == tokens
    if found.finish is not None:
        assert found.finish == finish.value
    if found.text is not None:
        assert found.text == text
    return tokens


@every_script
@pytest.mark.parametrize("block_size", [1, 2, 4, 8, 16])
def test_output_is_that_of_plain_decoding(
    entry: Entry, script: tuple[int, ...] | None, block_size: int, backend: Backend
) -> None:
    check(entry, backend, Scripted(backend, script), Call(TEXT, block_size=block_size))


@every_script
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_a_seed_gives_the_text_of_plain_decoding_whatever_is_drafted(
    entry: Entry, script: tuple[int, ...] | None, temperature: float, backend: Backend
) -> None:
    call = Call(TEXT, temperature=temperature, max_tokens=24)
    check(entry, backend, Scripted(backend, script), call)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_a_stop_id_ends_the_text_at_every_place_of_a_block(
    entry: Entry, block_size: int, backend: Backend
) -> None:
    open_ended = Call(TEXT, block_size=block_size, max_tokens=2 * block_size + 2)
    whole = check(entry, backend, Scripted(backend), open_ended)
    for stop in sorted(set(whole)):
        check(entry, backend, Scripted(backend, eos_ids=frozenset({stop})), open_ended)


@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_exactly_max_tokens_come_out(entry: Entry, block_size: int, backend: Backend) -> None:
    for limit in range(2 * block_size + 2):
        call = Call(TEXT, block_size=block_size, max_tokens=limit)
        assert len(check(entry, backend, Scripted(backend), call)) == limit


def test_several_stop_ids_all_stop(entry: Entry, backend: Backend) -> None:
    whole = check(entry, backend, Scripted(backend), Call(TEXT))
    for pick in (whole[7:9], whole[3:30:9], [whole[0]]):
        check(entry, backend, Scripted(backend, eos_ids=frozenset(pick)), Call(TEXT))


@every_script
def test_a_stop_string_ends_text_and_ids_wherever_the_block_does(
    entry_with_strings: Entry, script: tuple[int, ...] | None, backend: Backend
) -> None:
    entry = entry_with_strings
    tokens, _ = backend.plain.run(entry.request(Scripted(backend), Call(TEXT)))
    text = backend.pair.tokenizer.decode(tokens)
    pairs = [text[place : place + 2] for place in range(3, len(text) - 2)]
    stops = [pair for pair in pairs if pair.isascii() and pair.isprintable()][:4]
    assert stops, "the text has something to stop at"
    for stop in stops:
        check(entry, backend, Scripted(backend, script), Call(TEXT, stop=(stop, "never said")))


def test_ties_go_to_the_lowest_id_with_and_without_a_draft(entry: Entry, tied: Backend) -> None:
    for block_size in (1, 8):
        # a script's wrong token is the right one plus 1: the twin with exactly equal logits
        for script in SCRIPTS.values():
            said = check(entry, tied, Scripted(tied, script), Call(TEXT, block_size=block_size))
            assert all(token % 2 == 0 for token in said)


def test_repeats_give_one_output_also_with_other_requests_between(
    entry: Entry, backend: Backend
) -> None:
    for _ in range(3):
        pair = Scripted(backend, (2, 0, 5))
        check(entry, backend, pair, Call(TEXT, max_tokens=24))
        check(entry, backend, pair, Call("Something else", max_tokens=9))
        check(entry, backend, pair, Call(TEXT, max_tokens=24))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("block_size", [2, 5, 16])
def test_the_backends_own_draft_never_changes_the_output(
    entry: Entry, temperature: float, block_size: int, backend: Backend
) -> None:
    call = Call(TEXT, temperature=temperature, block_size=block_size, max_tokens=32)
    check(entry, backend, Own(backend), call)
