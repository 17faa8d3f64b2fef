"""What both sides of the EAGLE-3 comparison are given; numpy only, as `script.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

if __package__:
    from tests.parity import script
else:  # run beside it, where this project is not
    import script

ROWS, STEPS = 20, 3  # features there are, tokens of a chain
DRAFT_VOCAB = 48
LAYERS_INPUT = [2, 3, 6]  # as speculators names them: one more than ours

STACK: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": script.HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": script.VOCAB,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "normed_residual": {"norm_before_residual": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "qwen3": {"stack": {"model_type": "qwen3", "num_hidden_layers": 2}, "fc_norm": True},
    "whole_vocabulary": {"draft_vocab_size": script.VOCAB, "stack": {"num_key_value_heads": 4}},
}


def config(case: str) -> dict[str, Any]:
    """config.json in speculators' layout."""
    options = dict(CASES[case])
    stack = {**STACK, **options.pop("stack", {})}
    return {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": stack,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": LAYERS_INPUT,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": STEPS, "verifier_accept_k": 1}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        **options,
    }


def weight(case: str, name: str, shape: tuple[int, ...]) -> script.Floats:
    """One parameter of a case's draft, tables included."""
    if name == "embed_tokens.weight":
        return script.tables()[0]
    return script.weight(f"eagle3/{case}", name, shape)


def deltas() -> NDArray[np.int64]:
    """``d2t``: every third token, less the place it has in the draft."""
    return np.arange(DRAFT_VOCAB, dtype=np.int64) * 2


def features() -> script.Floats:
    """``[ROWS, taps * H]``."""
    taps = [script.states(layer - 1, ROWS) for layer in LAYERS_INPUT]
    return np.concatenate(taps, axis=-1)


def tokens() -> list[int]:
    """Tokens 0 .. ROWS + STEPS of the text."""
    return script.prompt(ROWS + STEPS + 1)
