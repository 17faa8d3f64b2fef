"""What kind of checkpoint a config.json describes, by name and by keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash.errors import CheckpointError
from dflash.registry import Registry

READERS = Registry(
    "draft kind",
    {
        "dflash": "dflash.drafts.spec:read_dflash",
        "dflash2": "dflash.drafts.dflash2:read_dflash2",
        "eagle3": "dflash.drafts.eagle3:read_eagle3",
    },
)
"""Kind to ``(keys, config as it was read, taps) -> DraftSpec``. A kind without a line here is
recognised and refused by name."""

# Lower-case fragments of an architecture's name, most telling first: dflash2 contains dflash.
_FRAGMENTS = (
    ("dflash2", "dflash2"),
    ("dspark", "dspark"),
    ("domino", "domino"),
    ("peagle", "peagle"),
    ("eagle", "eagle3"),
    ("mtp", "mtp"),
)
_DFLASH_NAMES = frozenset(
    {"DFlashDraftModel", "DFlashSpeculator", "DFlashModel", "MuseGlimmerAssistantModel"}
)
_TARGET_ENDINGS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_DFLASH_KEYS = frozenset({"dflash_config", "target_layer_ids"})  # no target has them
_SIBLING_KEYS = (
    ("selector_top_k", "dflash2"),
    ("selector_rank", "dflash2"),
    ("conv_kernel_size", "dflash2"),
    ("markov_rank", "dspark"),
    ("gru_hidden_dim", "domino"),
)


def kind_of(config: Mapping[str, Any]) -> str:
    """``dflash``, ``dflash2``, ``dspark``, ``domino``, ``peagle``, ``eagle3``, ``mtp`` or
    ``target``.

    Reads names and keys only. Raises CheckpointError when nothing in the config is known; the
    message has what was found, what is supported and how to say otherwise.
    """
    nested = _mapping(config.get("dflash_config"))
    named = config.get("speculators_model_type") or nested.get("projector_type")
    names = [str(name) for name in config.get("architectures") or ()]
    if named:
        kind = _by_fragment(str(named)) or _unknown([str(named)])
        return "dspark" if kind == "dflash" and config.get("sample_from_anchor") else kind
    known = _by_sibling(config, nested, names) or _by_name(config, names)
    return known or _unknown(names or [str(config.get("model_type") or "nothing known")])


def _by_sibling(
    config: Mapping[str, Any], nested: Mapping[str, Any], names: list[str]
) -> str | None:
    """Methods that share DFlash's config but not its layers or its rows."""
    for name in names:
        for fragment, kind in _FRAGMENTS:
            if fragment in name.lower():
                return kind
    for key, kind in _SIBLING_KEYS:
        if nested.get(key) or (config.get(key) and _looks_dflash(config)):
            return kind
    if nested.get("sample_from_anchor") or config.get("sample_from_anchor"):
        return "dspark"
    if config.get("draft_vocab_size") and not _looks_dflash(config):
        return "eagle3"
    return None


def _by_name(config: Mapping[str, Any], names: list[str]) -> str | None:
    borrowed = not names or _is_target(names)  # some exporters keep the target's name, or none
    if _DFLASH_NAMES & set(names) or (borrowed and _looks_dflash(config)):
        return "dflash"
    return "target" if _is_target(names) else None


def _by_fragment(name: str) -> str | None:
    lowered = name.lower()
    for fragment, kind in (*_FRAGMENTS, ("dflash", "dflash")):
        if fragment in lowered:
            return kind
    return None


def _is_target(names: list[str]) -> bool:
    return any(name.endswith(_TARGET_ENDINGS) for name in names)


def _looks_dflash(config: Mapping[str, Any]) -> bool:
    return bool(_DFLASH_KEYS & set(config))


def _unknown(found: list[str]) -> str:
    raise CheckpointError(
        f"config.json describes {', '.join(found)!r}, which is neither a known draft nor a "
        "target. Supported drafts: DFlash v1 (DFlashDraftModel, DFlashSpeculator, "
        "MuseGlimmerAssistantModel), DFlash2 (DFlash2DraftModel). If it is a DFlash v1 draft under "
        'another name, set "architectures": ["DFlashDraftModel"] in its config.json'
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
