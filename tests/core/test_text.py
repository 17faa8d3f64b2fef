"""Text as it comes: the pieces joined are the text of all ids, however blocks cut them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dflash.backends.toy import ToyTokenizer
from dflash.core.text import TextStream

BYTES = ToyTokenizer()
STORY = "naïve café – 東京タワー 🙂👩‍👩‍👧 e\u0301 z\u0323\u0307 \ufffd ok"


class Pieces:
    """Like a sentencepiece tokenizer: words carry their leading space, a text's first one loses it.

    Ids from 100 on are single bytes, for what is not in the vocabulary.
    """

    words = (" the", " cat", "s", " ", " sat", ".", "\n", " ab", "c", " END")

    def encode(self, text: str) -> list[int]:
        return [100 + byte for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        raw = b"".join(self.words[i % 10].encode() if i < 100 else bytes([i - 100]) for i in ids)
        return raw.decode(errors="replace").removeprefix(" ")


def cut_at(text: str, stop: Sequence[str]) -> str:
    """What a reader of single characters would print: up to the stop string complete first."""
    for end in range(len(text) + 1):
        found = [end - len(s) for s in stop if text[:end].endswith(s)]
        if found:
            return text[: min(found)]
    return text


def blocks_of(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    blocks, start, turn = [], 0, 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        blocks.append(list(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return blocks


def streamed(tokenizer: object, blocks: Sequence[Sequence[int]], stop: Sequence[str] = ()) -> str:
    stream = TextStream(tokenizer, stop)  # type: ignore[arg-type]
    text = "".join(stream.push(block) for block in blocks)
    return text + stream.finish()


@pytest.mark.parametrize("size", range(1, 9))
def test_a_character_cut_at_every_block_boundary_comes_out_whole(size: int) -> None:
    ids = BYTES.encode(STORY)
    stream = TextStream(BYTES)
    said = ""
    for block in blocks_of(ids, [size]):
        said += stream.push(block)
        assert STORY.startswith(said), "nothing is printed that changes later"
    assert said + stream.finish() == STORY


@given(
    st.lists(st.integers(0, 258), max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@example([0xE2, 0x82, 0xE2, 0x82, 0xAC, 0x41], [2, 1])
@example([0xF0, 0x9F, 0x41], [2])
@example([0x80] * 40 + [0x41], [1])
def test_any_bytes_stream_to_the_text_of_all_of_them(ids: list[int], sizes: list[int]) -> None:
    assert streamed(BYTES, blocks_of(ids, sizes)) == BYTES.decode(ids)


@given(
    st.lists(st.integers(0, 9) | st.integers(100, 355), max_size=60),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_a_tokenizer_that_drops_the_first_space_streams_the_same(
    ids: list[int], sizes: list[int]
) -> None:
    tokenizer = Pieces()
    assert streamed(tokenizer, blocks_of(ids, sizes)) == tokenizer.decode(ids)


words = st.text("abc€", min_size=1, max_size=4)


@given(
    st.text("abc€ ", max_size=40),
    st.lists(words, min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
@example("abcd", ["abcd", "bc"], [4])
@example("aab", ["ab"], [1])
@example("aaab", ["aab"], [2])
@example("ab", ["b", "ab"], [2])
def test_text_ends_before_the_stop_string_that_is_complete_first(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    said = streamed(BYTES, blocks_of(BYTES.encode(text), sizes), stop)
    assert said == cut_at(text, stop)


@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.lists(st.sampled_from(["ab", "c E", "END", ".", " c", "s sat."]), max_size=3),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_stop_strings_across_words_and_blocks(
    ids: list[int], stop: list[str], sizes: list[int]
) -> None:
    tokenizer = Pieces()
    assert streamed(tokenizer, blocks_of(ids, sizes), stop) == cut_at(tokenizer.decode(ids), stop)


def test_a_possible_stop_string_is_held_back_and_released_when_it_is_none() -> None:
    stream = TextStream(BYTES, ["STOP"])
    assert stream.push(b"go ST") == "go "
    assert stream.push(b"A") == "STA"
    assert not stream.stopped
    assert stream.push(b"STOP it") == ""
    assert stream.stopped


def test_what_is_held_back_at_the_end_is_printed() -> None:
    stream = TextStream(BYTES, ["STOP"])
    assert stream.push(b"go STO") == "go "
    assert stream.finish() == "STO"
    assert not stream.stopped


def test_a_character_that_never_completes_is_printed_as_what_it_is() -> None:
    stream = TextStream(BYTES)
    assert stream.push(b"a\xf0\x9f") == "a"
    assert stream.finish() == "\ufffd"


def test_a_stop_string_completed_only_by_the_end_is_found() -> None:
    stream = TextStream(BYTES, ["a\ufffd"])
    assert stream.push(b"ba\xf0") == "b"
    assert stream.finish() == ""
    assert stream.stopped


def test_nothing_follows_a_stop() -> None:
    stream = TextStream(BYTES, ["."])
    assert stream.push(b"yes. no") == "yes"
    assert stream.stopped
    assert stream.push(b"more") == ""
    assert stream.finish() == ""


def test_special_tokens_print_nothing_and_break_nothing() -> None:
    euro = list("€".encode())
    assert streamed(BYTES, [[65, 256], [*euro[:1], 257], euro[1:], [256]]) == "A€"


def test_an_empty_push_prints_nothing() -> None:
    assert TextStream(BYTES).push([]) == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(AssertionError, match="empty stop string"):
        TextStream(BYTES, [""])


def test_a_long_text_is_not_decoded_from_the_start_each_time() -> None:
    longest = 0

    class Counting(ToyTokenizer):
        joins_bytes = False

        def decode(self, ids: Sequence[int]) -> str:
            nonlocal longest
            longest = max(longest, len(ids))
            return super().decode(ids)

    assert streamed(Counting(), blocks_of(BYTES.encode(STORY * 50), [3])) == STORY * 50
    assert longest < 60


def test_where_bytes_are_joined_only_what_is_no_character_yet_is_decoded_again() -> None:
    asked: list[list[int]] = []

    class Listening(ToyTokenizer):
        def decode(self, ids: Sequence[int]) -> str:
            asked.append(list(ids))
            return super().decode(ids)

    euro = list("€".encode())
    assert streamed(Listening(), [[65], [66], euro[:1], euro[1:], [67]]) == "AB€C"
    assert asked == [[65], [66], euro[:1], euro, [67], []]


@pytest.mark.parametrize("size", [1, 2, 5, 9])
def test_a_stop_string_that_is_complete_before_it_is_watched_for_ends_nothing(size: int) -> None:
    text, early = b"ab ab ab ab", 4
    stream, said = TextStream(BYTES, ["ab"]), ""
    for block in blocks_of(list(text), [size]):
        for token in block:
            early -= 1
            stream.watching = early < 0
            said += stream.push([token])
    assert said + stream.finish() == "ab ", "the second one is completed by the fifth token"
    assert stream.stopped


def test_what_was_held_back_unwatched_may_become_a_stop_string() -> None:
    stream = TextStream(BYTES, ["abab"])
    stream.watching = False
    assert stream.push(b"abab") == "ab"
    stream.watching = True
    assert stream.push(b"ab") == ""
    assert stream.stopped
