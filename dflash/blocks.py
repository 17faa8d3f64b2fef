"""Which block size a request gets, and the policy that plays it.

Precedence: asked for (argument, then command line, then DFLASH_BLOCK_SIZE; the surfaces sort these
out) > the draft's ``default_block_size`` > auto. The draft's native size caps all of them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from dflash.config import BlockSize
from dflash.core import policy as policies
from dflash.core.floor import Floor
from dflash.core.profile import Profile
from dflash.core.protocols import Branching, Pair, Policy
from dflash.core.stats import Stats
from dflash.errors import ConfigError
from dflash.generate_config import DraftTree

BUDGETS = (8, 12, 16, 24, 32)  # nodes of the trees that are weighed against chains


@dataclass(frozen=True, slots=True)
class Blocks:
    """The answer. Block sizes count the anchor."""

    policy: Policy
    name: str  # off, fixed, floor, adaptive
    block_size: int | None  # None = chosen each round
    clamped_from: int | None = None
    reason: str = ""  # why this size, for a person


def choose(
    asked: BlockSize,
    pair: Pair,
    profile: Profile | None = None,
    min_acceptance_rate: float | None = None,
    tree: DraftTree = 0,
) -> Blocks:
    """The policy for ``asked`` on ``pair``; warns once when the draft's native size clamps it.

    ``profile`` is what earlier requests of the pair taught about its costs. A fixed block with a
    ``min_acceptance_rate`` is given up while fewer of its drafts are accepted. A ``tree`` of so
    many nodes is as deep as the block, the native one if none is asked for. Raises ConfigError
    where the pair knows no trees, has no draft to grow one, or no pass for so many rows.
    """
    native, trees = pair.draft_block_size, _trees(tree, pair)
    if native is None:
        return Blocks(policies.Off(), "off", 1, reason="there is no draft")
    size = pair.default_block_size if asked is None else asked
    if size is None and isinstance(tree, int) and tree:
        size = native
    insist_on_room("auto" if size is None or tree == "auto" else size, pair)
    if size is None or size == "auto" or tree == "auto":
        adaptive = policies.Adaptive(native, profile, trees)
        return Blocks(adaptive, "adaptive", None, reason="chosen each round by measured time")
    clamped_from = size if size > native else None
    if clamped_from is not None:
        warnings.warn(
            f"block size {size} is more than this draft can do: running with its native {native}",
            UserWarning,
            stacklevel=2,
        )
    reason = _reason(asked, size, native)
    size = min(size, native)
    if size == 1:
        return Blocks(policies.Off(), "off", 1, clamped_from, reason)
    if min_acceptance_rate is not None:
        floor = Floor(size, min_acceptance_rate, None if profile is None else profile.costs)
        return Blocks(floor, "floor", size, clamped_from, reason)
    fixed = policies.Fixed(size, trees[0] if trees else 0)
    return Blocks(fixed, "fixed", size, clamped_from, reason)


def insist_on_room(asked: BlockSize, pair: Pair, hint: str = "block_size") -> None:
    """Raise ConfigError where a pass of ``pair`` cannot hold the blocks that ``asked`` leads to.

    ``hint`` is what can ask for smaller ones; "" = nothing can.
    """
    native, most = pair.draft_block_size, getattr(pair, "most_rows", None)
    if native is None or most is None:
        return
    size = pair.default_block_size if asked is None else asked
    free = size is None or size == "auto"
    rows = native if free else min(int(size or native), native)
    if rows > most:
        auto = f', which {hint} "auto" goes up to' if free else ""
        less = f", or {hint} at most {most}" if hint else ""
        plain = " (plain decoding)" if hint and most == 1 else ""
        raise ConfigError(
            f"n_batch {most} cannot hold a block of {rows} rows{auto}, and one is never split: "
            f"n_batch must be at least {rows}{less}{plain}"
        )


def _trees(tree: DraftTree, pair: Pair) -> tuple[int, ...]:
    """Numbers of nodes that may be planned. Raises ConfigError where the pair knows no trees."""
    if not tree:
        return ()
    if reason := _why_no_trees(pair):
        raise ConfigError(f"draft_tree is not possible here: {reason}. Leave draft_tree out")
    return BUDGETS if tree == "auto" else (tree,)


def _why_no_trees(pair: Pair) -> str:
    """In a sentence; "" = trees are possible."""
    if pair.draft_block_size is None:
        return "there is no draft"
    if isinstance(pair, Branching):
        return pair.why_no_trees()
    return f"the {pair.backend} backend judges chains"


def _reason(asked: BlockSize, size: int, native: int) -> str:
    if size > native:
        return f"the draft's native size; {size} was asked for"
    return "the draft's own default" if asked is None else "asked for"


def explained(stats: Stats, chosen: Blocks) -> Stats:
    """``stats`` with why blocks had their size, and how often and why drafting was given up."""
    idle = None if stats.drafted else getattr(chosen.policy, "idle_reason", None)
    return replace(
        stats,
        block_reason=chosen.reason,
        fallback_rounds=getattr(chosen.policy, "fallback_rounds", 0),
        fallback_reason=idle or getattr(chosen.policy, "fallback_reason", None),
    )
