"""What llama.cpp calls a draft: the seam between the published layouts and a GGUF file.

A subclass says the names of the tensors, the keys, and what llama.cpp would run otherwise than the
draft was trained; the base has what all of them share. Keys are without the architecture's prefix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from dflash.convert.gguf.rope import KNOWN, halves_first, pairs_first, rope_config, rope_keys
from dflash.convert.layer_ids import to_gguf
from dflash.convert.tensor import Tensor
from dflash.drafts.spec import DraftSpec
from dflash.errors import CheckpointError, PairError, WeightsError
from dflash.gguf_file import DRAFTS, Header

Array = NDArray[Any]
D2T = "d2t"  # differences in published files, target ids in GGUF; and one name
DERIVED = ("t2d",)  # says what d2t says
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
TABLES = {"embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}


class Architecture:
    """One kind of sidecar."""

    name: ClassVar[str]  # general.architecture, and the prefix of its keys
    top: ClassVar[Mapping[str, str]]  # published name -> GGUF's
    layer: ClassVar[Mapping[str, str]]  # the same behind ``layers.N.`` and ``blk.N.``
    pairs: ClassVar[bool]  # whether its rope turns pairs, see `rope`
    turned: ClassVar[tuple[str, ...]]  # endings of the tensors whose rows rope turns

    def gguf_name(self, name: str) -> str | None:
        """The GGUF name of a published tensor; None for one that it has no place for."""
        return _renamed(name, {**self.top, D2T: D2T}, self.layer, ("layers", "blk"))

    def hf_name(self, name: str) -> str | None:
        """The inverse of `gguf_name`."""
        top, layer = ({v: k for k, v in table.items()} for table in (self.top, self.layer))
        return _renamed(name, {**top, D2T: D2T}, layer, ("blk", "layers"))

    def settled(self, config: Mapping[str, Any], target: Header) -> dict[str, Any]:
        """``config`` with nothing left open that a sidecar spells out."""
        del target  # most configs leave nothing to it
        return dict(config)

    def to_file(self, name: str, values: Array, spec: DraftSpec) -> Array:
        """Rows of a published tensor in llama.cpp's order."""
        if spec.rope_interleaved == self.pairs or not name.endswith(self.turned):
            return values
        return (pairs_first if self.pairs else halves_first)(values, spec.head_dim)

    def from_file(self, name: str, tensor: Tensor, head_dim: int) -> Tensor:
        """The inverse of `to_file` for a draft whose rope turns halves."""
        if not self.pairs or not name.endswith(self.turned):
            return tensor
        return tensor.mapped(lambda values: halves_first(values, head_dim))

    def in_halves(self, name: str, tensor: Tensor, head_dim: int) -> Tensor:
        """A published tensor of a draft whose rope turns pairs as one whose rope turns halves."""
        if not name.endswith(self.turned):
            return tensor
        return tensor.mapped(lambda values: halves_first(values, head_dim))

    def needed(self, spec: DraftSpec) -> set[str]:
        """Published names of the tensors that llama.cpp insists on."""
        raise NotImplementedError

    def problems(self, spec: DraftSpec, names: Collection[str]) -> dict[str, bool]:
        """What llama.cpp has no place for, and whether it holds of this draft."""
        raise NotImplementedError

    def keys(self, spec: DraftSpec, target: Header) -> dict[str, Any]:
        """Metadata; the Python type is the stored one."""
        return {
            "block_count": spec.num_layers,
            "context_length": spec.max_position_embeddings
            or int(target.own("context_length", 4096)),
            "embedding_length": spec.hidden_size,
            "feed_forward_length": spec.intermediate_size,
            "attention.head_count": spec.num_heads,
            "attention.head_count_kv": spec.num_kv_heads,
            "attention.key_length": spec.head_dim,
            "attention.value_length": spec.head_dim,
            "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
            "target_layers": to_gguf(spec.taps),
            **rope_keys(spec, target),
        }

    def config(self, header: Header) -> dict[str, Any]:
        """The published config behind ``header``; a None is a key that it does not have."""
        own, d2t = header.own, header.tensors.get(D2T)
        return {
            "hidden_size": int(own("embedding_length")),
            "intermediate_size": own("feed_forward_length"),
            "num_hidden_layers": own("block_count"),
            "num_attention_heads": own("attention.head_count"),
            "num_key_value_heads": own("attention.head_count_kv"),
            "head_dim": head_dim(header),
            "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": own("context_length"),
            "vocab_size": len(header.metadata.get("tokenizer.ggml.tokens") or ()),
            "draft_vocab_size": None if d2t is None else d2t.shape[0],
            **rope_config(header, head_dim(header)),
        }

    def check(self, spec: DraftSpec, tensors: Mapping[str, Array], target: Header) -> None:
        """Raise CheckpointError for what llama.cpp would run otherwise, PairError for another
        target, WeightsError for tensors that are missing or have no place."""
        self._check_expressible(spec, tensors)
        _check_target(spec, target)
        self._check_complete(spec, tensors)

    def _check_expressible(self, spec: DraftSpec, tensors: Mapping[str, Array]) -> None:
        kinds = {rope["rope_type"] for rope in spec.rope_parameters.values()}
        distinct = {str(sorted(rope.items(), key=str)) for rope in spec.rope_parameters.values()}
        shared = {
            "its attention has biases": spec.attention_bias,
            "its layers differ in rope": len(distinct) > 1,
            f"its rope scaling is {', '.join(map(repr, sorted(kinds)))}": not kinds <= KNOWN,
        }
        problems = {**shared, **self.problems(spec, tensors)}
        if found := [problem for problem, holds in problems.items() if holds]:
            raise CheckpointError(
                f"this draft cannot become a GGUF sidecar: {'; '.join(found)}. llama.cpp has no "
                "place for that; run it with the torch backend"
            )

    def _check_complete(self, spec: DraftSpec, tensors: Mapping[str, Array]) -> None:
        missing = sorted(self.needed(spec) - tensors.keys())
        unknown = sorted(n for n in tensors if self.gguf_name(n) is None and n not in DERIVED)
        if missing or unknown:
            raise WeightsError(
                f"the draft's tensors do not fit a sidecar: {len(missing)} missing {missing[:3]}, "
                f"{len(unknown)} without a place {unknown[:3]}"
            )


def head_dim(header: Header) -> int:
    """Numbers of one head."""
    width, heads = int(header.own("embedding_length")), int(header.own("attention.head_count"))
    return int(header.own("attention.key_length", width // heads))


def absolute_ids(d2t: Array, vocab_size: int) -> NDArray[np.int64]:
    """``d2t`` [Vd] as differences to target ids. Raises WeightsError unless these are one to one"""
    ids: NDArray[np.int64] = np.arange(len(d2t), dtype=np.int64) + np.asarray(d2t, np.int64)
    if len(np.unique(ids)) < len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise WeightsError(f"d2t does not name {len(ids)} different tokens below {vocab_size}")
    return ids


def _renamed(
    name: str, top: Mapping[str, str], layer: Mapping[str, str], roots: tuple[str, str]
) -> str | None:
    if name in top:
        return top[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == roots[0] and parts[2] in layer:
        return f"{roots[1]}.{parts[1]}.{layer[parts[2]]}"
    return None


def _check_target(spec: DraftSpec, target: Header) -> None:
    width, depth = int(target.own("embedding_length", 0)), target.layers
    tokens = len(target.metadata.get("tokenizer.ggml.tokens") or ())
    problems = []
    if not target.architecture or target.architecture in DRAFTS:
        problems.append(f"it is of the architecture {target.architecture!r}, so no target")
    if width != spec.target_hidden_size:
        problems.append(f"it is {width} wide, the draft reads {spec.target_hidden_size}")
    if max(spec.taps) >= depth:
        problems.append(f"it has {depth} layers, the draft taps layer {max(spec.taps)}")
    if tokens > spec.vocab_size or spec.mask_token_id >= tokens:
        mask = f" and the mask {spec.mask_token_id}" if spec.mask_token_id >= 0 else ""
        problems.append(f"it has {tokens} tokens, the draft {spec.vocab_size}{mask}")
    if problems:
        raise PairError(f"{target.path} is not the target of this draft: {'; '.join(problems)}")
