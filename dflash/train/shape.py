"""From a target's config to a draft's: the config.json a trained draft is served with."""

from __future__ import annotations

from typing import Any

from dflash.doctor.static.name import tokenizer_digest
from dflash.doctor.static.template import KEY, template_digest
from dflash.drafts.layers import build_target_layer_ids
from dflash.errors import ConfigError
from dflash.train.config import DraftShape

TAPS = 5  # paper section 5: five layers, from the second to the third-to-last


def choose_mask_token(tokenizer: Any, eos_ids: frozenset[int], vocab_size: int) -> int:
    """A token that never ends or pads an answer; raises ConfigError if the tokenizer has none."""
    taken = set(eos_ids) | {tokenizer.pad_token_id}
    for token in (tokenizer.mask_token_id, tokenizer.unk_token_id):
        if token is not None and token not in taken and token < vocab_size:
            return int(token)
    raise ConfigError(
        "the target's tokenizer has no spare special token to use as mask; pass --mask-token-id ID "
        "(a special token that is neither end-of-sequence nor padding)"
    )


def tokenizer_keys(tokenizer: Any) -> dict[str, Any]:
    """What lets a later reader see that its tokenizer and chat template are those of the training.

    Read by `dflash.doctor.static`, at load.
    """
    return {
        "target_tokenizer_sha256": tokenizer_digest(tokenizer.get_vocab()),
        KEY: template_digest(getattr(tokenizer, "chat_template", None)),
    }


def draft_config(
    target: Any,  # the target's text config
    shape: DraftShape,
    *,
    mask_token_id: int,
    target_name: str,
) -> dict[str, Any]:
    """A z-lab style config.json: Qwen3 fields at the top, DFlash fields in ``dflash_config``."""
    depth = target.num_hidden_layers
    taps = (
        build_target_layer_ids(depth, min(TAPS, depth))
        if shape.taps == "auto"
        else list(shape.taps)
    )
    taps = sorted(set(taps))
    if taps[-1] >= depth or taps[0] < 0:
        raise ConfigError(f"--taps {taps}: the target has layers 0 to {depth - 1}")
    heads = target.num_attention_heads
    head_dim = getattr(target, "head_dim", None) or target.hidden_size // heads
    sliding = shape.window is not None
    kinds = ["sliding_attention" if sliding else "full_attention"] * (shape.layers - 1)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size or target.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": rope_theta(target),
        "rope_scaling": None,
        "layer_types": [*kinds, "full_attention"],
        "sliding_window": shape.window,
        "use_sliding_window": sliding,
        "is_causal": False,
        "tie_word_embeddings": bool(target.tie_word_embeddings),
        "dtype": "bfloat16",
        "num_target_layers": depth,
        "block_size": shape.block_size,
        "target_name": target_name,
        "dflash_config": {
            "block_size": shape.block_size,
            "mask_token_id": mask_token_id,
            "target_layer_ids": taps,
        },
    }
    if shape.draft_vocab_size is not None:
        config["draft_vocab_size"] = min(shape.draft_vocab_size, target.vocab_size)
    return config if shape.selector_rank is None else config | dflash2_keys(config, shape)


def dflash2_keys(config: dict[str, Any], shape: DraftShape) -> dict[str, Any]:
    """What makes a DFlash v1 config one of DFlash2."""
    sizes = {
        "conv_kernel_size": shape.conv_kernel_size,
        "conv_group_size": shape.conv_group_size,
        "selector_rank": shape.selector_rank,
        "selector_top_k": shape.selector_top_k,
    }
    return {
        "architectures": ["DFlash2DraftModel"],
        "dflash_config": {**config["dflash_config"], **sizes},
    }


def rope_theta(target: Any) -> float:
    """The target's base frequency, from either generation of configs."""
    parameters = getattr(target, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    theta = parameters.get("rope_theta") or getattr(target, "rope_theta", None)
    if theta is None:
        raise ConfigError(
            "the target's config names no rope_theta; a draft cannot be shaped after it"
        )
    return float(theta)
