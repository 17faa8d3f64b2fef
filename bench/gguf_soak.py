"""Memory and descriptors over many requests, and over many times of loading and closing.

    python -m bench.gguf_soak --requests 1000 --cycles 50
    python -m bench.gguf_soak --target tiny.gguf --draft tiny-draft.gguf --tokens 12

Requests differ in length and every fifth stream is left in the middle. The first tenth of each part
is not counted: caches fill, allocators warm up. The bound is 2 %.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dflash
from bench import gguf_files, record, sets
from bench.memory import MIB, rss

BOUND = 0.02


def descriptors() -> int:
    """Open file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def serve(engine: Any, number: int, prompts: Sequence[list[int]], tokens: int) -> None:
    """One request; every fifth is left after two chunks."""
    stream = engine.stream(prompts[number % len(prompts)], max_tokens=tokens, block_size=4)
    for place, _ in enumerate(stream):
        if number % 5 == 4 and place == 1:
            break
    stream.close()


def requests(load: Any, count: int, tokens: int) -> list[int]:
    """Resident bytes after each request."""
    with load() as engine:
        prompts = [engine.encode(p.text)[: 8 + 4 * place] for place, p in enumerate(sets.mixed(6))]
        found = []
        for number in range(count):
            serve(engine, number, prompts, tokens)
            found.append(rss())
            if number % 100 == 99:
                print(f"{number + 1} requests: {found[-1] / MIB:.1f} MiB", flush=True)
    return found


def cycles(load: Any, count: int) -> list[int]:
    """Resident bytes after each time of loading, one request and closing."""
    found = []
    for _ in range(count):
        with load() as engine:
            engine.generate([5, 6, 7, 8], max_tokens=4, block_size=4)
        gc.collect()
        found.append(rss())
    return found


def growth(found: Sequence[int]) -> float:
    """Growth after the first tenth, as a share."""
    warm = found[len(found) // 10]
    return found[-1] / warm - 1


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both parts, print, exit 1 beyond the bound."""
    parser = record.parser(__doc__, tokens=4, prompts=0)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--cycles", type=int, default=50)
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    target = str(gguf_files.target("q4_1")) if flags.target == "demo" else flags.target
    draft = flags.draft or str(gguf_files.sidecar())

    def load() -> Any:
        return dflash.load(target, draft, threads=flags.threads, profile=False)

    with load() as engine:
        engine.generate([5, 6, 7, 8], max_tokens=4)
    opened = descriptors()
    parts = {
        "requests": requests(load, flags.requests, flags.tokens),
        "cycles": cycles(load, flags.cycles),
    }
    left = descriptors() - opened
    result = {name: growth(found) for name, found in parts.items()}
    for name, found in parts.items():
        warm, last = found[len(found) // 10] / MIB, found[-1] / MIB
        print(f"{len(found)} {name}: {warm:.1f} to {last:.1f} MiB, {100 * result[name]:+.2f} %")
    print(f"descriptors left open: {left}")
    record.write(
        flags.out or Path("runs/gguf-soak.json"),
        {"conditions": before, "growth": result, "descriptors": left, "bytes": parts},
    )
    sys.exit(max(result.values()) > BOUND or left > 0)


if __name__ == "__main__":
    main()
