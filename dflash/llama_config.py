"""`SpecConfig` and `SpeculativeType`: llama-cpp-python's words for speculative decoding.

Fields, defaults and the kinds of errors are those its users know; the engine behind is ours.
Not promised: methods that this package does not draft with on llama.cpp, which validate refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from os import PathLike
from typing import Any

from dflash.checks import MOST_THREADS, is_number
from dflash.gguf_options import CACHE_TYPES


class SpeculativeType(IntEnum):
    """How drafts are made. DFlash2 is no type of its own: the file decides."""

    NONE = 0
    DRAFT_SIMPLE = 1
    DRAFT_EAGLE3 = 2
    DRAFT_MTP = 3
    DRAFT_DFLASH = 4
    DRAFT_DSPARK = 5
    NGRAM_SIMPLE = 6
    NGRAM_MAP_K = 7
    NGRAM_MAP_K4V = 8
    NGRAM_MOD = 9
    NGRAM_CACHE = 10
    COUNT = 11

    def __str__(self) -> str:
        """As `to_str`."""
        return self.to_str()

    def is_none(self) -> bool:
        """No drafts."""
        return self is SpeculativeType.NONE

    def is_draft(self) -> bool:
        """Drafts of a model."""
        return SpeculativeType.DRAFT_SIMPLE <= self <= SpeculativeType.DRAFT_DSPARK

    def is_ngram(self) -> bool:
        """Drafts looked up in a text."""
        return SpeculativeType.NGRAM_SIMPLE <= self <= SpeculativeType.NGRAM_CACHE

    def is_eagle3(self) -> bool:
        """An EAGLE-3 draft."""
        return self is SpeculativeType.DRAFT_EAGLE3

    def is_mtp(self) -> bool:
        """The target's own heads."""
        return self is SpeculativeType.DRAFT_MTP

    def is_dflash(self) -> bool:
        """A DFlash or DFlash2 sidecar."""
        return self is SpeculativeType.DRAFT_DFLASH

    def is_dspark(self) -> bool:
        """A DSpark sidecar."""
        return self is SpeculativeType.DRAFT_DSPARK

    def to_str(self) -> str:
        """The name with hyphens: draft-dflash, ngram-map-k, ..."""
        if self is SpeculativeType.COUNT:
            return "unknown"
        return self.name.lower().replace("_", "-")

    @classmethod
    def from_str(cls, name: str) -> SpeculativeType:
        """The type of a name; case, blanks, hyphens and underscores do not matter. Raises
        ValueError for a name nobody knows."""
        key = name.strip().lower().replace("_", "-").replace(" ", "-")
        known = {kind.to_str(): kind for kind in cls if kind is not cls.COUNT} | {
            "dflash": cls.DRAFT_DFLASH,
            "mtp": cls.DRAFT_MTP,
            "eagle3": cls.DRAFT_EAGLE3,
            "dspark": cls.DRAFT_DSPARK,
            "simple": cls.DRAFT_SIMPLE,
            "ngram-k": cls.NGRAM_MAP_K,
            "ngram-k4v": cls.NGRAM_MAP_K4V,
        }
        if key not in known:
            raise ValueError(f"Unknown speculative type: {name!r}. Known: {', '.join(known)}")
        return known[key]


IMPLEMENTED = (
    SpeculativeType.NONE,
    SpeculativeType.DRAFT_EAGLE3,
    SpeculativeType.DRAFT_MTP,
    SpeculativeType.DRAFT_DFLASH,
    SpeculativeType.NGRAM_SIMPLE,
)


KINDS = {  # fields that are no numbers, and what they must be
    **dict.fromkeys(("draft_cpu_moe", "draft_backend_sampling"), "switch"),
    **dict.fromkeys(("draft_type_k", "draft_type_v"), "format"),
    **dict.fromkeys(("draft_model_path", "lookup_cache_dynamic", "lookup_cache_static"), "path"),
    "draft_devices": "list",
    "draft_model_kwargs": "mapping",
}


@dataclass
class SpecConfig:
    """How `Llama` speculates. ``draft_n_max`` counts drafts, the anchor not among them."""

    spec_type: SpeculativeType = SpeculativeType.NONE
    draft_n_max: int = 3
    draft_n_min: int = 0
    draft_p_split: float = 0.1
    draft_p_min: float = 0.0
    draft_model_path: str | PathLike[str] | None = None
    draft_n_gpu_layers: int | str = "auto"
    draft_n_threads: int | None = None
    draft_n_threads_batch: int | None = None
    draft_cpu_moe: bool = False
    draft_n_cpu_moe: int = 0
    draft_tensor_buft_overrides: Any = None
    draft_type_k: Any = None
    draft_type_v: Any = None
    draft_devices: Sequence[Any] = field(default_factory=list)
    draft_backend_sampling: bool = True
    ngram_size_n: int = 12
    ngram_size_m: int = 48
    ngram_min_hits: int = 1
    ngram_max_entries_per_key: int | None = None
    ngram_mod_n_match: int = 24
    ngram_mod_n_max: int = 64
    ngram_mod_n_min: int = 48
    lookup_cache_dynamic: str | None = None
    lookup_cache_static: str | None = None
    draft_model_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Batches of the draft use as many threads as its single tokens unless told otherwise."""
        if self.draft_n_threads_batch is None:
            self.draft_n_threads_batch = self.draft_n_threads

    @property
    def has_file(self) -> bool:
        """Whether the draft is a file of its own."""
        return self.spec_type.is_dflash() or self.spec_type.is_eagle3()

    def enabled(self) -> bool:
        """Whether anything is drafted."""
        return not self.spec_type.is_none()

    def resolved_draft_n_gpu_layers(self) -> int:
        """llama.cpp's number: -1 as many as fit, -2 all. Raises ValueError."""
        words = {"auto": -1, "all": -2}
        value = self.draft_n_gpu_layers
        if isinstance(value, str):
            if value.strip().lower() not in words:
                raise ValueError(
                    f'SpecConfig: draft_n_gpu_layers is a number, "auto" or "all", got {value!r}'
                )
            return words[value.strip().lower()]
        if isinstance(value, bool) or not isinstance(value, int) or value < -2:
            raise ValueError(f"SpecConfig: draft_n_gpu_layers must be -2 or more, got {value!r}")
        return value

    def max_draft_tokens(self) -> int:
        """Most drafts of a round; 0 when nothing is drafted."""
        return self.draft_n_max if self.enabled() else 0

    def validate(self) -> None:
        """Raise NotImplementedError for a method that cannot run, ValueError for bad values."""
        if not isinstance(self.spec_type, SpeculativeType):
            raise ValueError(
                f"SpecConfig: spec_type must be a SpeculativeType, got {self.spec_type!r} "
                "(SpeculativeType.from_str knows names)"
            )
        if self.spec_type.is_none():
            return
        if self.spec_type not in IMPLEMENTED:
            known = ", ".join(kind.to_str() for kind in IMPLEMENTED)
            raise NotImplementedError(
                f"SpecConfig: drafting by {self.spec_type.to_str()} is not implemented on "
                f"llama.cpp here; {known} are"
            )
        if self.spec_type.is_mtp() and self.draft_model_path is not None:
            raise NotImplementedError(
                "SpecConfig: prediction heads in a file of their own are not implemented here; "
                "those inside the target are: leave draft_model_path out"
            )
        for name, value, holds, words in (*self._rules(), *self._kinds()):
            if not holds(value):
                raise ValueError(f"SpecConfig: {name} must be {words}, got {value!r}")
        if self.has_file and not isinstance(self.draft_model_path, str | PathLike):
            raise ValueError(
                f"SpecConfig: {self.spec_type.to_str()} needs draft_model_path, the sidecar's "
                f".gguf, got {self.draft_model_path!r}"
            )
        self.resolved_draft_n_gpu_layers()

    def _rules(self) -> list[tuple[str, Any, Callable[[Any], bool], str]]:
        def whole(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        def positive(value: Any) -> bool:
            return whole(value) and value > 0

        def workable(value: Any) -> bool:
            return value is None or (positive(value) and value <= MOST_THREADS)

        def share(value: Any) -> bool:
            return is_number(value) and 0 <= value <= 1

        counts = [
            *("draft_n_max", "ngram_size_n", "ngram_size_m", "ngram_min_hits"),
            *("ngram_mod_n_match", "ngram_mod_n_max", "ngram_mod_n_min"),
        ]
        if self.ngram_max_entries_per_key is not None:
            counts.append("ngram_max_entries_per_key")
        threads, some = ("draft_n_threads", "draft_n_threads_batch"), "a whole number above 0"
        most = self.draft_n_max
        return [
            *((name, getattr(self, name), positive, some) for name in counts),
            *((n, getattr(self, n), workable, f"{some}, at most {MOST_THREADS}") for n in threads),
            (
                "draft_n_min",
                self.draft_n_min,
                lambda value: whole(value) and 0 <= value <= most,
                f"between 0 and draft_n_max {most}",
            ),
            ("draft_p_split", self.draft_p_split, share, "between 0 and 1"),
            ("draft_p_min", self.draft_p_min, share, "between 0 and 1"),
            (
                "draft_n_cpu_moe",
                self.draft_n_cpu_moe,
                lambda value: whole(value) and value >= 0,
                "0 or more",
            ),
        ]

    def _kinds(self) -> Iterator[tuple[str, Any, Callable[[Any], bool], str]]:
        """As `_rules`, for fields that are no numbers."""

        def known(value: Any) -> bool:
            formats = (None, *CACHE_TYPES, *CACHE_TYPES.values())
            return not isinstance(value, bool) and value in formats

        wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
            "switch": (lambda value: isinstance(value, bool), "True or False"),
            "format": (known, f"one of {', '.join(CACHE_TYPES)}, or ggml's number of it"),
            "path": (lambda value: value is None or isinstance(value, str | PathLike), "a path"),
            "list": (lambda value: isinstance(value, list | tuple), "a list"),
            "mapping": (lambda value: isinstance(value, Mapping), "a mapping"),
        }
        for name, kind in KINDS.items():
            yield (name, getattr(self, name), *wanted[kind])


def speculative_output_limits(n_batch: int, n_parallel: int, n_draft: int) -> tuple[int, int]:
    """(rows with logits in a batch, of one sequence): a sequence needs its anchor and its drafts.

    Raises ValueError for numbers that are not positive.
    """
    for name, value in (("n_batch", n_batch), ("n_parallel", n_parallel), ("n_draft", n_draft)):
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    one = min(n_batch, 1 + n_draft)
    return min(n_batch, n_parallel * one), one
