"""A try-out at load: does this model's state continue, and come back, as a cache must?

Some models keep part of their state outside the cache, and some versions of transformers restart
a recurrence when several rows come at once. Both would change the output without a message, so a
model with state beyond keys and values is tried with six tokens before it is a target.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from dflash.backends.torch.cache import PreallocatedCache, make_cache
from dflash.backends.torch.forward import make_forward
from dflash.backends.torch.memory import guard
from dflash.backends.torch.rollback import Rewind
from dflash.errors import CheckpointError

BROKEN = (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError)
"""What foreign code raises over a cache that is not the one it would have made."""
ROUNDING, COARSE = 1e-3, 0.1
"""Of the size of logits or states, in float32 and in narrower formats. A loss is of their size."""


def check_state(model: Any, name: str) -> None:
    """Raise CheckpointError if ``model`` cannot be a target; plain attention is not tried."""
    cache = make_cache(model.config, 0)
    if not cache.states and not getattr(model, "_is_stateful", False):
        return
    vocab = model.get_input_embeddings().weight.shape[0]
    ids = [index * (vocab // 7) % vocab for index in range(1, 7)]
    kind = type(model).__name__
    try:
        with torch.inference_mode(), guard(f"trying {name}"):
            whole, pieces = _whole(model, ids[:5]), _pieces(model, ids)
    except BROKEN as error:
        raise CheckpointError(
            f"{name} ({kind}) keeps its state in a way that cannot be taken back after a rejected "
            f"draft ({type(error).__name__}: {error}). Use another target"
        ) from error
    bound = ROUNDING if model.dtype == torch.float32 else COARSE
    if any(differ(found, expected, bound) for found, expected in zip(pieces, whole, strict=True)):
        raise CheckpointError(
            f"{name} ({kind}) is not in the same state after a rejected draft as without one: "
            "part of its state is not in the cache, or transformers "
            f"{transformers.__version__} cannot continue it. Use another target"
        )


def _whole(model: Any, ids: list[int]) -> list[Tensor]:
    """Logits [V] after ``ids`` in one pass, and the states."""
    cache = make_cache(model.config, len(ids))
    return [make_forward(model)(ids, cache, 1)[-1], *_states(cache)]


def _pieces(model: Any, ids: list[int]) -> list[Tensor]:
    """The same after two rows, then a block of four that is cut to two, then the last row."""
    cache = make_cache(model.config, len(ids))
    forward, rewind = make_forward(model), Rewind(model, cache)
    forward(ids[:2], cache, 1)
    with rewind.record():
        forward([*ids[2:4], ids[5], ids[5]], cache, 1)
    rewind.to(4)
    return [forward(ids[4:5], cache, 1)[-1], *_states(cache)]


def _states(cache: PreallocatedCache) -> list[Tensor]:
    saved = [side for layer in cache.states for side in layer.save()]
    return [state for side in saved for state in side.values() if state is not None]


def differ(found: Tensor, expected: Tensor, bound: float) -> bool:
    """Whether two results are further apart than ``bound`` times their size."""
    found, expected = found.float(), expected.float()
    return not bool((found - expected).norm() <= bound * expected.norm())
