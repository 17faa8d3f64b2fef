"""Tiny random targets of every family with something of its own: experts, sinks, softcaps, scaled
embeddings, windows, shared keys, recurrences.

family("qwen3_next")    a seeded causal LM in eval mode, float32
HYBRIDS                 families with a state that cannot be cropped
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from .tiny import EOS, HIDDEN, LAYERS, START, VOCAB, WINDOW

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
    "bos_token_id": START,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": WINDOW,
}
_MAMBA2 = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_n_heads": 4, "mamba_d_head": 16}

_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []}),
    "gemma2": (
        "Gemma2",
        {**_SLIDING, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    ),
    "gemma3": ("Gemma3", {**_SLIDING, "query_pre_attn_scalar": 16}),
    "gemma4": (
        "Gemma4",
        {
            **_SLIDING,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {**_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "qwen3_next": (
        "Qwen3Next",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "qwen3_5": ("Qwen3_5", _DELTA),
    "mamba2": (
        "Mamba2",
        {
            "state_size": 8,
            "expand": 2,
            "conv_kernel": 4,
            "num_heads": 8,
            "n_groups": 1,
            "head_dim": 16,
            "chunk_size": 16,
        },
    ),
    "falcon_h1": (
        "FalconH1",
        {**_MAMBA2, "mamba_d_ssm": 64, "mamba_n_groups": 1, "mamba_chunk_size": 16},
    ),
    "lfm2": (
        "Lfm2",
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3},
    ),
}
FAMILIES = sorted(_FAMILIES)
HYBRIDS = ("falcon_h1", "lfm2", "mamba2", "qwen3_5", "qwen3_next")


def family(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A seeded random model of ``name``; ``changes`` go into its config."""
    prefix, own = _FAMILIES[name]
    model_class: Any = getattr(transformers, f"{prefix}ForCausalLM")
    torch.manual_seed(seed)
    model: Any = model_class(model_class.config_class(**{**_SIZES, **own, **changes}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            _lively(key, weight, generator)
    return model.float().eval()


def _lively(key: str, weight: Tensor, generator: torch.Generator) -> None:
    """Matrices large enough for logits that differ; what decays or normalises stays as it is."""
    if weight.dim() >= 2 and "conv" not in key and "A_log" not in key:
        scale = 1.0 if "embed" in key or "lm_head" in key else 2.0
        weight.normal_(0.0, scale / weight.shape[-1] ** 0.5, generator=generator)
