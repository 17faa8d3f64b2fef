"""Whole runs of the MLX reference on tiny targets: their configs and weights, and which drafts hit.

Numpy only. A target's greedy text is known beforehand, and each round's draft logits are steered:
rows that are to be accepted towards the text, the row after them away from it, later rows not at
all. So none, some and all drafts are accepted, with real rollbacks, on both sides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

if __package__:
    from tests.parity import script
else:  # beside the reference, where this package is not
    import script


RUNS = (
    *(("dense", case) for case in ("full", "mixed", "other_taps", "dflash2", "dflash2_window")),
    *(("hybrid", case) for case in ("full", "dflash2")),
)
PROMPT, TOKENS = 45, 48
PUSH = 1e3

_TEXT: dict[str, Any] = {
    "hidden_size": script.HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": script.LAYERS_OF_TARGET,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": script.VOCAB,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {**_TEXT, "model_type": "qwen3", "rope_theta": 10000.0},
    "hybrid": {
        "model_type": "qwen3_5",
        "text_config": {
            **_TEXT,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 3,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
    },
}


def target_weight(kind: str, name: str, shape: tuple[int, ...]) -> script.Floats:
    """One parameter of a target under mlx-lm's name."""
    if len(shape) == 1:
        return 1.0 + script.numbers(f"mlx/{kind}/{name}", *shape, scale=0.1)
    whole = name.endswith("embed_tokens.weight")
    scale = 1.0 if whole else 2.0 / shape[-1] ** 0.5
    return script.numbers(f"mlx/{kind}/{name}", *shape, scale=scale)


def steering(told: Sequence[int], rows: int, round_: int) -> script.Floats:
    """``[rows, V]``: what is added to the draft logits of a round; ``told`` is the text on."""
    push = np.zeros((rows, script.VOCAB), np.float32)
    right = min(script.ACCEPTS[round_ % len(script.ACCEPTS)], rows)
    for row, token in enumerate(told[:rows]):
        if row < right:
            push[row, token] = PUSH
        elif row == right:
            push[row, token] = -PUSH
    return push
