"""The layout that MLX readers take: Hugging Face's names, every key they ask for spelled out.

Upstream's MLX reader looks for the DFlash keys in ``dflash_config`` alone and for no defaults;
mlx-lm marks its files ``format: mlx``. Tensors are the same bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dflash.convert.draft import Draft, require_kind
from dflash.convert.folder import write_folder
from dflash.convert.layer_ids import to_target_layer_ids
from dflash.drafts.spec import read_spec


def write(draft: Draft, out: Path) -> None:
    """Write ``draft`` to the folder ``out``. Raises CheckpointError."""
    require_kind(draft, ["dflash", "dflash2"], "MLX")
    write_folder(out, draft, explicit(draft), draft.tensors, "mlx")


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
