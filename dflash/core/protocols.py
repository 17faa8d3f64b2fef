"""The seam: what a backend must offer, and nothing more.

Contract (the reasons are in docs/concepts/seam.md):
1. ``propose`` does not wait for the device; ``verify`` waits once.
2. The last kept token is never in the cache: after ``commit(kept)`` the cache ends right before it,
   for every ``kept`` in 1..accepted + 1. It is the next anchor.
3. ``commit`` may defer its work to the next ``verify``, ``fork`` or ``holds``.
4. Every draft gets every commit, chosen or not. A draft's ``commit`` only queues.
5. A session rolls back only what its own calls wrote.
6. Nothing drawn may choose: which draft, how deep, where to stop depend on committed tokens, past
   steps and distributions before drawing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar, runtime_checkable

from dflash.core.types import Outlook, Plan, Proposal, Request, Step, Verdict

A = TypeVar("A")


class Session(Protocol):
    """State of one model over one growing token sequence."""

    def holds(self, prompt: Sequence[int], most: int) -> int:
        """Longest prefix of ``prompt``, at most ``most``, at which this session can resume."""

    def fork(self) -> Self:
        """An independent session with the same state."""

    def close(self) -> None:
        """Free everything; idempotent."""


@runtime_checkable
class Growing(Protocol):
    """What a session offers beside that if its buffers can be made larger; optional."""

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` tokens and one block beyond; the state stays as it is."""


@runtime_checkable
class Branching(Protocol):
    """What a pair offers beside the rest if its target can judge trees of drafts; optional."""

    def why_no_trees(self) -> str:
        """Why it cannot after all; empty where it can. Asked for only where a tree is wanted."""


class TargetSession(Session, Protocol[A]):
    """The model whose distribution is kept."""

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[A]]:
        """Run the prompt from ``reuse`` on, a chunk a verdict; only the last has a token."""

    def verify(self, proposal: Proposal[A]) -> Verdict[A]:
        """Judge anchor + proposal in one pass; the one wait of a round."""

    def commit(self, kept: int) -> None:
        """Keep the first ``kept`` tokens of the last verdict; crop, replay or restore the rest."""


class DraftSession(Session, Protocol[A]):
    """A model (or a lookup) that proposes."""

    def begin(self, request: Request, reuse: int) -> None:
        """Start a request whose first ``reuse`` tokens are already held."""

    def outlook(self) -> Outlook:
        """What could be proposed now."""

    def propose(self, plan: Plan) -> Proposal[A]:
        """Propose ``plan.rows`` tokens after the anchor (fewer is allowed)."""

    def commit(self, verdict: Verdict[A], rows: int) -> None:
        """Queue the first ``rows`` context rows and tokens of ``verdict``."""


class Policy(Protocol):
    """Chooses the next block."""

    def plan(self, most: int, outlooks: Sequence[Outlook]) -> Plan:
        """The next round, at most ``most`` drafted rows; ``most == 0`` obliges to a plain step."""

    def observe(self, step: Step) -> None:
        """Learn from a finished round."""


class Tokenizer(Protocol):
    """What text needs; transformers' tokenizers fit.

    One with a true ``joins_bytes`` promises that the bytes of a text are those of its tokens, one
    after the other: then a stream need not look back.
    """

    def encode(self, text: str) -> list[int]:
        """Text to ids, no special tokens added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out."""


class Pair(Protocol):
    """A target and its draft, opened by one backend; makes the sessions of a request.

    One whose passes have room for so many rows and no more says so as ``most_rows``.

    Sessions are independent of each other, so a pair may serve several at a time as far as its
    backend allows. The pair owns the weights: close sessions first, then the pair.
    """

    @property
    def target_name(self) -> str:
        """What the user asked for: a folder, a file or a hub id."""

    @property
    def draft_name(self) -> str | None:
        """The draft's name; None = plain decoding only."""

    @property
    def backend(self) -> str:
        """Name in the registry."""

    @property
    def tokenizer(self) -> Any:
        """A ``Tokenizer``; with ``apply_chat_template`` where the target has a template."""

    @property
    def context_length(self) -> int:
        """Most tokens, prompt and output together."""

    @property
    def vocab_size(self) -> int:
        """Rows of the target's head."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every id that ends a turn, from all of the target's configs."""

    @property
    def draft_block_size(self) -> int | None:
        """Native block size of the draft, anchor included; None without a draft."""

    @property
    def default_block_size(self) -> int | None:
        """What the draft's config asks for, anchor included; None = it does not say."""

    def runs_on(self) -> Mapping[str, str]:
        """What its speed depends on beside the two names (device, dtype, threads, ...).

        Empty = a speed that is not worth remembering.
        """

    def memory(self) -> Mapping[str, int]:
        """Bytes per component (target, draft, ...)."""

    def open_target(self, capacity: int) -> TargetSession[Any]:
        """A fresh session with room for ``capacity`` tokens and one block beyond."""

    def open_drafts(self, capacity: int) -> list[DraftSession[Any]]:
        """Fresh draft sessions in the order of ``Plan.draft``; [] without a draft."""

    def close(self) -> None:
        """Free the weights; idempotent."""
