"""What was asked, checked once, frozen, handed down.

Every problem raises ConfigError with the value found and what to write instead. Nothing here reads
files, the environment or a model: whether a target exists is the backend's to find out.

Block sizes count the anchor: ``block_size`` = 1 anchor + K drafted; ``draft_tokens`` = K.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from os import PathLike, fspath
from typing import Any, Literal, TypedDict, TypeVar

from dflash.errors import ConfigError

BlockSize = int | Literal["auto"] | None

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
    "auto": None,
}
NO_DRAFT = "none"
DRAFT_TOKENS = 4  # of a block with a least acceptance rate, where no size was asked for
NGRAM = "ngram"  # drafts by looking up what followed the same tokens before; "A+ngram" = both


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Which pair to open and how.

    target  folder, hub id or GGUF file ("toy" names the built-in fake)
    draft   folder, hub id or file; None or "none" = no draft (plain decoding); "ngram" = drafts
            looked up in the text so far; "A+ngram" = both A and the look-up
    backend "auto" or a registered name
    device  "cpu", "cuda", "cuda:1", "mps"; None = the best there is
    dtype   of the target: float32, bfloat16, float16; None = the backend's choice for the device
    draft_dtype  float32 or bfloat16; None follows the target (bfloat16 where that is float16)
    taps    None = as the draft's config says; "auto" = the default formula where it says nothing;
            or the layer ids themselves
    threads CPU threads; None = leave as it is
    pack_weights  let prepacked copies replace the weights of linear layers (same results, faster
            verification on a CPU; the loaded model object changes)
    profile start with what earlier runs measured of this pair, and keep what this one measures
    """

    target: str
    draft: str | None = None
    backend: str = "auto"
    device: str | None = None
    dtype: str | None = None
    draft_dtype: str | None = None
    draft_sliding_window_size: int | None = None
    taps: tuple[int, ...] | Literal["auto"] | None = None
    threads: int | None = None
    pack_weights: bool = True
    trust_remote_code: bool = False
    profile: bool = True

    def __post_init__(self) -> None:
        """Normalise names and refuse impossible values. Raises ConfigError."""
        target = _path("target", self.target)
        if not target:
            raise ConfigError("target is empty: give a folder, a hub id or a .gguf file")
        draft = None if self.draft is None else _path("draft", self.draft)
        if draft == "":
            raise ConfigError('draft is empty: give a folder or a hub id, or "none" for no draft')
        _set(self, target=target, draft=None if draft is None else join_draft(*split_draft(draft)))
        _set(self, dtype=_dtype("dtype", self.dtype))
        _set(self, draft_dtype=_dtype("draft_dtype", self.draft_dtype))
        if self.draft_dtype == "float16":
            raise ConfigError(
                "a draft cannot run in float16: its residual stream overflows and nothing would "
                "be accepted. Use bfloat16 or float32"
            )
        if not isinstance(self.backend, str) or not self.backend:
            raise ConfigError(f"backend must be a name or 'auto', got {self.backend!r}")
        _at_least(1, "draft_sliding_window_size", self.draft_sliding_window_size)
        _at_least(1, "threads", self.threads)
        _set(self, taps=_taps(self.taps))


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """How one text is to be generated. temperature 0 is argmax, the lowest id winning ties.

    max_tokens      new tokens at most; clipped to the room the context leaves
    top_k, top_p    0 and 1.0 = off
    seed            None = fresh randomness each time (matters only above temperature 0)
    stop            strings that end the text (left out of it)
    stop_token_ids  ids that end it: an int, or any list, tuple, set, array or tensor of them
    block_size      anchor included; 1 = plain decoding; "auto" = chosen while running;
                    None = the draft's own default
    draft_tokens    the same without the anchor; give one of the two
    ignore_eos      go on to max_tokens whatever the model says
    strict_mode     keep a draft only where it equals the target's own sample; off: rejection
                    sampling, which keeps more of them. Both lossless, and a seed implies the former
    min_acceptance_rate  give the block up while fewer of its drafts are accepted, and probe;
                    without a block size of its own, for one of 4 drafts. None = never give it up
    reuse           resume from an earlier request that begins with the same tokens
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    block_size: BlockSize = None
    draft_tokens: int | None = None
    ignore_eos: bool = False
    reuse: bool = True
    strict_mode: bool = False
    min_acceptance_rate: float | None = None

    def __post_init__(self) -> None:
        """Normalise forms and refuse impossible values. Raises ConfigError."""
        _set(self, stop=_strings(self.stop), stop_token_ids=token_ids(self.stop_token_ids))
        _at_least(0, "max_tokens", self.max_tokens, required=True)
        _at_least(0, "top_k", self.top_k, required=True)
        _at_least(0, "draft_tokens", self.draft_tokens)
        _at_least(0, "seed", self.seed)
        if self.seed is not None and self.seed >= 2**64:
            raise ConfigError(f"seed must be below 2**64, got {self.seed}")
        if not _number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 or more, got {self.temperature!r}")
        if not _number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        self._check_rate()
        if self.block_size != "auto":
            _at_least(1, "block_size", self.block_size, hint=' (1 = plain decoding, or "auto")')
        if self.block_size is not None and self.draft_tokens is not None:
            raise ConfigError(
                "block_size and draft_tokens say the same thing (block_size = draft_tokens + 1): "
                "give one of the two"
            )

    def _check_rate(self) -> None:
        rate = self.min_acceptance_rate
        if rate is not None and (not _number(rate) or not 0 <= rate <= 1):
            raise ConfigError(f"min_acceptance_rate must lie between 0 and 1, got {rate!r}")
        if rate is not None and self.block_size == "auto":
            raise ConfigError(
                'min_acceptance_rate is a rule for a fixed block, and block_size="auto" decides by '
                "measured time: give one of the two"
            )

    @property
    def block(self) -> BlockSize:
        """The block size asked for in either form; None = nothing was asked."""
        if self.draft_tokens is not None:
            return self.draft_tokens + 1
        if self.block_size is None and self.min_acceptance_rate is not None:
            return DRAFT_TOKENS + 1
        return self.block_size


class LoadOptions(TypedDict, total=False):
    """The fields of LoadConfig that are keywords of ``dflash.load``."""

    backend: str
    device: str | None
    dtype: Any  # a name, or a torch dtype
    draft_dtype: Any
    draft_sliding_window_size: int | None
    taps: Sequence[int] | Literal["auto"] | None
    threads: int | None
    pack_weights: bool
    trust_remote_code: bool
    profile: bool


class GenerateOptions(TypedDict, total=False):
    """The fields of GenerateConfig, in every form that it takes."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Any  # an int, or any list, tuple, set, array or tensor of ints
    block_size: BlockSize
    draft_tokens: int | None
    ignore_eos: bool
    reuse: bool
    strict_mode: bool
    min_acceptance_rate: float | None


C = TypeVar("C", LoadConfig, GenerateConfig)


def from_options(kind: type[C], options: Mapping[str, Any]) -> C:
    """A config from keywords. Raises ConfigError, also for a keyword that does not exist."""
    known = [field.name for field in fields(kind)]
    for name in options:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."
            raise ConfigError(f"unknown option {name!r}.{hint}")
    return kind(**options)


def split_draft(name: str) -> tuple[str, bool]:
    """The model draft in ``name`` ("none" where there is no model), and whether n-grams join in.

    Raises ConfigError for "+ngram" with nothing before it.
    """
    if name == NGRAM:
        return NO_DRAFT, True
    model, ngram = name.removesuffix(f"+{NGRAM}"), name.endswith(f"+{NGRAM}")
    if not model:
        raise ConfigError(f'draft {name!r} names no model: "{NGRAM}" is the look-up alone')
    return model, ngram


def join_draft(model: str, ngram: bool) -> str | None:
    """The name that ``split_draft`` takes apart; None = no draft at all."""
    if model == NO_DRAFT:
        return NGRAM if ngram else None
    return f"{model}+{NGRAM}" if ngram else model


def draft_names(name: str | None) -> tuple[str, ...]:
    """The drafts in ``name``, in the order in which a pair opens them."""
    if name is None:
        return ()
    model, ngram = split_draft(name)
    return (NGRAM,) * ngram + ((model,) if model != NO_DRAFT else ())


def token_ids(value: Any) -> tuple[int, ...]:
    """Token ids from an int, None, or any (nested) sequence, set, array or tensor of ints.

    Raises ConfigError for anything else, negative ids included.
    """
    if hasattr(value, "tolist"):  # arrays and tensors of every library, without importing one
        value = value.tolist()
    if value is None:
        return ()
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"token ids must be 0 or more, got {value}")
        return (value,)
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return tuple(dict.fromkeys(i for item in value for i in token_ids(item)))
    raise ConfigError(f"token ids must be integers, got {value!r}")


def parse_taps(text: str) -> tuple[int, ...] | Literal["auto"]:
    """``auto`` or ``1,8,15``. Raises ConfigError."""
    if text == "auto":
        return "auto"
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"taps must be 'auto' or layer ids such as 1,8,15; got {text!r}"
        ) from None


def parse_block_size(text: str, name: str = "--block-size") -> int | Literal["auto"]:
    """``auto`` or a number. Raises ConfigError naming ``name``."""
    if text == "auto":
        return "auto"
    try:
        size = int(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number or 'auto', got {text!r}") from None
    _at_least(1, name, size, hint=" (1 = plain decoding, or 'auto')")
    return size


def _set(config: LoadConfig | GenerateConfig, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(config, name, value)  # frozen for everybody but __post_init__


def _path(name: str, value: Any) -> str:
    if not isinstance(value, str | PathLike):
        raise ConfigError(f"{name} must be a path or a hub id, got {type(value).__name__}")
    return str(fspath(value)).strip()


def _dtype(name: str, value: Any) -> str | None:
    if value is None:
        return None
    key = str(value).removeprefix("torch.").lower()
    if key not in DTYPES:
        raise ConfigError(f"{name} must be float32, bfloat16 or float16, got {value!r}")
    return DTYPES[key]


def _taps(value: Any) -> tuple[int, ...] | Literal["auto"] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_taps(value)
        if value == "auto":
            return "auto"
    ids = tuple(value)
    if not ids or any(not isinstance(i, int) or i < 0 for i in ids):
        raise ConfigError(f"taps must be layer ids of 0 or more, got {value!r}")
    return ids


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(least: int, name: str, value: Any, *, required: bool = False, hint: str = "") -> None:
    if value is None and not required:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} must be a whole number of {least} or more{hint}, got {value!r}")


def _strings(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    listed = isinstance(value, Iterable) and not isinstance(value, str)
    given = tuple(value) if listed else (value,)
    if any(not isinstance(text, str) or not text for text in given):
        raise ConfigError(f"stop must be non-empty strings, got {value!r}")
    return tuple(dict.fromkeys(given))
