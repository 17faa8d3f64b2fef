"""What a round costs as the context grows: attention should grow with it, and nothing else.

    python -m bench.long_context --contexts 128,512,2048,8192

At each length the rounds of a plain step and of a block are timed, then the same rounds run under
torch's profiler for the shares of attention and of copies. What a round costs does not depend on
what the caches hold, so they are filled with random keys, values and features; ``--fill text`` runs
a text instead, grown from one length to the next. ``--window N`` bounds the draft's history. Lines
are printed and written as they are measured.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import dflash
from bench import record, sets
from bench.parts import ATTENTION, VERIFY, WRITES
from bench.profile import Named, Watched, seen, timed, times, watched
from dflash.bench.table import markdown
from dflash.core.protocols import Pair
from dflash.engine import Engine
from dflash.errors import ConfigError


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


class Filled(Watched):
    """A watched pair whose targets hold a random context in place of the prompt."""

    def open_target(self, capacity: int) -> Any:
        """A session whose prefill makes its rows up."""
        return Named(
            Filling(self.inner.open_target(capacity), cast(Any, self.inner).target), VERIFY
        )


class Filling:
    """A session that runs its rounds, but not its prompts."""

    def __init__(self, session: Any, target: Any) -> None:
        """``session`` is of ``target``, whose layers are fused."""
        self._session, self._target = session, target

    def __getattr__(self, name: str) -> Any:
        """The rest is the session's own."""
        return getattr(self._session, name)

    def prefill(self, *given: Any) -> Iterator[Any]:
        """The session's own bookkeeping over passes that compute nothing."""
        session, forward = self._session, self._session._forward
        session._forward = self._made_up
        self.device = forward.device
        try:
            yield from session.prefill(*given)
        finally:
            session._forward = forward

    def _made_up(self, rows: Any, cache: Any, keep: int, taps: Any, *_tree: Any) -> Any:
        """Random keys, values, features and logits."""
        import torch

        config, count = self._target.config, len(rows)
        like = self._target.embedding.new_empty(self._target.model.model.layers[0].head_dim)
        for slot in cache.append(count, like, config.num_key_value_heads):
            slot.new.normal_()
        put = taps.tap(count)
        for layer in taps.layers:
            put(layer, torch.randn(count, config.hidden_size).to(like))
        return torch.randn(max(1, keep), self._target.vocab_size).to(like)


def filled(engine: Engine) -> Engine:
    """An engine over the same pair that takes no time for its prompts."""
    fused = cast(Any, engine.pair).target.fused
    if not fused.layers:
        raise ConfigError(f"{fused.reason}: fill the context with --fill text")
    return Engine(cast(Pair, Filled(engine.pair)))


def measure(engine: Engine, flags: Namespace) -> Iterator[Line]:
    """A line for each length and block."""
    watching = filled(engine) if flags.fill == "random" else seen(engine)
    text = "\n".join(prompt.text for prompt in sets.mixed(240))
    ids = engine.encode(text, chat_template=False)
    ids = ids * (max(flags.lengths) // len(ids) + 1)
    for length in flags.lengths:
        for block in (1, flags.block_size):
            how = copy(flags)
            how.block_size, how.tokens = block, flags.rounds * block + 3
            yield line_of(watching, ids[: max(1, length - how.tokens)], how, length)


def line_of(watching: Engine, prompt: Sequence[int], how: Namespace, length: int) -> Line:
    """Rounds behind ``prompt``, alone and under the profiler."""
    pair = cast(Any, watching.pair)
    alone = median(timed(watching, prompt, how))
    events, count, _ = watched(watching, prompt, how)
    found = times(events, pair.vocab_size, pair.target.device.type == "cuda")
    parts = {
        name: sum(ms for (_, part), ms in found.items() if part == name) / count
        for name in (ATTENTION, WRITES)
    }
    return Line(length, how.block_size, alone, parts[ATTENTION], parts[WRITES])


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
    parser.add_argument("--fill", choices=("random", "text"), default="random")
    parser.add_argument("--window", type=int, default=None, help="of the draft's history")
    flags = parser.parse_args(arguments)
    flags.lengths, flags.reuse = [int(length) for length in flags.contexts.split(",")], True
    before = record.conditions(flags.threads)
    out, lines = flags.out or Path("runs/long-context.json"), list[Line]()
    with dflash.load(
        flags.target,
        flags.draft,
        threads=flags.threads,
        dtype=flags.dtype,
        draft_sliding_window_size=flags.window,
        profile=False,
    ) as engine:
        for line in measure(engine, flags):
            lines.append(line)
            print(
                table_of(lines).splitlines()[-1] if len(lines) > 1 else table_of(lines), flush=True
            )
            record.write(out, {"conditions": before, "lines": [asdict(line) for line in lines]})


if __name__ == "__main__":
    main()
