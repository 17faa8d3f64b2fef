"""auto against every fixed block and plain decoding, on text that suits drafts and text that hurts.

    python -m bench.policy --prompts-per-set 4 --tokens 96 --repeats 5

One process, greedy, float32, arms interleaved as in bench.demo. Besides the prompt sets: text that
repeats itself, random tokens, and random tokens under a draft whose every proposal is wrong, the
worst there is. auto has to reach 95 % of the best fixed block everywhere, and must nowhere take
more than 1.03 of plain decoding's time. With --seconds a group is repeated until that is decided.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import dflash
from bench import record, sets
from bench.arms import Arm, engine_arm
from bench.demo import AGAIN, run_until, split
from bench.table import markdown
from dflash.bench.arms import PLAIN
from dflash.bench.paired import Ratio, Runs, alike, ratio, seconds
from dflash.core.protocols import Pair
from dflash.core.types import Plan, Proposal
from dflash.engine import Engine

AUTO = "auto"
OVER_BEST, OVER_PLAIN = 0.95, 1 / 1.03
RANDOM_LENGTH, WORDS = 48, "the river and the old road went under a blue stone house"
REPETITIVE, RANDOM, CONTRARY = "repetitive", "random tokens", "never right"


@dataclass(frozen=True, slots=True)
class Line:
    """What came out on one group of texts."""

    group: str
    texts: int
    circles: int  # texts that ran in circles, left out of the prompt sets
    plain_rate: float  # tokens/s
    fixed: dict[str, float]  # block -> x plain
    best: str  # the fastest fixed block
    over_plain: Ratio  # auto's
    over_best: Ratio
    committed: float  # per verify pass of auto

    @property
    def verdict(self) -> tuple[str, str]:
        """Whether auto reached the best fixed block's bound, and plain decoding's."""
        return self.over_best.verdict(OVER_BEST), self.over_plain.verdict(OVER_PLAIN)


class Contrary:
    """A pair whose drafts are never right: each proposed token is moved on by one id."""

    def __init__(self, inner: Pair) -> None:
        """``inner`` belongs to somebody else and stays open."""
        self.inner = inner

    def open_drafts(self, capacity: int) -> list[Any]:
        """Sessions that cost what the real ones cost."""
        vocabulary = self.inner.vocab_size
        return [Wrong(draft, vocabulary) for draft in self.inner.open_drafts(capacity)]

    def close(self) -> None:
        """Nothing of its own."""

    def __getattr__(self, name: str) -> Any:
        """The rest is the inner pair's."""
        return getattr(self.inner, name)


class Wrong:
    """A draft session that proposes the tokens after the ones it means."""

    def __init__(self, inner: Any, vocabulary: int) -> None:
        """``inner`` is the session that means them."""
        self.inner, self._vocabulary = inner, vocabulary

    def propose(self, plan: Plan) -> Proposal[Any]:
        """As many as ``inner``, and as dear."""
        proposal = self.inner.propose(plan)
        tokens: Any = proposal.tokens
        moved: Any = (
            [(token + 1) % self._vocabulary for token in tokens]
            if isinstance(tokens, Sequence)
            else (tokens + 1) % self._vocabulary
        )
        return replace(proposal, tokens=moved)

    def __getattr__(self, name: str) -> Any:
        """The rest is the session's."""
        return getattr(self.inner, name)


def make_arms(plain: Engine, engine: Engine, blocks: Sequence[int]) -> dict[str, Arm]:
    """Plain decoding by one engine; fixed blocks and auto by the other."""
    native = engine.pair.draft_block_size or 1
    arms = {PLAIN: engine_arm(plain, 1)}
    arms |= {f"block {size}": engine_arm(engine, size) for size in blocks if size <= native}
    return {**arms, AUTO: engine_arm(engine, AUTO)}


def repetitive(engine: Engine, count: int) -> list[list[int]]:
    """Lines that say the same over and over; a small model goes on so."""
    words = WORDS.split()
    lines = (" ".join(words[place:] + words[:place]) for place in range(count))
    return [engine.encode(f"{line}. " * 8, chat_template=False) for line in lines]


def scrambled(engine: Engine, count: int) -> list[list[int]]:
    """Prompts of random tokens."""
    rng = random.Random(0)
    size = engine.pair.vocab_size
    return [[rng.randrange(size) for _ in range(RANDOM_LENGTH)] for _ in range(count)]


def summarise(group: str, texts: Sequence[Runs], circles: int = 0) -> Line:
    """The line of a group."""
    blocks = [arm for arm in texts[0] if arm not in (PLAIN, AUTO)]
    fixed = {arm: ratio(texts, arm, PLAIN).value for arm in blocks}
    best = max(fixed, key=fixed.__getitem__)
    stats = [text[AUTO][-1].stats for text in texts]
    rounds = [(s.rounds, s.mean_committed) for s in stats if s is not None and s.rounds]
    passes = sum(count for count, _ in rounds)
    rates = [run.rate for text in texts for run in text[PLAIN]]
    return Line(
        group=group,
        texts=len(alike(texts, list(texts[0]))),
        circles=circles,
        plain_rate=sum(rates) / len(rates),
        fixed=fixed,
        best=best,
        over_plain=ratio(texts, AUTO, PLAIN),
        over_best=ratio(texts, AUTO, best),
        committed=sum(count * mean for count, mean in rounds) / passes if passes else 0.0,
    )


def measure(engine: Engine, flags: Any) -> dict[str, list[Runs]]:
    """Runs by group, warm-up left out."""
    blocks = [int(size) for size in flags.blocks.split(",")]
    arms = make_arms(engine, engine, blocks)
    contrary = make_arms(engine, Engine(cast(Pair, Contrary(engine.pair))), blocks)
    count = flags.prompts_per_set
    noise = scrambled(engine, count)
    groups: dict[str, tuple[list[list[int]], Mapping[str, Arm]]] = {
        name: ([engine.encode(p.text) for p in sets.load(name, count)], arms)
        for name in sets.HELD_OUT
    }
    groups[REPETITIVE] = (repetitive(engine, count), arms)
    groups[RANDOM], groups[CONTRARY] = (noise, arms), (noise, contrary)
    for arm in [*arms.values(), *contrary.values()]:
        arm(engine.encode(sets.load("mbpp", 1)[0].text), min(32, flags.tokens))
    return {
        name: run_until(partial(_sure, name), prompts, with_arms, flags)
        for name, (prompts, with_arms) in groups.items()
        if name in flags.groups.split(",")
    }


def line_of(name: str, texts: Sequence[Runs]) -> Line:
    """The line of a group; of a prompt set without the texts in circles, where any are left."""
    if name in (REPETITIVE, RANDOM, CONTRARY):
        return summarise(name, texts)
    good, circles = split(texts)
    return summarise(name, good or texts, len(circles))


def _sure(name: str, texts: Sequence[Runs]) -> bool:
    return "unsure" not in line_of(name, texts).verdict


def table_of(lines: Sequence[Line]) -> str:
    """For the terminal and the README: blocks and auto in multiples of plain decoding."""
    blocks = list(lines[0].fixed)
    head = ["text", "texts", "plain tok/s", *blocks, "auto (95 %)", "auto / best (95 %)"]
    rows = [
        [
            line.group,
            line.texts,
            f"{line.plain_rate:.1f}",
            *(f"{line.fixed[block]:.3f}" for block in blocks),
            line.over_plain,
            line.over_best,
            f"{line.committed:.2f}",
            *line.verdict,
        ]
        for line in lines
    ]
    return markdown([*head, "committed", "near the best", "never slower"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=96, prompts=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", default="2,3,4,6,8")
    everything = [*sets.HELD_OUT, REPETITIVE, RANDOM, CONTRARY]
    parser.add_argument("--groups", default=",".join(everything), help="several with commas")
    parser.add_argument("--seconds", type=float, default=0, help=AGAIN)
    flags = parser.parse_args(arguments)
    before = record.conditions(flags.threads)
    with dflash.load(
        flags.target, flags.draft, threads=flags.threads, dtype="float32", profile=False
    ) as engine:
        results = measure(engine, flags)
    lines = [line_of(name, texts) for name, texts in results.items()]
    print(table_of(lines))
    record.write(
        flags.out or Path("runs/bench-policy.json"),
        {
            "conditions": before,
            "lines": [{**asdict(line), "verdict": line.verdict} for line in lines],
            "decode_seconds": {name: seconds(texts) for name, texts in results.items()},
        },
    )


if __name__ == "__main__":
    main()
