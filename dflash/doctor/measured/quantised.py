"""Quantised target: nothing is wrong, but one should know what lossless refers to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dflash.doctor.measured.patient import Patient
from dflash.doctor.static.facts import Finding
from dflash.drafts.keys import read_config
from dflash.errors import CheckpointError
from dflash.inspection import inspect

FULL = frozenset({"F64", "F32", "F16", "BF16"})


def check_quantised(patient: Patient) -> Iterator[Finding]:
    """Looks at local files only; what a hub id names was downloaded as it is published."""
    kinds = quantised_as(Path(patient.engine.pair.target_name).expanduser())
    if kinds:
        yield Finding(
            "note",
            "quantised",
            f"the target is quantised ({kinds}): the text with the draft is exactly that of this "
            "file without one, not that of the unquantised model. A draft that was trained on the "
            "unquantised model may lose some acceptance here",
        )


def quantised_as(place: Path) -> str:
    """Names of the quantised formats in a GGUF file or model folder; "" for none."""
    if not place.exists():
        return ""
    if place.is_dir() and (place / "config.json").is_file():
        asked = read_config(place).get("quantization_config") or {}
        return str(asked.get("quant_method", "")) if isinstance(asked, dict) else ""
    try:
        found = inspect(str(place))
    except CheckpointError:  # the backend could read it; this is no place to complain
        return ""
    return ", ".join(sorted(name for name in found.dtypes if name not in FULL))
