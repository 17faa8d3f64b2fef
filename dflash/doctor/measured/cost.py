"""What a verify pass costs here, what the draft costs, and from which acceptance it pays.

The verify pass is timed with a draft that proposes one token over and over and costs nothing; a
round with the real draft costs so much more. All through the one loop, sizes in turn, so that a
machine that slows down slows all of them. Medians; the first round of each run is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from statistics import median
from typing import Any, Self

from dflash.bench import guards
from dflash.core.protocols import DraftSession, Pair
from dflash.core.types import Outlook, Plan, Proposal, Request, Verdict
from dflash.doctor.measured.rounds import rounds

SIZES = (1, 2, 4, 6, 8, 12, 16)  # blocks that are timed, as far as the draft goes
RUNS, ROUNDS = 3, 4  # per size; of each run the first round is left out
MS = 1e-6  # of a nanosecond


@dataclass(frozen=True, slots=True)
class Block:
    """One block size; milliseconds, anchor included."""

    block_size: int
    verify_ms: float  # a pass of this many rows
    draft_ms: float  # what the round takes beyond that; 0 for a plain step
    cost: float  # of the round, in plain steps: committed per pass from which it pays
    committed: float  # expected per round, from the measured survival

    @property
    def speed(self) -> float:
        """Expected, in multiples of plain decoding."""
        return self.committed / self.cost

    @property
    def break_even(self) -> float | None:
        """Chance to keep each next draft from which the block pays; None = never."""
        return even_chance(self.block_size - 1, self.cost)


@dataclass(frozen=True, slots=True)
class Cost:
    """The curve, block size 1 first."""

    blocks: tuple[Block, ...]
    spread: float = 0.0  # of the runs of one size, see guards.spread

    @property
    def best(self) -> Block:
        """The fastest block; size 1 where no draft pays."""
        return max(self.blocks, key=lambda block: block.speed)

    @property
    def best_drafted(self) -> Block:
        """The fastest block that drafts at all, whether it pays or not."""
        return max(self.blocks[1:] or self.blocks, key=lambda block: block.speed)

    def to_json(self) -> list[dict[str, Any]]:
        """Plain rows."""
        derived = ("speed", "break_even")
        return [{**asdict(b), **{name: getattr(b, name) for name in derived}} for b in self.blocks]


def even_chance(drafts: int, cost: float) -> float | None:
    """The p at which 1 + p + ... + p^drafts equals ``cost``; None where even p = 1 is too little.

    By bisection; a cost of 1 or less pays with nothing accepted.
    """
    if cost > drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if sum(middle**i for i in range(drafts + 1)) < cost:
            low = middle
        else:
            high = middle
    return high


def expected(survival: Sequence[float], block_size: int) -> float:
    """Tokens a round of ``block_size`` commits on average."""
    return 1.0 + sum(survival[: block_size - 1])


def measure(
    pair: Pair,
    prompt: Sequence[int],
    survival: Sequence[float],
    watch: Callable[[int, int], None] = lambda *_: None,
) -> Cost:
    """Time blocks up to the draft's native size, as far as a pass has room, after ``prompt``.

    ``watch`` hears run and block size of each.
    """
    native = pair.draft_block_size or 1
    native = min(native, getattr(pair, "most_rows", native))
    sizes = [size for size in dict.fromkeys((*SIZES, native)) if size <= native]
    free: dict[int, list[list[int]]] = {size: [] for size in sizes}
    real: dict[int, list[int]] = {size: [] for size in sizes if size > 1}
    for run in range(1, RUNS + 1):
        for size in sizes:
            watch(run, size)
            free[size].append(list(_times(pair, prompt, size, [Blank(native)])))
        for size in real:
            watch(run, size)
            real[size] += _times(pair, prompt, size)
    passes = {size: list(chain(*runs)) for size, runs in free.items() if any(runs)}
    middle = {size: median(times) for size, times in passes.items()}
    return Cost(
        tuple(
            _block(size, middle[size], median(real.get(size) or passes[size]), middle[1], survival)
            for size in sorted(passes)
        ),
        guards.spread([[median(run) for run in runs if run] for runs in free.values()]),
    )


def _block(
    size: int, verify: float, whole: float, plain: float, survival: Sequence[float]
) -> Block:
    return Block(
        block_size=size,
        verify_ms=verify * MS,
        draft_ms=max(0.0, whole - verify) * MS,
        cost=max(whole, verify) / plain,
        committed=expected(survival, size),
    )


def _times(
    pair: Pair, prompt: Sequence[int], size: int, drafts: Sequence[DraftSession[Any]] | None = None
) -> Iterator[int]:
    """Nanoseconds of full rounds at one block size, but for the first, which pays for more."""
    steps = rounds(pair, prompt, 1 + size * ROUNDS, size, drafts)
    yield from (step.ns for step in islice(steps, 1, ROUNDS) if step.rows == size - 1)


class Blank:
    """A draft that costs nothing and proposes token 0: what is left of a round is the target."""

    def __init__(self, block_size: int) -> None:
        """``block_size`` counts the anchor."""
        self._most = block_size - 1

    def holds(self, prompt: Sequence[int], most: int) -> int:  # noqa: ARG002 - the protocol
        """Anything."""
        return most

    def fork(self) -> Self:
        """Itself: there is no state."""
        return self

    def begin(self, request: Request, reuse: int) -> None:
        """Nothing to do."""

    def outlook(self) -> Outlook:
        """As deep as asked."""
        return Outlook(self._most)

    def propose(self, plan: Plan) -> Proposal[Any]:
        """``plan.rows`` times token 0."""
        return Proposal([0] * plan.rows, plan.rows)

    def commit(self, verdict: Verdict[Any], rows: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to free."""
