"""Hand-written GGUF files of tiny models: what a converter of llama.cpp would write.

The permutation and the names are written out here once more, on purpose: the reader under test must
not be checked against itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .tiny import CHAT_TEMPLATE, EOS, START

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def gguf_name(name: str, arch: str) -> str:
    """The GGUF name of a transformers parameter."""
    base, _, suffix = name.rpartition(".")
    if base in TOP:
        return f"{TOP[base]}.{suffix}"
    _, _, layer, rest = base.split(".", 3)
    names = NAMES | (GEMMA_NAMES if arch.startswith("gemma") else {})
    return f"blk.{layer}.{names[rest]}.{suffix}"


def permute(weight: Any, heads: int) -> Any:
    """Halves of each head to neighbouring pairs: row i and row i + D/2 become 2i and 2i + 1."""
    rows = weight.shape[0]
    width = rows // heads
    order = []
    for head in range(heads):
        for i in range(width // 2):
            order += [head * width + i, head * width + width // 2 + i]
    return weight[order]


def write_gguf(
    path: Path,
    model: Any,
    tokenizer: Any,
    *,
    arch: str = "llama",
    quant: gguf.GGMLQuantizationType | None = None,
    pre: str = "gpt-2",
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    skip: str = "",
) -> Path:
    """Write ``model`` and ``tokenizer``; ``quant`` for matrices, float32 otherwise.

    ``change`` adds metadata before the file is written; tensors named ``skip`` are left out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    _write_tokenizer(writer, tokenizer, pre)
    if change is not None:
        change(writer)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = gguf_name(name, arch)
        if theirs == skip:
            continue
        values = weight.float().numpy()
        if arch == "llama" and "q_proj" in name:
            values = permute(values, config.num_attention_heads)
        if arch == "llama" and "k_proj" in name:
            values = permute(values, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        if quant is not None and values.ndim == 2:
            writer.add_tensor(theirs, gguf.quantize(values, quant), raw_dtype=quant)
        else:
            writer.add_tensor(theirs, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, pre: str) -> None:
    model = tokenizer.backend_tokenizer.model
    import json

    stored = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    assert model is not None
    tokens = [token for token, _ in sorted(stored["vocab"].items(), key=lambda item: item[1])]
    kinds = [gguf.TokenType.NORMAL] * len(tokens)
    kinds[EOS] = kinds[START] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in stored["merges"]])
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
