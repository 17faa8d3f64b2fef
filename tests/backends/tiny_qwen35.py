"""A tiny Qwen3.5 with its multi-token prediction head as a GGUF file, from its folder.

Written out once more, on purpose, as llama.cpp's converter would have it: norms as what they
multiply by, value heads of the recurrent layers tiled, decay as it is used.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from .tiny import tiny_tokenizer
from .tiny_gguf import _write_tokenizer

LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
HEAD = {
    "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm",
    "norm": "nextn.shared_head_norm",
}
TOP = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}


def write_qwen35(file: Path, folder: Path, heads: int = 1, arch: str = "qwen35") -> Path:
    """``folder`` as ``file``, which says that it has so many ``heads``."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    layers, writer = config["num_hidden_layers"], gguf.GGUFWriter(file, arch)
    writer.add_block_count(layers + heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    rotated = int(config["head_dim"] * rope["partial_rotary_factor"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_dimension_sections([rotated // 2 - 1, 1, 0, 0])  # pairs in turn; none left out
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    writer.add_uint32(f"{arch}.full_attention_interval", 4)
    if heads:
        writer.add_uint32(f"{arch}.nextn_predict_layers", heads)
    _write_tokenizer(writer, tiny_tokenizer(), "gpt-2")
    for name, values in load_file(folder / "model.safetensors").items():
        if heads or not name.startswith("mtp."):
            place, stored = _stored(name, values, config)
            writer.add_tensor(place, np.ascontiguousarray(stored, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _stored(name: str, values: Any, config: dict[str, Any]) -> tuple[str, Any]:
    """GGUF name and values of one tensor."""
    short = name.removeprefix("model.").removeprefix("language_model.")
    if "linear_attn" in short:
        values = _tiled(short, values, config)
    if short.endswith("A_log"):
        return f"blk.{short.split('.')[1]}.ssm_a", -np.exp(values)
    if short.endswith("dt_bias"):
        return f"blk.{short.split('.')[1]}.ssm_dt.bias", values
    if "norm" in short and "linear_attn" not in short:
        values = values + 1
    own = config["num_hidden_layers"]
    base = short.removesuffix(".weight").removeprefix("mtp.")
    if base.startswith("layers."):
        _, layer, rest = base.split(".", 2)
        layer = str(own) if short.startswith("mtp.") else layer
        return f"blk.{layer}.{LAYER[rest]}.weight", values.squeeze()
    if short.startswith("mtp."):
        return f"blk.{own}.{HEAD[base]}.weight", values
    return f"{TOP[base]}.weight", values


def _tiled(name: str, values: Any, config: dict[str, Any]) -> Any:
    """Value heads in turn, one of each key head, instead of key head by key head."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    size = config["linear_value_head_dim"]
    before = 2 * keys * config["linear_key_head_dim"]

    def turned(rows: Any, width: int) -> Any:
        split = rows.reshape(keys, heads // keys, width, *rows.shape[1:])
        return split.swapaxes(0, 1).reshape(rows.shape)

    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([values[:before], turned(values[before:], size)])
    if "in_proj_z" in name:
        return turned(values, size)
    if "out_proj" in name:
        return turned(values.T, size).T
    return values if name.endswith("norm.weight") else turned(values, 1)
