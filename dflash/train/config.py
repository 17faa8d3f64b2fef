"""What a training run is asked to do, checked once."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dflash.checks import threads
from dflash.errors import ConfigError

DEFAULT_DECAY = {8: 4.0, 10: 5.0, 16: 7.0}  # gamma by block size, DFlash paper section 5

LARGEST_SEED = 2**32 - 1  # multiplied by a million it still fits torch's 64 bits


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The draft to be trained. ``None`` takes the value from the target."""

    layers: int = 3
    block_size: int = 8
    taps: tuple[int, ...] | Literal["auto"] = "auto"
    mask_token_id: int | None = None
    window: int | None = None  # sliding window on all layers but the last
    intermediate_size: int | None = None
    selector_rank: int | None = None  # of a DFlash2 draft; None: a DFlash v1 draft
    selector_top_k: int = 16
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    draft_vocab_size: int | None = None  # most frequent tokens the draft can say; None: all


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss. See `losses`."""

    decay: float | Literal["prefix", "uniform"] | None = None  # None: by block size
    head_vocab: int = 8192  # tokens the training head knows; 0 = all
    hidden_weight: float = 0.5
    soft_mix: float = 0.0
    selector_weight: float = 1.0  # of the second term, for DFlash2


@dataclass(frozen=True, slots=True)
class Schedule:
    """Optimisation: AdamW, linear warm-up, cosine to ``final`` x the peak."""

    steps: int = 8000
    learning_rate: float = 2e-3
    warmup: float = 0.04
    final: float = 0.02
    weight_decay: float = 0.01
    clip: float = 1.0
    sequences: int = 2  # a step
    anchors: int = 32  # blocks a sequence, at the native block size
    block_sizes: tuple[int, ...] = ()  # taken in turn, a step each; () = always the native size
    seed: int = 0
    selector_first: int = 0  # steps in which only the selector of a DFlash2 draft learns
    start_rate: float = 1.0  # learning rate of what ``start`` brought, as a share of the others'


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """One run: data in, draft folder out."""

    target: str
    data: tuple[Path, ...]
    out: Path
    shape: DraftShape = field(default_factory=DraftShape)
    objective: Objective = field(default_factory=Objective)
    schedule: Schedule = field(default_factory=Schedule)
    max_length: int = 512
    eval_every: int = 1000
    eval_prompts: int = 8
    checkpoint_every: int = 500
    valid_every: int = 50  # every n-th conversation is held out
    skip_malformed: bool = False
    resume: bool = False
    device: str | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = None
    start: Path | None = None  # a draft folder whose weights the new one begins with
    target_name: str | None = None  # what to write into the draft's config; default: the target

    def __post_init__(self) -> None:
        """Raise ConfigError for values that cannot work."""
        shape, schedule = self.shape, self.schedule
        for name, value, least in (
            ("--layers", shape.layers, 1),
            ("--block-size", shape.block_size, 2),
            ("--steps", schedule.steps, 1),
            ("--anchors", schedule.anchors, 1),
            ("--batch", schedule.sequences, 1),
            ("--max-length", self.max_length, 16),
            ("--eval-every", self.eval_every, 1),
            ("--checkpoint-every", self.checkpoint_every, 1),
            ("--window", shape.window or 1, 1),
            ("--threads", 1 if self.threads is None else self.threads, 1),
            ("--seed", schedule.seed, 0),
            ("--selector-rank", shape.selector_rank or 1, 1),
            ("--selector-first", schedule.selector_first, 0),
            ("--draft-vocab", shape.draft_vocab_size or shape.selector_top_k, shape.selector_top_k),
        ):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        threads("--threads", self.threads)
        wrong = [size for size in schedule.block_sizes if not 2 <= size <= shape.block_size]
        if wrong:
            raise ConfigError(
                f"--block-sizes {wrong}: each must be between 2 and --block-size {shape.block_size}"
            )
        if not self.data:
            raise ConfigError("no training data: pass --data FILE.jsonl")
        if schedule.seed > LARGEST_SEED:
            raise ConfigError(f"--seed must be at most {LARGEST_SEED}, got {schedule.seed}")
        if not 0 < schedule.learning_rate < math.inf:
            raise ConfigError(
                f"--learning-rate must be a number above 0, got {schedule.learning_rate}"
            )
        self._check_start()

    def _check_start(self) -> None:
        """Raise ConfigError for ways to begin that the draft or its start does not have."""
        shape, schedule = self.shape, self.schedule
        if not 0 <= schedule.start_rate < math.inf:
            raise ConfigError(f"--start-rate must be a number from 0, got {schedule.start_rate}")
        if schedule.start_rate != 1 and self.start is None:
            raise ConfigError("--start-rate is for what --start brings: name a draft with --start")
        if schedule.start_rate == 0 and shape.selector_rank is None:
            raise ConfigError("with --start-rate 0 nothing would learn: the start has all parts")
        if schedule.selector_first and shape.selector_rank is None:
            raise ConfigError(
                "--selector-first is for a DFlash2 draft: make it one with --selector-rank"
            )

    @property
    def decay(self) -> float | Literal["prefix", "uniform"]:
        """The effective loss decay: as given, else by block size (half the block otherwise)."""
        if self.objective.decay is not None:
            return self.objective.decay
        return DEFAULT_DECAY.get(self.shape.block_size, self.shape.block_size / 2)

    def to_json(self) -> dict[str, Any]:
        """Plain data for the log and the card."""
        plain = asdict(self)
        start = None if self.start is None else str(self.start)
        data = [str(path) for path in self.data]
        return plain | {"data": data, "out": str(self.out), "start": start}

    def identity(self) -> dict[str, Any]:
        """What a continuation takes over from the run it continues."""
        here = ("out", "resume", "threads", "device")
        return {key: value for key, value in self.to_json().items() if key not in here}


CHANGEABLE = {"schedule.steps", "eval_every", "eval_prompts", "checkpoint_every"}
"""Leaves of the identity that a continuation may have otherwise."""


def from_json(plain: Mapping[str, Any]) -> TrainConfig:
    """The config that ``to_json`` wrote. Raises ConfigError."""
    parts: dict[str, Any] = {"shape": DraftShape, "objective": Objective, "schedule": Schedule}
    given = {name: _as_tuple(value) for name, value in plain.items()}
    for name, kind in parts.items():
        given[name] = kind(**{key: _as_tuple(value) for key, value in plain[name].items()})
    for name in ("out", "start"):
        if given.get(name) is not None:
            given[name] = Path(given[name])
    return TrainConfig(**{**given, "data": tuple(map(Path, plain["data"]))})


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def leaves(plain: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested settings as one level: ``{"shape.layers": 3}``."""
    found: dict[str, Any] = {}
    for name, value in plain.items():
        nested = isinstance(value, Mapping)
        found |= leaves(value, f"{above}{name}.") if nested else {above + name: value}
    return found


def option_of(path: str) -> str:
    """The command's parameter behind a leaf."""
    return {
        "target": "model",
        "schedule.sequences": "batch",
        "shape.draft_vocab_size": "draft_vocab",
    }.get(path, path.rpartition(".")[2])


def continued(config: TrainConfig, saved: Mapping[str, Any], told: Collection[str]) -> TrainConfig:
    """``config`` with everything that no flag (``told``: their parameters) said as it was saved."""
    now = config.to_json()
    for path, value in leaves(saved).items():
        above, _, name = path.rpartition(".")
        place = now[above] if above else now
        if name in place and option_of(path) not in told:
            place[name] = value
    if "model" in told:
        now["target_name"] = config.target_name
    return from_json(now)
