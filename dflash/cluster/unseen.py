"""A plan for a command that is only printed: the hub is not asked.

Folders, files and the hub's cache are read. Of a draft that is not here its name says what it is,
as the names of published drafts do (``owner/Qwen3-8B-DFlash-b16``); nothing is checked then, and a
note says so.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.cluster.pair import Draft, draft_of, insist_on_model, make_plan, plan_of, target_facts
from dflash.cluster.plan import Method, Plan
from dflash.config import MTP, NO_DRAFT, BlockSize
from dflash.drafts.layers import ANY_DEPTH
from dflash.hub import is_hub_id, kept_config

METHODS: tuple[tuple[str, Method], ...] = (
    (r"dflash-?2(?![\d.]|b\b)", "dflash2"),  # and no size, as in DFlash-2B
    ("dflash", "dflash"),
    ("eagle", "eagle3"),
)
"""Pattern of what a name has in it -> method; the first that fits."""
_BLOCK = re.compile(r"-b([2-9]|[1-9]\d{1,2})\b")


def plan_here(target: str, draft: str | None, block: BlockSize, **options: Any) -> Plan:
    """`make_plan` as far as it goes without the hub. Raises as that does."""
    away = [name for name in (target, draft) if name is not None and is_away(name)]
    if not away:
        return make_plan(target, draft, block, read=_kept, **options)
    unchecked = f"{' and '.join(away)}: not here, and --print asks no hub, so nothing was checked"
    if target not in away:
        target_facts(target, _kept)
    if draft is None or draft == NO_DRAFT:
        return Plan(target, notes=(unchecked,), **options)
    insist_on_model(draft)
    found = _look(draft)
    plan, guess = plan_of(found, target, draft, block, **options), list[str]()
    if is_away(draft):
        kind = f"{found.method} draft of block {plan.block_size}"
        guess.append(f"by the name of {draft} it is a {kind}")
    return replace(plan, notes=(unchecked, *plan.notes, *guess))


def is_away(name: str) -> bool:
    """Whether ``name`` is a hub id that the hub's cache has no config of."""
    return is_hub_id(name) and not Path(name).exists() and kept_config(name) is None


def _look(draft: str) -> Draft:
    """What the draft is: by its config where that is here, else by its name."""
    if draft == MTP:
        return Draft("mtp")
    if not is_away(draft) and not draft.endswith(".gguf"):
        return draft_of(draft, _kept, ANY_DEPTH)
    found = (method for said, method in METHODS if re.search(said, draft.lower()))
    method: Method = next(found, "dflash")
    size = _BLOCK.search(draft)
    return Draft(method, None if size is None else int(size[1]))


def _kept(name: str) -> dict[str, Any]:
    found = kept_config(name)
    assert found is not None, "looked at before"
    return found
