"""The words of speculative decoding, as data.

    block_size    rows of one verify pass: 1 anchor + K drafts
    anchor        the newest committed token; sampled by the target, not yet run through it
    drafted       K, tokens proposed by a draft and judged by the target
    accepted      drafts kept, the bonus not counted
    bonus         the target's own token that ends every block
    committed     accepted + 1
    target/draft  the model whose distribution is kept / the one that proposes
    round         propose, verify, commit: one pass of the loop

Letters in shapes: B batch, T committed length, K drafted, L tapped layers, H hidden, V vocabulary.
Everything here is frozen (what is made anew each round, for the type checker), and the core reads
only the integers in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, dataclass_transform

A = TypeVar("A")  # the backend's array type; the core never looks inside
T = TypeVar("T")

MOST_NODES = 64  # of a tree of drafts; sessions have room for it beside the text

Rule = Literal["match", "rejection", "block"]
Path = Literal["walk", "best"]
Processor = Callable[[list[int], Any], Any]
"""``(ids of prompt and output so far, logits [V] as numpy) -> logits [V]``; the host's."""


@dataclass_transform(frozen_default=True)
def light(cls: type[T]) -> type[T]:
    """A dataclass with slots for what is made anew each round, frozen for the type checker alone.

    Python's own freezing is a call for each field: five microseconds a value right after a pass of
    the target, when all caches are cold.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


class Finish(StrEnum):
    """Why a generation ended."""

    STOP = "stop"  # a stop id, or a stop string
    LENGTH = "length"  # max_tokens, or the context is full


class Logprob(NamedTuple):
    """What the target itself thought of one committed token, before any option changed it."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the likeliest (token, logprob), best first


class Grammar(Protocol):
    """A constraint on the output; lives on the host, one per sample."""

    def allow(self, draft: Sequence[int]) -> Any:
        """Mask [V], numpy bool, for the place after the committed tokens and ``draft``; only looks.

        None = that place is out of reach: ``draft`` is not allowed itself, or ends the text.
        """

    def commit(self, tokens: Sequence[int]) -> None:
        """Advance by committed tokens; called by the target session alone."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target chooses a token at each place; temperature 0 is argmax, lowest id on ties.

    What the options below ``sample`` do to logits, and in which order: `dflash.core.logits`.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    rule: Rule = "match"
    seed: int = 0  # key of the noise; a request without a seed gets a fresh random one
    sample: int = 0  # which of n samples this is; part of the key
    min_p: float = 0.0  # least probability, as a share of the likeliest token's; 0 = off
    repetition_penalty: float = 1.0  # on tokens of prompt and output; 1 = off
    presence_penalty: float = 0.0  # on tokens of the output
    frequency_penalty: float = 0.0  # on tokens of the output, each time they occurred
    no_repeat_ngram: int = 0  # length of token runs that may occur once; 0 = off
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit)
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that may not occur
    min_tokens: int = 0  # no stop id before that many tokens
    processors: tuple[Processor, ...] = ()
    logprobs: int | None = None  # how many alternatives to report beside each token; None = off
    greedy_drafts: bool = False  # drafts propose their likeliest token also above temperature 0
    draft_path: Path = "walk"  # token after token, or the likeliest path as a whole
    draft_p_min: float = 0.0  # a draft stops where its likeliest token has less; 0 = off


@dataclass(frozen=True, slots=True)
class Request:
    """What target and drafts both know of one generation."""

    prompt: Sequence[int]
    max_tokens: int  # already clipped to the context that is left
    stop_ids: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    grammar: Grammar | None = None


@light
class Outlook:
    """What a draft says before it draws anything. Must cost O(1)."""

    most: int  # deepest proposal possible now; 0 = none
    grade: int = 0  # confidence bucket: which survival curve applies
    lag: int = 0  # context rows to catch up first
    tree: int = 0  # most nodes of a tree; 0 = this draft proposes chains only
    prior: tuple[float, ...] = ()  # usual chance of a draft by place, if the method knows one
    least: int = 1  # fewest rows it proposes: a plan of fewer would be a plain step


@dataclass(frozen=True, slots=True)
class Plan:
    """The policy's answer: which draft, how many rows."""

    draft: int = 0  # index into the list of drafts
    rows: int = 0  # drafted rows beside the anchor; 0 = a plain step
    depth: int = 0  # rows == depth: chain; rows > depth: tree of so many nodes, that deep at most

    @property
    def is_tree(self) -> bool:
        """Whether branches are asked for."""
        return 0 < self.depth < self.rows


@dataclass(frozen=True, slots=True)
class Proposal(Generic[A]):
    """What a draft proposes: a chain, or a tree whose nodes come after their parents.

    The core reads ``rows`` and nothing else.
    """

    tokens: A | Sequence[int]  # [rows]; may still be on the device
    rows: int  # upper bound, known without a wait
    parents: A | Sequence[int] | None = None  # None = chain; -1 = the anchor
    q: A | None = None  # [rows, m]; None = one-hot
    ids: A | None = None  # vocabulary of q: [rows, m] or [m]; None = all of V
    depth: int = 0  # most drafts on one path of a tree, known without a wait
    meta: Any = None  # live row count on the device, timing events


@light
class Verdict(Generic[A]):
    """What the target says of a proposal (or of a chunk of the prompt)."""

    tokens: list[int]  # len(path) + 1, the last is the target's own; [] for a prompt chunk
    path: Sequence[int] = ()  # accepted node per depth; accepted = len(path)
    drafted: int = 0  # rows really judged, <= proposal.rows
    rows: int = 0  # context rows in features
    features: A | None = None  # [rows, L*H], gathered along anchor + path
    notes: Sequence[Logprob] | None = None  # one per token, where they were asked for
    ns: tuple[int, int] = (-1, -1)  # nanoseconds of draft, verify; -1 = unknown


@light
class Step:
    """One round as the reader of the loop sees it."""

    tokens: list[int]  # committed tokens, cut at a stop id and at max_tokens
    plan: Plan
    rows: int  # drafted rows really verified: the key of the cost curve
    verdict: Verdict[Any]
    ns: int  # nanoseconds of this round, the consumer's time left out
    finish: Finish | None = None

    @property
    def accepted(self) -> int:
        """Drafts kept in this round (the bonus not counted, the cut applied)."""
        return min(len(self.verdict.path), len(self.tokens))


PLAIN_STEP = Plan()
PLAIN: Proposal[Any] = Proposal((), 0)
