"""A draft as a sidecar: one file, with its target's whole tokenizer, so that file is needed.

Keys and names are those of the draft's `architecture`. What llama.cpp cannot run as the draft was
trained is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dflash.convert.draft import Draft, require_kind, target_ids
from dflash.convert.gguf import extra
from dflash.convert.gguf.architecture import D2T, DERIVED, Array, absolute_ids
from dflash.convert.gguf.kinds import KINDS
from dflash.convert.gguf.read import tables_in
from dflash.convert.tensor import FLOATS, Tensor, to_dtype
from dflash.drafts.layers import ANY_DEPTH
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.errors import CheckpointError, ConfigError, MissingBackend
from dflash.gguf_file import KEPT, Header, read_header

HEAD = "lm_head.weight"
STORED = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def settled(draft: Draft, target: str | Path) -> Draft:
    """``draft`` as a sidecar for the GGUF file ``target`` will give it back.

    Its taps are written out, its rope turns halves, and a vocabulary of its own has a head of its
    own. No tensor is computed with.
    """
    require_kind(draft, KINDS, "GGUF sidecar")
    kind = KINDS[draft.kind]
    spec = read_spec(draft.config, num_target_layers=ANY_DEPTH)
    header = read_header(target)
    draft, config = _with_head(draft, header), kind.settled(draft.config, header)
    if not spec.rope_interleaved:
        return replace(draft, config=config)
    tensors = {n: kind.in_halves(n, t, spec.head_dim) for n, t in draft.tensors.items()}
    config = {key: value for key, value in config.items() if not key.endswith("is_neox_style")}
    return replace(draft, config=config, tensors=tensors)


def _with_head(draft: Draft, target: Header) -> Draft:
    """Rows of the target's head for the tokens of ``d2t``, which llama.cpp insists on."""
    if D2T not in draft.tensors or HEAD in draft.tensors:
        return draft
    head = tables_in(target)[1]
    if head is None:
        raise CheckpointError(f"{target.path} has no head that a draft with d2t could have rows of")
    kind, ids = draft.tensors["fc.weight"].dtype, target_ids(draft.tensors[D2T])
    rows = to_dtype(Tensor(head.dtype, head.values[ids]).floats(), kind)
    note = f"{HEAD}: {len(ids)} rows of the target's, as {kind}"
    return replace(draft, tensors={**draft.tensors, HEAD: rows}, notes=(*draft.notes, note))


def write(draft: Draft, out: str | Path, target: str | Path, stored: str = "F32") -> Path:
    """`write_sidecar` for a draft that another format's reader made."""
    if draft.mask_embedding is not None:
        raise CheckpointError(
            "this draft has an embedding of its own for the mask token, and a sidecar has no place "
            "for one; run it with the torch backend"
        )
    draft = settled(draft, target)
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

    ``tensors`` are float arrays (``d2t`` integers, as differences) under published names.
    ``stored`` is the type of the matrices; norms and convolution kernels stay F32. Raises
    ConfigError for another type, CheckpointError for what a sidecar cannot express, WeightsError
    for tensors that are missing or unknown, PairError when draft and target do not fit,
    MissingBackend without the ``gguf`` package.
    """
    if stored not in STORED:
        raise ConfigError(f"a sidecar is stored as {', '.join(STORED)}, not {stored!r}")
    kind, header = KINDS[spec.kind], read_header(target)
    kind.check(spec, tensors, header)
    writer = _open_writer(Path(out), kind.name)
    for key, value in kind.keys(spec, header).items():
        _add_key(writer, f"{kind.name}.{key}", value)
    if kept := extra.packed(spec.raw):
        _add_key(writer, KEPT, kept)
    _copy_tokenizer(writer, header, spec.mask_token_id if spec.mask_token_id >= 0 else None)
    for name, values in tensors.items():
        if name == D2T:
            _add_tensor(writer, D2T, absolute_ids(values, spec.vocab_size), stored)
        elif name not in DERIVED:
            turned = np.asarray(kind.to_file(name, values, spec), np.float32)
            _add_tensor(writer, kind.gguf_name(name), turned, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Path(out)


def _open_writer(out: Path, architecture: str) -> Any:
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


def _add_key(writer: Any, key: str, value: Any) -> None:
    """One line of metadata; the Python type is the stored one."""
    adders: Sequence[tuple[type, Callable[[str, Any], None]]] = (
        (bool, writer.add_bool),  # before int, which it is too
        (int, writer.add_uint32),
        (float, writer.add_float32),
        (str, writer.add_string),
        (list, writer.add_array),
    )
    next(add for kind, add in adders if isinstance(value, kind))(key, value)


def _copy_tokenizer(writer: Any, target: Header, mask: int | None) -> None:
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


def _add_tensor(writer: Any, name: str | None, values: Array, stored: str) -> None:
    """A matrix as ``stored``, anything else as it is (vectors are F32)."""
    import gguf

    assert name is not None, "names were checked"
    kind = gguf.GGMLQuantizationType[stored]
    block, _ = gguf.GGML_QUANT_SIZES[kind]
    vector = values.ndim != 2 or values.dtype == np.int64
    if vector or stored == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values))
    elif values.shape[-1] % block:  # rows that no block fits into
        writer.add_tensor(name, np.ascontiguousarray(values, np.float16))
    else:
        with np.errstate(over="ignore"):  # what overflows is seen by whoever compares
            packed = gguf.quantize(np.ascontiguousarray(values, np.float32), kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
