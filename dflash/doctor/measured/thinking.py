"""Thinking mode: a draft trained on answers without thinking is lost inside of it, and vice versa.

The template's own default is what the engine uses. Where the template has the switch, the other
position is tried.
"""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.measured.acceptance import measure
from dflash.doctor.measured.patient import FEW, Patient
from dflash.doctor.static.facts import Finding

SWITCH = "enable_thinking"


def check_thinking(patient: Patient) -> Iterator[Finding]:
    """Acceptance with thinking on and off, where the template knows the difference."""
    template = getattr(patient.engine.pair.tokenizer, "chat_template", None)
    if not isinstance(template, str) or SWITCH not in template:
        return
    for value in (True, False):
        prompts = [_rendered(patient, text, value) for text in patient.texts[:FEW]]
        if prompts == list(patient.prompts[:FEW]):
            continue  # the default is this position
        found = measure(patient.engine.pair, prompts, patient.short)
        if found.clearly_above(patient.brief):
            word = "on" if value else "off"
            yield Finding(
                "warning",
                "thinking",
                f"the draft matches better with thinking {word}: {found.mean_committed:.2f} "
                f"committed per pass instead of {patient.brief.mean_committed:.2f}. It was "
                f"probably trained so: render prompts with {SWITCH}={value}",
            )


def _rendered(patient: Patient, text: str, thinking: bool) -> list[int]:
    tokenizer = patient.engine.pair.tokenizer
    turns = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
    )
    ids: list[int] = tokenizer.encode(rendered)
    return ids
