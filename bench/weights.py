"""What weights in fewer bytes give: plain decoding and drafting, against float32 weights.

    python -m bench.weights --forms float16,bfloat16,int8 --prompts-per-set 2 --repeats 3

One process, greedy, all pairs loaded at once and their arms interleaved. A rounded target is
another model and may say something else, so ratios are over time per token, and the table says
where the text is float32's. Within a form, the text with a draft has to be the one without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import track

import dflash
from bench import record, sets
from dflash.bench.arms import Arm, engine_arm, interleaved
from dflash.bench.paired import Ratio, Runs, compared, seconds
from dflash.bench.table import markdown

WIDE = "float32"  # the form that is compared with
PLAIN = 1
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """One form with one block size."""

    form: str
    block: Any
    rate: float  # tokens/s after the prefill
    over_plain: Ratio  # against float32's plain decoding
    over_same: Ratio  # against float32 with the same block
    committed: float
    mib: float  # of the target's weights
    as_wide: int  # texts that are float32's
    as_plain: int  # texts that are those of the form's own plain decoding
    texts: int


def name_of(form: str, block: Any) -> str:
    """Of an arm."""
    return f"{form} {block}"


def measure(flags: Any) -> tuple[list[Runs], dict[str, float]]:
    """Runs by text and arm, and MiB of each form's target."""
    prompts = [p.text for name in flags.sets.split(",") for p in sets.load(name, flags.each)]
    arms: dict[str, Arm] = {}
    sizes: dict[str, float] = {}
    with ExitStack() as opened:
        for form in (WIDE, *flags.forms.split(",")):
            engine = opened.enter_context(
                dflash.load(
                    flags.target,
                    flags.draft,
                    threads=flags.threads,
                    dtype=WIDE,
                    weights=None if form == WIDE else form,
                    profile=False,
                )
            )
            sizes[form] = engine.pair.memory()["target"] / MIB
            for block in flags.blocks:
                arms[name_of(form, block)] = engine_arm(engine, block, ignore_eos=True)
        ids = [engine.encode(text) for text in prompts]
        for arm in arms.values():
            arm(ids[0], 24)
        texts: list[Runs] = [
            interleaved(prompt, arms, flags.tokens, flags.repeats)
            for prompt in track(ids, "texts", transient=True)
        ]
    return texts, sizes


def lines_of(
    texts: Sequence[Runs], sizes: Mapping[str, float], blocks: Sequence[Any]
) -> list[Line]:
    """A line an arm, float32 first."""
    return [_line(texts, form, block, sizes[form]) for form in sizes for block in blocks]


def _line(texts: Sequence[Runs], form: str, block: Any, mib: float) -> Line:
    arm, plain = name_of(form, block), name_of(WIDE, PLAIN)
    runs = [run for text in texts for run in text[arm]]
    rounds = sum(run.stats.rounds for run in runs)
    made = sum(run.stats.rounds * run.stats.mean_committed for run in runs)

    def same(other: str) -> int:
        return sum(text[arm][0].ids == text[other][0].ids for text in texts)

    return Line(
        form=form,
        block=block,
        rate=sum(run.rate for run in runs) / len(runs),
        over_plain=compared(texts, arm, plain, per_token=True),
        over_same=compared(texts, arm, name_of(WIDE, block), per_token=True),
        committed=made / rounds if rounds else 1.0,
        mib=mib,
        as_wide=same(plain),
        as_plain=same(name_of(form, PLAIN)),
        texts=len(texts),
    )


def table_of(lines: Sequence[Line]) -> str:
    """For the terminal and the docs."""
    rows = [
        [
            line.form,
            "plain" if line.block == PLAIN else line.block,
            f"{line.mib:.0f}",
            f"{line.rate:.1f}",
            line.over_plain,
            line.over_same,
            f"{line.committed:.2f}",
            f"{line.as_plain} of {line.texts}",
            f"{line.as_wide} of {line.texts}",
        ]
        for line in lines
    ]
    head = ["weights", "block", "MiB", "tok/s", "x float32 plain", "x float32, same block"]
    return markdown([*head, "committed", "as its plain", "as float32"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=64, prompts=2)
    parser.add_argument("--forms", default="float16,bfloat16,int8")
    parser.add_argument("--block-sizes", default="4,8,auto", help="beside plain decoding")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sets", default=",".join(sets.HELD_OUT))
    flags = parser.parse_args(arguments)
    flags.each = flags.prompts_per_set
    sizes = flags.block_sizes.split(",")
    flags.blocks = [PLAIN, *(int(size) if size.isdecimal() else size for size in sizes)]
    before = record.conditions(flags.threads)
    texts, mib = measure(flags)
    lines = lines_of(texts, mib, flags.blocks)
    print(table_of(lines))
    record.write(
        flags.out or Path("runs/weights.json"),
        {
            "conditions": before,
            "lines": [asdict(line) for line in lines],
            "decode_seconds": seconds(texts),
        },
    )


if __name__ == "__main__":
    main()
