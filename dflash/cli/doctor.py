"""``dflash doctor``: do target and draft fit, and does the draft pay here?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli.given import open_engine
from dflash.cli.groups import Given, flat, with_groups
from dflash.cli.output import emit_json, note
from dflash.cli.progress import progress
from dflash.cli.verify import Prompts

if TYPE_CHECKING:
    from dflash.doctor.measured import Report
    from dflash.doctor.measured.acceptance import Acceptance
    from dflash.doctor.measured.cost import Cost

BROKEN = 1  # exit status


@with_groups
def doctor(
    pair: Given = o.PAIR_FLAGS,
    engine_flags: Given = e.FLAGS,
    prompts: Prompts = None,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", "-n", min=2, metavar="N", help="Tokens of each prompt."),
    ] = 48,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Examine a pair: fit, acceptance, cost, and a verdict. Exit status 1 when it is broken."""
    given = flat(locals())
    from dflash.bench import guards
    from dflash.doctor.measured import examine
    from dflash.verify.prompts import read

    texts = [prompt.text for prompt in read(prompts)]
    with progress(quiet=json) as say:
        report = examine(lambda: open_engine(given), texts, max_tokens, say)
    if json:
        emit_json(report.to_json())
    else:
        for line in _lines(report):
            typer.echo(line)
    if report.cost is not None and (noise := guards.noise(report.cost.spread)) is not None:
        note(f"{noise}, so do not build on the costs: run again while nothing else runs")
    raise typer.Exit(BROKEN if report.verdict == "broken" else 0)


def _lines(report: Report) -> Iterator[str]:
    for finding in report.findings:
        yield f"{finding.level}: {finding.check}: {finding.message}"
    if report.acceptance is not None:
        yield from _acceptance(report.acceptance, report.promised)
    if report.cost is not None:
        yield from _cost(report.cost)
    yield f"verdict: {report.sentence}"


def _acceptance(found: Acceptance, promised: float | None) -> Iterator[str]:
    card = "" if promised is None else f" (the card promises {promised:.2f})"
    macro = f", mean of the prompts' own means {found.macro_committed:.2f}"
    yield f"committed per pass: {found.mean_committed:.2f}{macro}{card}"
    yield f"drafts accepted: {found.accepted} of {found.drafted} ({100 * found.rate:.0f} %)"
    yield f"kept at draft 1, 2, ...: {_row(found.survival)}"
    yield f"once the one before was kept: {_row(found.conditional)}"


def _cost(cost: Cost) -> Iterator[str]:
    yield "block  verify ms  draft ms  pays from    has  speed"
    for b in cost.blocks:
        yield (
            f"{b.block_size:>5}{b.verify_ms:>11.1f}{b.draft_ms:>10.1f}{b.cost:>11.2f}"
            f"{b.committed:>7.2f}{b.speed:>7.2f}"
        )
    even = cost.best_drafted.break_even
    chance = "no acceptance is enough" if even is None else f"{100 * even:.0f} % of drafts kept"
    yield f"break-even at block {cost.best_drafted.block_size}: {chance}"


def _row(chances: tuple[float, ...]) -> str:
    return " ".join(f"{chance:.2f}" for chance in chances)
