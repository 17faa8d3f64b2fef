"""Bytes: what will be needed, what is there, and one error when it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash.checks import readable
from dflash.errors import OutOfMemory

STATE_ONLY = ("linear_attention", "conv", "mamba", "moe", "mlp")  # layer types without keys
HINT = "Try --dtype bfloat16 (half the memory), or a smaller --max-tokens or prompt"


def kv_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of ``tokens`` tokens; ``config`` is a transformers model config.

    Recurrent layers keep none; their states do not grow with the context.
    """
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = zip(kinds, _layer_configs(text), strict=True)
    numbers = sum(_kv_numbers(layer) for kind, layer in layers if kind not in STATE_ONLY)
    return int(2 * numbers * tokens * dtype.itemsize)


def _layer_configs(text: Any) -> list[Any]:
    """What each layer is made of: families like Gemma 4 have heads of several widths."""
    own = getattr(text, "per_layer_config", None)  # not in old transformers
    return [text] * text.num_hidden_layers if own is None else list(own)


def _kv_numbers(layer: Any) -> int:
    """Numbers in the keys of one token, which are as many as in its values; 0 without heads."""
    queries = getattr(layer, "num_attention_heads", None)
    if queries is None:
        return 0
    heads = getattr(layer, "num_key_value_heads", None) or queries
    return int(heads * (getattr(layer, "head_dim", None) or layer.hidden_size // queries))


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be allocated on ``device``; None where nobody can say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min(found + _container_free(), default=None)


def _container_free() -> list[int]:
    """What a container's limit leaves (control groups, version 2); [] without one."""
    group = Path("/sys/fs/cgroup")
    try:
        most, used = ((group / name).read_text() for name in ("memory.max", "memory.current"))
        reclaimable = [
            int(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        ]
        return [int(most) - int(used) + sum(reclaimable)]
    except (OSError, ValueError):  # no such group, or "max"
        return []


def require(what: str, needed: int, device: torch.device) -> None:
    """Raise OutOfMemory if ``needed`` bytes are more than ``device`` has left."""
    free = free_bytes(device)
    if free is not None and needed > free:
        raise OutOfMemory(
            f"{what} needs {readable(needed)} on {device}, {readable(free)} are free. {HINT}"
        )


@contextmanager
def guard(what: str) -> Iterator[None]:
    """Map torch's out-of-memory errors to OutOfMemory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"out of memory while {what}: {error}. {HINT}") from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # the CPU allocator's words
            raise
        raise OutOfMemory(f"out of memory while {what}: {error}. {HINT}") from error
