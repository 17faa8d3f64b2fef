"""What a round costs as the context grows: attention should grow with it, and nothing else.

    python -m bench.long_context --contexts 128,512,2048,8192

One text, grown from one length to the next (what is cached is not run again). At each length the
rounds of a plain step and of a block are timed, then the same rounds run under torch's profiler for
the shares of attention and of copies.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import dflash
from bench import record, sets
from bench.profile import ATTENTION, WRITES, seen, timed, times, watched
from dflash.bench.table import markdown
from dflash.engine import Engine


@dataclass(frozen=True, slots=True)
class Line:
    """A round at one length and block size, in milliseconds."""

    context: int
    block: int
    round_ms: float
    attention_ms: float  # under the profiler
    copies_ms: float

    @property
    def rest_ms(self) -> float:
        """What should not depend on the context."""
        return self.round_ms - self.attention_ms


def measure(engine: Engine, flags: Namespace) -> list[Line]:
    """A line for each length and block."""
    watching, pair = seen(engine), cast(Any, engine.pair)
    text = "\n".join(prompt.text for prompt in sets.mixed(240))
    ids = engine.encode(text, chat_template=False)
    longest = max(flags.lengths)
    ids = ids * (longest // len(ids) + 1)
    cuda = pair.target.device.type == "cuda"
    lines = []
    for length in flags.lengths:
        for block in (1, flags.block_size):
            how = copy(flags)
            how.block_size, how.tokens = block, flags.rounds * block + 3
            prompt = ids[: max(1, length - how.tokens)]
            alone = median(timed(watching, prompt, how))
            events, count, _ = watched(watching, prompt, how)
            found = times(events, pair.vocab_size, cuda)
            parts = {
                name: sum(ms for (_, part), ms in found.items() if part == name) / count
                for name in (ATTENTION, WRITES)
            }
            lines.append(Line(length, block, alone, parts[ATTENTION], parts[WRITES]))
    return lines


def table_of(lines: Sequence[Line]) -> str:
    """For the terminal."""
    rows = [
        [
            line.context,
            "plain" if line.block == 1 else line.block,
            f"{line.round_ms:.1f}",
            f"{line.attention_ms:.2f}",
            f"{line.copies_ms:.2f}",
            f"{line.rest_ms:.1f}",
        ]
        for line in lines
    ]
    head = ["context", "block", "ms a round", "attention", "copies", "all but attention"]
    return markdown(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=0, prompts=1)
    parser.add_argument("--contexts", default="128,512,1024,2048,4096,8192")
    parser.add_argument("--block-size", type=int, default=8, help="anchor included")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", default=None)
    flags = parser.parse_args(arguments)
    flags.lengths, flags.reuse = [int(length) for length in flags.contexts.split(",")], True
    before = record.conditions(flags.threads)
    with dflash.load(
        flags.target, flags.draft, threads=flags.threads, dtype=flags.dtype, profile=False
    ) as engine:
        lines = measure(engine, flags)
    print(table_of(lines))
    out = flags.out or Path("runs/long-context.json")
    record.write(out, {"conditions": before, "lines": [asdict(line) for line in lines]})


if __name__ == "__main__":
    main()
