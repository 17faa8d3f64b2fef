"""A DFlash or DFlash2 draft as a GGUF sidecar: what llama.cpp runs beside a GGUF target.

`write_sidecar` takes the spec and the tensors under their Hugging Face names; keys, names and the
tokenizer's place are those of llama.cpp's architecture ``dflash``. A sidecar carries the target's
whole tokenizer, so the target's .gguf file is needed. What llama.cpp cannot run as the draft was
trained (biases, causality that differs from layer to layer) is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dflash.convert.draft import Draft, require_kind
from dflash.convert.tensor import FLOATS
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import CheckpointError, ConfigError, MissingBackend, PairError, WeightsError
from dflash.gguf_file import Header, read_header

QUANTISED = ("Q8_0", "Q4_0")
STORED = ("F32", "F16", "BF16", *QUANTISED)
DFLASH2_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
TOP = {
    "fc.weight": "fc.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
}
IN_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
    "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
}
ROPED = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")
IGNORED = ("t2d",)

Array = NDArray[Any]


def gguf_name(name: str) -> str | None:
    """The GGUF name of a Hugging Face tensor; None for one that a sidecar has no place for."""
    if name in TOP:
        return TOP[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "layers" and parts[2] in IN_LAYER:
        return f"blk.{parts[1]}.{IN_LAYER[parts[2]]}"
    return None


def hf_name(name: str) -> str | None:
    """The inverse of `gguf_name`."""
    top = {theirs: ours for ours, theirs in TOP.items()}
    layer = {theirs: ours for ours, theirs in IN_LAYER.items()}
    if name in top:
        return top[name]
    parts = name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in layer:
        return f"layers.{parts[1]}.{layer[parts[2]]}"
    return None


def write(draft: Draft, out: str | Path, target: str | Path, stored: str = "F32") -> Path:
    """`write_sidecar` for a draft that another format's reader made."""
    require_kind(draft, ("dflash", "dflash2"), "GGUF sidecar")
    if draft.mask_embedding is not None:
        raise CheckpointError(
            "this draft has an embedding of its own for the mask token, and a sidecar has no place "
            "for one; run it with the torch backend"
        )
    tensors = {
        name: tensor.floats() if tensor.dtype in FLOATS else tensor.values
        for name, tensor in draft.tensors.items()
    }
    return write_sidecar(read_spec(draft.config), tensors, target, out, stored)


def write_sidecar(
    spec: DraftSpec,
    tensors: Mapping[str, Array],
    target: str | Path,
    out: str | Path,
    stored: str = "F32",
) -> Path:
    """Write the sidecar of a draft for the GGUF file ``target`` to ``out``; returns ``out``.

    ``tensors`` are float arrays (``d2t`` integers, as differences) under Hugging Face names.
    ``stored`` is the type of the matrices; norms and convolution kernels stay F32. Raises
    ConfigError for another type, CheckpointError for what a sidecar cannot express, WeightsError
    for tensors that are missing or unknown, PairError when draft and target do not fit,
    MissingBackend without the ``gguf`` package.
    """
    if stored not in STORED:
        raise ConfigError(f"a sidecar is stored as {', '.join(STORED)}, not {stored!r}")
    header = read_header(target)
    check_expressible(spec, tensors)
    check_target(spec, header)
    check_complete(spec, tensors)
    writer = make_writer(Path(out), "dflash")
    for key, value in sidecar_keys(spec, header).items():
        add_key(writer, f"dflash.{key}", value)
    copy_tokenizer(writer, header, spec.mask_token_id)
    for name, values in _converted(spec, tensors):
        add_tensor(writer, name, values, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(out)


def sidecar_keys(spec: DraftSpec, target: Header) -> dict[str, Any]:
    """Metadata of the sidecar without the prefix ``dflash.``; the Python type is the stored one."""
    keys: dict[str, Any] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings or int(target.own("context_length", 4096)),
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "attention.causal": spec.causal[0],
        "block_size": spec.block_size,
        "target_layers": [tap + 1 for tap in spec.taps],  # a tap is the input of a layer there
    }
    scale = spec.embedding_scale_for(target.architecture)
    optional = {
        "hidden_activation": None if spec.hidden_act == "silu" else spec.hidden_act,
        "final_logit_softcapping": spec.softcap,
        "logit_scale": _unless_one(spec.output_multiplier * spec.logit_scale),
        "embedding_scale": _unless_one(scale),
        "attention.value_scale": _unless_one(spec.value_scale),
    }
    keys |= {key: value for key, value in optional.items() if value is not None}
    if spec.sliding_window is not None and "sliding_attention" in spec.layer_types:
        keys["attention.sliding_window"] = spec.sliding_window
        pattern = [kind == "sliding_attention" for kind in spec.layer_types]
        keys["attention.sliding_window_pattern"] = pattern
    return keys | rope_keys(spec, target) | _dflash2_keys(spec)


def _unless_one(value: float) -> float | None:
    return None if value == 1.0 else float(value)


def rope_keys(spec: DraftSpec, target: Header) -> dict[str, Any]:
    """Rotary settings as both architectures have them."""
    rope = next(iter(spec.rope_parameters.values()))
    rotated = int(spec.head_dim * rope["partial_rotary_factor"])
    keys: dict[str, Any] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": rotated,
    }
    if any(target.own("rope.dimension_sections") or ()):
        keys["rope.dimension_sections"] = [rotated // 2, 0, 0, 0]  # text positions only
    if rope["rope_type"] == "default":
        return keys
    keys["rope.scaling.type"] = str(rope["rope_type"])
    keys["rope.scaling.factor"] = float(rope["factor"])
    if rope["rope_type"] == "yarn":
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name):
                keys[f"rope.scaling.yarn_{name}"] = float(rope[name])
    return keys


def _dflash2_keys(spec: DraftSpec) -> dict[str, int]:
    """The four sizes; none for a v1 draft."""
    nested = spec.raw.get("dflash_config") or {}
    found = {key: nested.get(key, spec.raw.get(key)) for key in DFLASH2_SIZES}
    return {key: int(value) for key, value in found.items() if value is not None}


def check_expressible(spec: DraftSpec, tensors: Mapping[str, Array]) -> None:
    """Raise CheckpointError for what llama.cpp would run otherwise than the draft was trained."""
    kinds = [rope["rope_type"] for rope in spec.rope_parameters.values()]
    distinct = {str(sorted(rope.items(), key=str)) for rope in spec.rope_parameters.values()}
    reduced = spec.draft_vocab_size is not None or "d2t" in tensors
    problems = {
        "its layers differ in causality": len(set(spec.causal)) > 1,
        "its attention has biases": spec.attention_bias,
        "its layers differ in rope": len(distinct) > 1,
        f"its rope scaling is {kinds[0]!r}": kinds[0] not in ("default", "linear", "yarn"),
        "it has both a soft cap and a logit scale": spec.softcap is not None
        and spec.logit_scale != 1.0,
        "it is a DFlash2 draft with a vocabulary of its own, whose selector needs all tokens": (
            reduced and bool(_dflash2_keys(spec))
        ),
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found:
        raise CheckpointError(
            f"this draft cannot become a GGUF sidecar: {'; '.join(found)}. llama.cpp has no place "
            "for that; run it with the torch backend"
        )


def check_target(spec: DraftSpec, target: Header) -> None:
    """Raise PairError when ``target`` is not the draft's."""
    width, depth = int(target.own("embedding_length", 0)), int(target.own("block_count", 0))
    tokens = len(target.metadata.get("tokenizer.ggml.tokens") or ())
    problems = []
    if target.architecture in ("", "dflash", "eagle3"):
        problems.append(f"it is of the architecture {target.architecture!r}, so no target")
    if width != spec.target_hidden_size:
        problems.append(f"it is {width} wide, the draft reads {spec.target_hidden_size}")
    if max(spec.taps) >= depth:
        problems.append(f"it has {depth} layers, the draft taps layer {max(spec.taps)}")
    if tokens > spec.vocab_size or spec.mask_token_id >= tokens:
        problems.append(
            f"it has {tokens} tokens, the draft {spec.vocab_size} and the mask {spec.mask_token_id}"
        )
    if problems:
        raise PairError(f"{target.path} is not the target of this draft: {'; '.join(problems)}")


def check_complete(spec: DraftSpec, tensors: Mapping[str, Array]) -> None:
    """Raise WeightsError unless every tensor of the kind is there and has a place."""
    wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
    layer = [name for name in IN_LAYER if "conv" not in name and "sink" not in name]
    if _dflash2_keys(spec):
        layer = [name for name in IN_LAYER if "sink" not in name]
        wanted |= {name for name in TOP if name.startswith("candidate_selector.")}
    wanted |= {f"layers.{i}.{name}" for i in range(spec.num_layers) for name in layer}
    missing = sorted(wanted - set(tensors))
    unknown = sorted(n for n in tensors if gguf_name(n) is None and n not in ("d2t", *IGNORED))
    if missing or unknown:
        raise WeightsError(
            f"the draft's tensors do not fit a sidecar: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} without a place {unknown[:3]}"
        )


def _converted(spec: DraftSpec, tensors: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
    for name, values in tensors.items():
        if name in IGNORED:
            continue
        if name == "d2t":
            yield name, absolute_ids(values, spec.vocab_size)
            continue
        theirs = gguf_name(name)
        assert theirs is not None, f"{name} was checked"
        if spec.rope_interleaved and name.endswith(ROPED):
            values = halves_first(values, spec.head_dim)
        yield theirs, np.asarray(values, np.float32)


def absolute_ids(d2t: Array, vocab_size: int) -> NDArray[np.int64]:
    """``d2t`` [Vd] as differences to target ids. Raises WeightsError unless these are one to one"""
    ids: NDArray[np.int64] = np.arange(len(d2t), dtype=np.int64) + np.asarray(d2t, np.int64)
    if len(np.unique(ids)) < len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        raise WeightsError(f"d2t does not name {len(ids)} different tokens below {vocab_size}")
    return ids


def halves_first(values: Array, head_dim: int) -> Array:
    """Rows of every head from pairs (2i, 2i + 1) to halves: the even ones first."""
    heads = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)


def make_writer(out: Path, architecture: str) -> Any:
    """A writer of a file for ``out``. Raises MissingBackend without the ``gguf`` package."""
    try:
        import gguf
    except ImportError as problem:
        raise MissingBackend(
            "writing GGUF files needs the gguf package: pip install 'dflash-engine[gguf]'"
        ) from problem
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_type("model")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    return writer


def add_key(writer: Any, key: str, value: Any) -> None:
    """One line of metadata; the Python type is the stored one."""
    adders: Sequence[tuple[type, Callable[[str, Any], None]]] = (
        (bool, writer.add_bool),  # before int, which it is too
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    )
    next(add for kind, add in adders if isinstance(value, kind))(key, value)


def copy_tokenizer(writer: Any, target: Header, mask: int | None) -> None:
    """Every ``tokenizer.`` key of the target in its own type, and the draft's mask token."""
    import gguf

    for key, value in target.metadata.items():
        kind, inner = target.kinds[key]
        if not key.startswith("tokenizer.") or key == "tokenizer.ggml.mask_token_id":
            continue
        sub = None if inner < 0 else gguf.GGUFValueType(inner)
        writer.add_key_value(key, value, gguf.GGUFValueType(kind), sub)
    if mask is not None:
        writer.add_uint32("tokenizer.ggml.mask_token_id", mask)


def add_tensor(writer: Any, name: str, values: Array, stored: str) -> None:
    """A matrix as ``stored``, anything else as it is (vectors are F32)."""
    import gguf

    kind = gguf.GGMLQuantizationType[stored]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    vector = values.ndim != 2 or values.dtype == np.int64
    if vector or stored == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif values.shape[-1] % block:  # rows that no block fits into
        writer.add_tensor(name, np.ascontiguousarray(values, np.float16))
    else:
        packed = gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
