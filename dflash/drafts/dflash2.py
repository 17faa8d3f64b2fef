"""The config of a DFlash2 draft: a DFlash v1 config and four sizes, all of them required."""

from __future__ import annotations

from dataclasses import replace

from dflash.drafts.keys import Config, Keys
from dflash.drafts.methods import DFlash2
from dflash.drafts.spec import DraftSpec, read_dflash
from dflash.errors import CheckpointError


def read_dflash2(keys: Keys, raw: Config, taps: tuple[int, ...]) -> DraftSpec:
    """The spec of a DFlash2 draft. Raises CheckpointError for sizes no module could have."""
    for key in ("block_size", "selector_top_k"):  # never the readers' default, as it is for v1
        if keys.get(key) is None:
            raise CheckpointError(f"the config.json of a DFlash2 draft must have {key}")
    spec = read_dflash(keys, raw, taps)
    sizes = DFlash2(
        conv_kernel_size=keys.count("conv_kernel_size"),
        conv_group_size=keys.count("conv_group_size"),
        selector_rank=keys.count("selector_rank"),
        selector_top_k=keys.count("selector_top_k"),
    )
    if spec.hidden_size % sizes.conv_group_size:
        raise CheckpointError(
            f"conv_group_size {sizes.conv_group_size} does not divide hidden_size "
            f"{spec.hidden_size}"
        )
    if sizes.conv_kernel_size > spec.block_size:
        raise CheckpointError(
            f"conv_kernel_size {sizes.conv_kernel_size} is more than the block_size "
            f"{spec.block_size}"
        )
    choices = spec.draft_vocab_size or spec.vocab_size
    if sizes.selector_top_k > choices:
        raise CheckpointError(
            f"selector_top_k {sizes.selector_top_k} is more than the {choices} tokens there are"
        )
    return replace(spec, kind="dflash2", dflash2=sizes)
