"""Speculative decoding under the names of decoders people know: a config, a decoder with states.

    config = SpeculativeConfigBuilder().draft_tokens_per_step(6).min_acceptance_rate(0.4).build()
    with SpeculativeDecoder("path/to/target", "path/to/draft", config) as decoder:
        tokens = decoder.generate(prompt_tokens)
        print(decoder.state, decoder.stats.acceptance_rate)

A fixed number of drafts is proposed each round and given up while too few are accepted; what
decides by measured time instead is ``block_size="auto"`` of ``dflash.load``. The text is that of
plain decoding either way. There is no loop in this file: the engine has it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Self, cast

from dflash.closing import Closing
from dflash.config import NO_DRAFT, GenerateConfig, split_draft
from dflash.core.policy import State
from dflash.core.protocols import Pair
from dflash.core.stats import Stats
from dflash.engine import Engine, load
from dflash.errors import ConfigError, UnknownName
from dflash.ngram_pair import NgramPair
from dflash.opening import pair_names
from dflash.registry import WRAPPERS

if TYPE_CHECKING:
    from typing import Unpack

    from dflash.config import GenerateOptions

__all__ = [
    "SpeculativeConfig",
    "SpeculativeConfigBuilder",
    "SpeculativeDecoder",
    "SpeculativeStats",
    "State",
]

ACCEPTANCE = 0.3  # share below which it falls back, where nobody says another


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How to speculate. Raises ConfigError for values that cannot be meant.

    draft_tokens_per_step  drafts a round, the anchor not counted (block_size - 1)
    max_new_tokens         tokens generated at most
    min_acceptance_rate    below this share of accepted drafts it falls back to plain decoding;
                           judged over the last 32 drafted tokens and never before 16. A tree is
                           not given up, so its default gives way to a ``draft_tree``
    strict_mode            keep a draft only where it equals the target's own sample; off:
                           rejection sampling. Both leave the target's distribution exact
    """

    draft_tokens_per_step: int = 4
    max_new_tokens: int = 128
    min_acceptance_rate: float = ACCEPTANCE
    strict_mode: bool = False

    def __post_init__(self) -> None:
        """Refuse impossible values."""
        for name in ("draft_tokens_per_step", "max_new_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be a whole number of 1 or more, got {value!r}")
        if self.min_acceptance_rate is None:
            raise ConfigError("min_acceptance_rate must lie between 0 (never fall back) and 1")
        GenerateConfig(min_acceptance_rate=self.min_acceptance_rate)
        if not isinstance(self.strict_mode, bool):
            raise ConfigError(f"strict_mode must be True or False, got {self.strict_mode!r}")

    @classmethod
    def conservative(cls) -> SpeculativeConfig:
        """Few drafts, given up early."""
        return cls(draft_tokens_per_step=2, min_acceptance_rate=0.5, strict_mode=True)

    @classmethod
    def aggressive(cls) -> SpeculativeConfig:
        """Many drafts, held on to."""
        return cls(draft_tokens_per_step=8, min_acceptance_rate=0.15, strict_mode=False)

    @classmethod
    def profile(cls, name: str) -> SpeculativeConfig:
        """``conservative`` or ``aggressive``. Raises UnknownName."""
        if name not in ("conservative", "aggressive"):
            raise UnknownName(f"unknown profile {name!r}. Known: aggressive, conservative.")
        found: SpeculativeConfig = getattr(cls, name)()
        return found

    def options(self) -> GenerateOptions:
        """The same as keywords of ``Engine.generate``."""
        return {
            "max_tokens": self.max_new_tokens,
            "draft_tokens": self.draft_tokens_per_step,
            "min_acceptance_rate": self.min_acceptance_rate,
            "strict_mode": self.strict_mode,
        }


class SpeculativeConfigBuilder:
    """Sets one field after the other; ``build`` checks them."""

    def __init__(self, start: SpeculativeConfig | None = None) -> None:
        """``start`` gives the values that are not set."""
        self._start = start or SpeculativeConfig()
        self._values: dict[str, Any] = {}

    def draft_tokens_per_step(self, value: int) -> Self:
        """Drafts a round, the anchor not counted."""
        return self._set(draft_tokens_per_step=value)

    def max_new_tokens(self, value: int) -> Self:
        """Tokens generated at most."""
        return self._set(max_new_tokens=value)

    def min_acceptance_rate(self, value: float) -> Self:
        """Share of accepted drafts below which it falls back."""
        return self._set(min_acceptance_rate=value)

    def strict_mode(self, value: bool = True) -> Self:
        """Whether a draft must equal the target's own sample."""
        return self._set(strict_mode=value)

    def build(self) -> SpeculativeConfig:
        """The config. Raises ConfigError."""
        return replace(self._start, **self._values)

    def _set(self, **value: Any) -> Self:
        self._values |= value
        return self


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    """Counts of one generation, and what they say about its speed."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafted: int = 0  # tokens proposed and judged
    accepted: int = 0  # of those, kept; the target's own token that ends each block is not in it
    fallback_tokens: int = 0  # tokens of passes without a draft: the prefill's, and plain steps'
    target_forward_passes: int = 0  # the prefill counts as one
    tokens_per_second: float = 0.0  # after the prefill
    measured_speedup: float | None = None  # over plain steps of this pair; None = none timed yet

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0.0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def estimated_speedup(self) -> float:
        """(accepted + fallback tokens) / target forward passes; 1.0 before the first pass.

        1.0 for plain decoding. It leaves out the token that the target adds to each block and the
        cost of everything, so it is no measurement: that is ``measured_speedup``.
        """
        if not self.target_forward_passes:
            return 1.0
        return (self.accepted + self.fallback_tokens) / self.target_forward_passes

    @classmethod
    def of(cls, stats: Stats) -> SpeculativeStats:
        """From the engine's figures."""
        drafting = sum(share.rounds for share in stats.by_draft)
        prefill = min(1, stats.completion_tokens)
        return cls(
            prompt_tokens=stats.prompt_tokens,
            generated_tokens=stats.completion_tokens,
            drafted=stats.drafted,
            accepted=stats.accepted,
            fallback_tokens=stats.rounds - drafting + prefill,
            target_forward_passes=stats.rounds + 1,
            tokens_per_second=stats.tokens_per_second,
            measured_speedup=stats.speedup,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain numbers by name, the two rates included."""
        rates = {name: getattr(self, name) for name in ("acceptance_rate", "estimated_speedup")}
        return {**asdict(self), **rates}


class SpeculativeDecoder(Closing):
    """A target and its draft, generating under a SpeculativeConfig. One text at a time."""

    def __init__(self, target: Any, draft: Any = None, config: SpeculativeConfig | None = None):
        """``target`` and ``draft`` are both names, both loaded objects, or an Engine and None.

        target  folder, hub id or GGUF file; a transformers model, which is never altered; an
                Engine, which stays open when this decoder closes
        draft   folder, hub id, "ngram", "A+ngram"; a DFlashDraftModel beside a transformers model;
                None: as ``dflash.load`` has it (with a model object: no draft)

        Raises what ``dflash.load`` raises.
        """
        if config is not None and not isinstance(config, SpeculativeConfig):
            raise ConfigError(f"config must be a SpeculativeConfig, got {type(config).__name__}")
        self.config = config or SpeculativeConfig()
        self._owned = not isinstance(target, Engine)
        self._engine = _engine(target, draft)
        self._state, self._stats = State.PREFILL, SpeculativeStats()

    @property
    def state(self) -> State:
        """Where the generation stands: prefill, speculating, fallback or done."""
        return self._state

    @property
    def stats(self) -> SpeculativeStats:
        """Of the last generation that was finished."""
        return self._stats

    def generate(self, prompt_tokens: Any, **options: Unpack[GenerateOptions]) -> list[int]:
        """The new tokens after ``prompt_tokens`` (ids: a list, an array, a tensor).

        A stop token is the last of them. ``options`` are those of ``Engine.generate``, such as
        temperature, seed, stop_token_ids. Raises ConfigError, PromptError, EngineClosed.
        """
        return [token for tokens in self.stream(prompt_tokens, **options) for token in tokens]

    def stream(self, prompt_tokens: Any, **options: Unpack[GenerateOptions]) -> Iterator[list[int]]:
        """The same round by round, so that ``state`` can be watched. Checked at the call."""
        if options.get("n", 1) != 1 or options.get("echo"):
            raise ConfigError("a decoder gives the new tokens of one text: leave out n and echo")
        merged = cast("GenerateOptions", {**self._defaults(options), **options})
        chunks = self._engine.stream(prompt_tokens, **merged)
        self._state, self._stats = State.PREFILL, SpeculativeStats()

        def rounds() -> Iterator[list[int]]:
            for chunk in chunks:
                # without a draft there is no policy that has states: every step is a plain one
                self._state = State(chunk.state or State.FALLBACK)
                if chunk.stats is not None:
                    self._stats = SpeculativeStats.of(chunk.stats)
                yield list(chunk.token_ids)

        return rounds()

    def _defaults(self, options: GenerateOptions) -> GenerateOptions:
        """The config's, without a floor that nobody asked for where trees were."""
        found = self.config.options()
        if options.get("draft_tree") and self.config.min_acceptance_rate == ACCEPTANCE:
            found["min_acceptance_rate"] = None
        return found

    def close(self) -> None:
        """Free what this decoder loaded; idempotent."""
        if self._owned:
            self._engine.close()


def _engine(target: Any, draft: Any) -> Engine:
    if isinstance(target, Engine):
        if draft is not None:
            raise ConfigError("an engine has its draft already: leave the draft out")
        return target
    named = target is None or isinstance(target, str | PathLike)
    if named and (draft is None or isinstance(draft, str | PathLike)):
        return load(target, draft)
    if named:
        raise ConfigError(
            f"target {target!r} is a name and the draft a loaded model: give both as names, or "
            "both loaded"
        )
    return Engine(_wrapped(target, draft))


def _wrapped(target: Any, draft: Any) -> Pair:
    """A pair over the user's own target. Only torch has models that people hold."""
    look_up = False
    if isinstance(draft, str | PathLike):
        _, named = pair_names("held", str(draft))  # "demo" has a folder
        draft, look_up = split_draft(str(named))
        draft = None if draft == NO_DRAFT else draft
    pair: Pair = WRAPPERS.load("torch")(target, draft)
    for message in getattr(pair, "warnings", ()):
        warnings.warn(message, UserWarning, stacklevel=4)
    return cast(Pair, NgramPair(pair)) if look_up else pair
