"""The shapes of published DFlash v1 configs, cut down to a few thousand weights."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "num_target_layers": 4,
}


def config(**changes: Any) -> dict[str, Any]:
    """A flat config with a nested ``dflash_config``; keys in ``nested`` go there, None removes."""
    nested = {"mask_token_id": 3, "target_layer_ids": [1, 2], "block_size": 8}
    nested.update(changes.pop("nested", {}))
    made = {**SMALL, **changes, "dflash_config": {k: v for k, v in nested.items() if v is not None}}
    return {key: value for key, value in made.items() if value is not None}


CONV_AND_SELECTOR: dict[str, Any] = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}


def config2(**changes: Any) -> dict[str, Any]:
    """A DFlash2 config, as `config` makes one of DFlash v1."""
    nested = {**CONV_AND_SELECTOR, **changes.pop("nested", {})}
    made = {"architectures": ["DFlash2DraftModel"], "is_causal": False, **changes}
    return config(nested=nested, **made)


def published(**keys: Any) -> dict[str, Any]:
    """A config with nothing but what is said (for the published shapes, in their real sizes)."""
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **keys}


QWEN3_4B = published(
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=151936,
    rope_theta=1000000,
    rope_scaling=None,
    attention_bias=False,
    block_size=16,
    num_target_layers=36,
    layer_types=["full_attention"] * 5,
    sliding_window=None,
    use_sliding_window=False,
    dflash_config={"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
)
QWEN36_27B = published(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248320,
    rope_parameters={"rope_theta": 10000000, "rope_type": "default", "mrope_section": [11, 11, 10]},
    layer_types=["sliding_attention"] * 4 + ["full_attention"],
    sliding_window=2048,
    use_sliding_window=True,
    num_target_layers=64,
    dflash_config={
        "block_size": 16,
        "mask_token_id": 248070,
        "target_layer_ids": [1, 16, 31, 46, 61],
    },
)
KIMI_K25 = published(
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=6,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=163840,
    rope_theta=50000,
    rope_scaling={
        "type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    max_position_embeddings=262144,
    dflash_config={
        "block_size": 8,
        "mask_token_id": 163838,
        "target_layer_ids": [1, 12, 24, 35, 47, 58],
    },
)
GPT_OSS = published(
    hidden_size=2880,
    intermediate_size=8640,
    num_hidden_layers=8,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=201088,
    rope_theta=150000,
    attention_bias=True,
    block_size=10,
    dflash_config={"mask_token_id": 200000, "target_layer_ids": [1, 9, 17, 25, 33]},
)
GEMMA4_31B = published(
    hidden_size=5376,
    intermediate_size=10752,
    num_hidden_layers=5,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=262144,
    rope_theta=1000000,
    final_logit_softcapping=30.0,
    layer_types=["sliding_attention"] * 4 + ["full_attention"],
    sliding_window=2048,
    dflash_config={
        "block_size": 16,
        "mask_token_id": 4,
        "target_layer_ids": [1, 12, 23, 35, 46, 57],
    },
)
MUSE_GLIMMER: dict[str, Any] = {
    "architectures": ["MuseGlimmerAssistantModel"],
    "model_type": "muse_glimmer_assistant",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 202048,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "block_size": 16,
    "mask_token_id": 201818,
    "target_layer_ids": [1, 13, 25, 37, 49],
}
ORNITH = published(
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=6,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248320,
    rope_theta=10000000,
    layer_types=["sliding_attention"] * 5 + ["full_attention"],
    sliding_window=4096,
    dflash_config={
        "block_size": 16,
        "mask_token_id": 248077,
        "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
    },
)
MIMO = published(
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=5,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=152576,
    rope_theta=5000000,
    partial_rotary_factor=0.5,
    block_size=8,
    dflash_config={
        "mask_token_id": 151667,
        "target_layer_ids": [1, 12, 23, 34, 45],
        "use_swa": True,
        "swa_window_size": 1024,
        "causal": False,
        "attention_sink_bias": True,
        "attention_value_scale": 0.707,
    },
)
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
        ],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
        "sliding_window": 2048,
    },
    "draft_vocab_size": 32000,
    "mask_token_id": 151669,
    "target_hidden_size": 4096,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "sliding_window_non_causal": False,
}
