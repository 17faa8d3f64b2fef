"""Drafting by look-up alone against plain decoding, on prompts whose answer copies from them.

    python -m bench.ngram --tokens 160 --repeats 3

Edits of a given file and summaries with quotes (bench/prompts/copying.jsonl), greedy, float32,
arms interleaved as in bench.demo. A text that compresses more than threefold repeats itself, which
flatters a look-up: it is shown and does not count. The bound is 1.6 times plain decoding.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dflash
from bench import record, sets
from bench.arms import Arm, engine_arm
from bench.demo import run_set
from bench.table import markdown
from dflash.bench.arms import PLAIN
from dflash.bench.paired import Ratio, Runs, ratio, seconds
from dflash.config import NGRAM
from dflash.engine import Engine

COPYING = "copying"
MOST_COMPRESSION = 3.0
BOUND = 1.6


def compression(text: str) -> float:
    """Bytes of ``text`` / bytes that zlib makes of them."""
    whole = text.encode()
    return len(whole) / len(zlib.compress(whole, 9))


def make_arms(engine: Engine, blocks: Sequence[str]) -> dict[str, Arm]:
    """Plain decoding, then one arm a block size."""
    arms = {PLAIN: engine_arm(engine, 1)}
    for block in blocks:
        arms[block] = engine_arm(engine, block if block == "auto" else int(block))
    return arms


def measure(engine: Engine, arms: Mapping[str, Arm], flags: Any) -> list[Runs]:
    """Runs by prompt, warm-up left out."""
    prompts = [engine.encode(p.text) for p in sets.load(COPYING, flags.prompts_per_set)]
    for arm in arms.values():
        arm(prompts[0], min(32, flags.tokens))
    return run_set(prompts, arms, flags.tokens, flags.repeats)


def summarise(
    texts: Mapping[str, Runs], counted: Sequence[str], arms: Sequence[str]
) -> dict[str, Ratio]:
    """Each arm against plain decoding, over the texts that count."""
    chosen = [texts[name] for name in counted]
    return {arm: ratio(chosen, arm, PLAIN) for arm in arms if arm != PLAIN}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=160, prompts=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--blocks", default="auto,4,8,16")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    options: Any = {"threads": flags.threads, "dtype": "float32", "profile": False}
    with dflash.load(flags.target, flags.draft or NGRAM, **options) as engine:
        arms = make_arms(engine, flags.blocks.split(","))
        names = [p.id for p in sets.load(COPYING, flags.prompts_per_set)]
        texts = dict(zip(names, measure(engine, arms, flags), strict=True))
        decode = engine.pair.tokenizer.decode
        squeezed = {name: compression(decode(runs[PLAIN][0].ids)) for name, runs in texts.items()}
    counted = [name for name in names if squeezed[name] <= MOST_COMPRESSION]
    ratios = summarise(texts, counted, list(arms))
    rows = [_row(name, texts[name], squeezed[name], list(ratios)) for name in names]
    print(markdown(["text", "tokens", "compression", *ratios], rows))
    print()
    verdicts = [[arm, found, found.texts, found.verdict(BOUND)] for arm, found in ratios.items()]
    print(markdown(["block", "x plain (95 %)", "texts", f"{BOUND} reached"], verdicts))
    result = {
        "conditions": before,
        "ratios": {arm: {**asdict(r), "reached": r.verdict(BOUND)} for arm, r in ratios.items()},
        "compression": squeezed,
        "counted": counted,
        "decode_seconds": dict(zip(names, seconds(list(texts.values())), strict=True)),
    }
    record.write(flags.out or Path("runs/bench-ngram.json"), result)


def _row(name: str, runs: Runs, squeezed: float, arms: Sequence[str]) -> list[str]:
    ratios = [ratio([runs], arm, PLAIN) for arm in arms]
    mark = "" if squeezed <= MOST_COMPRESSION else " (not counted)"
    cells = [f"{found.value:.2f}" if found.texts else "differs" for found in ratios]
    return [name, str(len(runs[PLAIN][0].ids)), f"{squeezed:.1f}{mark}", *cells]


if __name__ == "__main__":
    main()
