"""The config keys that mean something to a draft, so that the others can be named.

And those among them that no forward pass reads and every layout should keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TOP = frozenset(
    {
        "architectures",
        "model_type",
        "auto_map",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "vocab_size",
        "max_position_embeddings",
        "max_window_layers",
        "attention_bias",
        "attention_dropout",
        "mlp_bias",
        "initializer_range",
        "use_cache",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "pretraining_tp",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "partial_rotary_factor",
        "is_neox_style",
        "rope_is_neox_style",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "is_causal",
        "num_target_layers",
        "target_hidden_size",
        "target_name",
        "target_tokenizer_sha256",
        "chat_template_sha256",
        "logit_scale",
        "draft_vocab_size",
        "has_embed_tokens",
        "has_lm_head",
        "eagle_config",
        "eagle_aux_hidden_state_layer_ids",
        "aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "embed_requires_grad",
        "dflash_config",
    }
)
_DFLASH = frozenset(
    {
        "block_size",
        "default_block_size",
        "mask_token_id",
        "mask_token",
        "target_layer_ids",
        "layer_ids",
        "causal",
        "is_causal",
        "num_target_layers",
        "acceptance_by_position",
        "use_swa",
        "swa_window_size",
        "output_multiplier",
        "final_logit_softcapping",
        "input_embedding_scale",
        "attention_sink_bias",
        "attention_value_scale",
        "attention_mode",
        "projector_type",
        "sample_from_anchor",
        "conv_kernel_size",
        "conv_group_size",
        "selector_rank",
        "selector_top_k",
    }
)


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a flat config that nothing here reads, sorted, with their place."""
    nested = config.get("dflash_config")
    inner = nested if isinstance(nested, Mapping) else {}
    top = [key for key in config if key not in _TOP | _DFLASH]
    return sorted(top) + [f"dflash_config.{key}" for key in sorted(set(inner) - _DFLASH)]


_ABOUT = frozenset(
    {
        *("num_target_layers", "target_name", "target_tokenizer_sha256", "chat_template_sha256"),
        *("default_block_size", "acceptance_by_position"),
    }
)


def told(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a flat config says about a draft beside its arithmetic, and what nothing here knows.

    In the places where it stands: a layout that has no keys of its own for it keeps this.
    """
    nested = config.get("dflash_config")
    inner = nested if isinstance(nested, Mapping) else {}
    names = {*_ABOUT, *unknown_keys(config)}
    kept = {key: value for key, value in config.items() if key in names and value is not None}
    below = {
        key: value
        for key, value in inner.items()
        if value is not None and (key in _ABOUT or f"dflash_config.{key}" in names)
    }
    return {**kept, **({"dflash_config": below} if below else {})}


def told_flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same, wherever in the config it stands."""
    kept = told(config)
    below = kept.pop("dflash_config", {})
    return {**kept, **below}
