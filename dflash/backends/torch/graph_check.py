"""Whether a pair's passes can be replayed on its device, tried out before anybody relies on it.

The same rows run directly and replayed: at a few places, in two stretches of the cache, with the
draft's features in between. What differs, or cannot be recorded, is a sentence for the user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dflash.backends.torch.cache import make_cache
from dflash.backends.torch.draft_load import LoadedDraft
from dflash.backends.torch.forward import FusedForward
from dflash.backends.torch.graph_target import make_forward
from dflash.backends.torch.graphs import SHORTEST, Compiler, CudaRecorder, Graphs, Recorder, same
from dflash.backends.torch.load import LoadedTarget
from dflash.backends.torch.rows import whole
from dflash.core.types import Request, Verdict

PROMPT, ROOM = SHORTEST - 6, 64  # rows; the passes after the prompt cross the shortest stretch
PASSES = ((4, 2), (4, 4), (1, 1), (4, 1), (1, 1))  # rows of a pass, and how many of them stay
WRONG = "replayed passes of the {} give other numbers than direct ones"
AS_IT_IS = "It runs as it does without --compile (compile=True)"


def open_graphs(
    target: LoadedTarget,
    draft: LoadedDraft | None,
    recorder: Recorder | None = None,
    compiler: Compiler | None = None,
) -> tuple[Graphs | None, str]:
    """The graphs of a pair, or None and why there are none: "" where no device asks for them.

    ``recorder`` None is the device's own. Takes a few passes of each model, which ``compiler``
    compiles; it is off where that goes wrong, and the graphs are those without it.
    """
    if recorder is None and target.device.type != "cuda":
        return None, ""
    graphs, why = _tried(target, draft, recorder, compiler)
    if why and compiler is not None and not compiler.off:
        compiler.off = why  # whichever of the two it is: once more without it
        compiler.forget()
        graphs, why = _tried(target, draft, recorder, compiler)
    return (None, why) if why else (graphs, "")


def _tried(
    target: LoadedTarget,
    draft: LoadedDraft | None,
    recorder: Recorder | None,
    compiler: Compiler | None,
) -> tuple[Graphs, str]:
    graphs = Graphs(recorder or CudaRecorder(target.device), compiler)
    graphs.on_trial = True
    if compiler is not None:
        compiler.on_trial = True
    with torch.inference_mode():
        why = _of_target(target, graphs) or _of_draft(target, draft, graphs)
    graphs.forget()
    graphs.on_trial = False
    if compiler is not None:
        compiler.on_trial = False
    return graphs, why


def _of_target(target: LoadedTarget, graphs: Graphs) -> str:
    both = [make_forward(target.model, how) for how in (None, graphs)]
    if isinstance(both[1], FusedForward):
        return ""
    caches = [make_cache(target.config, PROMPT + ROOM) for _ in both]
    ids = _spread(PROMPT + ROOM, target.vocab_size)
    for forward, cache in zip(both, caches, strict=True):
        forward(ids[:PROMPT], cache, 1)
    start = PROMPT
    for rows, kept in PASSES * 2:
        found = [
            forward(ids[start : start + rows], cache, 0)
            for forward, cache in zip(both, caches, strict=True)
        ]
        if graphs.off or not same(*found):
            return graphs.off or WRONG.format("target")
        start += kept
        for cache in caches:
            cache.rollback(start)
    return ""


def _of_draft(target: LoadedTarget, draft: LoadedDraft | None, graphs: Graphs) -> str:
    sessions = [] if draft is None else [draft.open(PROMPT + ROOM, how) for how in (None, graphs)]
    if draft is None or not sessions[1].replays:
        return ""
    ids, size = _spread(PROMPT + ROOM, target.vocab_size), draft.spec.block_size
    generator = torch.Generator().manual_seed(0)
    for session in sessions:
        session.begin(Request(ids[:PROMPT], ROOM), 0)
    for rows, tokens, block in ((PROMPT - 1, 0, size), (2, 2, size), (1, 1, 2), (size, size, size)):
        made = torch.randn(rows, len(draft.spec.taps) * target.hidden_size, generator=generator)
        features = made.to(target.device, target.dtype)
        verdict = Verdict(tokens=ids[:tokens], rows=rows, features=features)
        for session in sessions:
            session.commit(verdict, rows)
        direct, replayed = (session.states(block) for session in sessions)
        if graphs.off or not same(whole(direct.logits), whole(replayed.logits)):
            return graphs.off or WRONG.format("draft")
    return ""


def _spread(count: int, size: int) -> list[int]:
    """``count`` different token ids, or nearly."""
    return [(7 + 31 * place) % size for place in range(count)]


def rerun(body: Callable[[], None]) -> Callable[[], Any]:
    """A recorder that records nothing, for passes that are compiled and not replayed."""
    return body


def why_uncompiled(target: LoadedTarget, draft: LoadedDraft | None) -> dict[str, str]:
    """Why no pass of a model is compiled; "" where they are, or could be."""
    whys = {"target": "" if target.fused.layers else target.fused.reason}
    if draft is not None:
        fits = draft.replayable and hasattr(draft.model, "fused_context")
        whys["draft"] = "" if fits else "it has no fused layers that see the whole context"
    return whys


def uncompiled(
    target: LoadedTarget, draft: LoadedDraft | None, compiler: Compiler
) -> tuple[str, ...]:
    """What the user is told: a sentence for each model that runs as it does without a compiler."""
    if compiler.off:
        return (f"nothing is compiled: {compiler.off}. {AS_IT_IS}",)
    whys = why_uncompiled(target, draft)
    return tuple(
        f"the {name} is not compiled: {why}. {AS_IT_IS}" for name, why in whys.items() if why
    )
