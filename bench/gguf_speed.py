"""Speed of the gguf backend, and what our loop costs beside the calls of llama.cpp.

    python -m bench.gguf_speed --kind q8_0 --method ngram --sets copying --copied 0.6
    python -m bench.gguf_speed --kind q4_1 --method dflash --blocks auto,2,4,8
    python -m bench.gguf_speed --kind q4_1 --method whole --blocks 4,8

Arms interleaved in one process, ratios against plain steps of the same engine. The overhead is the
time of rounds that was spent outside llama.cpp's decode. With ``--copied`` there is a line more for
the texts of which so much is copied, as bench.replay counts it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import dflash
from bench import gguf_files, record, sets
from bench.arms import engine_arm
from bench.demo import run_set
from bench.replay import Text, share
from bench.table import markdown
from dflash.backends.gguf.native import Context
from dflash.bench.arms import PLAIN
from dflash.bench.paired import Runs, ratio, seconds

DRAFTS = ("ngram", "dflash", "dflash+ngram", "whole", "whole+ngram")


class Native:
    """Seconds inside llama.cpp, making contexts and decoding, while it is watched."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._init = Context.__init__

    def __enter__(self) -> Native:
        def make(context: Context, *arguments: Any, **named: Any) -> None:
            start = time.perf_counter()
            self._init(context, *arguments, **named)  # a fresh answer makes its context anew
            inner = context._decode
            self.seconds += time.perf_counter() - start

            def decode(*arguments: Any) -> int:
                start = time.perf_counter()
                status: int = inner(*arguments)
                self.seconds += time.perf_counter() - start
                return status

            context._decode = decode

        Context.__init__ = make  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Context.__init__ = self._init  # type: ignore[method-assign]


def overhead(engine: Any, prompt: Sequence[int], tokens: int, size: Any) -> float:
    """Share of a whole answer's time (prefill too) that is ours."""
    with Native() as native:
        start = time.perf_counter()
        engine.generate(list(prompt), max_tokens=tokens, block_size=size, reuse=False)
        whole = time.perf_counter() - start
    return 1 - native.seconds / whole


def names(asked: str) -> str:
    """What ``dflash.load`` calls the draft."""
    model, _, ngram = asked.partition("+")
    if model == "ngram":
        return "ngram"
    file = gguf_files.sidecar(whole=model == "whole")
    return f"{file}+ngram" if ngram else str(file)


def groups(
    name: str, prompts: Sequence[list[int]], texts: list[Runs], copied: float
) -> dict[str, list[Runs]]:
    """The texts of a set; beside them those of which at least ``copied`` is copied, if any are."""
    told = [
        Text(name, name, ids, list(runs[PLAIN][0].ids))
        for ids, runs in zip(prompts, texts, strict=True)
    ]
    some = [
        runs for text, runs in zip(told, texts, strict=True) if copied and share(text) >= copied
    ]
    return {name: texts, **({f"{name}, {copied} copied": some} if some else {})}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=96, prompts=4)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--kind", choices=("q4_1", "q8_0"), default="q4_1")
    parser.add_argument("--method", choices=DRAFTS, default="dflash")
    parser.add_argument("--sets", default=",".join(sets.HELD_OUT))
    parser.add_argument("--blocks", default="auto,2,4,8")
    parser.add_argument("--copied", type=float, default=0.0, help="share of a text, from 0 to 1")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    sizes = [b if b == "auto" else int(b) for b in flags.blocks.split(",")]
    rows, found = list[list[Any]](), dict[str, Any]()
    target = str(gguf_files.target(flags.kind))
    with dflash.load(
        target, names(flags.method), backend="gguf", threads=flags.threads, profile=False
    ) as engine:
        arms = {PLAIN: engine_arm(engine, 1), **{str(s): engine_arm(engine, s) for s in sizes}}
        for name in flags.sets.split(","):
            prompts = [engine.encode(p.text) for p in sets.load(name, flags.prompts_per_set)]
            for answer in arms.values():
                answer(prompts[0], 16)
            texts = run_set(prompts, arms, flags.tokens, flags.repeats)
            chosen = groups(name, prompts, texts, flags.copied)
            for (group, some), arm in product(chosen.items(), arms):
                runs = [run for text in some for run in text[arm]]
                rate = sum(len(r.ids) - r.first for r in runs) / sum(r.decode for r in runs)
                kept = [r.stats.mean_committed for r in runs if r.stats is not None]
                times = ratio(some, arm, PLAIN)
                rows.append([group, arm, f"{rate:.1f}", f"{sum(kept) / len(kept):.2f}", times])
                found[f"{group} {arm}"] = {"rate": rate, "texts": len(some), **asdict(times)}
            found[f"{name} seconds"] = seconds(texts)
        ours = {str(s): overhead(engine, prompts[0], flags.tokens, s) for s in (1, *sizes)}
    print(markdown(["set", "block", "tok/s", "committed", "x plain (95 %)"], rows))
    print("share of the time outside llama.cpp:", {k: f"{100 * v:.2f} %" for k, v in ours.items()})
    result = {"conditions": before, "found": found, "overhead": ours}
    record.write(flags.out or Path("runs/gguf-speed.json"), result)


if __name__ == "__main__":
    main()
