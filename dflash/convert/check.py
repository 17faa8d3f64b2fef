"""Is the converted draft the same draft? Its config by field, its numbers by running both.

Both sides get the same random features and block rows; the final hidden states must agree. So a
wrong tap order, a transposed matrix or rows in another rope layout shows, whatever the reason.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from dflash import registry
from dflash.convert import hf
from dflash.convert.draft import Draft
from dflash.convert.known import told_flat
from dflash.convert.tensor import Tensor
from dflash.drafts.layers import ANY_DEPTH
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import WeightsError

CONTEXT = 12  # context rows of the trial
LOSSLESS = 1e-5  # largest difference of hidden states between formats that keep every bit
SAID = ("default_block_size", "target_name", "tokenizer_digest", "num_target_layers")
"""Fields of what a config says beside the arithmetic: `known.told` has them, and more."""
NOT_FORWARD = frozenset({"max_position_embeddings"})
"""Fields that no forward pass reads: where a format has no place for one, that is told."""
TINY = 1e-5  # rows of smaller numbers may be lost whole: float16 has no scale for them
ROUNDED = {
    "Q8_0": (1 / 200, TINY),
    "Q4_0": (1 / 7, TINY),
    "F16": (2.0**-11, 2.0**-14),  # below that its steps do not get finer
    "BF16": (2.0**-8, 2.0**-126),
}
"""Most that a stored type moves a number, as a share of the largest one of its row, and what counts
as the largest one where all are smaller."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What comparing source and result found."""

    backend: str | None  # None = nothing here runs this kind of draft
    difference: float  # largest of the final hidden states
    scale: float  # their largest size in the source, for comparison
    lost: tuple[str, ...]  # what the new format has no place for
    rounded: str | None = None  # type that the matrices were rounded to


@dataclass(frozen=True, slots=True)
class Side:
    """A draft as read, and its folder where a backend can load that as it is."""

    draft: Draft
    folder: Path | None = None


def compare(before: Side, after: Side, rounded: str | None = None) -> Trial:
    """Compare ``after`` with ``before``, as the source has it.

    Where ``rounded`` names the type asked for, numbers may differ by what that type rounds, and the
    states by what comes of it: that is reported, unless it kept every bit. Raises WeightsError when
    they are not the same draft.
    """
    lost = _lost(before.draft, after.draft)
    rounded = rounded if rounded in ROUNDED and _moved(before.draft, after.draft) else None
    _same_numbers(before.draft, after.draft, rounded)
    backend = _runner(before.draft.kind)
    if backend is None:
        return Trial(None, 0.0, 0.0, lost, rounded)
    with tempfile.TemporaryDirectory(prefix="dflash-convert-") as folder:
        one, two = (_run(backend, Path(folder) / side.draft.kind, side) for side in (before, after))
    difference, scale = float(np.abs(one - two).max()), float(np.abs(one).max())
    if rounded is None and not difference <= LOSSLESS * max(1.0, scale):
        raise WeightsError(
            f"the converted draft is another one: on the same features its hidden states differ "
            f"by {difference:.3g} (they reach {scale:.3g}). Nothing was kept; please report this"
        )
    return Trial(backend, difference, scale, lost, rounded)


def _lost(before: Draft, after: Draft) -> tuple[str, ...]:
    """Names and values of what has no place; raises WeightsError for what a forward pass reads."""
    old, new = (read_spec(x.config, num_target_layers=ANY_DEPTH) for x in (before, after))
    changed = {
        field.name: (getattr(old, field.name), getattr(new, field.name))
        for field in fields(DraftSpec)
        if field.name not in ("raw", *SAID) and _told(old, field.name) != _told(new, field.name)
    }
    free = NOT_FORWARD | ({"block_size"} if before.kind == "eagle3" else set())  # a chain's length
    wrong = {name: pair for name, pair in changed.items() if name not in free}
    if wrong:
        listed = "; ".join(f"{name} {a!r} became {b!r}" for name, (a, b) in wrong.items())
        raise WeightsError(f"the converted config says something else: {listed}")
    said, kept = told_flat(before.config), told_flat(after.config)
    gone = {name: value for name, value in said.items() if kept.get(name) != value}
    gone |= {name: pair[0] for name, pair in changed.items() if pair[0] is not None}
    return tuple(f"{name} {value!r}" for name, value in gone.items())


def _told(spec: DraftSpec, name: str) -> Any:
    """A field in a form in which equal drafts are equal."""
    value = getattr(spec, name)
    if name == "output_multiplier":
        value = spec.output_multiplier * (1.0 if spec.softcap else spec.logit_scale)
    if name == "logit_scale":
        value = spec.logit_scale if spec.softcap else 1.0
    if name == "embedding_scale":
        value = spec.embedding_scale or 1.0
    return _rounded(value)


def _rounded(value: Any) -> Any:
    """Numbers as float32, which is how some formats store them."""
    if isinstance(value, float):
        return float(np.float32(value))
    if isinstance(value, Mapping):
        return {key: _rounded(one) for key, one in value.items()}
    return value


def _same_numbers(before: Draft, after: Draft, rounded: str | None) -> None:
    """Raise WeightsError unless every tensor has the same bits, or matrices are ``rounded``."""
    gone = sorted(before.tensors.keys() - after.tensors.keys())
    if gone:
        raise WeightsError(f"the converted draft lacks {', '.join(gone)}; nothing was kept")
    for name, tensor in before.tensors.items():
        found = after.tensors[name]
        if tensor.equals(found):
            continue
        if rounded is None:
            raise WeightsError(
                f"{name} changed on its way: {tensor.dtype} does not fit into what was asked for. "
                "Nothing was kept: leave out --stored, or take a type that rounds "
                f"({', '.join(ROUNDED)})"
            )
        if not np.isfinite(found.floats()).all():
            most = float(np.abs(tensor.floats()).max())
            raise WeightsError(
                f"{name} has numbers of up to {most:g}, which {rounded} cannot hold. Nothing was "
                "kept: store it as F32, BF16 or Q8_0, or leave --stored out"
            )
        if not _near(tensor, found, *ROUNDED[rounded]):
            raise WeightsError(
                f"{name} changed by more than {rounded} rounds. Nothing was kept; please report "
                "this"
            )


def _moved(before: Draft, after: Draft) -> bool:
    """Whether a tensor of both has other bits than it had."""
    both = before.tensors.keys() & after.tensors.keys()
    return not all(before.tensors[name].equals(after.tensors[name]) for name in both)


def _near(before: Tensor, after: Tensor, share: float, least: float) -> bool:
    if before.shape != after.shape or len(before.shape) != 2:
        return False
    one, two = before.floats(), after.floats()
    most = np.abs(one).max(axis=-1, keepdims=True)
    return bool((np.abs(one - two) <= np.maximum(most, least) * share).all())


def _runner(kind: str) -> str | None:
    """The installed backend that runs drafts of this kind, if there is one."""
    installed = (name for name in ("torch", "mlx") if find_spec(name) is not None)
    known = (name for name in installed if name in registry.DRAFT_RUNNERS.names())
    runs = (name for name in known if kind in registry.DRAFT_RUNNERS.load(name).kinds)
    return next(runs, None)


def _run(backend: str, spare: Path, side: Side) -> Any:
    """Final hidden states [B, H] of a block on fixed random features, float32."""
    folder = side.folder
    if folder is None:
        folder = spare.with_name(f"{spare.name}-{id(side)}")
        hf.write(side.draft, folder)
    spec = read_spec(folder, num_target_layers=ANY_DEPTH)
    numbers = np.random.default_rng(0)
    features = numbers.standard_normal((CONTEXT, len(spec.taps) * spec.target_hidden_size))
    block = numbers.standard_normal((spec.block_size, spec.hidden_size))
    runner = registry.DRAFT_RUNNERS.load(backend)
    return runner.hidden_states(folder, features.astype(np.float32), block.astype(np.float32))
