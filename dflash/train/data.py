"""Training text as token sequences with the answer positions marked.

A line of the JSONL is a conversation ``{"messages": [{"role": ..., "content": ...}, ...]}``. Only
tokens of assistant turns are learned: a draft is never asked to predict the user.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Protocol

from dflash.errors import ConfigError, DataError

FEWEST = 4  # conversations of which one can be held out


class ChatTokenizer(Protocol):
    """The part of a transformers tokenizer used here."""

    def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
        """Render a list of messages."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Text to ids."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation: all ids, and which of them are an assistant's words."""

    ids: tuple[int, ...]
    answer: tuple[bool, ...]  # same length


@dataclass(frozen=True, slots=True)
class Corpus:
    """Sequences for training and for validation, and the lines that were left out."""

    train: list[Conversation]
    valid: list[Conversation]
    skipped: list[str]

    @property
    def answer_tokens(self) -> int:
        """Learned tokens in the training part."""
        return sum(sum(sequence.answer) for sequence in self.train)

    def answers(self) -> Iterator[int]:
        """Learned tokens of the training part, in order."""
        for sequence in self.train:
            yield from compress(sequence.ids, sequence.answer)

    def covered(self, kept: Collection[int]) -> float:
        """Share of the held-out answers' tokens (of the learned ones without any) in ``kept``."""
        texts = self.valid or self.train
        ids = [token for text in texts for token in compress(text.ids, text.answer)]
        return sum(token in kept for token in ids) / max(len(ids), 1)


def load_corpus(
    paths: Sequence[Path],
    tokenizer: ChatTokenizer,
    *,
    max_length: int,
    valid_every: int = 50,
    skip_malformed: bool = False,
) -> Corpus:
    """Read, tokenise and split; every ``valid_every``-th conversation is held out, or more of few.

    Raises DataError for a malformed line (with file and line number) unless ``skip_malformed``,
    and when nothing is left to train on.
    """
    found: list[tuple[int, Conversation]] = []  # with its place among the lines
    skipped: list[str] = []
    for number, (place, raw) in enumerate(lines(paths)):
        try:
            sequence = tokenise(messages_of(raw), tokenizer, max_length)
        except DataError as error:
            if not skip_malformed:
                raise DataError(
                    f"{place}: {error}. Mend the line, or pass --skip-malformed to leave such out"
                ) from None
            skipped.append(f"{place}: {error}")
            continue
        found.append((number, sequence))
    every = held_out_every(len(found) + len(skipped), valid_every)
    train, valid = (
        [one for number, one in found if (every > 0 and number % every == every - 1) is held_out]
        for held_out in (False, True)
    )
    if not train:
        raise DataError(
            f"no conversation to train on in {', '.join(map(str, paths)) or 'no file'} "
            f"({len(skipped)} lines left out); a line is {{'messages': [user, assistant]}}"
        )
    return Corpus(train, valid, skipped)


def held_out_every(count: int, asked: int) -> int:
    """Which of ``count`` conversations are held out, each so many-th; 0 = none.

    As asked where that leaves enough to judge by; a quarter, and never more, of very few.
    """
    if asked <= 0 or count < FEWEST:
        return 0
    return min(asked, max(FEWEST, count // 4))


def check_files(paths: Sequence[Path]) -> None:
    """Raise ConfigError for a path that is no file."""
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"training data {path} is not a file; --data takes a JSONL (or .jsonl.gz)"
            )


def lines(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """(``file:line``, text) of every non-empty line; .gz files are opened as they are."""
    check_files(paths)
    for path in paths:
        try:
            with (
                gzip.open(path, "rt", encoding="utf-8")
                if path.suffix == ".gz"
                else path.open(encoding="utf-8") as file
            ):
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", line
        except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
            raise DataError(f"{path} is not UTF-8 JSONL: {error}") from error


def messages_of(raw: str) -> list[dict[str, str]]:
    """The conversation in one line; raises DataError with what is wrong."""
    try:
        row = json.loads(raw)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg} at column {error.colno})") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise DataError("no 'messages' list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataError("a message without text 'content'")
        if message.get("role") not in ("system", "user", "assistant"):
            raise DataError(f"unknown role {message.get('role')!r}")
    if messages[-1]["role"] != "assistant" or not messages[-1]["content"]:
        raise DataError("the last message is not an assistant's answer")
    return messages


def tokenise(messages: list[dict[str, str]], tokenizer: ChatTokenizer, limit: int) -> Conversation:
    """Ids as the target sees them in generation: prompt and answer are encoded apart.

    Encoding them apart matters: in generation the answer starts on a token boundary, and a merge
    over that boundary would make training ids that never occur when serving.
    """
    ids: list[int] = []
    answer: list[bool] = []
    done = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:place], tokenize=False, add_generation_prompt=True
        )
        through = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
        if not before.startswith(done) or not through.startswith(before):
            raise DataError(
                "the chat template rewrites earlier turns, so the answer cannot be located"
            )
        for text, learned in ((before[len(done) :], False), (through[len(before) :], True)):
            part = tokenizer.encode(text, add_special_tokens=False)
            ids += part
            answer += [learned] * len(part)
        done = through
    ids, answer = ids[:limit], answer[:limit]
    if sum(answer) < 2:
        raise DataError(f"no answer within the first {limit} tokens")
    return Conversation(tuple(ids), tuple(answer))
