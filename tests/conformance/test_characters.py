"""Emoji, CJK and combining marks cut at every block boundary, through the whole engine."""

from __future__ import annotations

import pytest

from dflash.backends.toy import ToyModel, ToyPair
from dflash.engine import Engine
from tests.conformance.backends import SCRIPTS

STORY = "日本語 🙂👩‍👩‍👧 naïve e\u0301 z\u0323\u0307 Ünïcødé – ok. "


class Parrot(ToyModel):
    """A toy that says one text over and over, whatever it is asked."""

    def _next_word(self, chain: int) -> tuple[int, ...]:
        return tuple(STORY.encode())


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
@pytest.mark.parametrize("block_size", range(1, 17))
def test_every_character_comes_out_whole(script: tuple[int, ...] | None, block_size: int) -> None:
    pair = ToyPair(Parrot(), draft_name="scripted", script=script)
    size = len(STORY.encode())
    with Engine(pair) as engine:
        chunks = list(engine.stream("Go", max_tokens=size, block_size=block_size))
    said = "".join(chunk.text for chunk in chunks)
    assert said == STORY
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert said == "".join(piece.text for chunk in chunks for piece in chunk.pieces)
    whole = [token for chunk in chunks for token in chunk.token_ids]
    assert said == pair.tokenizer.decode(whole)


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_text_that_ends_inside_a_character_is_flushed(cut: int) -> None:
    pair = ToyPair(Parrot(), draft_name="scripted")
    with Engine(pair) as engine:
        found = engine.generate("Go", max_tokens=cut, block_size=4)
    assert found.text == pair.tokenizer.decode(found.token_ids)


@pytest.mark.parametrize("stop", ["🙂", "👧", "語", "\u0301", "ï", "ok."])
@pytest.mark.parametrize("block_size", [1, 3, 8, 16])
def test_a_stop_string_of_several_bytes_is_found(stop: str, block_size: int) -> None:
    pair = ToyPair(Parrot(), draft_name="scripted")
    with Engine(pair) as engine:
        found = engine.generate("Go", max_tokens=200, block_size=block_size, stop=stop)
    assert found.text == STORY[: STORY.index(stop)]
    assert found.finish_reason == "stop"
    assert list(found.token_ids) == list((STORY[: STORY.index(stop)] + stop).encode())
