"""The speculators format (vLLM): DFlash, DFlash2 and EAGLE-3.

The draft stack's own config sits in ``transformer_layer_config``, what makes it a draft on top.
Tensors are named as in DFlash files; the embedding and the head may be stored too, and are then
taken from the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dflash.convert.draft import Draft, make_t2d, require_kind
from dflash.convert.folder import write_folder
from dflash.convert.hf import read_as
from dflash.convert.layer_ids import (
    from_eagle,
    from_specforge,
    from_speculators,
    to_eagle,
    to_specforge,
    to_speculators,
)
from dflash.convert.tensor import Tensor
from dflash.drafts.eagle3 import DRAFTED
from dflash.drafts.keys import Keys, read_config
from dflash.drafts.spec import read_spec
from dflash.errors import CheckpointError

VERSION = "0.9.0"  # of the speculators library whose layout this is
CLASSES = {
    "dflash": ("DFlashSpeculator", "DFlashDraftModel"),
    "dflash2": ("DFlash2DraftModel", "DFlash2DraftModel"),
    "eagle3": ("Eagle3Speculator", "LlamaForCausalLMEagle3"),
}
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SCALARS = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
EAGLE = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "embed_requires_grad")
_NESTED = ("block_size", "mask_token_id", *SELECTOR, *SCALARS)
_OWN = frozenset(
    {
        *("speculators_model_type", "speculators_version", "speculators_config", "architectures"),
        *("transformer_layer_config", "aux_hidden_state_layer_ids", "sliding_window_non_causal"),
        *("eagle_aux_hidden_state_layer_ids", "dflash_config", *_NESTED),
    }
)


def read(folder: Path) -> Draft:
    """The draft in ``folder``. Raises CheckpointError, WeightsError, MissingBackend."""
    config = read_config(folder)
    flat = flatten(config)
    steps = _proposal(config).get("verifier_accept_k", 1)
    lossy = (
        (f"its verifier_accept_k {steps} would be a lossy rule; it is not kept",)
        if steps != 1
        else ()
    )
    return replace(read_as(folder, flat), notes=lossy)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """The Hugging Face config of a speculators config. Raises CheckpointError."""
    kind, stack = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind not in CLASSES or not isinstance(stack, Mapping):
        raise CheckpointError(
            f"a speculators config of type {kind!r} is not converted; those of "
            f"{', '.join(CLASSES)} with a transformer_layer_config are"
        )
    flat = {"architectures": [CLASSES[kind][1]], **stack}
    flat |= {key: value for key, value in config.items() if key not in _OWN}
    if flat.get("draft_vocab_size") == flat.get("vocab_size") and kind != "eagle3":
        flat.pop("draft_vocab_size", None)
    if flat.get("target_hidden_size") == flat.get("hidden_size"):
        flat.pop("target_hidden_size", None)
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    if verifier.get("name_or_path"):
        flat["target_name"] = verifier["name_or_path"]
    return _eagle_keys(flat, config) if kind == "eagle3" else _dflash_keys(flat, config)


def _dflash_keys(flat: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    nested = dict(config.get("dflash_config") or {})
    nested |= {key: config[key] for key in _NESTED if config.get(key) is not None}
    nested.setdefault("block_size", 8)  # this format's default, not Hugging Face's
    if config.get("aux_hidden_state_layer_ids"):
        nested["target_layer_ids"] = from_speculators(config["aux_hidden_state_layer_ids"])
    if config.get("sliding_window_non_causal"):
        flat["is_causal"] = False
    return {**flat, "dflash_config": nested}


def _eagle_keys(flat: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    for key in EAGLE:
        if not flat.get(key):
            flat.pop(key, None)
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        nested = to_specforge(from_eagle(ids))
        flat["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": nested,
            "use_aux_hidden_state": True,
        }
    return flat


def _proposal(config: Mapping[str, Any]) -> Mapping[str, Any]:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    first = methods[0]
    return first if isinstance(first, Mapping) else {}


def write(draft: Draft, out: Path, tables: Mapping[str, Tensor] | None = None) -> None:
    """Write ``draft`` to the folder ``out``; ``tables`` are the target's embedding and head.

    Raises CheckpointError for kinds without a place in this format.
    """
    require_kind(draft, CLASSES, "speculators")
    config = nest(draft.config, draft.kind)
    tensors = {**(tables or {}), **draft.tensors}
    if "d2t" in tensors:
        tensors["t2d"] = make_t2d(tensors["d2t"], draft.keys.count("vocab_size"))
    write_folder(out, draft, config, tensors, "pt")


def nest(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The speculators config of a Hugging Face config: the inverse of `flatten`."""
    keys = Keys(config)
    made = {
        "architectures": [CLASSES[kind][0]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": _speculators_config(keys, kind),
        "transformer_layer_config": _stack(config),
        "draft_vocab_size": keys.count("draft_vocab_size", keys.count("vocab_size")),
        "target_hidden_size": keys.count("target_hidden_size", keys.count("hidden_size")),
    }
    if kind == "eagle3":
        return made | _eagle_top(keys)
    taps = read_spec(config).taps
    made |= {key: keys.get(key) for key in _NESTED if keys.get(key) is not None}
    made["block_size"] = keys.count("block_size", 16)
    made["aux_hidden_state_layer_ids"] = to_speculators(taps)
    causal = keys.get("is_causal", keys.nested.get("causal"))
    made["sliding_window_non_causal"] = causal is False
    if causal:
        made["is_causal"] = True  # has no word in this format: full layers are never causal there
    left = {k: v for k, v in keys.nested.items() if k not in {*_NESTED, "target_layer_ids"}}
    left.pop("causal", None)
    for name in ("num_target_layers", "target_tokenizer_sha256", "chat_template_sha256"):
        if name in config:
            made[name] = config[name]
    return made | ({"dflash_config": left} if left else {})


def _speculators_config(keys: Keys, kind: str) -> dict[str, Any]:
    drafted = keys.count("block_size", 16) - 1 if kind != "eagle3" else DRAFTED
    name = keys.get("target_name")
    return {
        "algorithm": kind,
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": drafted,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": name, "architectures": []},
    }


_NOT_STACK = frozenset(
    {
        *("architectures", "auto_map", "dflash_config", "num_target_layers", "target_layer_ids"),
        *("target_name", "target_tokenizer_sha256", "chat_template_sha256", "is_causal"),
        *("draft_vocab_size", "target_hidden_size", "eagle_config", *_NESTED, *EAGLE),
        *("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"),
    }
)


def _stack(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the draft's own layers; position sections for images are left out."""
    return {key: value for key, value in config.items() if key not in _NOT_STACK}


def _eagle_top(keys: Keys) -> dict[str, Any]:
    made: dict[str, Any] = {key: bool(keys.top.get(key, False)) for key in EAGLE}
    nested = keys.top.get("eagle_config") or {}
    ids = keys.top.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        made["eagle_aux_hidden_state_layer_ids"] = to_eagle(from_eagle(ids))
    elif nested.get("eagle_aux_hidden_state_layer_ids"):
        outputs = from_specforge(nested["eagle_aux_hidden_state_layer_ids"])
        made["eagle_aux_hidden_state_layer_ids"] = to_eagle(outputs)
    return made
