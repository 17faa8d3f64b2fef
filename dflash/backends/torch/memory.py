"""Bytes: what will be needed, what is there, and one error when it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dflash.errors import OutOfMemory

HINT = "Try --dtype bfloat16 (half the memory), or a smaller --max-tokens or prompt"


def kv_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values of ``tokens`` tokens; ``config`` is a transformers model config."""
    text = config.get_text_config(decoder=True)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * tokens * dtype.itemsize)


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
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


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


def readable(count: int) -> str:
    """``1536 -> '1.5 KiB'``."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size /= 1024
    else:
        unit = "TiB"
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
