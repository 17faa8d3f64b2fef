"""Where the time of a round goes, part by part, against what this machine could do at best.

    python -m bench.profile --block-size 8 --rounds 40

Rounds of one text under torch's profiler. Every operator's own time is given to the phase it ran in
(draft, verify, or the loop around them) and to a part: the products of the layers and of the head,
attention, writes to caches, elementwise work, the choice of tokens. "calls" is what operators that
compute nothing (views, allocations) take, "python" is when no operator ran at all; both together
are the share of a round without a tensor kernel: a kernel runs while an operator that computes is
in torch's dispatcher, its own fixed cost included.

The profiler lengthens exactly that share. So it is measured by a clock that adds almost nothing
(`gaps.py`, where there is a compiler), and, beside it, from the profiler's figures less its cost of
one operator, measured on a loop of small ones, for each operator in a gap.

Bounds: the weights of a part read once at the measured bandwidth (the better of a copy and of a
product with one row), or its operations at the speed of a large product, whichever is longer.
On CUDA nothing is replayed: a profiler gives the kernels of a graph to no operator.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import dflash
from bench import record, sets
from bench.gaps import Gaps, Rounds, added_by, gaps, observer, why_not
from bench.parts import BODY, CALLS, DRAFT, HEAD, IDLE, LOOP, PYTHON, VERIFY, computes, part_of
from dflash.bench.roofline import ITEM, ceilings
from dflash.bench.table import markdown
from dflash.core.protocols import Pair
from dflash.engine import Engine

TEXTS = 4  # times that the text is run with the clock in the dispatcher
FUNCTION = 2  # torch's number for functions that its interpreter runs: they are no operators
WIDE = 16384  # rows of the matrix whose reading is timed


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a round."""

    phase: str
    part: str
    ms: float  # a round
    bound_ms: float | None = None  # no product can take less
    by: str = ""  # memory or arithmetic


@dataclass(frozen=True, slots=True)
class Notes:
    """What the profiler noted of a round, and what that costs."""

    operators: float
    in_gaps: float  # of them, those that no computing operator called
    added_us: float  # by the profiler, an operator


@dataclass(frozen=True, slots=True)
class Profiled:
    """A round's parts and their sum."""

    parts: list[Part]
    rounds: int
    round_ms: float  # under the profiler
    quiet_round_ms: float  # median without it, same text and block
    notes: Notes
    gaps: Gaps | None  # None = no compiler

    @property
    def idle_share(self) -> float:
        """Of a profiled round: no tensor kernel running."""
        return sum(p.ms for p in self.parts if p.part in IDLE) / self.round_ms

    @property
    def quiet_idle_share(self) -> float:
        """The same with the profiler's cost of each operator taken off."""
        added = self.notes.added_us / 1e3
        idle = self.idle_share * self.round_ms - added * self.notes.in_gaps
        return idle / (self.round_ms - added * self.notes.operators)


class Watched:
    """A pair whose sessions say to the profiler what they do."""

    def __init__(self, inner: Pair) -> None:
        """``inner`` belongs to somebody else and stays open."""
        self.inner = inner

    def open_target(self, capacity: int) -> Any:
        """A session whose verify and commit are named."""
        return Named(self.inner.open_target(capacity), VERIFY)

    def open_drafts(self, capacity: int) -> list[Any]:
        """Sessions whose propose and commit are named."""
        return [Named(session, DRAFT) for session in self.inner.open_drafts(capacity)]

    def close(self) -> None:
        """Nothing of its own."""

    def __getattr__(self, name: str) -> Any:
        """The rest is the inner pair's."""
        return getattr(self.inner, name)


class Named:
    """A session whose work carries the name of a phase."""

    def __init__(self, inner: Any, phase: str) -> None:
        """``phase`` is draft or verify."""
        self._inner, self._phase = inner, phase

    def __getattr__(self, name: str) -> Any:
        """The inner session's; the round's own methods inside a range of the profiler."""
        found = getattr(self._inner, name)
        if name not in ("propose", "verify", "commit"):
            return found

        def named(*given: Any) -> Any:
            from torch.profiler import record_function

            with record_function(self._phase):
                return found(*given)

        return named


def seen(engine: Engine) -> Engine:
    """An engine over the same pair whose rounds can be watched."""
    return Engine(cast(Pair, Watched(engine.pair)))


def rounds(engine: Engine, prompt: Sequence[int], flags: Namespace) -> Iterator[Any]:
    """Chunks after the first two: every ``next`` is one round."""
    chunks = engine.stream(
        list(prompt),
        max_tokens=flags.tokens,
        block_size=flags.block_size,
        ignore_eos=True,
        reuse=flags.reuse,
    )
    for _ in range(2):
        next(chunks)
    return chunks


def timed(engine: Engine, prompt: Sequence[int], flags: Namespace) -> list[float]:
    """Milliseconds of each round, nobody watching."""
    found, chunks = [], rounds(engine, prompt, flags)
    for _ in range(flags.rounds):
        start = time.perf_counter()
        if next(chunks, None) is None:
            break
        found.append(1e3 * (time.perf_counter() - start))
    return found


def watched(engine: Engine, prompt: Sequence[int], flags: Namespace) -> tuple[Any, int, float]:
    """(profiler's events, rounds, milliseconds of all); ``engine`` is over a `Watched` pair."""
    chunks, count = rounds(engine, prompt, flags), 0
    with _profile(_on_cuda(engine)) as watch, _clock() as spent:
        for _ in range(flags.rounds):
            count += next(chunks, None) is not None
    return watch.events(), count, spent[0]


def _profile(cuda: bool) -> Any:
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    return profile(activities=kinds, record_shapes=True)


def notes_of(events: Any, count: int, cuda: bool) -> Notes:
    """Of the ``events`` of ``count`` rounds."""
    found = [event for event in events if _is_operator(event)]
    inside = sum(_is_operator(e.cpu_parent) and computes(e.cpu_parent.name) for e in found)
    added = added_by(lambda: _profile(cuda))
    return Notes(len(found) / count, (len(found) - inside) / count, added / 1e3)


def _is_operator(event: Any) -> bool:
    return (
        event is not None
        and event.name not in (DRAFT, VERIFY)
        and event.scope != FUNCTION  # what operators lie between in there is a gap
        and str(event.device_type) == "DeviceType.CPU"
    )


def gaps_of(engine: Engine, prompt: Sequence[int], flags: Namespace) -> Gaps | None:
    """Of rounds without the profiler; None where the clock cannot be built."""
    if why_not() or _on_cuda(engine):
        return None
    with observer() as watch:
        found = Rounds(watch)
        for _ in range(TEXTS):
            chunks = rounds(engine, prompt, flags)
            found.run(partial(next, chunks, None), flags.rounds)
    return gaps(found, computes)


@contextmanager
def _clock() -> Iterator[list[float]]:
    spent, start = [0.0], time.perf_counter()
    yield spent
    spent[0] = 1e3 * (time.perf_counter() - start)


def times(events: Any, vocabulary: int, cuda: bool) -> Counter[tuple[str, str]]:
    """Milliseconds by (phase, part), "python" apart."""
    found: Counter[tuple[str, str]] = Counter()
    for event in events:
        if not _is_operator(event):
            continue
        part = part_of(event.name, event.input_shapes, vocabulary)
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        if cuda and part == CALLS:
            continue
        found[_phase(event), part] += spent / 1e3
    return found


def _phase(event: Any) -> str:
    while event is not None and event.name not in (DRAFT, VERIFY):
        event = event.cpu_parent
    return LOOP if event is None else str(event.name)


def weights(pair: Any) -> dict[tuple[str, str], int]:
    """Numbers in the matrices of each product; the embedding table is looked up, not multiplied."""
    from torch import nn

    target, draft = pair.target, pair.draft

    def size(module: Any) -> int:
        return int(getattr(module, "in_features", 0) * getattr(module, "out_features", 0))

    whole = sum(size(m) for m in target.model.modules() if not isinstance(m, nn.Embedding))
    head = size(target.head)
    found = {(VERIFY, BODY): whole - head, (VERIFY, HEAD): head}
    if draft is not None:
        found[DRAFT, BODY] = sum(size(m) for m in draft.model.modules())
        reduced = draft.tables.target_ids
        rows = target.vocab_size if reduced is None else reduced.numel()
        found[DRAFT, HEAD] = rows * draft.spec.hidden_size
    return found


def bandwidth(pair: Pair) -> float:
    """Bytes a second that a product with one row reads."""
    import torch

    device = pair.runs_on().get("device", "cpu").split(" ")[0]
    matrix, row = torch.ones(WIDE, 4096, device=device), torch.ones(4096, device=device)
    best = float("inf")
    for _ in range(6):
        start = time.perf_counter()
        float(torch.mv(matrix, row)[0])
        best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best


def measure(engine: Engine, flags: Namespace) -> tuple[Profiled, dict[str, float]]:
    """The map of a round, and the ceilings it is held against."""
    prompt = engine.encode(sets.load("gsm8k", 3)[1].text)
    cuda, pair = _on_cuda(engine), cast(Any, engine.pair)
    timed(engine, prompt, flags)
    alone = timed(engine, prompt, flags)
    events, count, spent = watched(seen(engine), prompt, flags)
    alone += timed(engine, prompt, flags)
    found, notes = times(events, pair.vocab_size, cuda), notes_of(events, count, cuda)
    without = gaps_of(engine, prompt, flags)
    top = ceilings(engine.pair)
    reading = max(top.bytes_per_second, bandwidth(engine.pair))
    sizes, item = weights(pair), ITEM.get(top.dtype, 4)
    parts = []
    for (phase, part), ms in sorted(found.items(), key=lambda entry: -entry[1]):
        bound, by = None, ""
        if (phase, part) in sizes:
            number = sizes[phase, part]
            limits = {
                "memory": 1e3 * number * item / reading,
                "arithmetic": 2e3 * number * flags.block_size / top.flops_per_second,
            }
            by = max(limits, key=limits.__getitem__)
            bound = limits[by]
        parts.append(Part(phase, part, ms / count, bound, by))
    spent /= count
    idle = spent - sum(part.ms for part in parts)
    parts.append(Part(LOOP, PYTHON, idle))
    made = {"bytes_per_second": reading, "flops_per_second": top.flops_per_second}
    return Profiled(parts, count, spent, median(alone), notes, without), made


def _on_cuda(engine: Engine) -> bool:
    return engine.pair.runs_on().get("device", "cpu").startswith("cuda")


def table_of(found: Profiled, top: dict[str, float]) -> str:
    """For the terminal."""
    rows = [
        [
            f"{part.phase}: {part.part}",
            f"{part.ms:.2f}",
            f"{100 * part.ms / found.round_ms:.0f} %",
            "" if part.bound_ms is None else f"{part.bound_ms:.2f}",
            "" if part.bound_ms is None else f"{100 * part.bound_ms / part.ms:.0f} %",
            part.by,
        ]
        for part in found.parts
    ]
    head = ["part of a round", "ms", "share", "bound ms", "of the bound", "bound by"]
    return (
        f"{markdown(head, rows)}\n\n"
        f"a round takes {found.quiet_round_ms:.1f} ms, {found.round_ms:.1f} under the profiler; "
        f"no tensor kernel runs in {100 * found.idle_share:.1f} % of the latter, "
        f"{100 * found.quiet_idle_share:.1f} % less {found.notes.in_gaps:.0f} notes of "
        f"{found.notes.added_us:.2f} us\n{_said(found.gaps)}\n"
        f"this machine: {top['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{top['flops_per_second'] / 1e9:.0f} GFLOP/s"
    )


def _said(found: Gaps | None) -> str:
    if found is None:
        return f"by the clock in the dispatcher: not measured. {why_not()}"
    low, high = found.quarters
    return (
        f"by the clock in the dispatcher no tensor kernel runs in {100 * found.share:.1f} % of a "
        f"round (half of {found.rounds} rounds: {100 * low:.1f} to {100 * high:.1f}), "
        f"{found.gap_ms:.2f} of {found.round_ms:.1f} ms; rounds in turn without it "
        f"{found.bare_ms:.1f} ms; {found.operators:.0f} operators, {found.added_us:.2f} us of the "
        f"clock's at each taken off. In place it is {found.in_place_us:.2f} us, give or take "
        f"{found.in_place_error_us:.2f} ({found.twin_us:.2f} for a second copy), and the share "
        f"less that {100 * found.in_place_share:.1f} %"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write JSON."""
    parser = record.parser(__doc__, tokens=320, prompts=1)
    parser.add_argument("--block-size", type=int, default=8, help="anchor included")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", default=None)
    flags = parser.parse_args(arguments)
    flags.reuse = False
    before = record.conditions(flags.threads)
    asked: Any = {"threads": flags.threads, "dtype": flags.dtype, "profile": False}
    with dflash.load(flags.target, flags.draft, cuda_graphs=False, **asked) as engine:
        found, top = measure(engine, flags)
    print(table_of(found, top))
    result = {**asdict(found), "idle_share": found.idle_share}
    result["quiet_idle_share"] = found.quiet_idle_share
    out = flags.out or Path("runs/profile.json")
    record.write(out, {"conditions": before, "ceilings": top, **result})


if __name__ == "__main__":
    main()
