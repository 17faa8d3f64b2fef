"""Whether speculation changes the text: ids with the draft against ids without, in float32.

    python -m bench.identical --prompts 200 --tokens 96

At a first difference the target alone judges both continuations in a pass of one row. Two logits
within 1e-3 are a tie (the row count of a pass changes the last bits of a sum); anything wider is a
real difference, and the exit status is 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import dflash
from bench import record, sets
from bench.arms import plain_transformers
from dflash.engine import Engine

TIE = 1e-3

Gap = Callable[[Sequence[int], int, int], float]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which two texts part."""

    id: str
    position: int  # of the output
    plain: int  # token id; -1 = the text had ended
    speculative: int
    gap: float  # of the two logits, one row

    @property
    def tie(self) -> bool:
        """Within rounding."""
        return self.gap <= TIE


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both texts of all prompts."""

    prompts: int
    tokens: int  # compared, up to each first difference
    committed: float  # mean per verify pass, so that a draft that does nothing shows
    differences: tuple[Difference, ...]


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; an ended text differs where it ends."""
    for place, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return place
    return None if len(plain) == len(other) else min(len(plain), len(other))


def compare(
    engine: Engine, prompts: Iterable[sets.Prompt], tokens: int, block_size: int, gap: Gap
) -> Comparison:
    """Generate both ways and judge."""
    count, compared, committed, rounds = 0, 0, 0.0, 0
    differences = []
    for prompt in prompts:
        ids = engine.encode(prompt.text)
        plain, spec = (
            engine.generate(ids, max_tokens=tokens, block_size=block, reuse=False)
            for block in (1, block_size)
        )
        place = first_difference(plain.token_ids, spec.token_ids)
        count += 1
        compared += len(plain.token_ids) if place is None else place
        committed += spec.stats.mean_committed * spec.stats.rounds
        rounds += spec.stats.rounds
        if place is not None:
            differences.append(_judge(prompt.id, ids, plain.token_ids, spec.token_ids, place, gap))
    mean = committed / rounds if rounds else 0.0
    return Comparison(count, compared, mean, tuple(differences))


def _judge(
    name: str, prompt: list[int], plain: Sequence[int], spec: Sequence[int], place: int, gap: Gap
) -> Difference:
    a, b = (text[place] if place < len(text) else -1 for text in (plain, spec))
    width = gap([*prompt, *plain[:place]], a, b) if min(a, b) >= 0 else float("inf")
    return Difference(name, place, a, b, width)


def one_row_gap(target: str) -> Gap:
    """Distance of two logits after a prefix, its last token run alone. Loads on first use."""
    import torch

    from dflash.backends.torch.cache import make_cache
    from dflash.backends.torch.target import Forward

    models: list[Any] = []

    def gap(prefix: Sequence[int], a: int, b: int) -> float:
        if not models:
            models.append(plain_transformers(target))
        forward, cache = Forward(models[0]), make_cache(models[0].config, len(prefix))
        with torch.inference_mode():
            forward(prefix[:-1], cache, 1)
            row = forward(prefix[-1:], cache, 1)[-1]
        return abs(float(row[a] - row[b]))

    return gap


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare, print, exit 1 on a real difference."""
    parser = record.parser(__doc__, tokens=96, prompts=40)
    parser.add_argument("--prompts", type=int, default=200, help="of all sets, in turn")
    parser.add_argument("--block-size", type=int, default=8)
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    prompts = sets.mixed(flags.prompts)
    with dflash.load(flags.target, flags.draft, threads=flags.threads, dtype="float32") as engine:
        gap = one_row_gap(engine.pair.target_name)
        result = compare(
            engine, track(prompts, transient=True), flags.tokens, flags.block_size, gap
        )
    _print(result)
    record.write(flags.out or Path("runs/identical.json"), {"conditions": before, **asdict(result)})
    sys.exit(any(not d.tie for d in result.differences))


def _print(result: Comparison) -> None:
    console = Console()
    real = sum(not d.tie for d in result.differences)
    console.print(
        f"{result.prompts} prompts, {result.tokens} tokens compared, "
        f"{result.committed:.3f} committed per pass: {real} real differences, "
        f"{len(result.differences) - real} ties"
    )
    for d in result.differences:
        word = "tie" if d.tie else "REAL"
        console.print(
            f"{word}: {d.id} at {d.position}: {d.plain} / {d.speculative}, gap {d.gap:.2e}"
        )


if __name__ == "__main__":
    main()
