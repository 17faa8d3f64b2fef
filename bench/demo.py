"""Speed of the demo pair against transformers generate and plain decoding, interleaved.

    python -m bench.demo --prompts-per-set 6 --tokens 96 --repeats 3

One process, greedy, float32. For every prompt every arm runs in turn, the order rotated with each
repeat; the first prompt is run once before anything counts. With --seconds a set is repeated until
its intervals are narrower than +-3 %, for so long at most. A set's ratio is the sum of the
prompts' median decode times of transformers / that of the arm, the same texts on both sides: a
text on which an arm differs from plain decoding is counted in "differ" and left out, and so is one
that runs in circles, which is reported apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import track

import dflash
from bench import record, sets
from bench.arms import Arm, engine_arm, plain_transformers, transformers_arm
from bench.table import speed_table
from dflash.bench.arms import PLAIN, interleaved
from dflash.bench.paired import NARROW, Runs, alike, compared, seconds
from dflash.engine import Engine
from dflash.errors import ConfigError

BASE = "transformers"
AGAIN = "more repeats of a set while its intervals decide nothing, for so long at most"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm on one group of texts."""

    arm: str
    texts: int
    differ: int
    prefill_ms: float  # median
    rate: float  # tokens/s after the prefill: all tokens / all median times
    over_transformers: float
    low: float  # 95 % bootstrap interval of over_transformers, over repeats
    high: float
    over_plain: float
    micro: float | None  # committed per verify pass; None where there is no draft
    macro: float | None


def run_set(
    prompts: Sequence[Sequence[int]], arms: Mapping[str, Arm], tokens: int, repeats: int
) -> list[Runs]:
    """Every arm on every prompt, interleaved."""
    return [interleaved(p, arms, tokens, repeats) for p in track(prompts, transient=True)]


def run_until(
    sure: Callable[[Sequence[Runs]], bool],
    prompts: Sequence[Sequence[int]],
    arms: Mapping[str, Arm],
    flags: Any,
) -> list[Runs]:
    """`run_set`, and again while the intervals decide nothing, for ``flags.seconds`` at most.

    A repeat that something else on the machine disturbed is outvoted, never thrown out.
    """
    end = perf_counter() + flags.seconds
    texts = run_set(prompts, arms, flags.tokens, flags.repeats)
    while perf_counter() < end and not sure(texts):
        more = run_set(prompts, arms, flags.tokens, 1)
        texts = [
            {arm: [*runs, *again[arm]] for arm, runs in text.items()}
            for text, again in zip(texts, more, strict=True)
        ]
    return texts


def narrow(texts: Sequence[Runs]) -> bool:
    """Whether every arm's ratio over transformers is known to +-3 %."""
    same = [compared(alike(texts, (PLAIN, arm, BASE)), arm, BASE) for arm in texts[0]]
    return all(ratio.spread <= NARROW for ratio in same)


def summarise(texts: Sequence[Runs]) -> list[Row]:
    """A row per arm."""
    return [_row(arm, texts) for arm in (texts[0] if texts else ())]


def _row(arm: str, texts: Sequence[Runs]) -> Row:
    same = alike(texts, (PLAIN, arm, BASE))
    ratio = compared(same, arm, BASE)
    seconds = sum(median(run.decode for run in text[arm]) for text in same)
    stats = [t[arm][0].stats for t in same]
    drafted = [s for s in stats if s is not None and s.drafted]
    rounds = sum(s.rounds for s in drafted)
    return Row(
        arm=arm,
        texts=len(same),
        differ=len(texts) - len(same),
        prefill_ms=1e3 * median([r.prefill for t in texts for r in t[arm]] or [0.0]),
        rate=sum(len(t[arm][0].ids) - t[arm][0].first for t in same) / seconds if seconds else 0.0,
        over_transformers=ratio.value,
        low=ratio.low,
        high=ratio.high,
        over_plain=compared(same, arm, PLAIN).value,
        micro=sum(s.mean_committed * s.rounds for s in drafted) / rounds if rounds else None,
        macro=sum(s.mean_committed for s in drafted) / len(drafted) if drafted else None,
    )


def split(texts: Sequence[Runs]) -> tuple[list[Runs], list[Runs]]:
    """Texts that go somewhere, and texts in circles (judged on the plain run)."""
    circles = [t for t in texts if record.in_circles(t[PLAIN][0].ids)]
    return [t for t in texts if t not in circles], circles


def average(rows: Sequence[Sequence[Row]]) -> list[dict[str, Any]]:
    """Unweighted means over the sets, arm by arm."""
    columns = ("rate", "over_transformers", "over_plain", "micro", "macro", "prefill_ms")
    result: list[dict[str, Any]] = []
    for same_arm in zip(*rows, strict=True):
        row: dict[str, Any] = {"arm": same_arm[0].arm}
        for column in columns:
            values = [getattr(r, column) for r in same_arm]
            row[column] = None if None in values else sum(values) / len(values)
        result.append(row)
    return result


def make_arms(engine: Engine, blocks: Sequence[str]) -> dict[str, Arm]:
    """transformers, plain, then one arm a block size; sizes past the draft's own are left out."""
    model = plain_transformers(engine.pair.target_name)
    arms = {BASE: transformers_arm(model, engine.pair.eos_ids), PLAIN: engine_arm(engine, 1)}
    native = engine.pair.draft_block_size or 1
    for block in blocks:
        if block == "auto" or int(block) <= native:
            arms[f"block {block}"] = engine_arm(engine, block if block == "auto" else int(block))
    if len(arms) == 2:
        raise ConfigError(f"the draft's native block size is {native}: no block size to measure")
    return arms


def measure(engine: Engine, arms: Mapping[str, Arm], flags: Any) -> dict[str, list[Runs]]:
    """Runs by set, warm-up left out."""
    warm = engine.encode(sets.load(sets.HELD_OUT[0], 1)[0].text)
    for arm in arms.values():
        arm(warm, min(32, flags.tokens))
    return {
        name: run_until(
            lambda texts: narrow(split(texts)[0] or texts),
            [engine.encode(p.text) for p in sets.load(name, flags.prompts_per_set)],
            arms,
            flags,
        )
        for name in flags.sets.split(",")
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=96, prompts=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0, help=AGAIN)
    parser.add_argument("--blocks", default="2,3,4,6,8,auto")
    parser.add_argument("--sets", default=",".join(sets.HELD_OUT))
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    with dflash.load(
        flags.target, flags.draft, threads=flags.threads, dtype="float32", profile=False
    ) as engine:
        results = measure(engine, make_arms(engine, flags.blocks.split(",")), flags)
    report(results, before, flags.out or Path("runs/bench-demo.json"))


def report(results: Mapping[str, list[Runs]], conditions: dict[str, Any], out: Path) -> None:
    """Tables on the terminal, everything in the file."""
    console = Console()
    rows, circles = {}, {}
    for name, texts in results.items():
        good, bad = split(texts)
        rows[name], circles[name] = summarise(good), summarise(bad)
        console.print(speed_table(f"{name}: {len(good)} texts", rows[name]))
        if bad:
            console.print(speed_table(f"{name}: {len(bad)} texts in circles, apart", circles[name]))
    means = average([r for r in rows.values() if r])
    console.print(speed_table(f"average of {len(rows)} sets", [_as_row(m) for m in means]))
    record.write(
        out, {"conditions": conditions, "average": means, "sets": _plain(rows, circles, results)}
    )


def _as_row(mean: dict[str, Any]) -> Row:
    return Row(texts=0, differ=0, low=0.0, high=0.0, **mean)


def _plain(
    rows: Mapping[str, list[Row]],
    circles: Mapping[str, list[Row]],
    results: Mapping[str, list[Runs]],
) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        name: {
            "rows": [asdict(r) for r in rows[name]],
            "circles": [asdict(r) for r in circles[name]],
            "decode_seconds": seconds(results[name]),
            "tokens": [len(text[PLAIN][0].ids) for text in results[name]],
        }
        for name in results
    }


if __name__ == "__main__":
    main()
