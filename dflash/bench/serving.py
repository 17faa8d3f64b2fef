"""A run through one server, or two that are compared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from dflash.bench import report, sheet
from dflash.bench.advice import Advice
from dflash.bench.counters import Counters
from dflash.bench.prompts import Conversation
from dflash.bench.remote import Server
from dflash.bench.session import Say, Settings, finish, save
from dflash.bench.trial import Contestant, Course, Journal, Outcome, Record

SERVER, BASELINE = "server", "baseline server"


@dataclass(frozen=True, slots=True)
class Load:
    """What one server did under the load of a run."""

    requests: int
    tokens: int
    seconds: float  # by the wall clock
    counters: Counters | None  # between the beginning and the end; other clients count, too

    def to_json(self) -> dict[str, Any]:
        """Counts and the throughput."""
        rate = self.tokens / self.seconds if self.seconds else 0.0
        counted = None if self.counters is None else self.counters.to_json()
        plain = {"requests": self.requests, "tokens": self.tokens, "seconds": self.seconds}
        return {**plain, "throughput": rate, "counters": counted}


def run(
    servers: Mapping[str, Server],
    conversations: Sequence[Conversation],
    settings: Settings,
    say: Say,
) -> tuple[dict[str, Any], Advice]:
    """Measure ``servers`` (arm -> server, the baseline first) and report.

    One request at a time, they answer in turn; with more, each takes the whole set, one after the
    other in every repeat. Raises DownloadError when one of them stops answering.
    """
    before = {arm: server.counters() for arm, server in servers.items()}
    facts = {**sheet.machine(None), "note": "the machine of the client, not of the server"}
    names = {arm: f"{server.url} {server.model}" for arm, server in servers.items()}
    course = _course({arm: server.answer for arm, server in servers.items()}, settings)
    with settings.journal(settings.shared(names)) as journal:
        if settings.warmup:
            say("warming up ...")
            course.warm_up(conversations[0], settings.warmup)
            before = {arm: server.counters() for arm, server in servers.items()}
        seconds = _measure(course, conversations, settings, journal, say)
        records = list(journal.records.values())
    loads = {
        arm: _load(arm, records, seconds[arm], before[arm], servers[arm].counters())
        for arm in servers
    }
    base = next(iter(servers))
    material = report.Material(
        records=records,
        blocks={},
        others=list(servers),
        base=base,
        greedy=settings.greedy and settings.concurrency == 1,
        sheet=facts,
        pair={"target": next(iter(servers.values())).model, **names},
        settings={**settings.shared({}), "concurrency": settings.concurrency},
        notes=_notes(loads, settings),
    )
    made, advice = finish(material, None)
    made["servers"] = {arm: load.to_json() for arm, load in loads.items()}
    save(made, settings.out)
    return made, advice


def _course(contestants: Mapping[str, Contestant], settings: Settings) -> Course:
    def text(outcome: Outcome) -> str:
        return outcome.text

    return Course(contestants, settings.tokens, settings.repeats, encode=None, says=text)


def _measure(
    course: Course,
    conversations: Sequence[Conversation],
    settings: Settings,
    journal: Journal,
    say: Say,
) -> dict[str, float]:
    """Seconds by the wall clock of each arm."""
    if settings.concurrency == 1:
        for number, _ in enumerate(course.run(conversations, journal), 1):
            say(f"{number} of {len(conversations)}")
        return {
            arm: sum(_spent(r) for r in journal.records.values() if r.key.arm == arm)
            for arm in course.contestants
        }
    seconds = dict.fromkeys(course.contestants, 0.0)
    shared = _Locked(journal)
    for repeat in range(settings.repeats):
        for arm, contestant in course.contestants.items():
            alone = replace(course, contestants={arm: contestant}, repeats=repeat + 1)
            start = time.perf_counter()
            with ThreadPoolExecutor(settings.concurrency) as pool:
                jobs = [pool.submit(_one, alone, c, shared) for c in conversations]
                for job in jobs:
                    job.result()
            seconds[arm] += time.perf_counter() - start
            say(f"repeat {repeat + 1} of {settings.repeats}: {arm}")
    return seconds


def _one(course: Course, conversation: Conversation, journal: Any) -> None:
    list(course.run([conversation], journal))


class _Locked:
    """A journal that several threads write."""

    def __init__(self, journal: Journal) -> None:
        """``journal`` stays the caller's."""
        self.records, self._journal, self._lock = journal.records, journal, Lock()

    def add(self, record: Record) -> None:
        """One at a time."""
        with self._lock:
            self._journal.add(record)


def _load(
    arm: str,
    records: Sequence[Record],
    seconds: float,
    before: Counters | None,
    after: Counters | None,
) -> Load:
    mine = [record.outcome for record in records if record.key.arm == arm]
    counted = None if before is None or after is None else after - before
    return Load(len(mine), sum(one.tokens for one in mine), seconds, counted)


def _spent(record: Record) -> float:
    return record.outcome.prefill + record.outcome.decode


def _notes(loads: Mapping[str, Load], settings: Settings) -> list[str]:
    notes = []
    for arm, load in loads.items():
        rate = load.tokens / load.seconds if load.seconds else 0.0
        text = f"{arm}: {rate:.1f} tokens/s at concurrency {settings.concurrency}"
        if load.counters is not None:
            counted = load.counters.to_json()
            text += (
                f"; its counters: {counted['rounds']} verify passes, "
                f"{100 * counted['acceptance_rate']:.0f} % of drafts accepted, acceptance length "
                f"{counted['acceptance_length']:.2f} (the bonus counted)"
            )
        notes.append(text)
    return notes
