"""Whether a target can judge trees, found out once: by what it is made of, and by a try-out.

A tree needs keys and values of the path alone to be kept, positions by depth and a mask by branch.
Recurrent layers have one state, not one a node; sliding layers count rows where they should count
positions; and a model may take neither mask nor positions from outside. What is left is tried.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from dflash.backends.torch.attention import STACKED
from dflash.backends.torch.cache import PreallocatedLayer, make_cache
from dflash.backends.torch.forward import ModelForward, make_forward
from dflash.backends.torch.memory import guard
from dflash.backends.torch.rollback_check import BROKEN, COARSE, ROUNDING, differ
from dflash.backends.torch.tree import make_branches

ATTENTION = ("sdpa", "eager", STACKED)  # those that add a mask to their scores
PARENTS, PATHS = [-1, -1, 0, 1], ([0, 2], [1, 3])  # two siblings, each with a child


def why_no_trees(model: Any) -> str:
    """Why ``model`` (a transformers causal LM) cannot judge trees; empty where it can."""
    cache, kind = make_cache(model.config, 0), type(model).__name__
    config = model.config.get_text_config(decoder=True)
    if cache.states:
        return f"{kind} has recurrent layers, and each node of a tree would need a state of its own"
    if any(isinstance(x, PreallocatedLayer) and x.window is not None for x in cache.layers):
        return f"{kind} has sliding-window layers, whose windows know no branches"
    if isinstance(make_forward(model), ModelForward):
        if getattr(config, "_attn_implementation", None) not in ATTENTION:
            attention = config._attn_implementation
            return f"attention {attention!r} takes no mask of a tree: load with sdpa"
        if "position_ids" not in inspect.signature(model.forward).parameters:
            return f"{kind} takes no positions from outside, and a node's is its depth"
    try:
        with torch.inference_mode(), guard(f"trying {kind} with a tree"):
            found, expected = _try_out(model)
    except BROKEN as error:
        return f"{kind} fails on a tree ({type(error).__name__}: {error})"
    bound = ROUNDING if model.dtype == torch.float32 else COARSE
    if differ(found, expected, bound):
        return f"{kind} gives other logits for a tree than for its paths"
    return ""


def _try_out(model: Any) -> tuple[Tensor, Tensor]:
    """Logits [4, V] of four nodes in one pass, and in two passes along their paths."""
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = [index * (vocab // 10) % vocab for index in range(1, 9)]
    start, anchor, nodes = ids[:3], ids[3], ids[4:]
    forward, cache = make_forward(model), make_cache(model.config, 8)
    forward(start, cache, 1)
    tree = make_branches(PARENTS, 2, forward.device)
    found = forward([anchor, *nodes], cache, 0, tree=tree)[1:]
    expected = torch.empty_like(found)
    for path in PATHS:
        cache.rollback(len(start))
        rows = forward([anchor, *(nodes[node] for node in path)], cache, 0)[1:]
        expected[path] = rows
    return found, expected
