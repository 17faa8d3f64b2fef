"""Ordinary decoding against speculative decoding of one pair: same prompt, seed and stopping rules.

Both arms run in one process on the same weights and take turns, so that what disturbs the machine
disturbs both. Token ids are compared one by one. Nothing here decodes: the engine does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dflash.blocks import choose
from dflash.config import MTP, NGRAM, NO_DRAFT, split_draft
from dflash.core.stats import Stats
from dflash.drafts.spec import read_spec
from dflash.engine import Engine
from dflash.errors import ConfigError
from dflash.gguf_file import is_gguf, read_header
from dflash.results import Generation

ALGORITHMS = ("dflash", "dflash2", "dspark", "eagle3", "mtp", "ngram")
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Trial:
    """What is run: ``sizes`` are drafts a round, ``options`` keywords of ``Engine.generate``."""

    prompt: str
    sizes: Sequence[int]
    options: Mapping[str, Any]
    runs: int = 3
    warmup: int = 32  # tokens that each arm decodes before it counts
    draft_tree: int = 0  # nodes of a tree as deep as an arm's drafts; 0 = chains


@dataclass(frozen=True, slots=True)
class Arm:
    """One way of decoding, run several times."""

    draft_tokens: int  # 0 = ordinary decoding
    runs: tuple[float, ...]  # tokens a second after the first token
    tokens_per_second: float  # the median run's
    deterministic: bool  # all runs gave the same ids
    tokens_match: bool  # those of ordinary decoding
    first_divergence: int | None  # place in the output; None = none
    speedup: float  # medians
    rollbacks: int  # rounds that rejected a draft
    stats: Stats  # of the median run
    text: str

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return {**asdict(self), "stats": self.stats.to_json()}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result: the first arm is ordinary decoding."""

    model: str
    draft: str | None
    backend: str
    algorithm: str  # what the draft really is
    block_size: int | None  # native, anchor included
    selector_top_k: int  # 0 = no selector
    layout: str  # what the draft's pass puts out
    prompt_tokens: int
    arms: tuple[Arm, ...]
    draft_tree: int = 0  # nodes of a round's tree; 0 = chains
    clamped_from: tuple[int, ...] = ()  # drafts a round asked for, more than the draft proposes

    @property
    def same(self) -> bool:
        """Whether every arm gave the ids of ordinary decoding, every time."""
        return all(arm.tokens_match and arm.deterministic for arm in self.arms)

    def to_json(self) -> dict[str, Any]:
        """Plain values by field name."""
        return {**asdict(self), "arms": [arm.to_json() for arm in self.arms], "same": self.same}


def kind_of_draft(draft: str | None) -> tuple[str, int]:
    """(method of a draft by its file or folder, candidates of its selector)."""
    if draft is None or draft == NGRAM:
        return NGRAM, 0
    draft, _ = split_draft(draft)  # a look-up that joins in is told by the draft's name
    if draft == MTP:
        return MTP, 0
    if is_gguf(draft):
        header = read_header(draft)
        top_k = int(header.own("selector_top_k", 0))
        last = "markov_w1.weight" in header.tensors or header.own("sample_from_anchor")
        kind = "dspark" if last else header.architecture
        return ("dflash2" if top_k and kind == "dflash" else kind), top_k
    if not Path(draft).expanduser().exists():
        return "dflash", 0  # a hub id, or the toy's: opening it will tell
    spec = read_spec(Path(draft).expanduser())
    nested = spec.raw.get("dflash_config") or spec.raw
    return spec.kind, int(nested.get("selector_top_k") or 0)


def settle_algorithm(algorithm: str | None, draft: str | None) -> tuple[str, str, int]:
    """(draft to open, what it is, its selector's candidates) for what was asked.

    None: what the draft is. ``dflash`` renames itself where the file has a selector. Raises
    ConfigError for a draft of another method, before anything is loaded.
    """
    if algorithm not in (None, *ALGORITHMS):
        raise ConfigError(f"--algorithm must be one of {', '.join(ALGORITHMS)}, got {algorithm!r}")
    if draft is None and algorithm in (MTP, NGRAM):
        return algorithm, algorithm, 0
    if draft == NO_DRAFT or (draft is None and algorithm is None):
        raise ConfigError("there is no draft to compare with: name one (--draft-model)")
    if draft is None:
        raise ConfigError(f"--algorithm {algorithm} needs --draft-model, the draft to compare with")
    kind, top_k = kind_of_draft(draft)
    if algorithm is None:
        return draft, kind, top_k
    if algorithm == "dflash2" and kind == "dflash":
        raise ConfigError(
            f"--algorithm dflash2 requires a draft with a selector (selector_top_k above 0), and "
            f"{draft} has none: it is a DFlash v1 draft, --algorithm dflash"
        )
    if kind != algorithm and (algorithm, kind) != ("dflash", "dflash2"):
        raise ConfigError(
            f"--algorithm {algorithm} was asked for, and {draft} is of another method: say "
            f"--algorithm {kind}, or leave it out"
        )
    return draft, kind, top_k


def compare(
    engine: Engine,
    trial: Trial,
    kind: tuple[str, int] = (NGRAM, 0),
    note: Note = lambda _: None,
) -> Comparison:
    """Run ordinary decoding and one arm for each number of drafts, in turn.

    Prompt, seed, temperature and stopping rules are the same for every arm. Drafts above the
    native block are clamped, which ``note`` and ``clamped_from`` say. ``kind`` is what
    `kind_of_draft` says.
    """
    pair = engine.pair
    choose(1, pair, tree=trial.draft_tree)  # refused now, and not after the ordinary arm
    most = (pair.draft_block_size or 1) - 1
    wanted = [0, *dict.fromkeys(min(size, most) for size in trial.sizes if min(size, most) > 0)]
    clamped = tuple(dict.fromkeys(size for size in trial.sizes if size > most))
    if clamped:
        note(f"this draft proposes {most} at most: {', '.join(map(str, clamped))} run as {most}")
    found: dict[int, list[Generation]] = {size: [] for size in wanted}
    for size in wanted:
        note(f"warming up with {size} drafts")
        _run(engine, trial, size, max_tokens=trial.warmup)
    for turn in range(trial.runs):
        for size in wanted:
            note(f"run {turn + 1} of {trial.runs} with {size} drafts")
            found[size].append(_run(engine, trial, size))
    plain = found[0]
    rate = median(one.stats.tokens_per_second for one in plain)
    return Comparison(
        model=pair.target_name,
        draft=pair.draft_name,
        backend=pair.backend,
        algorithm=kind[0],
        block_size=pair.draft_block_size,
        selector_top_k=kind[1],
        layout=_layout(*kind),
        prompt_tokens=plain[0].stats.prompt_tokens,
        arms=tuple(_arm(size, found[size], plain[0], rate) for size in wanted),
        draft_tree=trial.draft_tree,
        clamped_from=clamped,
    )


def _run(engine: Engine, trial: Trial, size: int, **changes: Any) -> Generation:
    tree = trial.draft_tree if size else 0
    options: Any = {**trial.options, "draft_tree": tree, **changes}
    return engine.generate(trial.prompt, block_size=size + 1, reuse=False, **options)


def _arm(size: int, runs: Sequence[Generation], plain: Generation, rate: float) -> Arm:
    speeds = [one.stats.tokens_per_second for one in runs]
    middle = sorted(runs, key=lambda one: one.stats.tokens_per_second)[len(runs) // 2]
    places = [divergence(one.token_ids, plain.token_ids) for one in runs]
    apart = [place for place in places if place is not None]
    stats = middle.stats
    return Arm(
        draft_tokens=size,
        runs=tuple(speeds),
        tokens_per_second=median(speeds),
        deterministic=len({one.token_ids for one in runs}) == 1,
        tokens_match=not apart,
        first_divergence=min(apart, default=None),
        speedup=median(speeds) / rate if rate else 0.0,
        rollbacks=stats.rollbacks,
        stats=stats,
        text=middle.text,
    )


def divergence(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place where two outputs differ; None where they are the same."""
    if list(one) == list(other):
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _layout(kind: str, top_k: int) -> str:
    if kind == NGRAM:
        return "looked-up tokens"
    return f"lattice of {top_k} candidates a place" if top_k else "a row of logits a place"
