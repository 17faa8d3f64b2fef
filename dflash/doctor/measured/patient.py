"""What the measured checks look at: a running pair, prompts for it, and how it did on them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dflash.doctor.measured.acceptance import Acceptance, measure
from dflash.drafts.spec import DraftSpec
from dflash.engine import Engine
from dflash.verify.probe import Probe

FEW = 4  # prompts on which a rival is tried
SHORT = 24  # tokens of each


@dataclass(frozen=True)
class Patient:
    """A pair with a draft, and its acceptance as it stands."""

    engine: Engine
    probe: Probe
    texts: Sequence[str]  # of the prompts, one user turn each
    prompts: Sequence[Sequence[int]]  # their ids, through the chat template
    acceptance: Acceptance  # over all of them
    brief: Acceptance  # over the first FEW of them, cut short: what rivals are held against
    short: int  # tokens of each then

    @property
    def spec(self) -> DraftSpec:
        """The draft's config; only where the draft is a model."""
        assert self.probe.spec is not None, "asked of a draft without a config"
        return self.probe.spec

    def under(self, **changes: Any) -> Acceptance:
        """The same weights on the same few prompts under a changed spec."""
        with closing(self.probe.variant(**changes)) as pair:
            return measure(pair, self.prompts[:FEW], self.short)


def admit(engine: Engine, probe: Probe, texts: Sequence[str], tokens: int) -> Patient:
    """Measure the pair as it stands. Raises PromptError, WeightsError."""
    prompts = [engine.encode(text) for text in texts]
    whole, short = measure(engine.pair, prompts, tokens), min(SHORT, tokens)
    same = len(prompts) <= FEW and short == tokens
    brief = whole if same else measure(engine.pair, prompts[:FEW], short)
    return Patient(engine, probe, texts, prompts, whole, brief, short)
