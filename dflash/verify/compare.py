"""Plain against speculative decoding, prompt by prompt, through the engine.

Equal means: the same ids, the same number of them, the same finish reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from dflash.engine import Engine
from dflash.generate_config import PLAIN
from dflash.results import Generation

ENDED = -1  # stands for a token where a text had ended
LOSSLESS, LOSSY = "lossless", "real differences"

Gap = Callable[[Sequence[int], Sequence[int], int, int], tuple[float | None, float]]
"""(prompt, output so far, token, token) -> (gap, widest gap that is a tie), see `gap.Judge`."""


class Named(Protocol):
    """A prompt with a name."""

    @property
    def id(self) -> str:
        """What to call it."""

    @property
    def text(self) -> str:
        """One user turn."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which two texts part."""

    position: int  # of the output
    plain: int  # token id, or ENDED
    speculative: int
    gap: float | None  # of the two logits, in a pass of one row; None = nothing to compare
    limit: float  # widest gap that is a tie

    @property
    def tie(self) -> bool:
        """Within rounding."""
        return self.gap is not None and self.gap <= self.limit


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt, decoded both ways."""

    id: str
    tokens: int  # compared, up to the first difference
    rounds: int  # verify passes of the speculative text
    committed: int  # tokens those brought
    difference: Difference | None = None

    @property
    def kind(self) -> Literal["identical", "tie", "real"]:
        """What became of it."""
        if self.difference is None:
            return "identical"
        return "tie" if self.difference.tie else "real"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All prompts of an audit."""

    outcomes: tuple[Outcome, ...]

    @property
    def prompts(self) -> int:
        """How many were decoded both ways."""
        return len(self.outcomes)

    @property
    def tokens(self) -> int:
        """Compared tokens, up to each first difference."""
        return sum(outcome.tokens for outcome in self.outcomes)

    @property
    def committed(self) -> float:
        """Mean committed per verify pass: near 1, the draft had little to say in this audit."""
        rounds = sum(outcome.rounds for outcome in self.outcomes)
        return sum(outcome.committed for outcome in self.outcomes) / rounds if rounds else 0.0

    @property
    def max_gap(self) -> float:
        """Widest gap among the differences that have one; 0.0 without any."""
        found = [o.difference for o in self.outcomes if o.difference is not None]
        return max((d.gap for d in found if d.gap is not None), default=0.0)

    @property
    def verdict(self) -> str:
        """LOSSLESS unless there is a real difference."""
        return LOSSY if self.count("real") else LOSSLESS

    def count(self, kind: Literal["identical", "tie", "real"]) -> int:
        """Outcomes of one kind."""
        return sum(outcome.kind == kind for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the differences with the prompt's name."""
        return {
            "prompts": self.prompts,
            "identical": self.count("identical"),
            "ties": self.count("tie"),
            "real": self.count("real"),
            "max_gap": self.max_gap,
            "verdict": self.verdict,
            "tokens": self.tokens,
            "committed": self.committed,
            "differences": [
                {"id": o.id, "kind": o.kind, **asdict(o.difference)}
                for o in self.outcomes
                if o.difference is not None
            ],
        }


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; an ended text differs where it ends."""
    for place, (one, two) in enumerate(zip(plain, other, strict=False)):
        if one != two:
            return place
    return None if len(plain) == len(other) else min(len(plain), len(other))


def outcomes(
    engine: Engine, prompts: Iterable[Named], settings: Mapping[str, Any], gap: Gap
) -> Iterator[Outcome]:
    """Decode each prompt both ways and judge it.

    ``settings`` are keywords of ``Engine.generate``; above temperature 0 they need a seed, without
    which two texts are not meant to be equal.
    """
    apart = {**settings, "reuse": False}
    template = {name: apart.pop(name) for name in ("chat_template", "system") if name in apart}
    for prompt in prompts:
        ids = engine.encode(prompt.text, **template)
        plain = engine.generate(ids, **{**apart, **PLAIN})
        yield judged(prompt.id, ids, (plain, engine.generate(ids, **apart)), gap)


def judged(
    name: str, ids: Sequence[int], texts: tuple[Generation, Generation], gap: Gap
) -> Outcome:
    """What became of the prompt ``ids``: ``texts`` are its plain and its speculative answer."""
    plain, spec = texts
    place = _parted(plain, spec)
    return Outcome(
        id=name,
        tokens=len(plain.token_ids) if place is None else place,
        rounds=spec.stats.rounds,
        committed=round(spec.stats.mean_committed * spec.stats.rounds),
        difference=None if place is None else _judge(ids, plain, spec, place, gap),
    )


def _parted(plain: Generation, spec: Generation) -> int | None:
    place = first_difference(plain.token_ids, spec.token_ids)
    if place is None and plain.finish_reason != spec.finish_reason:
        return len(plain.token_ids)
    return place


def _judge(
    prompt: Sequence[int], plain: Generation, spec: Generation, place: int, gap: Gap
) -> Difference:
    one, two = (
        text.token_ids[place] if place < len(text.token_ids) else ENDED for text in (plain, spec)
    )
    if ENDED in (one, two):
        return Difference(place, one, two, None, 0.0)
    width, limit = gap(prompt, plain.token_ids[:place], one, two)
    return Difference(place, one, two, width, limit)
