"""What the measured checks look at: a running pair, prompts for it, and how it did on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from dflash.core.types import Step
from dflash.doctor.measured.acceptance import Acceptance, cut, over, texts_of
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
    first: Acceptance  # over the first of those alone
    short: int  # tokens of each then

    @property
    def spec(self) -> DraftSpec:
        """The draft's config; only where the draft is a model."""
        assert self.probe.spec is not None, "asked of a draft without a config"
        return self.probe.spec

    def under(self, **changes: Any) -> Acceptance | None:
        """The same weights on the same few prompts under a changed spec.

        None where it matches no better on the first of them: the others could hardly change that.
        """
        with closing(self.probe.variant(**changes)) as pair:
            texts = list(texts_of(pair, self.prompts[:1], self.short))
            if over(texts).mean_committed <= self.first.mean_committed:
                return None
            return over([*texts, *texts_of(pair, self.prompts[1:FEW], self.short)])


def admit(
    engine: Engine, probe: Probe, texts: Sequence[str], tokens: int, watch: Callable[[int], None]
) -> Patient:
    """Measure the pair as it stands; ``watch`` hears the number of each prompt.

    Raises PromptError, WeightsError.
    """
    prompts = [engine.encode(text) for text in texts]
    said: list[list[Step]] = []
    for number, prompt in enumerate(prompts, 1):
        watch(number)
        said += texts_of(engine.pair, [prompt], tokens)
    short = min(SHORT, tokens)
    few = [cut(text, short) for text in said[:FEW]]
    return Patient(engine, probe, texts, prompts, over(said), over(few), over(few[:1]), short)
