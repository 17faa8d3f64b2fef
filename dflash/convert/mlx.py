"""The layout that MLX readers take: Hugging Face's names, every key they ask for spelled out.

Upstream's MLX reader looks for the DFlash keys in ``dflash_config`` alone, for no defaults, and for
exactly the tensors of its own model; mlx-lm marks its files ``format: mlx``. EAGLE-3 drafts are
written as EAGLE has them, which the MLX backend here reads and upstream does not. Tensors are the
same bytes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dflash.convert import eagle
from dflash.convert.draft import Draft
from dflash.convert.folder import MASK, write_folder
from dflash.convert.layer_ids import to_target_layer_ids
from dflash.drafts.layers import ANY_DEPTH
from dflash.drafts.spec import DraftSpec, read_spec

FORMAT = "mlx"
_UPSTREAM = re.compile(
    r"(fc|norm|hidden_norm)\.weight|candidate_selector\..*"
    r"|layers\.\d+\.((input|post_attention)_layernorm|mlp\.(gate|up|down)_proj)\.weight"
    r"|layers\.\d+\.self_attn\.([qkvo]_proj|[qk]_norm)\.weight"
    r"|layers\.\d+\.(attention|mlp)_conv\.(base_kernel|kernel_projection\.weight)"
)
"""Tensors of upstream's model; any other makes its reader refuse the folder."""


def write(draft: Draft, out: Path) -> None:
    """Write ``draft`` to the folder ``out``. Raises CheckpointError."""
    if draft.kind == "eagle3":
        eagle.write(draft, out, FORMAT)
    else:
        write_folder(out, draft, explicit(draft), draft.tensors, FORMAT)


def explicit(draft: Draft) -> dict[str, Any]:
    """The config with nothing left to a reader's defaults that the draft says. CheckpointError."""
    spec = read_spec(draft.config)
    config = dict(draft.config)
    nested = dict(config.get("dflash_config") or {})
    nested |= {
        "block_size": spec.block_size,
        "mask_token_id": spec.mask_token_id,
        "target_layer_ids": to_target_layer_ids(spec.taps),
    }
    for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
        if key not in nested and config.get(key) is not None:
            nested[key] = config[key]
    config |= {
        "dflash_config": nested,
        "head_dim": spec.head_dim,
        "num_key_value_heads": spec.num_kv_heads,
        "rms_norm_eps": spec.rms_norm_eps,
        "layer_types": list(spec.layer_types),
        "rope_theta": spec.rope_parameters[spec.layer_types[0]]["rope_theta"],
    }
    said = draft.keys.nested.get("causal", draft.keys.nested.get("is_causal"))
    if said is not None and config.get("is_causal") is None:
        config["is_causal"] = said
    return config


def beyond_upstream(draft: Draft) -> str | None:
    """In a sentence, what upstream's reader would refuse or pass over; None = nothing."""
    if draft.kind == "eagle3":
        return "upstream's MLX reader knows no EAGLE-3 drafts; the MLX backend here runs it"
    spec = read_spec(draft.config, num_target_layers=ANY_DEPTH)
    found = sorted(name for name in draft.tensors if not _UPSTREAM.fullmatch(name))
    found += [f"{MASK}.safetensors"] if draft.mask_embedding is not None else []
    found += [words for words, holds in _passed_over(spec).items() if holds]
    if not found:
        return None
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return (
        f"upstream's MLX reader has no place for {', '.join(found[:4])}{more}; the MLX backend "
        "here runs it"
    )


def _passed_over(spec: DraftSpec) -> dict[str, bool]:
    """Options that upstream's MLX model lacks, so that it would draft otherwise."""
    ropes = list(spec.rope_parameters.values())
    return {
        f"hidden_act {spec.hidden_act}": spec.hidden_act != "silu",
        "rope in pairs": spec.rope_interleaved,
        "partial_rotary_factor": any(rope["partial_rotary_factor"] != 1 for rope in ropes),
        "rope that differs from layer to layer": any(rope != ropes[0] for rope in ropes),
        "attention_value_scale": spec.value_scale != 1,
        "logit_scale": spec.logit_scale != 1,
        "a target of another width": spec.hidden_size != spec.target_hidden_size,
    }
