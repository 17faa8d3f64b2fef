"""Checks of a pair that need it to run: above the engine, one check a file.

``examine`` runs all of them: what the static checks say, whether another reading of the draft's
config matches better, acceptance against the card's promise, and what a round costs on this
machine. It names causes; it changes nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from dflash.blocks import insist_on_room
from dflash.config import NO_DRAFT, split_draft
from dflash.doctor.measured import cost
from dflash.doctor.measured.causality import other_causality
from dflash.doctor.measured.mask import other_masks
from dflash.doctor.measured.norms import check_norms
from dflash.doctor.measured.patient import Patient, admit
from dflash.doctor.measured.promise import check_promise, promise
from dflash.doctor.measured.quantised import check_quantised
from dflash.doctor.measured.report import Report
from dflash.doctor.measured.rivals import Rival, judge
from dflash.doctor.measured.rope import other_rope
from dflash.doctor.measured.taps import other_taps
from dflash.doctor.measured.thinking import check_thinking
from dflash.doctor.static.facts import Finding
from dflash.engine import Engine
from dflash.errors import ConfigError, PairError, WeightsError
from dflash.verify.probe import Probe, probe_of

__all__ = ["CHECKS", "RIVALS", "Report", "examine"]

Say = Callable[[str], None]

RIVALS: tuple[Callable[[Patient], Iterator[Rival]], ...] = (
    other_taps,
    other_masks,
    other_causality,
    other_rope,
)
CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_norms,
    check_thinking,
    check_promise,
    check_quantised,
)


def examine(
    open_engine: Callable[[], Engine],
    texts: Sequence[str],
    tokens: int = 48,
    say: Say = lambda _: None,
) -> Report:
    """Open a pair and look at everything; ``say`` is told each step: ``part: where in it``.

    A pair that does not fit, or computes what is not finite, is a finding. Raises ConfigError for
    a pair without a draft, and what loading raises for files that cannot be read at all.
    """
    say("loading: target and draft")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they come back as findings
            engine = open_engine()
    except PairError as problem:
        return Report(tuple(problem.findings) or (Finding("error", "pair", str(problem)),))
    except WeightsError as problem:
        return Report((Finding("error", "weights", str(problem)),))
    with engine:
        if engine.pair.draft_name is None:
            raise ConfigError("there is no draft to examine: name one (--draft)")
        probe = probe_of(engine.pair)
        if probe.spec is None or not split_draft(engine.pair.draft_name)[1]:
            return _run(engine, probe, texts, tokens, say)
        with Engine(probe.variant()) as alone:  # of A+ngram the model draft is examined
            return _run(alone, probe_of(alone.pair), texts, tokens, say)


def _run(engine: Engine, probe: Probe, texts: Sequence[str], tokens: int, say: Say) -> Report:
    insist_on_room(engine.pair.draft_block_size, engine.pair, hint="")
    findings = probe.findings()
    try:
        patient = admit(
            engine, probe, texts, tokens, lambda n: say(f"acceptance: prompt {n} of {len(texts)}")
        )
    except WeightsError as problem:
        return Report((*findings, Finding("error", "finite", str(problem))))
    if probe.spec is not None:
        rivals = [rival for others in RIVALS for rival in others(patient)]
        findings += judge(
            patient,
            rivals,
            lambda n, r: say(f"other readings of the draft: {r.check}, {n} of {len(rivals)}"),
        )
    for check in CHECKS:
        say(f"checks: {check.__name__.removeprefix('check_')}")
        findings += check(patient)
    curve = cost.measure(
        engine.pair,
        patient.prompts[0],
        patient.acceptance.survival,
        lambda run, size: say(f"cost of a round: block {size}, run {run} of {cost.RUNS}"),
    )
    look_up = probe.spec is None and split_draft(engine.pair.draft_name or NO_DRAFT)[1]
    return Report(tuple(findings), patient.acceptance, curve, promise(patient), look_up)
