"""A run: every arm on every prompt, in turn, each answer written down before the next begins.

The journal is a JSONL file: a line of settings, then one record a line. A run that was interrupted
goes on from it, and one with more arms, prompts or repeats adds to it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from dflash.bench.arms import Arm, Run, in_turn
from dflash.bench.prompts import Conversation
from dflash.errors import ConfigError

WARM_TOKENS = 32


class TimeUp(Exception):
    """Raised inside a course whose time is over; it never leaves it."""


class Ask(NamedTuple):
    """One turn: the conversation so far, and its ids where this process has a tokenizer."""

    messages: tuple[dict[str, str], ...]
    ids: tuple[int, ...] = ()


class Key(NamedTuple):
    """What a record is of."""

    arm: str
    set: str
    prompt: str
    turn: int
    repeat: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer. Times in seconds by the reader's clock; None = the arm cannot tell."""

    tokens: int
    first: int  # tokens that came with the prefill
    prefill: float
    decode: float
    ids: tuple[int, ...] = ()  # () from a server, which gives text
    text: str = ""  # only from a server
    prompt_tokens: int = 0
    rounds: int = 0  # verify passes, the prefill's not counted
    drafted: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()  # [a]: rounds that kept a drafts
    judged: tuple[int, ...] = ()  # [i]: rounds that judged draft i+1
    draft_seconds: float | None = None
    verify_seconds: float | None = None

    @property
    def said(self) -> tuple[Hashable, ...]:
        """What two answers are compared by: ids, or words where there are none."""
        return self.ids or tuple(self.text.split())


@dataclass(frozen=True, slots=True)
class Record:
    """One answer of one arm."""

    key: Key
    category: str
    outcome: Outcome

    def to_json(self) -> dict[str, Any]:
        """One flat object."""
        return {**self.key._asdict(), "category": self.category, **asdict(self.outcome)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """What ``to_json`` gave. Raises KeyError and TypeError for anything else."""
        plain = {f.name: row[f.name] for f in fields(Outcome)}
        made: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in plain.items()}
        return cls(Key(*(row[n] for n in Key._fields)), row["category"], Outcome(**made))


def complete(records: Iterable[Record], arms: Collection[str], repeats: int) -> list[Record]:
    """Records of the turns that all ``arms`` answered in all ``repeats``."""
    asked: dict[tuple[str, str, int], list[Record]] = {}
    for one in records:
        if one.key.arm in arms and one.key.repeat < repeats:
            asked.setdefault((one.key.set, one.key.prompt, one.key.turn), []).append(one)
    whole = len(arms) * repeats
    return [one for answers in asked.values() if len(answers) == whole for one in answers]


Contestant = Callable[[Ask, int], Outcome]
"""(one turn, new tokens at most) -> the answer."""


def on_ids(arm: Arm) -> Contestant:
    """An arm of this process."""

    def answer(ask: Ask, tokens: int) -> Outcome:
        return outcome_of(arm(ask.ids, tokens), len(ask.ids))

    return answer


def outcome_of(run: Run, prompt_tokens: int) -> Outcome:
    """A run with what its statistics say."""
    stats = run.stats
    counts: dict[str, Any] = {}
    if stats is not None:
        names = ("rounds", "drafted", "accepted", "histogram", "judged")
        counts = {n: getattr(stats, n) for n in (*names, "draft_seconds", "verify_seconds")}
    return Outcome(
        tokens=len(run.ids),
        first=run.first,
        prefill=run.prefill,
        decode=run.decode,
        ids=run.ids,
        prompt_tokens=prompt_tokens,
        **counts,
    )


class Journal(AbstractContextManager["Journal"]):
    """Records in order, in memory and in a file."""

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], *, resume: bool = False
    ) -> None:
        """``settings`` are what all records must share; ``resume`` reads what the file has.

        Raises ConfigError when the file was made with other settings, or is no journal.
        """
        self.records: dict[Key, Record] = {}
        self._file: IO[str] | None = None
        head = json.dumps({"settings": dict(settings)}, sort_keys=True)
        there = resume and path is not None and path.exists()
        if path is not None:
            if there:
                self._read(path, head)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a" if there else "w", encoding="utf-8")
            if not there:
                self._write(head)

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def add(self, record: Record) -> None:
        """Keep one record, on the disk before the next is measured."""
        self.records[record.key] = record
        self._write(json.dumps(record.to_json(), ensure_ascii=False))

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(line + "\n")
            self._file.flush()

    def _read(self, path: Path, head: str) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        if lines[0] != head:
            raise ConfigError(
                f"{path} was made with other settings ({lines[0][:200]}): give another --out, or "
                "leave out --resume to begin anew"
            )
        whole = lines[1:-1]  # what stands after the last newline was cut off in the middle
        try:
            for line in whole:
                record = Record.from_json(json.loads(line))
                self.records[record.key] = record
        except (ValueError, LookupError, TypeError) as problem:
            raise ConfigError(f"{path} is no journal of a run: begin anew, without --resume") from (
                problem
            )
        if lines[-1]:
            path.write_text("\n".join([*lines[:-1], ""]), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Course:
    """How a run goes; the arms in ``contestants`` answer in turn, the first one sets the history.

    encode  messages -> ids; None where the arms take messages
    says    an answer as text, for the next turn
    """

    contestants: Mapping[str, Contestant]
    tokens: int
    repeats: int
    encode: Callable[[Sequence[dict[str, str]]], Sequence[int]] | None
    says: Callable[[Outcome], str]
    is_over: Callable[[], bool] = lambda: False  # asked before each answer: is the time used up?
    context: int | None = None  # most tokens, prompt and answer together
    asked: dict[tuple[str, str, int], tuple[int, ...]] = field(default_factory=dict)
    """(set, prompt, turn) -> ids of the prompt, as they come up."""

    def warm_up(self, conversation: Conversation, times: int) -> None:
        """Let every arm answer once or more, off the record."""
        ask = self._ask([{"role": "user", "content": conversation.turns[0]}])
        for _ in range(times):
            for contestant in self.contestants.values():
                if self.is_over():
                    return
                contestant(ask, min(WARM_TOKENS, self.tokens))

    def run(
        self, conversations: Iterable[Conversation], journal: Journal
    ) -> Iterator[Conversation | None]:
        """Yields a conversation when it is through; None for one too long for the context.

        Ends when the time is used up, in the middle of a conversation, too: see `complete`.
        """
        for conversation in conversations:
            try:
                fits = self._converse(conversation, journal)
            except TimeUp:
                return
            yield conversation if fits else None

    def _converse(self, conversation: Conversation, journal: Journal) -> bool:
        messages: list[dict[str, str]] = []
        names = list(self.contestants)
        for turn, text in enumerate(conversation.turns):
            messages.append({"role": "user", "content": text})
            ask = self._ask(messages)
            if self.context is not None and len(ask.ids) + self.tokens > self.context:
                return False
            self.asked[conversation.set, conversation.id, turn] = ask.ids
            for repeat, name in in_turn(names, self.repeats):
                key = Key(name, conversation.set, conversation.id, turn, repeat)
                if key not in journal.records:
                    if self.is_over():
                        raise TimeUp
                    found = self.contestants[name](ask, self.tokens)
                    journal.add(Record(key, conversation.category, found))
            first = Key(names[0], conversation.set, conversation.id, turn, 0)
            answer = self.says(journal.records[first].outcome)
            messages.append({"role": "assistant", "content": answer})
        return True

    def _ask(self, messages: Sequence[dict[str, str]]) -> Ask:
        ids = () if self.encode is None else tuple(self.encode(messages))
        return Ask(tuple(messages), ids)
