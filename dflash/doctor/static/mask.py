"""Mask token: a row of the target's embedding that means nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from dflash.doctor.static.facts import Choice, Finding, TargetFacts
from dflash.drafts.spec import DraftSpec


def check_mask(spec: DraftSpec, target: TargetFacts, _: Choice) -> Iterator[Finding]:
    """Inside the embedding table (padding rows are fine), no end-of-sequence, rather not padding.

    An unset id is refused where the config is read.
    """
    mask = spec.mask_token_id
    if mask < 0:  # a kind without masks
        return
    if mask >= target.embedding_rows:
        yield Finding(
            "error",
            "mask",
            f"mask_token_id {mask} is beyond the target's {target.embedding_rows} embedding rows; "
            "set dflash_config.mask_token_id to the id the draft was trained with",
        )
    if mask in target.eos_ids:
        yield Finding(
            "error",
            "mask",
            f"mask_token_id {mask} is an end-of-sequence token of the target; set "
            "dflash_config.mask_token_id to the id the draft was trained with",
        )
    elif mask == target.pad_id:
        yield Finding(
            "warning",
            "mask",
            f"mask_token_id {mask} is the target's padding token; if acceptance is poor, check "
            "that the draft was trained with it",
        )
