"""A transformers config from GGUF metadata, for the dense families whose mapping is known.

What a file says is taken; what it cannot say (Gemma's attention scale) follows the family's rule.
Rope scaling is taken over or refused, never dropped: without it a model is right for short texts
and quietly wrong for long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from transformers import AutoConfig

from dflash.errors import CheckpointError

# Text of end-of-turn tokens that a chat template may use without the file naming them as EOS.
TURN_ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|eom_id|>"})
CONTROL = 3  # token type in tokenizer.ggml.token_type


class Metadata:
    """GGUF metadata by key; keys that begin with a dot belong to the architecture."""

    def __init__(self, fields: Mapping[str, Any], file: str) -> None:
        """``fields`` of a gguf.GGUFReader."""
        self._fields = fields
        self._file = file
        self.architecture = str(self.get("general.architecture"))

    def get(self, key: str, default: Any = ...) -> Any:
        """The value of ``key``; raises CheckpointError if missing and no ``default``."""
        name = f"{self.architecture}{key}" if key.startswith(".") else key
        field = self._fields.get(name)
        if field is not None:
            try:
                return field.contents()
            except (UnicodeDecodeError, IndexError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"{self._file} is damaged: its metadata {name!r} cannot be read ({error}). "
                    "Download it again"
                ) from error
        if default is ...:
            raise CheckpointError(f"{self._file} lacks the metadata {name!r}, so it is no model")
        return default

    def refuse(self, why: str) -> CheckpointError:
        """The error for a file we cannot read right."""
        return CheckpointError(
            f"{self._file} {why}. GGUF files are read as targets in the dense families "
            f"{', '.join(FAMILIES)}; use the model's safetensors folder instead"
        )


def model_config(fields: Mapping[str, Any], tensors: Mapping[str, Any], file: str) -> Any:
    """The transformers config of the model in ``file``. Raises CheckpointError."""
    meta = Metadata(fields, file)
    family = FAMILIES.get(meta.architecture)
    if family is None:
        raise meta.refuse(f"has the architecture {meta.architecture!r}")
    if meta.get(".expert_count", 0):
        raise meta.refuse("is a mixture of experts")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{file} has no token_embd.weight: not a whole model (one split?)")
    values = _common(meta, tensors) | family(meta, tensors)
    kind = values.pop("model_type")
    return AutoConfig.for_model(kind, **values)


def _common(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Keys every family shares."""
    heads = _one(meta, ".attention.head_count")
    hidden = int(meta.get(".embedding_length"))
    ids = {
        f"{ours}_token_id": meta.get(f"tokenizer.ggml.{theirs}_token_id", None)
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {
        "hidden_size": hidden,
        "intermediate_size": _one(meta, ".feed_forward_length"),
        "num_hidden_layers": int(meta.get(".block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": _one(meta, ".attention.head_count_kv", heads),
        "head_dim": int(meta.get(".attention.key_length", hidden // heads)),
        "rms_norm_eps": float(meta.get(".attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(meta.get(".context_length")),
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": "float32",
        **ids,
    }


def _one(meta: Metadata, key: str, default: Any = ...) -> int:
    """A number that may be stored once per layer, as long as all layers agree."""
    value = meta.get(key, default)
    values = {int(item) for item in value} if isinstance(value, list) else {int(value)}
    if len(values) != 1:
        raise meta.refuse(f"has layers of different shapes ({key.lstrip('.')})")
    return values.pop()


def _llama(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_parameters": rope(meta, tensors, 10_000.0),
        "architectures": ["LlamaForCausalLM"],
    }


def _qwen2(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "use_sliding_window": False,
        "rope_parameters": rope(meta, tensors, 10_000.0),
        "architectures": ["Qwen2ForCausalLM"],
    }


def _qwen3(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "rope_parameters": rope(meta, tensors, 10_000.0),
        "architectures": ["Qwen3ForCausalLM"],
    }


def _gemma2(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "gemma2",
        "sliding_window": int(meta.get(".attention.sliding_window", 4096)),
        "attn_logit_softcapping": float(meta.get(".attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(meta.get(".final_logit_softcapping", 30.0)),
        "query_pre_attn_scalar": _gemma_scale(meta, largest=46),
        "rope_parameters": rope(meta, tensors, 10_000.0),
        "architectures": ["Gemma2ForCausalLM"],
    }


def _gemma3(meta: Metadata, tensors: Mapping[str, Any]) -> dict[str, Any]:
    local = float(meta.get(".rope.freq_base_swa", 10_000.0))
    return {
        "model_type": "gemma3_text",
        "sliding_window": int(meta.get(".attention.sliding_window")),
        "query_pre_attn_scalar": _gemma_scale(meta, largest=62),
        "rope_parameters": {
            "full_attention": rope(meta, tensors, 1_000_000.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
        "architectures": ["Gemma3ForCausalLM"],
    }


def _gemma_scale(meta: Metadata, largest: int) -> int:
    """Attention is scaled by the head width, in the 27B models by hidden size per head."""
    heads, hidden = _one(meta, ".attention.head_count"), int(meta.get(".embedding_length"))
    per_head = hidden // heads
    wide = int(meta.get(".block_count")) == largest
    return per_head if wide else int(meta.get(".attention.key_length", per_head))


FAMILIES: dict[str, Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}


def rope(meta: Metadata, tensors: Mapping[str, Any], base: float) -> dict[str, Any]:
    """transformers' ``rope_parameters``. Raises CheckpointError for a scaling we cannot express."""
    theta = float(meta.get(".rope.freq_base", base))
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = meta.get(".rope.scaling.type", "none")
    if "rope_freqs.weight" in tensors:
        return found | _llama3(meta, np.array(tensors["rope_freqs.weight"].data), theta)
    if kind == "none":
        return found
    if kind not in ("linear", "yarn"):
        raise meta.refuse(f"uses rope scaling {kind!r}")
    found |= {"rope_type": kind, "factor": float(meta.get(".rope.scaling.factor"))}
    original = meta.get(".rope.scaling.original_context_length", None)
    if kind == "yarn" and original is not None:
        found["original_max_position_embeddings"] = int(original)
    return found


def _llama3(meta: Metadata, stored: Any, theta: float) -> dict[str, Any]:
    """Llama 3.1's scaling, recovered from the divisors of each frequency that the file stores."""
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    width = 2 * stored.size
    waves = 2 * math.pi * theta ** (np.arange(0, width, 2) / width)
    blend = ((original / waves - low) / (high - low)).clip(0.0, 1.0)
    expected = 1.0 / ((1.0 - blend) / factor + blend)
    if not np.allclose(expected, stored, rtol=1e-3):
        raise meta.refuse("scales its rope frequencies in an unknown way")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def generation_config(fields: Mapping[str, Any], template: str | None) -> dict[str, Any]:
    """generation_config.json: every id that ends a turn, and begin and pad ids."""
    meta = Metadata(fields, "this file")
    names = ("eos", "eot", "eom")
    ends = [meta.get(f"tokenizer.ggml.{name}_token_id", None) for name in names]
    ids = {int(i) for i in ends if i is not None} | _template_ends(meta, template)
    found: dict[str, Any] = {"eos_token_id": sorted(ids)} if ids else {}
    for ours, theirs in (("bos", "bos"), ("pad", "padding")):
        value = meta.get(f"tokenizer.ggml.{theirs}_token_id", None)
        if value is not None:
            found[f"{ours}_token_id"] = int(value)
    return found


def _template_ends(meta: Metadata, template: str | None) -> set[int]:
    """Ids of end-of-turn tokens that the chat template writes after a turn."""
    used = {text for text in TURN_ENDS if template and text in template}
    if not used:
        return set()
    tokens = meta.get("tokenizer.ggml.tokens")
    kinds = meta.get("tokenizer.ggml.token_type", [CONTROL] * len(tokens))
    return {i for i, (t, k) in enumerate(zip(tokens, kinds, strict=True)) if t in used and k == 3}
