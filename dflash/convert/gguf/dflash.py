"""DFlash and DFlash2 as llama.cpp's architecture ``dflash``: rope in halves, any number of taps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from dflash.convert.gguf.architecture import LAYER, TABLES, Architecture
from dflash.convert.layer_ids import from_gguf
from dflash.drafts.spec import DraftSpec
from dflash.gguf_file import Header

SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
SELECTOR = {
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
CONVOLUTIONS = {
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
SINKS = "self_attn.attention_sink_bias"


class DFlashSidecar(Architecture):
    """One stack, with or without convolutions and a selector."""

    name = "dflash"
    pairs = False
    turned = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
    top: ClassVar[Mapping[str, str]] = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
        **TABLES,
        **SELECTOR,
    }
    layer: ClassVar[Mapping[str, str]] = {
        **LAYER,
        "self_attn.q_norm.weight": "attn_q_norm.weight",
        "self_attn.k_norm.weight": "attn_k_norm.weight",
        SINKS: "attn_sinks.weight",
        **CONVOLUTIONS,
    }

    def needed(self, spec: DraftSpec) -> set[str]:
        """All but own tables and sinks, as far as the kind has them."""
        layer = set(self.layer) - {SINKS} - (set() if spec.dflash2 else set(CONVOLUTIONS))
        wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
        wanted |= set(SELECTOR) if spec.dflash2 else set()
        return wanted | {f"layers.{i}.{name}" for i in range(spec.num_layers) for name in layer}

    def problems(self, spec: DraftSpec, names: Collection[str]) -> dict[str, bool]:
        """One causality, one width, one scale of the logits; all tokens for a selector."""
        reduced = spec.draft_vocab_size is not None or "d2t" in names
        return {
            "its layers differ in causality": len(set(spec.causal)) > 1,
            f"it is {spec.hidden_size} wide and its target {spec.target_hidden_size}": (
                spec.hidden_size != spec.target_hidden_size
            ),
            "it has both a soft cap and a logit scale": spec.softcap is not None
            and spec.logit_scale != 1.0,
            "it is a DFlash2 draft with a vocabulary of its own, whose selector needs all tokens": (
                reduced and spec.dflash2 is not None
            ),
        }

    def keys(self, spec: DraftSpec, target: Header) -> dict[str, Any]:
        """The stack's, the block's, and where they are not 1 the scales."""
        own: dict[str, Any] = {"attention.causal": spec.causal[0], "block_size": spec.block_size}
        optional = {
            "hidden_activation": None if spec.hidden_act == "silu" else spec.hidden_act,
            "final_logit_softcapping": spec.softcap,
            "logit_scale": _unless_one(spec.output_multiplier * spec.logit_scale),
            "embedding_scale": _unless_one(spec.embedding_scale_for(target.architecture)),
            "attention.value_scale": _unless_one(spec.value_scale),
        }
        own |= {key: value for key, value in optional.items() if value is not None}
        if spec.sliding_window is not None and "sliding_attention" in spec.layer_types:
            own["attention.sliding_window"] = spec.sliding_window
            pattern = [kind == "sliding_attention" for kind in spec.layer_types]
            own["attention.sliding_window_pattern"] = pattern
        if spec.dflash2 is not None:
            own |= {size: getattr(spec.dflash2, size) for size in SIZES}
        return {**super().keys(spec, target), **own}

    def config(self, header: Header) -> dict[str, Any]:
        """z-lab's config of the sidecar."""
        own, shared = header.own, super().config(header)
        sizes = {key: own(key) for key in SIZES if own(key)}
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
        return {
            "architectures": ["DFlash2DraftModel" if sizes else "DFlashDraftModel"],
            "model_type": "qwen3",
            **shared,
            "target_hidden_size": shared["hidden_size"],
            "hidden_act": own("hidden_activation", "silu"),
            "is_causal": bool(own("attention.causal", False)),
            **_window(header),
            "dflash_config": {key: value for key, value in nested.items() if value is not None},
        }


def _unless_one(value: float) -> float | None:
    return None if value == 1.0 else float(value)


def _window(header: Header) -> Mapping[str, Any]:
    """``use_sliding_window`` too: Qwen3's own config class drops the window without it."""
    pattern = header.own("attention.sliding_window_pattern")
    if not pattern or not header.own("attention.sliding_window"):
        return {"layer_types": ["full_attention"] * int(header.own("block_count"))}
    return {
        "layer_types": [("full", "sliding")[bool(one)] + "_attention" for one in pattern],
        "sliding_window": header.own("attention.sliding_window"),
        "use_sliding_window": True,
    }
