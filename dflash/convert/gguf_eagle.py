"""An EAGLE-3 draft as a GGUF file of llama.cpp's architecture ``eagle3``, and back.

What differs from a DFlash sidecar: three taps, named by their inputs; one layer with two norms and
projections twice as wide; queries and keys in pairs, as llama.cpp's Llama has them. The target's
.gguf file gives the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dflash.convert.draft import Draft
from dflash.convert.gguf import (
    Array,
    absolute_ids,
    add_key,
    add_tensor,
    copy_tokenizer,
    halves_first,
    make_writer,
    rope_keys,
)
from dflash.convert.layer_ids import from_gguf, to_specforge
from dflash.convert.tensor import FLOATS
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import CheckpointError, PairError, WeightsError
from dflash.gguf_file import Header, read_header

NAMES = {
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
    "layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
OPTIONAL = ("input_norm.weight", "embed_tokens.weight", "lm_head.weight", "d2t")
TURNED = ("layers.0.self_attn.q_proj.weight", "layers.0.self_attn.k_proj.weight")


def settled(draft: Draft, target: str | Path) -> Draft:
    """``draft`` with its taps written out, as they are for the GGUF file ``target``."""
    depth = int(read_header(target).own("block_count", 0))
    taps = read_spec(draft.config, num_target_layers=depth).taps
    kept = {k: v for k, v in draft.config.items() if k != "eagle_aux_hidden_state_layer_ids"}
    ids = {"eagle_aux_hidden_state_layer_ids": to_specforge(taps), "use_aux_hidden_state": True}
    config = {**kept, "eagle_config": ids}
    return Draft(draft.kind, config, draft.tensors, notes=draft.notes)


def write(draft: Draft, out: str | Path, target: str | Path, stored: str) -> Path:
    """Write ``draft``, which is `settled`, to ``out``.

    Raises CheckpointError for what llama.cpp would run otherwise, PairError for another target,
    WeightsError for tensors without a place, MissingBackend without the ``gguf`` package.
    """
    spec, header = read_spec(draft.config), read_header(target)
    _check(spec, draft, header)
    writer = make_writer(Path(out), "eagle3")
    for key, value in file_keys(spec, header).items():
        add_key(writer, f"eagle3.{key}", value)
    copy_tokenizer(writer, header, None)
    for name, tensor in draft.tensors.items():
        values = tensor.floats() if tensor.dtype in FLOATS else tensor.values
        if name == "d2t":
            values = absolute_ids(values, spec.vocab_size)
        elif name in TURNED:
            values = pairs_first(values, spec.head_dim)
        add_tensor(writer, NAMES[name], values, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(out)


def file_keys(spec: DraftSpec, target: Header) -> dict[str, Any]:
    """Metadata without the prefix ``eagle3.``; the Python type is the stored one."""
    assert spec.eagle3 is not None, "checked"
    return {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings or int(target.own("context_length", 4096)),
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": float(spec.rms_norm_eps),
        "target_layers": [tap + 1 for tap in spec.taps],  # a tap is the input of a layer there
        "target_hidden_size": spec.target_hidden_size,
        "norm_before_residual": spec.eagle3.norm_before_residual,
        "norm_before_fc": spec.eagle3.norm_before_fc,
        **rope_keys(spec, target),
    }


def read(header: Header, tensors: Mapping[str, Any]) -> Draft:
    """The draft behind ``header``; ``tensors`` are those of the file under its own names."""
    ours = {theirs: name for name, theirs in NAMES.items()}
    unknown = sorted(tensors.keys() - ours.keys())
    if unknown:
        raise CheckpointError(f"{header.path} has tensors of no known meaning: {unknown}")
    found = {ours[name]: tensor for name, tensor in tensors.items()}
    width = int(header.own("attention.key_length"))
    for name in TURNED:
        found[name] = found[name].mapped(lambda values: halves_first(values, width))
    return Draft("eagle3", config_of(header), found)


def config_of(header: Header) -> dict[str, Any]:
    """EAGLE's config of the file behind ``header``, as SpecForge writes it."""
    own, tokens = header.own, header.metadata.get("tokenizer.ggml.tokens") or ()
    width, d2t = int(own("embedding_length")), header.tensors.get("d2t")
    theirs = int(own("target_hidden_size", width))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": width,
        "target_hidden_size": theirs if theirs != width else None,
        "intermediate_size": own("feed_forward_length"),
        "num_hidden_layers": own("block_count"),
        "num_attention_heads": own("attention.head_count"),
        "num_key_value_heads": own("attention.head_count_kv"),
        "head_dim": own("attention.key_length"),
        "rms_norm_eps": own("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": own("context_length"),
        "vocab_size": len(tokens),
        "draft_vocab_size": len(tokens) if d2t is None else d2t.shape[0],
        "norm_before_residual": bool(own("norm_before_residual", False)) or None,
        "norm_before_fc": bool(own("norm_before_fc", False)) or None,
        "rope_theta": own("rope.freq_base"),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": to_specforge(from_gguf(own("target_layers"))),
            "use_aux_hidden_state": True,
        },
    }
    kind = own("rope.scaling.type", "none")
    if kind != "none":
        given = own("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": own("rope.scaling.factor")}
        config["rope_scaling"] = (
            scaling | {"original_max_position_embeddings": given} if given else scaling
        )
    return {key: value for key, value in config.items() if value is not None}


def pairs_first(values: Array, head_dim: int) -> Array:
    """Rows of every head from halves to pairs: the inverse of `halves_first`."""
    heads = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return heads.swapaxes(1, 2).reshape(values.shape)


def _check(spec: DraftSpec, draft: Draft, target: Header) -> None:
    assert spec.eagle3 is not None, "a draft of another kind"
    rope, options = next(iter(spec.rope_parameters.values())), spec.eagle3
    problems = {
        f"it has {spec.num_layers} layers, and one is known": spec.num_layers != 1,
        f"it taps {len(spec.taps)} layers, and three are known": len(spec.taps) != 3,
        "its attention has biases": spec.attention_bias,
        "its layer has a window": spec.sliding_window is not None,
        "it has norms on queries and keys": options.qk_norm,
        "it has a norm a tap": options.fc_norm,
        "its next step reads the normed state": options.norm_output,
        f"its rope scaling is {rope['rope_type']!r}": rope["rope_type"]
        not in ("default", "linear", "yarn"),
    }
    found = [problem for problem, holds in problems.items() if holds]
    if found:
        raise CheckpointError(
            f"this draft cannot become a GGUF file: {'; '.join(found)}. llama.cpp has no place for "
            "that; run it with the torch backend"
        )
    width, depth = int(target.own("embedding_length", 0)), int(target.own("block_count", 0))
    tokens = len(target.metadata.get("tokenizer.ggml.tokens") or ())
    if width != spec.target_hidden_size or max(spec.taps) >= depth or tokens > spec.vocab_size:
        raise PairError(
            f"{target.path} is not the target of this draft: it is {width} wide with {depth} "
            f"layers and {tokens} tokens; the draft reads {spec.target_hidden_size}, taps layer "
            f"{max(spec.taps)} and knows {spec.vocab_size} tokens"
        )
    needed = {name for name in NAMES if name not in OPTIONAL}
    needed |= {"input_norm.weight"} if options.norm_before_fc else set()
    missing = sorted(needed - draft.tensors.keys())
    unknown = sorted(draft.tensors.keys() - NAMES.keys())
    if missing or unknown:
        raise WeightsError(
            f"the draft's tensors do not fit an eagle3 file: missing {missing}, without a place "
            f"{unknown}"
        )
