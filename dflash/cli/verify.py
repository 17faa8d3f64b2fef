"""``dflash verify``: does the draft change the text?"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.checks import counted
from dflash.cli import engine_flags as e
from dflash.cli import options as o
from dflash.cli import text_options as t
from dflash.cli.given import insist_on_block, open_engine, settings_of
from dflash.cli.groups import Given, flat, was_given, with_groups
from dflash.cli.output import emit_json, note, status
from dflash.errors import ConfigError

if TYPE_CHECKING:
    from dflash.engine import Engine
    from dflash.verify.compare import Comparison, Outcome
    from dflash.verify.prompts import Prompt
    from dflash.verify.sampling import Audit

LOSSLESS, BIASED = "lossless", "biased samples"
UNTESTED = "samples not tested: only one token was ever possible, so choose another prompt"
DIFFERS = 1  # exit status

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE|NAME",
        help="JSONL with 'prompt' or 'turns', a folder of them, or a set by name (gsm8k, math500, "
        "humaneval, mbpp, mt-bench). Left out: a small mixed set.",
        rich_help_panel=o.TEXT,
    ),
]


@with_groups
def verify(
    ctx: typer.Context,
    pair: Given = o.PAIR_FLAGS,
    force_dflash: o.ForceDFlash = False,
    engine_flags: Given = e.FLAGS,
    prompts: Prompts = None,
    max_tokens: o.MaxTokens = 64,
    temperature: o.Temperature = 0.0,
    top_k: o.TopK = 0,
    top_p: o.TopP = 1.0,
    shape: Given = t.SHAPE_FLAGS,
    seed: o.Seed = None,
    ignore_eos: o.IgnoreEos = False,
    system: o.System = None,
    no_chat_template: o.NoChatTemplate = False,
    block_size: o.BlockSize = None,
    draft_tokens: o.DraftTokens = None,
    draft_tree: o.DraftTree = "0",
    sampling: Annotated[
        bool,
        typer.Option(
            "--sampling",
            help="Test samples against exact probabilities, too; at temperature 1 unless "
            "--temperature says another.",
        ),
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", min=1, metavar="N", help="How many, with --sampling.")
    ] = 2000,
    json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Compare plain with speculative decoding. Exit status 1 when they really differ, or when
    samples tested nothing, else 0.

    Other failures: 2 for what can be mended, 141 when the reader of the output left early.
    """
    given = flat({name: value for name, value in locals().items() if name != "ctx"})
    settings = _settings(given, asked=was_given(ctx, "temperature"))
    from dflash.verify.prompts import read

    texts = read(prompts)
    with open_engine(given) as engine:
        _insist_on_draft(engine, settings)
        comparison = _compare(engine, texts, settings, aloud=not json)
        audits = _sample(engine, texts[0], settings, samples) if sampling else []
        if comparison.count("identical") < comparison.prompts:
            _explain(engine)
    verdict = comparison.verdict if all(audit.passed for audit in audits) else BIASED
    if verdict == LOSSLESS and audits and not any(audit.freedom for audit in audits):
        verdict = UNTESTED
    result = {**comparison.to_json(), "verdict": verdict}
    if sampling:
        result["sampling"] = [audit.to_json() for audit in audits]
    if json:
        emit_json(result)
    else:
        for line in _conclusion(comparison, audits, verdict):
            typer.echo(line)
    raise typer.Exit(0 if verdict == LOSSLESS else DIFFERS)


def _settings(given: dict[str, Any], asked: bool) -> dict[str, Any]:
    """Samples need a temperature, and two equal texts a seed. ``asked``: the former was given."""
    if given["sampling"] and given["temperature"] == 0:
        if asked:
            raise ConfigError(
                "--sampling tests samples, and at --temperature 0 there are none: give one above "
                "0, or leave it out (1)"
            )
        given["temperature"] = 1.0
        note("samples need a temperature: this is --temperature 1")
    if given["temperature"] > 0 and given["seed"] is None:
        given["seed"] = secrets.randbits(32)
        note(f"equal samples need a seed: this is --seed {given['seed']}")
    return settings_of(given)


def _insist_on_draft(engine: Engine, settings: dict[str, Any]) -> None:
    """A draft, and its whole block unless told otherwise: the most speculation there is.

    A tree that is chosen by measured time is chosen with its block.
    """
    if engine.pair.draft_name is None:
        raise ConfigError("there is no draft to verify: name one (--draft)")
    free = settings["block_size"] is None and settings["draft_tokens"] is None
    if free and settings["draft_tree"] != "auto":
        settings["block_size"] = engine.pair.draft_block_size
    insist_on_block(engine, settings)


def _compare(
    engine: Engine, prompts: Sequence[Prompt], settings: Mapping[str, Any], *, aloud: bool
) -> Comparison:
    from dflash.verify.compare import Comparison, outcomes
    from dflash.verify.gap import Judge

    found = []
    for outcome in outcomes(engine, prompts, settings, Judge(engine, settings).gap):
        found.append(outcome)
        if aloud:
            typer.echo(_line(outcome, engine))
    return Comparison(tuple(found))


def _explain(engine: Engine) -> None:
    """What the backend itself says of passes of several rows."""
    from dflash.doctor.static.facts import ROUNDING
    from dflash.verify.probe import probe_of

    for finding in probe_of(engine.pair).findings():
        if finding.check == ROUNDING:
            note(finding.message)


def _sample(
    engine: Engine, prompt: Prompt, settings: Mapping[str, Any], samples: int
) -> list[Audit]:
    """Once with seeds, once without: two rules of acceptance."""
    from dflash.verify.gap import Judge
    from dflash.verify.sampling import audit, drawn_by

    apart = dict(settings)
    template = {name: apart.pop(name) for name in ("chat_template", "system")}
    ids = engine.encode(prompt.text, **template)
    exact = partial(Judge(engine, settings).exact, ids)
    audits = []
    for name, seed in (("seeded", settings["seed"]), ("unseeded", None)):
        drawn = counted(samples, f"{name} sample")
        status(f"drawing {drawn} at temperature {settings['temperature']} ...")
        draw = drawn_by(engine, ids, {**apart, "seed": seed})
        audits.append(audit(name, draw, exact, samples))
    return audits


def _line(outcome: Outcome, engine: Engine) -> str:
    if outcome.difference is None:
        return f"identical  {outcome.id}  ({counted(outcome.tokens, 'token')})"
    there = outcome.difference
    one, two = (_shown(engine, token) for token in (there.plain, there.speculative))
    gap = "" if there.gap is None else f", gap {there.gap:.1e}"
    word = "tie      " if there.tie else "DIFFERENT"
    return f"{word}  {outcome.id}  (token {there.position}: {one} / {two}{gap})"


def _shown(engine: Engine, token: int) -> str:
    return "the end" if token < 0 else repr(engine.pair.tokenizer.decode([token]))


def _conclusion(comparison: Comparison, audits: Sequence[Audit], verdict: str) -> Iterator[str]:
    yield (
        f"{counted(comparison.prompts, 'prompt')}, {counted(comparison.tokens, 'token')}, "
        f"{comparison.committed:.2f} committed per pass: {comparison.count('identical')} "
        f"identical, {counted(comparison.count('tie'), 'tie')}, "
        f"{counted(comparison.count('real'), 'real difference')}"
    )
    for audit in audits:
        word = "as the target's own" if audit.passed else "BIASED"
        word = word if audit.freedom else "but only one token was ever possible: nothing was tested"
        samples = counted(audit.samples, f"{audit.name} sample")
        yield f"{samples}: chi-square p = {audit.p:.3g}, {word}"
    yield f"verdict: {verdict}"
