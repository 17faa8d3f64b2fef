"""What look-ups give on greedy texts at given costs of a round: counted, nothing is timed.

    python -m bench.replay --target runs/gguf/target.q8_0.gguf --costs 0:9.5,1:18,3:26,7:31,15:62

The real loop, look-up and policy play each text again under a clock that only a pass moves, by what
``--costs`` says of its rows. Requests share a profile, as in an engine, so the mean over several
orders of the texts counts. ``copied`` is the share of a text's tokens that the look-up has right
where they come next. Ceilings are blocks chosen by who knows how many drafts are right: the
look-up's own (``told``), those of the best place where two tokens agree (``any place``), and drafts
that are always right (``perfect``). Texts are made once and kept in ``--texts``.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import dflash
from bench import record, sets
from bench.ngram import COPYING
from bench.table import markdown
from dflash.config import NO_DRAFT
from dflash.core.decode import decode
from dflash.core.policy import Adaptive, Fixed
from dflash.core.profile import Profile
from dflash.core.protocols import Policy
from dflash.core.types import Plan, Proposal, Request, Verdict
from dflash.drafts.ngram import BLOCK_SIZE, SHORTEST, NgramDraft

MOST = BLOCK_SIZE - 1
Q8_0 = "0:9.5,1:18,3:26,7:31,15:62"  # the demo target on two cores (docs/LOG.md)
LONG, BOUND = 64, 0.97  # tokens; of plain decoding's speed
CLASSES = (0.0, 0.4, 0.6, 0.8, 1.01)  # shares copied
Costs = Sequence[float]
"""Milliseconds of a round by drafted rows, 0 to ``MOST``."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and what the target says to it at temperature 0."""

    id: str
    set: str
    prompt: list[int]
    ids: list[int]


def curve(asked: str) -> Costs:
    """``rows:ms,rows:ms,...``, from 0 to ``MOST`` rows, with straight lines between them."""
    points = sorted((int(rows), float(ms)) for rows, ms in (p.split(":") for p in asked.split(",")))
    found = [points[0][1]]
    for (low, one), (high, other) in pairwise(points):
        found += [one + (other - one) * step / (high - low) for step in range(1, high - low + 1)]
    assert points[0][0] == 0 and len(found) > MOST, f"costs from 0 to {MOST} rows, got {asked}"
    return found


class Told:
    """A target that says a text which is known, and takes the time that rounds cost."""

    def __init__(self, text: Text, costs: Costs) -> None:
        self.now, self._left, self._costs = 0, list(text.ids), costs

    def prefill(self, request: Request, reuse: int) -> Iterator[Verdict[Any]]:  # noqa: ARG002
        """The whole prompt at once."""
        yield Verdict(self._left[:1], rows=len(request.prompt))
        self.commit(1)

    def verify(self, proposal: Proposal[Any]) -> Verdict[Any]:
        """Drafts are right as long as they are the text."""
        kept = agreement(list(proposal.tokens), self._left)
        self.now += round(1e6 * self._costs[proposal.rows])
        return Verdict(self._left[: kept + 1], range(kept), proposal.rows, kept + 1)

    def commit(self, kept: int) -> None:
        """So much of it was said."""
        del self._left[:kept]


def agreement(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are the same before the first that is not."""
    pairs = zip(ours, theirs, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))


def play(text: Text, policy: Policy, costs: Costs) -> float:
    """Milliseconds of the text after its first token."""
    target, request = Told(text, costs), Request(text.prompt, len(text.ids))
    session: Any = target  # one that is never resumed, forked or closed
    steps = list(decode(request, session, [NgramDraft()], policy, lambda: target.now))
    assert [token for step in steps for token in step.tokens] == text.ids
    return target.now / 1e6


def auto(texts: Sequence[Text], costs: Costs, orders: int) -> list[list[float]]:
    """Milliseconds by text with the adaptive block, in so many orders of the texts."""
    spent: list[list[float]] = [[] for _ in texts]
    for order in range(orders):
        profile, places = Profile(), list(range(len(texts)))
        random.Random(order).shuffle(places)
        for place in places:
            spent[place].append(play(texts[place], Adaptive(BLOCK_SIZE, profile), costs))
    return spent


def slowest(found: Sequence[Text], spent: Sequence[Sequence[float]], costs: Costs) -> str:
    """How often a text of 64 tokens and more takes over 3 % more than plain decoding."""
    long = [(text, ms) for text, some in zip(found, spent, strict=True) for ms in some]
    shares = [costs[0] * (len(t.ids) - 1) / ms for t, ms in long if len(t.ids) >= LONG]
    under = sum(share < BOUND for share in shares)
    return (
        f"auto, text by text: {under} of {len(shares)} plays of {LONG} tokens and more are below "
        f"{BOUND} x plain, the worst is {min(shares, default=1.0):.3f}"
    )


def told(text: Text) -> list[int]:
    """[i]: how many of the look-up's drafts are right once i tokens are said."""
    draft, found = NgramDraft(), [0]
    draft.begin(Request(text.prompt, len(text.ids)), 0)
    for place, token in enumerate(text.ids, 1):
        draft.commit(Verdict([token]), 1)
        drafts = draft.propose(Plan(0, MOST, MOST)).tokens
        found.append(agreement(list(drafts), text.ids[place:]))
    return found


def any_place(text: Text) -> list[int]:
    """The same for the best place of the context where the last tokens stood together."""
    whole, start = text.prompt + text.ids, len(text.prompt)
    found = [0]
    for end in range(start + 1, len(whole) + 1):
        last = whole[end - SHORTEST : end]
        places = [p for p in range(SHORTEST, end) if whole[p - SHORTEST : p] == last]
        right = (agreement(whole[p : p + MOST], whole[end:]) for p in places)
        found.append(max(right, default=0))
    return found


def perfect(text: Text) -> list[int]:
    """The same for drafts that are always right."""
    return [MOST] * (len(text.ids) + 1)


def least(costs: Costs, right: Sequence[int]) -> float:
    """Milliseconds after the first token, with blocks chosen by who knows how far drafts go."""
    length = len(right) - 1
    spent = [0.0] * (length + 1)
    for said in range(length - 1, 0, -1):
        spent[said] = min(
            costs[rows] + spent[said + min(rows, right[said]) + 1]
            for rows in range(min(MOST, length - said - 1) + 1)
        )
    return spent[1]


CEILINGS: dict[str, Callable[[Text], list[int]]] = {
    "told": told,
    "any place": any_place,
    "perfect": perfect,
}


def share(text: Text) -> float:
    """Of the text's tokens after the first, how many the look-up has right where they come next."""
    return sum(right > 0 for right in told(text)[1:-1]) / max(1, len(text.ids) - 1)


def texts(flags: Any) -> list[Text]:
    """Greedy texts of the sets, from ``--texts`` if they are there; cut to ``--tokens``."""
    if not flags.texts.is_file():
        found = [asdict(text) for text in made(flags)]
        record.write(flags.texts, {"conditions": record.conditions(flags.threads), "texts": found})
    rows = [Text(**row) for row in json.loads(flags.texts.read_text(encoding="utf-8"))["texts"]]
    chosen = [text for text in rows if text.set in flags.sets.split(",")]
    return [replace(text, ids=text.ids[: flags.tokens]) for text in chosen]


def made(flags: Any) -> Iterator[Text]:
    """The same, by plain decoding."""
    options: Any = {"backend": flags.backend, "threads": flags.threads, "profile": False}
    with dflash.load(flags.target, NO_DRAFT, **options) as engine:
        for name in flags.sets.split(","):
            for prompt in sets.load(name, flags.prompts_per_set):
                ids = engine.encode(prompt.text)
                said = engine.generate(ids, max_tokens=flags.tokens, block_size=1, reuse=False)
                yield Text(prompt.id, name, list(ids), list(said.token_ids))


def gains(
    found: Sequence[Text], spent: Sequence[Sequence[float]], costs: Costs, flags: Any
) -> dict[str, list[float]]:
    """Milliseconds by text, column by column; ``plain`` comes first, then auto's mean."""
    columns = {"plain": [costs[0] * (len(text.ids) - 1) for text in found]}
    columns["auto"] = [fmean(some) for some in spent]
    for block in flags.blocks.split(","):
        columns[f"block {block}"] = [play(text, Fixed(int(block)), costs) for text in found]
    for name, rights in CEILINGS.items():
        columns[name] = [least(costs, rights(text)) for text in found]
    return columns


def groups(found: Sequence[Text], shares: Sequence[float]) -> dict[str, list[int]]:
    """Each text; those that copy so much and do not run in circles; each set; all."""
    made = {text.id: [place] for place, text in enumerate(found)}
    straight = [place for place, text in enumerate(found) if not record.in_circles(text.ids)]
    for low, high in pairwise(CLASSES):
        some = [place for place in straight if low <= shares[place] < high]
        made |= {f"copied {low} to {min(high, 1.0)}": some} if some else {}
    for name in dict.fromkeys(text.set for text in found):
        made[name] = [place for place, text in enumerate(found) if text.set == name]
    return {**made, "all": list(range(len(found)))}


def lines(found: Sequence[Text], columns: dict[str, list[float]]) -> Iterator[list[str]]:
    """A line a group, in multiples of plain decoding."""
    shares = [share(text) for text in found]
    for name, places in groups(found, shares).items():
        tokens = sum(len(found[place].ids) for place in places)
        copied = sum(shares[place] * len(found[place].ids) for place in places) / tokens
        spent = {column: sum(ms[place] for place in places) for column, ms in columns.items()}
        speeds = [f"{spent['plain'] / spent[column]:.2f}" for column in list(columns)[1:]]
        yield [name, str(len(places)), str(tokens), f"{copied:.2f}", *speeds]


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write JSON."""
    parser = record.parser(__doc__, tokens=96, prompts=40)
    parser.add_argument("--backend", default="gguf", help="what generates the texts")
    parser.add_argument("--sets", default=COPYING)
    parser.add_argument("--texts", type=Path, default=Path("runs/texts.json"))
    parser.add_argument("--costs", type=curve, default=curve(Q8_0), help="rows:ms,rows:ms,...")
    parser.add_argument("--blocks", default="4,8,16")
    parser.add_argument("--orders", type=int, default=5, help="of the texts, for auto")
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    found = texts(flags)
    spent = auto(found, flags.costs, flags.orders)
    columns, said = gains(found, spent, flags.costs, flags), slowest(found, spent, flags.costs)
    header, table = (
        ["text", "texts", "tokens", "copied", *list(columns)[1:]],
        list(lines(found, columns)),
    )
    print(markdown(header, table), said, sep="\n\n")
    result = {"conditions": before, "costs": flags.costs, "columns": header, "rows": table}
    result["auto"] = said
    record.write(flags.out or Path("runs/bench-replay.json"), result)


if __name__ == "__main__":
    main()
