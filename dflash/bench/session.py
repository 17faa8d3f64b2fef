"""One run from its settings to its report, through a local engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dflash.bench import local, record, report, sheet
from dflash.bench.advice import Advice
from dflash.bench.arms import PLAIN
from dflash.bench.budget import Budget
from dflash.bench.load import Line, Walls, loads, measure, one_at_a_time
from dflash.bench.local import Template
from dflash.bench.prompts import Conversation
from dflash.bench.rows import texts_of
from dflash.bench.totals import add_up
from dflash.bench.trial import Contestant, Course, Journal, Record, complete
from dflash.bench.verdict import Verdict
from dflash.blocks import insist_on_room
from dflash.checks import counted, within
from dflash.config import DraftTree
from dflash.engine import Engine
from dflash.errors import ConfigError

HALF = 0.5  # of the time: if it is used up, passes are not timed alone after the run
RECORDS, REPORT, CONDITIONS = "records.jsonl", "report.json", "conditions.json"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run goes.

    blocks    None = the common sizes and auto
    sampling  keywords of Engine.stream beside length and block: temperature, top_p, seed, ...
    out       folder for report.html, report.json and records.jsonl; None = keep nothing
    costs     whether to time passes alone, and the machine's ceilings
    """

    tokens: int = 128
    blocks: Sequence[int | str] | None = None
    repeats: int = 3
    warmup: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)
    template: Template = field(default_factory=Template)
    threads: int | None = None
    out: Path | None = None
    resume: bool = False
    costs: bool = True
    concurrency: int = 1  # requests at a time
    tree: DraftTree = 0  # nodes of the trees of our arms, as deep as their blocks
    seconds: float | None = None  # to measure in, warm-up included; None = as long as it takes

    def __post_init__(self) -> None:
        """Refuse what no run could do. Raises ConfigError."""
        for name, least in (("tokens", 2), ("repeats", 1), ("warmup", 0), ("concurrency", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be {least} or more, got {getattr(self, name)}")
        if self.tree == "auto" and (self.blocks is None or set(self.blocks) - {1, "auto"}):
            raise ConfigError(
                "--draft-tree auto decides by measured time, and blocks are fixed: give a number "
                "of nodes, or --block-sizes auto"
            )
        if self.seconds is not None:
            within("--seconds", self.seconds, lambda value: value > 0, "a positive number")
            if self.concurrency > 1:
                raise ConfigError("throughput at a --concurrency is of a whole run: no --seconds")
        if self.resume and self.concurrency > 1:
            raise ConfigError("throughput at a --concurrency is of a whole run: leave out --resume")

    @property
    def greedy(self) -> bool:
        """Whether every arm has to write the same text."""
        return not self.sampling.get("temperature", 0.0)

    def shared(self, pair: Mapping[str, Any]) -> dict[str, Any]:
        """What all records of one journal have to agree in."""
        template = {n: getattr(self.template, n) for n in ("chat", "system", "thinking")}
        tree = {"draft_tree": self.tree} if self.tree else {}
        return {"tokens": self.tokens, **self.sampling, **tree, **template, **pair}

    def told(self) -> dict[str, Any]:
        """What the report says of them."""
        names = ("repeats", "warmup", "concurrency")
        return {**self.shared({}), **{name: getattr(self, name) for name in names}}

    def journal(self, shared: Mapping[str, Any]) -> Journal:
        """The run's journal, in ``out`` if there is one. Raises ConfigError."""
        place = None if self.out is None else self.out / RECORDS
        return Journal(place, shared, resume=self.resume)


def run(
    engine: Engine,
    conversations: Sequence[Conversation],
    settings: Settings,
    say: Say,
    others: Mapping[str, Contestant] | None = None,
) -> tuple[dict[str, Any], Advice]:
    """Measure and report. ``others`` are arms of other programs, which run in turn with ours.

    Raises ConfigError when there is nothing to compare, and whatever the engine raises.
    """
    others = others or {}
    if others and settings.concurrency > 1:
        raise ConfigError("other programs answer one request at a time: leave out --concurrency")
    native = engine.pair.draft_block_size
    if native is None and not others:
        raise ConfigError("there is no draft to measure: name one (--draft)")
    blocks = local.block_sizes(native or 1, settings.blocks if native else ())
    most = max(size for size in blocks.values() if isinstance(size, int))
    insist_on_room("auto" if "auto" in blocks.values() else most, engine.pair, "block_sizes")
    facts = sheet.machine(settings.threads)  # before anything runs: how busy is the machine?
    pair = sheet.pair_sheet(engine.pair)
    names = {n: pair.get(n) for n in ("target", "draft", "runs_on_dtype", "runs_on_threads")}
    if settings.out is not None:  # a run that is cut off has figures, too
        record.write(settings.out / CONDITIONS, facts)
    with ExitStack() as stack:
        through = (
            stack.enter_context(Line(settings.concurrency)) if settings.concurrency > 1 else None
        )
        ours = local.contestants(engine, blocks, settings.sampling, through, settings.tree)
        budget = Budget(settings.seconds)
        course = _course(engine, settings, {**ours, **others}, budget)
        journal = stack.enter_context(settings.journal(settings.shared(names)))
        notes, walls = _measure(course, conversations, settings, journal, say, budget)
        records = _wanted(journal, course, conversations, settings.repeats)
    material = report.Material(
        records=records,
        blocks=blocks,
        others=list(others),
        base=PLAIN,
        greedy=settings.greedy,
        verdict=_verdict(engine, settings, course, records, blocks),
        sheet=facts,
        pair=sheet.pair_sheet(engine.pair),
        settings=settings.told(),
        notes=notes,
        walls=walls,
    )
    if settings.costs and native and records and not budget.is_over(HALF):
        say("timing passes alone, and the machine's limits ...")
        material = replace(material, costs=_costs(engine, course, records))
    return finish(material, settings.out)


def _verdict(
    engine: Engine,
    settings: Settings,
    course: Course,
    records: Sequence[Record],
    blocks: Mapping[str, int | str],
) -> Verdict | None:
    """Whether our arms wrote what plain decoding writes; None above temperature 0, or of none."""
    if not settings.greedy:
        return None
    texts = texts_of(records)
    if not texts:
        return None
    arms = [arm for arm in blocks if arm != PLAIN]
    return local.greedy_verdict(engine, texts, course.asked, arms, {"temperature": 0.0})


def finish(material: report.Material, out: Path | None) -> tuple[dict[str, Any], Advice]:
    """The report, also as files where ``out`` asks for them."""
    made, advice = report.build(material)
    save(made, out)
    return made, advice


def save(made: Mapping[str, Any], out: Path | None) -> None:
    """``report.json`` and ``report.html``."""
    if out is not None:
        from dflash.bench import page

        record.write(out / REPORT, dict(made))
        page.write(made, out)


def _course(
    engine: Engine, settings: Settings, contestants: Mapping[str, Contestant], budget: Budget
) -> Course:
    return Course(
        contestants=contestants,
        tokens=settings.tokens,
        repeats=settings.repeats,
        encode=one_at_a_time(lambda messages: settings.template.encode(engine, messages)),
        says=one_at_a_time(local.says(engine)),
        is_over=budget.is_over,
        context=engine.pair.context_length,
    )


def _measure(
    course: Course,
    conversations: Sequence[Conversation],
    settings: Settings,
    journal: Journal,
    say: Say,
    budget: Budget,
) -> tuple[list[str], Walls | None]:
    """Run; what there is to note, and the times by the wall where several run at a time."""
    if settings.warmup and conversations:
        say("warming up ...")
        course.warm_up(conversations[0], settings.warmup)
    if settings.concurrency > 1:
        walls = measure(course, conversations, settings.concurrency, journal, say)
        found = loads(walls)
        return [load.note(arm, settings.concurrency) for arm, load in found.items()], walls
    too_long = number = 0
    for number, done in enumerate(course.run(conversations, journal), 1):
        too_long += done is None
        say(f"{number} of {len(conversations)}: {'too long' if done is None else done.id}")
    notes = []
    if too_long:
        prompts = counted(too_long, "prompt")
        notes = [f"{prompts} left out or cut short: with the answer, longer than the context"]
    if number < len(conversations):
        notes.append(budget.note(number - too_long, len(conversations)))
    return notes, None


def _wanted(
    journal: Journal, course: Course, conversations: Sequence[Conversation], repeats: int
) -> list[Record]:
    """Of what the journal holds, what this run is about."""
    asked = {(c.set, c.id) for c in conversations}
    mine = [one for key, one in journal.records.items() if (key.set, key.prompt) in asked]
    return complete(mine, course.contestants, repeats)


def _costs(engine: Engine, course: Course, records: Sequence[Record]) -> Any:
    """Passes timed alone, on the first prompt; survival as this run found it."""
    survival = add_up(r.outcome for r in records if r.outcome.judged).unconditional
    prompt = next(iter(course.asked.values()))
    return local.costs(engine, prompt, survival)
