"""What a match of a look-up is worth, by its lead over others: where `ngram.USUAL` comes from.

    python -m bench.lookups --threads 1

At every token of greedy texts, what the look-up would propose there is held against what follows.
No round is run and nothing is timed, so a busy machine does no harm. One line a grade: how often it
came up, and the chance that draft 1, 2, ... is right once those before it were.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from bench import record, sets
from bench.ngram import COPYING
from bench.replay import made
from bench.table import markdown
from dflash.core.types import Plan, Request, Verdict
from dflash.drafts.ngram import GRADES, NgramDraft

MOST = 7  # drafts that are looked at
Counts = Counter[tuple[int, int]]
"""By grade and place of the draft."""


def rounds(prompt: Sequence[int], text: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(grade, drafts judged, drafts right) at every token of ``text`` where there is a match.

    Nothing is asked behind the last but one, where hardly anything follows that could be copied.
    """
    draft = NgramDraft(MOST + 1)
    draft.begin(Request(prompt, len(text)), 0)
    for place, token in enumerate(text[:-2], 1):
        draft.commit(Verdict([token]), 1)
        outlook = draft.outlook()
        if outlook.most:
            proposed = draft.propose(Plan(0, MOST, MOST)).tokens
            pairs = list(zip(proposed, text[place:], strict=False))
            wrong = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
            kept = len(pairs) if wrong is None else wrong
            yield outlook.grade, min(kept + 1, len(pairs)), kept


def count(prompt: Sequence[int], text: Sequence[int], judged: Counts, right: Counts) -> None:
    """Add what `rounds` finds: drafts behind the first wrong one are not judged."""
    for grade, looked_at, kept in rounds(prompt, text):
        judged.update((grade, place) for place in range(looked_at))
        right.update((grade, place) for place in range(kept))


def rows(judged: Counts, right: Counts) -> Iterator[list[str]]:
    """A line a grade."""
    names = [f"{low} to {high - 1}" for low, high in pairwise((0, *GRADES))]
    for grade, name in enumerate((*names, f"{GRADES[-1]} and more")):
        seen = [(judged[grade, place], right[grade, place]) for place in range(MOST)]
        chances = [f"{kept / asked:.2f}" if asked else "-" for asked, kept in seen]
        yield [name, str(seen[0][0]), *chances]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write JSON."""
    parser = record.parser(__doc__, tokens=96, prompts=10)
    parser.add_argument("--backend", default="gguf", help="what generates the texts")
    parser.add_argument("--sets", default=",".join((*sets.HELD_OUT, COPYING)))
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    header = ["lead", "places", *(f"draft {place + 1}" for place in range(MOST))]
    counts = {name: (Counts(), Counts()) for name in flags.sets.split(",")}
    for text in made(flags):
        count(text.prompt, text.ids, *counts[text.set])
    found = {name: list(rows(*both)) for name, both in counts.items()}
    judged, right = (sum(parts, Counts()) for parts in zip(*counts.values(), strict=True))
    found["all"] = list(rows(judged, right))
    for name, table in found.items():
        print(f"{name}\n{markdown(header, table)}\n")
    result = {"conditions": before, "tokens": flags.tokens, "columns": header, "rows": found}
    record.write(flags.out or Path("runs/bench-lookups.json"), result)


if __name__ == "__main__":
    main()
