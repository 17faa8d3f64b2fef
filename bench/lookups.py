"""What a match of a look-up is worth, by how many tokens agree: where `ngram.USUAL` comes from.

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
from typing import Any

import dflash
from bench import record, sets
from bench.ngram import COPYING
from bench.table import markdown
from dflash.config import NO_DRAFT
from dflash.core.types import Plan, Request, Verdict
from dflash.drafts.ngram import GRADES, SHORTEST, NgramDraft

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
    names = [f"{low} to {high - 1}" for low, high in pairwise((SHORTEST, *GRADES))]
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
    header = ["tokens that agree", "places", *(f"draft {place + 1}" for place in range(MOST))]
    judged, right = Counts(), Counts()
    found: dict[str, list[list[str]]] = {}
    options: Any = {"backend": flags.backend, "threads": flags.threads, "profile": False}
    with dflash.load(flags.target, NO_DRAFT, **options) as engine:
        for name in flags.sets.split(","):
            ours, theirs = Counts(), Counts()
            for prompt in sets.load(name, flags.prompts_per_set):
                ids = engine.encode(prompt.text)
                said = engine.generate(ids, max_tokens=flags.tokens, block_size=1, reuse=False)
                count(ids, said.token_ids, ours, theirs)
            found[name] = list(rows(ours, theirs))
            judged, right = judged + ours, right + theirs
    found["all"] = list(rows(judged, right))
    for name, table in found.items():
        print(f"{name}\n{markdown(header, table)}\n")
    result = {"conditions": before, "tokens": flags.tokens, "columns": header, "rows": found}
    record.write(flags.out or Path("runs/bench-lookups.json"), result)


if __name__ == "__main__":
    main()
