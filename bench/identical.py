"""Whether speculation changes the text: ids with the draft against ids without, in float32.

    python -m bench.identical --prompts 200 --tokens 96
    python -m bench.identical --prompts 60 --tokens 64 --way greedy,constrained --block-size 4,auto

``dflash verify`` over the prompt sets, with the conditions of the run written down: at a first
difference the target alone judges both continuations in a pass of one row. Two logits within 1e-3
are a tie; anything wider is a real difference, and the exit status is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import dflash
from bench import record, sets
from dflash.config import parse_block_size
from dflash.verify.compare import Comparison, Outcome, judged
from dflash.verify.gap import Judge

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "points": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 4},
        "score": {"type": "integer"},
    },
    "required": ["title", "points", "score"],
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.1},
    "constrained": {"json_schema": SCHEMA},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, exit 1 on a real difference."""
    parser = record.parser(__doc__, tokens=96, prompts=40)
    parser.add_argument("--prompts", type=int, default=200, help="of all sets, in turn")
    parser.add_argument("--skip", type=int, default=0, help="the first N, for a run in parts")
    parser.add_argument("--block-size", default="8", help="N or auto; several with commas")
    parser.add_argument("--way", default="greedy", help=f"of {', '.join(WAYS)}; or several")
    parser.add_argument("--weights", default=None, help="of the target: float16, bfloat16, int8")
    flags = parser.parse_args(arguments)
    before, blocks = record.conditions(flags.threads), _blocks(flags.block_size)
    found: dict[tuple[str, Any], list[Outcome]] = {}
    how: dict[str, Any] = {"threads": flags.threads, "dtype": "float32", "weights": flags.weights}
    with dflash.load(flags.target, flags.draft, **how) as engine:
        for way in flags.way.split(","):
            settings = {"max_tokens": flags.tokens, "reuse": False, **WAYS[way]}
            gap = Judge(engine, settings).gap
            for prompt in track(sets.mixed(flags.prompts)[flags.skip :], way, transient=True):
                ids = engine.encode(prompt.text)
                plain = engine.generate(ids, block_size=1, **settings)
                for block in blocks:
                    spec = engine.generate(ids, block_size=block, **settings)
                    outcome = judged(prompt.id, ids, (plain, spec), gap)
                    found.setdefault((way, block), []).append(outcome)
    results = {key: Comparison(tuple(outcomes)) for key, outcomes in found.items()}
    for (way, block), result in results.items():
        _print(f"{way}, block {block}", result)
    rows = [{"way": w, "block_size": b, **r.to_json()} for (w, b), r in results.items()]
    out = flags.out or Path("runs/identical.json")
    record.write(out, {"conditions": before, "tokens": flags.tokens, "results": rows})
    sys.exit(any(result.count("real") for result in results.values()))


def _blocks(text: str) -> list[Any]:
    return [parse_block_size(part) for part in text.split(",")]


def _print(name: str, result: Comparison) -> None:
    console = Console()
    console.print(
        f"{name}: {result.prompts} prompts, {result.tokens} tokens compared, "
        f"{result.committed:.3f} committed per pass: {result.count('real')} real differences, "
        f"{result.count('tie')} ties",
        soft_wrap=True,
    )
    for d in result.to_json()["differences"]:
        gap = "no gap" if d["gap"] is None else f"gap {d['gap']:.2e}"
        console.print(
            f"{d['kind']}: {d['id']} at {d['position']}: {d['plain']} / {d['speculative']}, {gap}"
        )


if __name__ == "__main__":
    main()
