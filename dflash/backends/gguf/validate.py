"""Everything about a pair of files that llama.cpp would answer with an abort of the process.

Looked at in the two headers, before any native call. All that is wrong comes in one error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from dflash.backends.gguf.sidecar import Sidecar
from dflash.backends.gguf.taps import AFTER_LAST, is_native
from dflash.errors import CheckpointError, ConfigError, PairError, WeightsError
from dflash.gguf_file import DRAFTS, Header

F32, I64 = 0, 27


def check_target(header: Header) -> None:
    """Raise CheckpointError for a file that is no target."""
    file = header.path.name
    if header.architecture in DRAFTS:
        raise CheckpointError(
            f"{file} is a draft ({header.architecture}), not a target: give it as --draft"
        )
    if not header.architecture or not header.metadata.get("tokenizer.ggml.tokens"):
        raise CheckpointError(
            f"{file} has no architecture or no tokenizer in its metadata, so it is no language "
            "model: give a text model's .gguf file"
        )


def insist_on_width(target: Header, draft: Header) -> None:
    """Raise ConfigError for a draft that only a projection would fit to ``target``."""
    here = target.own("embedding_length")
    read = draft.own("target_hidden_size", draft.own("embedding_length"))
    if here != read:
        raise ConfigError(
            f"force_dflash: draft {draft.path.name} was made for a target {read} wide and "
            f"{target.path.name} is {here}, and llama.cpp has no projection between the two: use "
            "the draft's safetensors folder, on torch"
        )


def check_files(target: Header, sidecar: Sidecar) -> None:
    """Raise WeightsError for a sidecar that contradicts itself, PairError for two that do not fit.

    The messages have the numbers of both sides.
    """
    refuse_broken(sidecar.header, _broken_tensors(sidecar))
    refuse_unfit(
        target,
        sidecar.header,
        [
            *_widths(target, sidecar),
            *depths_apart(target, sidecar.taps),
            *tokens_apart(target, sidecar.header),
            *_mask_outside(target, sidecar),
        ],
    )


def refuse_broken(draft: Header, broken: Iterable[str]) -> None:
    """Raise WeightsError if there is anything in ``broken``."""
    if found := list(broken):
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise WeightsError(f"{draft.path.name}: {'; '.join(found[:4])}{more}")


def refuse_unfit(target: Header, draft: Header, problems: Sequence[str]) -> None:
    """Raise PairError if there are ``problems``."""
    if problems:
        raise PairError(
            f"draft {draft.path.name} does not fit target {target.path.name}: "
            f"{'; '.join(problems)}. Use the draft made for this target, converted with its "
            "tokenizer (dflash convert DRAFT --to gguf)"
        )


def _shapes(sidecar: Sidecar) -> dict[str, tuple[int, ...]]:
    """Every tensor that must be there, slowest dimension first."""
    s, vocab = sidecar, vocabulary(sidecar.header)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (s.width, len(s.taps) * s.width),
        "enc.output_norm.weight": (s.width,),
        "output_norm.weight": (s.width,),
    }
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (s.width,),
        "attn_q.weight": (s.heads * s.head_dim, s.width),
        "attn_k.weight": (s.kv_heads * s.head_dim, s.width),
        "attn_output.weight": (s.width, s.heads * s.head_dim),
        "attn_q_norm.weight": (s.head_dim,),
        "attn_k_norm.weight": (s.head_dim,),
        "ffn_norm.weight": (s.width,),
        "ffn_gate.weight": (s.feed_forward, s.width),
        "ffn_up.weight": (s.feed_forward, s.width),
        "ffn_down.weight": (s.width, s.feed_forward),
    }
    if s.selector is not None:
        kernel, group, rank, _ = s.selector
        for part in ("attn", "ffn"):
            layer[f"{part}_conv_base"] = (2, kernel, s.width)
            layer[f"{part}_conv_proj.weight"] = (2 * kernel * s.width // group, s.width)
        shapes["selector_predecessor.weight"] = shapes["selector_successor.weight"] = (vocab, rank)
        shapes["selector_hidden.weight"] = (rank, s.width)
    for i in range(s.layers):
        shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _optional_shapes(sidecar: Sidecar) -> dict[str, tuple[int, ...]]:
    """Tensors that may be there."""
    s, vocab = sidecar, vocabulary(sidecar.header)
    d2t = s.header.tensors.get("d2t")
    head = vocab if d2t is None else d2t.shape[0]
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (vocab, s.width),
        "output.weight": (head, s.width),
    }
    for i in range(s.layers):
        shapes[f"blk.{i}.attn_v.weight"] = (s.kv_heads * s.head_dim, s.width)
        shapes[f"blk.{i}.attn_sinks.weight"] = (s.heads,)
    return shapes


def wrong_shapes(
    draft: Header, needed: Mapping[str, tuple[int, ...]], others: Mapping[str, tuple[int, ...]]
) -> Iterator[str]:
    """Tensors that are missing or of another shape; ``others`` may be missing."""
    tensors = draft.tensors
    yield from (f"tensor {name} is missing" for name in needed if name not in tensors)
    for name, shape in (*needed.items(), *others.items()):
        if name in tensors and tensors[name].shape != shape:
            yield f"tensor {name} is {tensors[name].shape}, must be {shape}"


def _broken_tensors(sidecar: Sidecar) -> Iterator[str]:
    tensors = sidecar.header.tensors
    yield from wrong_shapes(sidecar.header, _shapes(sidecar), _optional_shapes(sidecar))
    for name, tensor in tensors.items():
        if name.endswith("_conv_base") and tensor.kind != F32:
            yield f"tensor {name} is {tensor.kind_name}, must be F32"
    if "d2t" in tensors:
        yield from broken_map(sidecar.header)
        if sidecar.selector is not None:
            yield "a DFlash2 draft chooses among all tokens and cannot have d2t"
    window, pattern = (
        sidecar.header.own(f"attention.sliding_window{end}") for end in ("", "_pattern")
    )
    if window and (not isinstance(pattern, list) or len(pattern) != sidecar.layers):
        yield "dflash.attention.sliding_window_pattern must have one entry a layer"


def broken_map(header: Header) -> Iterator[str]:
    """``d2t`` names target ids, each once, and comes with a head of its own."""
    d2t = header.tensors["d2t"]
    if d2t.kind != I64 or len(d2t.shape) != 1:
        yield f"tensor d2t is {d2t.kind_name} {d2t.shape}, must be I64 with one axis"
        return
    if "output.weight" not in header.tensors:
        yield "a draft with d2t must have output.weight"
    ids = np.fromfile(header.path, "<i8", d2t.shape[0], offset=header.start + d2t.offset)
    if ids.min() < 0 or ids.max() >= vocabulary(header) or len(np.unique(ids)) < len(ids):
        yield f"d2t does not name different tokens below {vocabulary(header)}"


def _widths(target: Header, sidecar: Sidecar) -> Iterator[str]:
    width = target.own("embedding_length")
    if width != sidecar.width:
        yield (
            f"the target is {width} wide and the draft {sidecar.width}: llama.cpp feeds a draft "
            "of the target's own width only"
        )


def depths_apart(target: Header, taps: Sequence[int]) -> Iterator[str]:
    """Taps that llama.cpp does not give."""
    layers, architecture = target.layers, target.architecture
    most = layers if architecture in AFTER_LAST else layers - 1
    least = 0 if is_native(architecture) else 1
    outside = [tap for tap in taps if not least <= tap <= most]
    if outside:
        yield (
            f"the draft reads the input of layer {outside[0]}, and of this target "
            f"({architecture}, {layers} layers) llama.cpp gives those of {least} to {most}"
        )


def tokens_apart(target: Header, draft: Header) -> Iterator[str]:
    """Where the two sides do not number the same tokens in the same way."""
    for key in ("model", "bos_token_id", "eos_token_id"):
        both = [h.metadata.get(f"tokenizer.ggml.{key}") for h in (target, draft)]
        if both[0] != both[1]:
            yield f"tokenizer.ggml.{key} is {both[0]!r} in the target and {both[1]!r} in the draft"
    texts = [h.metadata.get("tokenizer.ggml.tokens") or [] for h in (target, draft)]
    if len(texts[0]) != len(texts[1]):
        yield f"the target has {len(texts[0])} tokens and the draft {len(texts[1])}"
    elif texts[0] != texts[1]:
        pairs = enumerate(zip(*texts, strict=True))
        place, (one, other) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
        yield f"token {place} is {one!r} in the target and {other!r} in the draft"


def _mask_outside(target: Header, sidecar: Sidecar) -> Iterator[str]:
    if not 0 <= sidecar.mask_token_id < vocabulary(target):
        yield (
            f"the draft's mask token {sidecar.mask_token_id} is outside the target's vocabulary "
            f"of {vocabulary(target)}"
        )


def vocabulary(header: Header) -> int:
    """Tokens of the file."""
    return len(header.metadata.get("tokenizer.ggml.tokens") or ())
