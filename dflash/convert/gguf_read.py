"""A GGUF sidecar back as a draft: the inverse of `dflash.convert.gguf`.

Matrices keep their bits where they are stored as F32, F16 or BF16; quantised ones are dequantised
to F32. Rope comes back in halves, which is how a sidecar has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dflash.convert import gguf_eagle
from dflash.convert.draft import Draft, make_d2t
from dflash.convert.gguf import DFLASH2_SIZES, hf_name
from dflash.convert.layer_ids import from_gguf
from dflash.convert.tensor import Tensor
from dflash.errors import CheckpointError, MissingBackend
from dflash.gguf_file import Header, read_header

PLAIN = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def read(file: Path) -> Draft:
    """The draft in ``file``. Raises CheckpointError, MissingBackend."""
    header = read_header(file)
    if header.architecture == "eagle3":
        return gguf_eagle.read(header, {name: _tensor(header, name) for name in header.tensors})
    if header.architecture != "dflash" or "markov_w1.weight" in header.tensors:
        raise CheckpointError(
            f"{file} is no DFlash, DFlash2 or EAGLE-3 file (architecture {header.architecture!r})"
        )
    tensors = {}
    for name in header.tensors:
        ours = "d2t" if name == "d2t" else hf_name(name)
        if ours is None:
            raise CheckpointError(f"{file} has a tensor of no known meaning: {name}")
        tensors[ours] = _tensor(header, name)
    config = sidecar_config(header)
    kind = "dflash2" if "selector_rank" in config["dflash_config"] else "dflash"
    return Draft(kind, config, tensors)


def sidecar_config(header: Header) -> dict[str, Any]:
    """The Hugging Face config of the sidecar behind ``header``."""
    own, tokens = header.own, header.metadata.get("tokenizer.ggml.tokens") or ()
    sizes = {key: own(key) for key in DFLASH2_SIZES if own(key)}
    width = int(own("embedding_length"))
    nested = {
        "block_size": own("block_size", 16),
        "mask_token_id": header.metadata.get("tokenizer.ggml.mask_token_id"),
        "target_layer_ids": from_gguf(own("target_layers") or []),
        "input_embedding_scale": own("embedding_scale"),
        "final_logit_softcapping": own("final_logit_softcapping"),
        "output_multiplier": own("logit_scale"),
        "attention_value_scale": own("attention.value_scale"),
        "attention_sink_bias": "blk.0.attn_sinks.weight" in header.tensors or None,
        **sizes,
    }
    d2t = header.tensors.get("d2t")
    config = {
        "architectures": ["DFlash2DraftModel" if sizes else "DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": width,
        "target_hidden_size": width,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": own("attention.head_count_kv"),
        "head_dim": own("attention.key_length"),
        "hidden_act": own("hidden_activation", "silu"),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own("context_length"),
        "vocab_size": len(tokens),
        "draft_vocab_size": None if d2t is None else d2t.shape[0],
        "is_causal": bool(own("attention.causal", False)),
        **_window(header),
        **_rope(header),
        "dflash_config": {key: value for key, value in nested.items() if value is not None},
    }
    return {key: value for key, value in config.items() if value is not None}


def _window(header: Header) -> dict[str, Any]:
    pattern = header.own("attention.sliding_window_pattern")
    if not pattern:
        return {"layer_types": ["full_attention"] * int(header.own("block_count"))}
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    return {"layer_types": kinds, "sliding_window": header.own("attention.sliding_window")}


def _rope(header: Header) -> dict[str, Any]:
    own, size = header.own, int(header.own("attention.key_length"))
    found: dict[str, Any] = {"rope_theta": own("rope.freq_base")}
    rotated = int(own("rope.dimension_count", size))
    if rotated != size:
        found["partial_rotary_factor"] = rotated / size
    kind = own("rope.scaling.type", "none")
    if kind == "none":
        return found
    scaling = {
        "rope_type": kind,
        "factor": own("rope.scaling.factor"),
        "original_max_position_embeddings": own("rope.scaling.original_context_length"),
        "beta_fast": own("rope.scaling.yarn_beta_fast"),
        "beta_slow": own("rope.scaling.yarn_beta_slow"),
    }
    return {**found, "rope_scaling": {k: v for k, v in scaling.items() if v is not None}}


def _tensor(header: Header, name: str) -> Tensor:
    info = header.tensors[name]
    start = header.start + info.offset
    if name == "d2t":
        return make_d2t(np.fromfile(header.path, "<i8", info.shape[0], offset=start))
    if info.kind_name in PLAIN:
        words = PLAIN[info.kind_name]
        count = int(np.prod(info.shape))
        values = np.fromfile(header.path, words, count, offset=start).reshape(info.shape)
        return Tensor(info.kind_name, values)
    try:
        import gguf
    except ImportError as problem:
        raise MissingBackend(
            "quantised sidecars need the gguf package: pip install 'dflash-engine[gguf]'"
        ) from problem
    if info.bytes is None:
        raise CheckpointError(f"{header.path}: {name} is stored as {info.kind_name}: not read")
    raw = np.fromfile(header.path, np.uint8, info.bytes, offset=start)
    rows = raw.reshape(*info.shape[:-1], -1)
    values = gguf.dequantize(rows, gguf.GGMLQuantizationType(info.kind))
    return Tensor("F32", np.asarray(values, np.float32).reshape(info.shape))
