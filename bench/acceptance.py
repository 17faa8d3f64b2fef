"""How much the target accepts: tokens committed per verify pass, by real greedy generation.

    python -m bench.acceptance --block-size 8 --prompts-per-set 40 --tokens 128

Micro mean: committed tokens of all texts / verify passes of all texts, the prefill's token and pass
not counted. Texts that run in circles are reported apart and left out of the means.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import dflash
from bench import record, sets
from dflash.core.stats import Stats
from dflash.engine import Engine


@dataclass(frozen=True, slots=True)
class Summary:
    """Acceptance over some texts."""

    texts: int
    circles: int  # texts left out
    passes: int
    committed: int
    micro: float  # committed / passes
    macro: float  # mean over texts of their own ratio
    by_position: tuple[float, ...]  # [i]: share of passes that kept at least i+1 drafts
    circles_micro: float  # the same ratio over the texts left out; 0.0 without any


@dataclass(frozen=True, slots=True)
class Text:
    """One generated text."""

    id: str
    set: str
    ids: tuple[int, ...]
    stats: Stats

    @property
    def committed(self) -> int:
        """Tokens that verify passes brought."""
        return round(self.stats.mean_committed * self.stats.rounds)


def generate(
    engine: Engine, prompts: Iterable[sets.Prompt], tokens: int, block_size: int, tree: int = 0
) -> list[Text]:
    """Greedy texts for ``prompts``; drafted in chains, or in a ``tree`` of so many nodes."""
    texts = []
    for prompt in prompts:
        out = engine.generate(
            prompt.text,
            max_tokens=tokens,
            block_size=block_size,
            draft_tree=tree,
            temperature=0.0,
            reuse=False,
        )
        texts.append(Text(prompt.id, prompt.set, out.token_ids, out.stats))
    return texts


def summarise(texts: Sequence[Text]) -> Summary:
    """The means of ``texts``, those in circles left out."""
    good = [t for t in texts if not record.in_circles(t.ids) and t.stats.rounds]
    circles = [t for t in texts if record.in_circles(t.ids) and t.stats.rounds]
    passes = sum(t.stats.rounds for t in good)
    committed = sum(t.committed for t in good)
    return Summary(
        texts=len(good),
        circles=len(circles),
        passes=passes,
        committed=committed,
        micro=committed / passes if passes else 0.0,
        macro=sum(t.stats.mean_committed for t in good) / len(good) if good else 0.0,
        by_position=_by_position(good),
        circles_micro=sum(t.committed for t in circles)
        / max(1, sum(t.stats.rounds for t in circles)),
    )


def _by_position(texts: Sequence[Text]) -> tuple[float, ...]:
    """Survival of each draft position; with short last blocks, the sum + 1 is the micro mean."""
    depth = max((len(t.stats.histogram) for t in texts), default=1) - 1
    kept = [sum(sum(t.stats.histogram[i + 1 :]) for t in texts) for i in range(depth)]
    rounds = max(1, sum(t.stats.rounds for t in texts))
    return tuple(k / rounds for k in kept)


def measure(engine: Engine, names: Sequence[str], flags: Any) -> dict[str, Summary]:
    """A summary per set, and "average" (unweighted over the sets)."""
    result = {}
    for name in names:
        prompts = sets.load(name, flags.prompts_per_set)
        texts = generate(engine, prompts, flags.tokens, flags.block_size, flags.draft_tree)
        result[name] = summarise(texts)
    return result


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = record.parser(__doc__, tokens=128, prompts=40)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--draft-tree", type=int, default=0, help="nodes; 0 = chains")
    parser.add_argument("--sets", default=",".join(sets.HELD_OUT))
    parser.add_argument("--dtype", default=None)
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    try:
        engine = dflash.load(flags.target, flags.draft, threads=flags.threads, dtype=flags.dtype)
    except dflash.DFlashError as problem:
        parser.error(str(problem))
    with engine:
        result = measure(engine, flags.sets.split(","), flags)
    average = sum(s.micro for s in result.values()) / len(result)
    _print(result, average, f"block {flags.block_size}, tree {flags.draft_tree or 'none'}")
    out = flags.out or Path("runs/acceptance.json")
    rows = {name: asdict(summary) for name, summary in result.items()}
    record.write(out, {"conditions": before, "average": average, "sets": rows})


def _print(result: dict[str, Summary], average: float, how: str) -> None:
    table = Table(title=f"committed per verify pass, {how}, temperature 0")
    for column in ("set", "texts", "in circles", "micro", "macro", "kept 1, 2, ... drafts"):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, s in result.items():
        by = " ".join(f"{p:.2f}" for p in s.by_position)
        row = (str(s.texts), f"{s.circles} ({s.circles_micro:.2f})", f"{s.micro:.3f}")
        table.add_row(name, *row, f"{s.macro:.3f}", by)
    table.add_row("average", "", "", f"{average:.3f}", "", "")
    Console().print(table)


if __name__ == "__main__":
    main()
