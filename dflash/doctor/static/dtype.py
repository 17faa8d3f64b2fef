"""Number format: a draft needs bfloat16's range or float32."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_dtype(spec: DraftSpec, _: TargetFacts, choice: Choice) -> Iterator[Finding]:
    """Never run in float16 (the residual stream passes 65504); stored so is only worth a word."""
    if choice.dtype == "float16":
        yield Finding(
            "error",
            "dtype",
            "a draft cannot run in float16: its residual stream overflows and nothing would be "
            "accepted. Use bfloat16 or float32",
        )
    stored = str(spec.raw.get("dtype") or spec.raw.get("torch_dtype") or "")
    if stored.endswith("float16") and not stored.endswith("bfloat16"):
        yield Finding(
            "warning",
            "dtype",
            f"the draft's weights are stored in float16; it runs in {choice.dtype}",
        )
