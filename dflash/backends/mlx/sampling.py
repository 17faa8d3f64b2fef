"""Logits to tokens, and the one wait of a round.

Argmax and the match rule run on the device, in MLX's own operations, as `dflash.core.accept` says.
The rejection rules and requests whose options change logits are judged on the host by the reference
itself (`dflash.core.host`), after the same one wait: memory is shared on Apple Silicon, and the
rows are there anyway. The draft's side is `propose.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import log
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from dflash.core.accept import match
from dflash.core.host import Ruling
from dflash.core.host import rule as rule_on_host
from dflash.core.logits import BROKEN, EMPTY, changes_logits, insist_on_tokens
from dflash.core.noise import gumbel
from dflash.core.types import Request, Sampling

Ids: TypeAlias = Any  # an array [n], perhaps not computed yet, or a sequence of integers


def rule(
    logits: Any,  # [n + 1, V]
    request: Request,
    output: Sequence[int],
    drafted: Ids = (),
    q: Any = None,  # [n, V]
    *,
    beside: Sequence[Any] = (),
) -> Ruling:
    """Judge ``drafted`` after ``output``; ``beside`` are arrays to compute in the same wait.

    Raises WeightsError for logits that are not finite, ConfigError where the options leave nothing.
    """
    sampling = request.sampling
    own = None if by_host(request) else picked(logits, sampling, len(output))
    waiting = [logits if own is None else own, *beside]
    mx.eval(*waiting, *(part for part in (drafted, q) if isinstance(part, mx.array)))
    ids = as_list(drafted)
    if own is None:
        rows = to_numpy(logits)
        _check(rows[0])
        return rule_on_host(
            rows, request, output, ids, None if q is None else to_numpy(q).astype(float)
        )
    said = as_list(own)
    accepted = match(ids, said)
    insist_on_tokens(said[: accepted + 1])
    return Ruling(said[: accepted + 1], accepted)


def rule_by(
    sampler: Callable[[Any], Any], logits: Any, drafted: Ids, *, beside: Sequence[Any] = ()
) -> Ruling:
    """Judge ``drafted`` by what ``sampler`` makes of each row's log-probabilities.

    A draft is kept where it equals that choice: exact whatever the sampler does.
    """
    rows = logits.astype(mx.float32)
    own = sampler(rows - mx.logsumexp(rows, axis=-1, keepdims=True))
    mx.eval(own, *beside, *([drafted] if isinstance(drafted, mx.array) else []))
    ids, said = as_list(drafted), as_list(own)
    accepted = match(ids, said)
    return Ruling(said[: accepted + 1], accepted)


def by_host(request: Request) -> bool:
    """Whether the target's rows are judged by the reference."""
    sampling = request.sampling
    rejects = sampling.temperature > 0 and sampling.rule != "match"
    return rejects or changes_logits(request) or sampling.logprobs is not None


def log_probs(logits: Any, sampling: Sampling) -> Any:
    """``[n, V]`` after temperature, top-k, top-p and min-p, float32; -inf where cut.

    Not renormalised after the cuts of top-p and min-p.
    """
    scores = logits.astype(mx.float32) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        least = mx.topk(scores, sampling.top_k, axis=-1).min(axis=-1, keepdims=True)
        scores = mx.where(scores < least, -mx.inf, scores)
    scores = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
    if sampling.top_p < 1.0:
        order = mx.argsort(-scores, axis=-1)
        mass = mx.exp(mx.take_along_axis(scores, order, axis=-1))
        before = mx.cumsum(mass, axis=-1) - mass
        cut = (before >= sampling.top_p) & (mx.arange(before.shape[-1]) > 0)
        places = mx.argsort(order, axis=-1)  # the inverse permutation
        scores = mx.where(mx.take_along_axis(cut, places, axis=-1), -mx.inf, scores)
    if sampling.min_p > 0.0:
        least = scores.max(axis=-1, keepdims=True) + log(sampling.min_p)
        scores = mx.where(scores < least, -mx.inf, scores)
    return scores


def draw(weights: Any, thrown: Any) -> Any:
    """``[n, V], [n] -> [n]``: tokens where the summed weights pass the coins; none without one."""
    sums = mx.cumsum(weights, axis=-1)
    found = mx.argmax(sums > thrown[:, None] * sums[:, -1:], axis=-1)
    usable = mx.take_along_axis(weights, found[:, None], axis=-1)[:, 0] > 0
    return mx.where(usable, found, mx.argmax(weights, axis=-1))


def picked(logits: Any, sampling: Sampling, position: int) -> Any:
    """The target's own token of each row; negative where it has none."""
    scores = logits
    if sampling.temperature > 0:
        rows, size = logits.shape
        keys = ((sampling.seed, sampling.sample, position + i, size) for i in range(rows))
        scores = log_probs(logits, sampling) + mx.array(np.stack([gumbel(*key) for key in keys]))
    best, ids = scores.max(axis=-1), mx.argmax(scores, axis=-1).astype(mx.int32)
    finite = mx.abs(best) < mx.inf  # false for NaN, too
    return mx.where(finite, ids, mx.where(best == -mx.inf, EMPTY, BROKEN))


def compute(*arrays: Any) -> None:
    """Have ``arrays`` computed now, None left out; bounds what a long prompt keeps alive."""
    mx.eval([array for array in arrays if array is not None])


def as_list(ids: Ids) -> list[int]:
    """Token ids as plain integers. Waits where they are not computed yet."""
    found: Any = ids.tolist() if isinstance(ids, mx.array) else ids
    return list(found)


def to_numpy(rows: Any) -> NDArray[np.float32]:
    """Rows as float32 in numpy. Waits where they are not computed yet."""
    found: NDArray[np.float32] = np.array(rows.astype(mx.float32))
    return found


def _check(row: NDArray[np.float32]) -> None:
    if not np.isfinite(row.max()):
        insist_on_tokens([BROKEN])
