"""What `dflash.llama.Llama` says about a run when it is verbose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import fspath
from typing import Any

from dflash.gguf_file import read_header
from dflash.llama_config import SpecConfig


def estimate(path: str, spec: SpecConfig, n_ctx: int | None) -> Iterator[str]:
    """Memory of weights, caches and logits, from the headers alone."""
    for name, size in _memory(path, spec, n_ctx).items():
        yield f"memory estimate: {name} {size / 2**20:.1f} MiB"


def start(draft: Any, spec: SpecConfig, runs: int) -> Iterator[str]:
    """What was loaded: ``draft`` is the gguf backend's description of a file; None = none."""
    if draft is None:
        return
    top_k = getattr(draft, "top_k", 0)
    kept = "inactive: the selector chooses" if top_k else "inactive: sampled on host"
    mrope = any(draft.header.own("rope.dimension_sections") or ())
    asked = "requested" if spec.draft_backend_sampling else "off"
    yield f"LlamaDFlashDecoding: {draft.name} speculative decoding enabled"
    yield (
        f"LlamaDFlashDecoding: draft_n_max {spec.draft_n_max} (runs {runs}), "
        f"draft_n_min {spec.draft_n_min}, draft_p_min {spec.draft_p_min}"
    )
    yield (
        f"LlamaDFlashDecoding: block_size {draft.block_size}, mask_token "
        f"{getattr(draft, 'mask_token_id', None)}, target_layers {list(draft.taps)}, "
        f"selector_top_k {top_k}, mrope {mrope}"
    )
    yield f"LlamaDFlashDecoding: backend_sampling {asked}, {kept}"


def summary(stats: Mapping[str, Any], spec: SpecConfig) -> Iterator[str]:
    """How a request went; nothing where none was drafted."""
    if not spec.enabled:
        return
    s = stats
    yield f"Llama.generate: {spec.spec_type.to_str()} summary"
    yield f"  Calls       draft {s['draft_calls']}, verify {s['process_calls']}"
    yield f"  Acceptance  {s['accepted']} of {s['drafted']} ({s['acceptance_rate']:.3f})"
    phases = f"draft {s['draft_seconds']:.3f} s, target {s['target_decode_seconds']:.3f} s"
    yield f"  Phase time  {phases}"
    yield f"  Checkpoint  none needed, {s['rollbacks']} rollbacks by position"
    rate = s["generation_tokens_per_second"]
    yield f"  Output      {s['generation_tokens']} tokens, {rate:.1f} tokens a second"


def _memory(path: str, spec: SpecConfig, n_ctx: int | None) -> dict[str, int]:
    """Bytes by what they are for."""
    target = read_header(path)
    tokens = n_ctx or int(target.own("context_length", 0))
    heads = int(target.own("attention.head_count", 1))
    width = int(target.own("embedding_length", 0))
    kv = int(target.own("attention.head_count_kv", heads)) * (width // heads)
    found = {
        "target": target.path.stat().st_size,
        "target cache": 4 * tokens * kv * int(target.own("block_count", 0)),
        "logits": 4 * 64 * len(target.metadata.get("tokenizer.ggml.tokens") or ()),
    }
    if spec.has_file:
        draft = read_header(fspath(spec.draft_model_path or ""))
        size = int(draft.own("attention.head_count_kv", 0)) * int(
            draft.own("attention.key_length", 0)
        )
        found["sidecar"] = draft.path.stat().st_size
        found["sidecar cache"] = 4 * tokens * size * int(draft.own("block_count", 0))
    return found
