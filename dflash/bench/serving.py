"""A run through one server, or two that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dflash.bench import report, sheet
from dflash.bench.advice import Advice
from dflash.bench.budget import Budget
from dflash.bench.counters import Counters
from dflash.bench.load import Load, Walls, loads, measure
from dflash.bench.prompts import Conversation
from dflash.bench.remote import Server
from dflash.bench.session import Say, Settings, finish, save
from dflash.bench.trial import Contestant, Course, Journal, Outcome, Record, complete

SERVER, BASELINE = "server", "baseline server"


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
    budget = Budget(settings.seconds)
    course = _course({arm: one.answer for arm, one in servers.items()}, settings, budget)
    with settings.journal(settings.shared(names)) as journal:
        if settings.warmup:
            say("warming up ...")
            course.warm_up(conversations[0], settings.warmup)
            before = {arm: server.counters() for arm, server in servers.items()}
        done, walls, through = _measure(course, conversations, settings, journal, say)
        records = complete(journal.records.values(), course.contestants, settings.repeats)
    after = {arm: server.counters() for arm, server in servers.items()}
    done = {
        arm: replace(load, counters=_between(before[arm], after[arm])) for arm, load in done.items()
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
        settings=settings.told(),
        walls=walls,
        notes=[
            *(load.note(arm, settings.concurrency) for arm, load in done.items()),
            *([budget.note(through, asked)] if through < (asked := len(conversations)) else ()),
        ],
    )
    made, advice = finish(material, None)
    made["servers"] = {arm: load.to_json() for arm, load in done.items()}
    save(made, settings.out)
    return made, advice


def _course(contestants: Mapping[str, Contestant], settings: Settings, budget: Budget) -> Course:
    def text(outcome: Outcome) -> str:
        return outcome.text

    return Course(
        contestants, settings.tokens, settings.repeats, None, says=text, is_over=budget.is_over
    )


def _measure(
    course: Course,
    conversations: Sequence[Conversation],
    settings: Settings,
    journal: Journal,
    say: Say,
) -> tuple[dict[str, Load], Walls | None, int]:
    """What each arm did, its counters left out; its repeats, where several ran at a time; and how
    many conversations came to their end.
    """
    if settings.concurrency > 1:
        walls = measure(course, conversations, settings.concurrency, journal, say)
        return loads(walls), walls, len(conversations)
    number = 0
    for number, _ in enumerate(course.run(conversations, journal), 1):
        say(f"{number} of {len(conversations)}")
    found = {}
    for arm in course.contestants:
        mine = [r for r in journal.records.values() if r.key.arm == arm]
        seconds = sum(map(_spent, mine))
        found[arm] = Load(len(mine), sum(r.outcome.tokens for r in mine), seconds)
    return found, None, number


def _between(before: Counters | None, after: Counters | None) -> Counters | None:
    return None if before is None or after is None else after - before


def _spent(record: Record) -> float:
    return record.outcome.prefill + record.outcome.decode
