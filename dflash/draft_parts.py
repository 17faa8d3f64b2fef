"""What every backend asks of a draft's files before it runs them; names and shapes, no arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dflash.checkpoint import PICKLES
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError, ConfigError, PairError, WeightsError

FORMATS = ("bfloat16", "float32")
MASK = "mask_embedding"
_CONVERT = (
    'convert it once if you trust it: python -c "import torch, safetensors.torch as s; '
    "s.save_file(torch.load('{0}', weights_only=True), '{1}')\""
)
Shapes = Mapping[str, tuple[int, ...]]


def draft_format(asked: str | None, target: str) -> str:
    """float32 or bfloat16; None follows the ``target``'s, bfloat16 where that is float16.

    Raises ConfigError for float16 and for names that are none.
    """
    if asked is None:
        return "bfloat16" if target == "float16" else target
    if asked not in FORMATS:
        raise ConfigError(
            f"a draft runs in bfloat16 or float32, got {asked!r}"
            + (" (float16 overflows in it and nothing would be accepted)" if "16" in asked else "")
        )
    return asked


def refuse_files(folder: Path, spec: DraftSpec) -> None:
    """Raise CheckpointError for weights that are not read: pickles, and quantised ones."""
    if spec.raw.get("quantization_config") or spec.raw.get("quantization"):
        raise CheckpointError(
            f"{folder} is a quantised draft, which is not supported yet; use the draft's bfloat16 "
            "weights"
        )
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        advice = _CONVERT.format(pickles[0], "model.safetensors")
        raise CheckpointError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code and is not "
            f"opened; {advice}"
        )


def check_shapes(folder: Path, spec: DraftSpec, wanted: Shapes, found: Shapes) -> None:
    """Raise WeightsError with everything that does not fit."""
    problems = []
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(found.keys() - wanted.keys())
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)}")
    columns = len(spec.taps) * spec.target_hidden_size
    for name in sorted(wanted.keys() & found.keys()):
        shape, asked = found[name], wanted[name]
        if shape != asked and name == "fc.weight" and len(shape) == 2 and shape[1] != columns:
            problems.append(
                f"fc.weight has {shape[1]} columns, but {len(spec.taps)} taps of width "
                f"{spec.target_hidden_size} make {columns}"
            )
        elif shape != asked:
            problems.append(f"{name} is {list(shape)}, the config makes it {list(asked)}")
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise WeightsError(
            f"the tensors in {folder} are not those of the {spec.kind} draft its config.json "
            f"describes; nothing was loaded:\n{listed}"
        )


def check_floats(folder: Path, whole: Mapping[str, str]) -> None:
    """Raise WeightsError for weights stored as ``whole`` numbers: name to type."""
    if whole:
        names = sorted(whole)
        raise WeightsError(
            f"{folder} has weights stored as {whole[names[0]]}: {', '.join(names)}. "
            "Quantised drafts are not supported yet; use the draft's bfloat16 weights"
        )


def check_finite(folder: Path, bad: Sequence[str]) -> None:
    """Raise WeightsError for the weights in ``bad``, which are not finite."""
    if bad:
        raise WeightsError(
            f"{folder} has weights that are NaN or infinite: {', '.join(sorted(bad))}. The file "
            "is damaged or was converted to too narrow a dtype; get it again"
        )


def mask_sidecar(folder: Path) -> Path | None:
    """The file with the row that stands for the mask token's embedding; None = there is none.

    Raises CheckpointError for one that is a pickle.
    """
    file = folder / f"{MASK}.safetensors"
    if file.is_file():
        return file
    if (folder / f"{MASK}.pt").exists():
        raise CheckpointError(
            f"{folder} brings its mask token's embedding in {MASK}.pt, a pickle, which can "
            "run code and is not opened. Make a folder without it: dflash convert "
            f"{folder} --to hf --out NEW"
        )
    return None


def check_mask_row(file: Path, numbers: int | None, spec: DraftSpec) -> None:
    """Raise WeightsError where the sidecar does not hold a row of the target's width."""
    if numbers != spec.target_hidden_size:
        raise WeightsError(f"{file} must hold 'embedding' of {spec.target_hidden_size} numbers")


def check_borrowed(spec: DraftSpec, width: int) -> None:
    """Raise PairError where a draft borrows the tables of a target ``width`` wide, and is not."""
    if width != spec.hidden_size:
        raise PairError(
            f"the draft is {spec.hidden_size} wide and borrows the embedding and head of a target "
            f"that is {width} wide; it would need its own. Use the draft made for this target"
        )


def check_head(spec: DraftSpec, shape: Sequence[int], rows: int, *, reduced: bool) -> None:
    """Raise WeightsError where the draft's own head has not the ``rows`` it should."""
    if tuple(shape) != (rows, spec.hidden_size):
        raise WeightsError(
            f"the draft's lm_head.weight is {list(shape)}, it must be "
            f"[{rows}, {spec.hidden_size}]" + ("" if reduced else " (or come with d2t)")
        )


def reduced_ids(spec: DraftSpec, distances: Sequence[int], rows: int) -> list[int]:
    """Target id of each row of a reduced head, of which the file stores the distance to its own.

    Raises WeightsError unless the ids are distinct and below ``rows``.
    """
    ids = [place + distance for place, distance in enumerate(distances)]
    if min(ids, default=0) < 0 or max(ids, default=0) >= rows or len(set(ids)) < len(ids):
        raise WeightsError(
            f"d2t does not map the draft's vocabulary to distinct target ids below {rows}; it must "
            "hold target id minus draft id"
        )
    if spec.draft_vocab_size not in (None, len(ids)):
        raise WeightsError(
            f"d2t has {len(ids)} entries, draft_vocab_size is {spec.draft_vocab_size}"
        )
    return ids
