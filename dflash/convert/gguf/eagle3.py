"""EAGLE-3 as llama.cpp's architecture ``eagle3``: one layer, three taps, rope in pairs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from dflash.convert.gguf.architecture import LAYER, TABLES, Architecture
from dflash.convert.layer_ids import from_gguf, to_specforge
from dflash.drafts.methods import Eagle3
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.gguf_file import Header

INPUT_NORM = "input_norm.weight"
TAPS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Sidecar(Architecture):
    """Its layer reads a token and a state, each with a norm of its own."""

    name = "eagle3"
    pairs = True
    turned = ("q_proj.weight", "k_proj.weight")
    top: ClassVar[Mapping[str, str]] = {
        "fc.weight": "fc.weight",
        "norm.weight": "output_norm.weight",
        INPUT_NORM: "enc.output_norm.weight",
        **TABLES,
    }
    layer: ClassVar[Mapping[str, str]] = {**LAYER, "hidden_norm.weight": "attn_norm_2.weight"}

    def settled(self, config: Mapping[str, Any], target: Header) -> dict[str, Any]:
        """With its taps written out, as they are for ``target``."""
        taps = read_spec(config, num_target_layers=target.layers).taps
        kept = {key: value for key, value in config.items() if key != TAPS}
        return {**kept, "eagle_config": {TAPS: to_specforge(taps), "use_aux_hidden_state": True}}

    def needed(self, spec: DraftSpec) -> set[str]:
        """All but own tables."""
        wanted = {"fc.weight", "norm.weight", *(f"layers.0.{name}" for name in self.layer)}
        return wanted | ({INPUT_NORM} if _options(spec).norm_before_fc else set())

    def problems(self, spec: DraftSpec, names: Collection[str]) -> dict[str, bool]:
        """llama.cpp has one graph, of a Llama layer, and few switches."""
        del names  # a reduced vocabulary has a place
        options = _options(spec)
        scales = (spec.output_multiplier, spec.logit_scale, spec.embedding_scale or 1.0)
        return {
            f"it has {spec.num_layers} layers, and one is known": spec.num_layers != 1,
            f"it taps {len(spec.taps)} layers, and three are known": len(spec.taps) != 3,
            "its layer has a window": spec.sliding_window is not None,
            f"its activation is {spec.hidden_act}": spec.hidden_act != "silu",
            "it scales embeddings or logits": spec.softcap is not None or set(scales) != {1.0},
            "it has norms on queries and keys": options.qk_norm,
            "it has a norm a tap": options.fc_norm,
            "its next step reads the normed state": options.norm_output,
        }

    def keys(self, spec: DraftSpec, target: Header) -> dict[str, Any]:
        """The layer's and its switches."""
        return {
            **super().keys(spec, target),
            "target_hidden_size": spec.target_hidden_size,
            "norm_before_residual": _options(spec).norm_before_residual,
            "norm_before_fc": _options(spec).norm_before_fc,
        }

    def config(self, header: Header) -> dict[str, Any]:
        """EAGLE's config, as SpecForge writes it."""
        own, shared = header.own, super().config(header)
        theirs = int(own("target_hidden_size", shared["hidden_size"]))
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **shared,
            "target_hidden_size": theirs if theirs != shared["hidden_size"] else None,
            "draft_vocab_size": shared["draft_vocab_size"] or shared["vocab_size"],
            "norm_before_residual": bool(own("norm_before_residual", False)) or None,
            "norm_before_fc": bool(own("norm_before_fc", False)) or None,
            "eagle_config": {
                TAPS: to_specforge(from_gguf(own("target_layers") or [])),
                "use_aux_hidden_state": True,
            },
        }


def _options(spec: DraftSpec) -> Eagle3:
    assert spec.eagle3 is not None, "a draft of another kind"
    return spec.eagle3
