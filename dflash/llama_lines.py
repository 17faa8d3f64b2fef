"""What `dflash.llama.Llama` says about a run when it is verbose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from os import fspath
from typing import Any

from dflash.gguf_file import BLOCKS, Header, read_header
from dflash.gguf_options import CACHE_TYPES, GgufOptions
from dflash.llama_config import SpecConfig

LARGEST = 2**20  # tokens of a context whose file does not say what it was trained for
OUTPUTS = 64  # rows of a pass whose logits are kept
DRAFT_ROWS = 128  # rows of a pass of a sidecar
UNREAD = frozenset(
    {
        *("draft_p_split", "draft_cpu_moe", "draft_n_cpu_moe", "draft_tensor_buft_overrides"),
        *("draft_devices", "draft_model_kwargs", "ngram_size_n", "ngram_size_m"),
        *("ngram_min_hits", "ngram_max_entries_per_key", "ngram_mod_n_match", "ngram_mod_n_max"),
        *("ngram_mod_n_min", "lookup_cache_dynamic", "lookup_cache_static"),
    }
)
"""Fields of a `SpecConfig` that are checked and then have no meaning for this engine."""


def estimate(path: str, spec: SpecConfig, options: GgufOptions) -> Iterator[str]:
    """Memory of weights, caches and buffers, from the headers alone."""
    for name, size in _memory(path, spec, options).items():
        yield f"memory estimate: {name} {size / 2**20:.1f} MiB"


def clamped(asked: int, runs: int) -> Iterator[str]:
    """That ``runs`` drafts a round are fewer than were ``asked`` for."""
    if runs < asked:
        yield f"draft_n_max {asked}: this draft proposes {runs} tokens at most, so it runs {runs}"


def unused(spec: SpecConfig) -> Iterator[str]:
    """Fields that were set and that nothing here reads."""
    if not spec.enabled() and spec.draft_model_path is not None:
        said = f"draft_model_path={str(spec.draft_model_path)!r}"
        yield f"SpecConfig: {said} is not read, as spec_type is none: nothing is drafted"
    unread = UNREAD | {"draft_model_path"} if spec.spec_type.is_ngram() else UNREAD
    for field in fields(spec) if spec.enabled() else ():
        made = field.default_factory
        usual = field.default if made is MISSING else made()
        if field.name in unread and getattr(spec, field.name) != usual:
            said = f"{field.name}={getattr(spec, field.name)!r}"
            yield f"SpecConfig: {said} has nothing to do here: this package drafts without it"


def start(draft: Any, spec: SpecConfig, runs: int) -> Iterator[str]:
    """What was loaded: ``draft`` is the gguf backend's description of a file; None = none."""
    limits = (
        f"draft_n_max {spec.draft_n_max} (runs {runs}), "
        f"draft_n_min {spec.draft_n_min}, draft_p_min {spec.draft_p_min}"
    )
    if draft is None:
        if spec.enabled():
            yield f"Llama: {spec.spec_type} speculative decoding enabled, {limits}"
        return
    top_k = getattr(draft, "top_k", 0)
    kept = "inactive: the selector chooses" if top_k else "inactive: sampled on host"
    mrope = any(draft.header.own("rope.dimension_sections") or ())
    asked = "requested" if spec.draft_backend_sampling else "off"
    yield f"LlamaDFlashDecoding: {draft.name} speculative decoding enabled"
    yield f"LlamaDFlashDecoding: {limits}"
    yield (
        f"LlamaDFlashDecoding: block_size {draft.block_size}, mask_token "
        f"{getattr(draft, 'mask_token_id', None)}, target_layers {list(draft.taps)}, "
        f"selector_top_k {top_k}, mrope {mrope}"
    )
    yield f"LlamaDFlashDecoding: backend_sampling {asked}, {kept}"


def summary(stats: Mapping[str, Any], spec: SpecConfig) -> Iterator[str]:
    """How a request went; nothing where none was drafted."""
    if not spec.enabled():
        return
    s = stats
    yield f"Llama.generate: {spec.spec_type} summary"
    yield f"  Calls       draft {s['draft_calls']}, verify {s['process_calls']}"
    yield f"  Acceptance  {s['accepted']} of {s['drafted']} ({s['acceptance_rate']:.3f})"
    phases = f"draft {s['draft_seconds']:.3f} s, target {s['target_decode_seconds']:.3f} s"
    yield f"  Phase time  {phases}"
    yield f"  Checkpoint  none needed, {s['rollbacks']} rollbacks by position"
    rate = s["generation_tokens_per_second"]
    yield f"  Output      {s['generation_tokens']} tokens, {rate:.1f} tokens a second"


def _memory(path: str, spec: SpecConfig, options: GgufOptions) -> dict[str, float]:
    """Bytes by what they are for."""
    target = read_header(path)
    tokens = _count(target, "context_length")
    tokens = min(options.n_ctx or tokens, tokens or LARGEST)
    rows = options.n_ubatch
    formats = options.type_k, options.type_v
    found: dict[str, float] = {
        "target": target.path.stat().st_size,
        "target cache": tokens * _cached(target, *formats),
        "target buffers": _buffers(target, rows, OUTPUTS),
    }
    if spec.has_file:
        draft = read_header(fspath(spec.draft_model_path or ""))
        asked = options.draft_type_k or formats[0], options.draft_type_v or formats[1]
        found["sidecar"] = draft.path.stat().st_size
        found["sidecar cache"] = tokens * _cached(draft, *asked)
        found["sidecar buffers"] = _buffers(draft, DRAFT_ROWS, OUTPUTS)
    return found


def _cached(header: Header, type_k: str, type_v: str) -> float:
    """Bytes of the keys and values of a token, in all layers that have any."""
    layers, heads = _count(header, "block_count"), _count(header, "attention.head_count", 1)
    given = header.own("attention.head_count_kv", heads)
    kv = sum(given) if isinstance(given, list) else layers * given
    size = _count(header, "embedding_length") // max(1, heads)  # 0: Mamba has no attention
    return float(
        kv * _count(header, "attention.key_length", size) * _bytes(type_k)
        + kv * _count(header, "attention.value_length", size) * _bytes(type_v)
    )


def _buffers(header: Header, rows: int, outputs: int) -> int:
    """Bytes of the widest step of a pass, and of the logits that are kept; the rest is small."""
    tokens = len(header.metadata.get("tokenizer.ggml.tokens") or ())
    widest = 2 * _count(header, "feed_forward_length") + 2 * _count(header, "embedding_length")
    return 4 * (max(rows * widest, outputs * tokens) + outputs * tokens)


def _bytes(name: str) -> float:
    """Of one number in a format of the cache."""
    _, numbers, size = BLOCKS[CACHE_TYPES[name]]
    return size / numbers


def _count(header: Header, key: str, usual: int = 0) -> int:
    """A number of the header; the largest where layers differ."""
    value = header.own(key, usual)
    return max(value, default=usual) if isinstance(value, list) else int(value)
