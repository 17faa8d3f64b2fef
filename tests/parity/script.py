"""What both sides of the reference comparison are given: weights, features, verdicts.

Numpy only, so that it also runs where the reference is installed and this package is not. Numbers
come from raw Philox words, a stream that numpy keeps for good, so the golden files need to hold
results only.

The target is scripted: its hidden states are fixed per position, and in round i it agrees with
exactly ``accepts[i]`` drafted tokens, whatever they are. So the text that comes out depends on
every draft token of every round, with none, one, some and all of them accepted.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

VOCAB = 160
HIDDEN = 64
LAYERS_OF_TARGET = 6
ACCEPTS = [0, 1, 3, 7, 7, 0, 2, 7, 1, 5, 0, 7, 4, 6, 7, 7, 0, 3]

BASE: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["full_attention", "full_attention"],
    "num_target_layers": LAYERS_OF_TARGET,
    "dflash_config": {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [1, 4]},
}
_MIXED = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "use_sliding_window": True,
}
_NESTED: dict[str, Any] = BASE["dflash_config"]
_SECOND: dict[str, Any] = {  # what makes a DFlash2 draft
    **_NESTED,
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 4,
}

CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "mixed": _MIXED,  # sliding layers causal, since nothing is said
    "bidirectional_window": {
        **_MIXED,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
    },
    "causal": {"is_causal": True},
    "three_layers": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "biased_gelu": {"attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
    "yarn": {
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
        }
    },
    "scaled": {
        "dflash_config": {
            **_NESTED,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
            "input_embedding_scale": 3.0,
        }
    },
    "other_taps": {"dflash_config": {**_NESTED, "target_layer_ids": [0, 2, 5], "block_size": 5}},
    "dflash2": {"architectures": ["DFlash2DraftModel"], "dflash_config": _SECOND},
    "dflash2_window": {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 8,
        "use_sliding_window": True,
        "dflash_config": {
            **_SECOND,
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 32,
            "selector_top_k": 16,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
            "input_embedding_scale": 3.0,
        },
    },
}
SECOND = [case for case in CASES if case.startswith("dflash2")]
PROMPTS = {"short": 1, "usual": 13, "long": 45}


def config(case: str) -> dict[str, Any]:
    """The draft's config.json of a case."""
    return {**BASE, **CASES[case]}


def numbers(name: str, *shape: int, scale: float = 1.0) -> Floats:
    """Uniform numbers of that standard deviation, the same for the same name everywhere."""
    size = int(np.prod(shape))
    words = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(size)
    unit = (words >> np.uint64(11)) * 2.0**-52 - 1.0
    made: Floats = (unit * (3.0**0.5 * scale)).astype(np.float32).reshape(shape)
    return made


def weight(case: str, name: str, shape: tuple[int, ...]) -> Floats:
    """One parameter of a case's draft: matrices keep the size of what they read, norms near 1.

    The reference's codebooks are modules, and their names end in ``.weight``.
    """
    name = name.removesuffix(".weight") if "codebook" in name else name
    if "norm" in name:
        return 1.0 + numbers(f"{case}/{name}", *shape, scale=0.2)
    size = 0.3 if "kernel_projection" in name else 1.5  # coefficients beside base kernels
    scale = size / shape[-1] ** 0.5 if len(shape) == 2 else 0.5
    return numbers(f"{case}/{name}", *shape, scale=scale)


def tables() -> tuple[Floats, Floats]:
    """Embedding and head of the scripted target, each [VOCAB, HIDDEN]."""
    return (
        numbers("embed", VOCAB, HIDDEN),
        numbers("head", VOCAB, HIDDEN, scale=HIDDEN**-0.5),
    )


def states(layer: int, positions: int) -> Floats:
    """Outputs of one target layer at positions 0 .. positions - 1."""
    return numbers(f"states/{layer}", 256, HIDDEN)[:positions]


def parts() -> dict[str, Floats]:
    """What a convolution and a selector are given on their own."""
    return {
        "x": numbers("conv/x", 1, 8, HIDDEN),  # a sublayer's input, a block
        "y": numbers("conv/y", 1, 8, HIDDEN),  # its output
        "hidden": numbers("selector/hidden", 1, 7, HIDDEN),
        "logits": numbers("selector/logits", 1, 7, VOCAB, scale=2.0),
    }


def prompt(length: int) -> list[int]:
    """Token ids."""
    return [int(i) for i in (np.abs(numbers("prompt", 64)) * 1e6).astype(int) % VOCAB][:length]


def answer(drafted: list[int], round_: int) -> tuple[list[int], int]:
    """The target's own tokens at each row [drafted + 1], and how many drafts that accepts."""
    accepted = min(ACCEPTS[round_ % len(ACCEPTS)], len(drafted))
    own = [*drafted[:accepted], *((d + 1) % VOCAB for d in drafted[accepted:])]
    return [*own, (7 * round_ + 11) % VOCAB], accepted


def max_tokens(length: int) -> int:
    """Room for every pattern of ``ACCEPTS`` and a shortened last block."""
    return 60 if length > 1 else 41
