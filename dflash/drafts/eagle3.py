"""The config of an EAGLE-3 draft: EAGLE's own, SpecForge's and speculators' layouts.

There is no mask token and no native block: tokens are drafted one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dflash.drafts.keys import Config, Keys
from dflash.drafts.methods import Eagle3
from dflash.drafts.spec import DraftSpec, read_dflash
from dflash.errors import CheckpointError

NO_MASK = -1  # stands where other kinds have a mask token
DRAFTED = 7  # tokens of a chain where the config is silent: the depth EAGLE-3 was published with
LLAMA_THETA = 10_000.0  # what the layouts' own config class has where the file is silent


def read_eagle3(keys: Keys, raw: Config, taps: tuple[int, ...]) -> DraftSpec:
    """The spec of an EAGLE-3 draft. Raises CheckpointError for relatives and impossible options."""
    _refuse_older(raw)
    if not taps:
        raise CheckpointError("an EAGLE-3 draft must tap at least one layer of its target")
    top = {**keys.top, "mask_token_id": 0, "block_size": _drafted(raw) + 1, "is_causal": True}
    if not (top.get("rope_theta") or top.get("rope_parameters") or top.get("rope_scaling")):
        top["rope_theta"] = LLAMA_THETA
    spec = read_dflash(Keys(top), raw, taps)
    options = Eagle3(
        norm_before_residual=bool(keys.get("norm_before_residual", False)),
        norm_before_fc=bool(keys.get("norm_before_fc", False)),
        fc_norm=bool(keys.get("fc_norm", False)),
        norm_output=bool(keys.get("norm_output", False)),
        qk_norm=_has_qk_norm(raw),
    )
    if options.norm_before_fc and options.fc_norm:
        raise CheckpointError("norm_before_fc and fc_norm exclude each other; set one to false")
    return replace(spec, kind="eagle3", mask_token_id=NO_MASK, eagle3=options)


def _refuse_older(raw: Config) -> None:
    """EAGLE 1 and 2 read one hidden state and have no vocabulary of their own."""
    named = [
        str(raw.get("speculators_model_type") or ""),
        *map(str, raw.get("architectures") or ()),
    ]
    if "draft_vocab_size" not in raw and not any("eagle3" in name.lower() for name in named):
        raise CheckpointError(
            "this is an EAGLE-1 or EAGLE-2 draft (no draft_vocab_size, no Eagle3 in its "
            "architectures), which is not supported; EAGLE-3 is"
        )


def _has_qk_norm(raw: Config) -> bool:
    """speculators builds its layers after the stack's model type; the other layouts are Llama's."""
    stack = raw.get("transformer_layer_config")
    return isinstance(stack, Mapping) and str(stack.get("model_type", "")).startswith("qwen3")


def _drafted(raw: Config) -> int:
    """Tokens of a chain: what the file proposes, or the published depth."""
    speculators: Any = raw.get("speculators_config")
    methods = speculators.get("proposal_methods") if isinstance(speculators, Mapping) else None
    first = methods[0] if methods else {}
    count = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if count is None:
        return DRAFTED
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise CheckpointError(f"speculative_tokens must be an integer of at least 1, got {count!r}")
    return count
