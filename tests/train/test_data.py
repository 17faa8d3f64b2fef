from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from dflash.errors import ConfigError, DataError
from dflash.train.data import held_out_every, load_corpus, messages_of, tokenise
from tests.backends.tiny import tiny_tokenizer

GOOD = {
    "messages": [
        {"role": "user", "content": "Say hello to me."},
        {"role": "assistant", "content": "Hello to you, and good day."},
    ]
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows) + "\n")
    return path


def test_only_assistant_tokens_are_learned(tokenizer: Any) -> None:
    sequence = tokenise(GOOD["messages"], tokenizer, 512)
    learned = [i for i, a in zip(sequence.ids, sequence.answer, strict=True) if a]
    assert tokenizer.decode(learned).startswith("Hello to you, and good day.")
    prompt = tokenizer.apply_chat_template(
        GOOD["messages"][:1], tokenize=False, add_generation_prompt=True
    )
    assert list(sequence.ids[: sequence.answer.index(True)]) == tokenizer.encode(
        prompt, add_special_tokens=False
    )


def test_every_assistant_turn_of_a_conversation_is_learned(tokenizer: Any) -> None:
    more = [*GOOD["messages"], {"role": "user", "content": "Again!"}, GOOD["messages"][1]]
    sequence = tokenise(more, tokenizer, 512)
    starts = [
        i for i in range(1, len(sequence.ids)) if sequence.answer[i] and not sequence.answer[i - 1]
    ]
    assert len(starts) == 2


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{not json", "not JSON"),
        ("[1, 2]", "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "no answer"}]}, "assistant"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "assistant", "content": None}]}, "content"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, tokenizer: Any, line: Any, word: str) -> None:
    file = write(tmp_path / "text.jsonl", [GOOD, line, GOOD])
    with pytest.raises(DataError, match=rf"text\.jsonl:2: .*{word}.*--skip-malformed"):
        load_corpus([file], tokenizer, max_length=128)
    corpus = load_corpus([file], tokenizer, max_length=128, skip_malformed=True)
    assert len(corpus.train) == 2 and "text.jsonl:2" in corpus.skipped[0]


def test_gzip_is_read_and_every_nth_line_is_held_out(tmp_path: Path, tokenizer: Any) -> None:
    file = tmp_path / "text.jsonl.gz"
    with gzip.open(file, "wt") as out:
        out.write("\n".join(json.dumps(GOOD) for _ in range(10)))
    corpus = load_corpus([file], tokenizer, max_length=128, valid_every=5)
    assert (len(corpus.train), len(corpus.valid)) == (8, 2)


def test_of_few_conversations_one_at_least_is_held_out(tmp_path: Path, tokenizer: Any) -> None:
    sizes = {}
    for count in (3, 4, 20, 49, 120):
        file = write(tmp_path / "text.jsonl", [GOOD] * count)
        sizes[count] = len(load_corpus([file], tokenizer, max_length=128).valid)
    assert sizes == {3: 0, 4: 1, 20: 4, 49: 4, 120: 4}
    assert held_out_every(1000, 50) == 50
    assert held_out_every(1000, 0) == 0


def test_nothing_to_train_on_is_an_error(tmp_path: Path, tokenizer: Any) -> None:
    empty = write(tmp_path / "empty.jsonl", [""])
    with pytest.raises(DataError, match="no conversation"):
        load_corpus([empty], tokenizer, max_length=128)
    with pytest.raises(ConfigError, match="not a file"):
        load_corpus([tmp_path / "missing.jsonl"], tokenizer, max_length=128)


def test_the_last_message_must_be_the_targets() -> None:
    with pytest.raises(DataError, match="assistant"):
        messages_of(json.dumps({"messages": GOOD["messages"][:1]}))
