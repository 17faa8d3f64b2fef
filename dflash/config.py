"""What was asked, checked once, frozen, handed down.

Every problem raises ConfigError with the value found and what to write instead. Nothing here reads
files, the environment or a model: whether a target exists is the backend's to find out.

Block sizes count the anchor: ``block_size`` = 1 anchor + K drafted; ``draft_tokens`` = K.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from os import PathLike, fspath
from typing import Any, Literal, TypedDict, TypeVar

from dflash.checks import at_least, plain_numbers, set_fields, switch, threads, token_ids
from dflash.errors import ConfigError
from dflash.generate_config import (
    BlockSize,
    DraftTree,
    GenerateConfig,
    GenerateOptions,
    parse_block_size,
    parse_draft_tree,
)
from dflash.gguf_options import GgufOptions

__all__ = [
    "DEMO",
    "DTYPES",
    "MTP",
    "NGRAM",
    "NO_DRAFT",
    "BlockSize",
    "DraftTree",
    "GenerateConfig",
    "GenerateOptions",
    "GgufOptions",
    "LoadConfig",
    "LoadOptions",
    "draft_names",
    "from_options",
    "join_draft",
    "parse_block_size",
    "parse_draft_tree",
    "parse_taps",
    "path_name",
    "split_draft",
    "token_ids",
]

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
WEIGHTS = {
    "float16": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "int8": "int8",
}
DEMO = "demo"  # the demo pair, or the half of it that is asked for
NO_DRAFT = "none"
MTP = "mtp"  # the multi-token prediction heads inside the target
NGRAM = "ngram"  # drafts by looking up what followed the same tokens before; "A+ngram" = both


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """Which pair to open and how.

    target  folder, hub id or GGUF file ("toy" names the built-in fake)
    draft   folder, hub id or file; None or "none" = no draft (plain decoding); "ngram" = drafts
            looked up in the text so far; "A+ngram" = both A and the look-up; "mtp" = the
            multi-token prediction heads inside the target
    mtp     without a draft: use such heads where the target has them
    backend "auto" or a registered name
    device  "cpu", "cuda", "cuda:1", "mps"; None = the best there is
    dtype   of the target: float32, bfloat16, float16; None = the backend's choice for the device
    weights  hold the weights of products in "float16", "bfloat16" or "int8", rounded once at load,
            whatever ``dtype`` computes in; None = as ``dtype`` says (torch; on a CPU also where
            float16 is exact)
    cuda_graphs  replay passes of a few rows on CUDA, where a check at load finds them equal (torch)
    compile  put the passes that can be replayed through torch's compiler first, on CUDA; takes
            minutes once for each number of rows, and checks what it gets (torch)
    draft_dtype  float32 or bfloat16; None follows the target (bfloat16 where that is float16)
    draft_bits  4 or 8: quantise the draft's linear layers when it is loaded (mlx)
    taps    None = as the draft's config says; "auto" = the default formula where it says nothing;
            or the layer ids themselves
    threads CPU threads; None = leave as it is
    pack_weights  let prepacked copies replace the weights of linear layers (same results, faster
            verification on a CPU; the loaded model object changes)
    profile start with what earlier runs measured of this pair, and keep what this one measures
    force_dflash  use a draft that was made for a target of another hidden size, through a fixed
            projection of features and embeddings; loses most of the acceptance, never the text
    gguf    settings of the gguf backend, a `GgufOptions` or a mapping of its fields
    """

    target: str
    draft: str | None = None
    backend: str = "auto"
    device: str | None = None
    dtype: str | None = None
    draft_dtype: str | None = None
    draft_sliding_window_size: int | None = None
    draft_bits: int | None = None
    taps: tuple[int, ...] | Literal["auto"] | None = None
    threads: int | None = None
    pack_weights: bool = True
    trust_remote_code: bool = False
    profile: bool = True
    force_dflash: bool = False
    gguf: GgufOptions = field(default_factory=GgufOptions)
    mtp: bool = False
    weights: str | None = None
    cuda_graphs: bool = True
    compile: bool = False

    def __post_init__(self) -> None:
        """Normalise names and refuse impossible values. Raises ConfigError."""
        plain_numbers(self)
        target = path_name("target", self.target)
        if not target:
            raise ConfigError("target is empty: give a folder, a hub id or a .gguf file")
        draft = None if self.draft is None else path_name("draft", self.draft)
        if draft == "":
            raise ConfigError('draft is empty: give a folder or a hub id, or "none" for no draft')
        set_fields(
            self, target=target, draft=None if draft is None else join_draft(*split_draft(draft))
        )
        set_fields(self, dtype=_dtype("dtype", self.dtype))
        set_fields(self, weights=_weights(self.weights))
        set_fields(self, draft_dtype=_dtype("draft_dtype", self.draft_dtype))
        if self.draft_dtype == "float16":
            raise ConfigError(
                "a draft cannot run in float16: its residual stream overflows and nothing would "
                "be accepted. Use bfloat16 or float32"
            )
        if not isinstance(self.backend, str) or not self.backend:
            raise ConfigError(f"backend must be a name or 'auto', got {self.backend!r}")
        at_least(1, "draft_sliding_window_size", self.draft_sliding_window_size)
        threads("threads", self.threads)
        if self.draft_bits not in (None, 4, 8):
            raise ConfigError(f"draft_bits must be 4 or 8, got {self.draft_bits!r}")
        for name in ("pack_weights", "trust_remote_code", "profile", "force_dflash", "mtp"):
            switch(name, getattr(self, name))
        switch("cuda_graphs", self.cuda_graphs)
        switch("compile", self.compile)
        set_fields(self, taps=_taps(self.taps))
        if not isinstance(self.gguf, GgufOptions):
            set_fields(self, gguf=from_options(GgufOptions, self.gguf))


class LoadOptions(TypedDict, total=False):
    """The fields of LoadConfig that are keywords of ``dflash.load``."""

    backend: str
    device: str | None
    dtype: Any  # a name, or a torch dtype
    draft_dtype: Any
    draft_sliding_window_size: int | None
    draft_bits: int | None
    taps: Sequence[int] | Literal["auto"] | None
    threads: int | None
    pack_weights: bool
    trust_remote_code: bool
    profile: bool
    force_dflash: bool
    gguf: GgufOptions | Mapping[str, Any]
    mtp: bool
    weights: str | None
    cuda_graphs: bool
    compile: bool


C = TypeVar("C", LoadConfig, GenerateConfig, GgufOptions)


def from_options(kind: type[C], options: Mapping[str, Any]) -> C:
    """A config from keywords. Raises ConfigError, also for a keyword that does not exist."""
    known = [one.name for one in fields(kind)]
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"settings must be a {kind.__name__} or a mapping of its fields ({', '.join(known)}), "
            f"got {options!r}"
        )
    for name in options:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(known)}."
            raise ConfigError(f"unknown option {name!r}.{hint}")
    return kind(**options)


def split_draft(name: str) -> tuple[str, bool]:
    """The model draft in ``name`` ("none" where there is no model), and whether n-grams join in.

    Raises ConfigError for "+ngram" with nothing before it, or the look-up once more.
    """
    if name == NGRAM:
        return NO_DRAFT, True
    model, ngram = name.removesuffix(f"+{NGRAM}"), name.endswith(f"+{NGRAM}")
    if not model or model == NGRAM:
        raise ConfigError(f'draft {name!r} names no model: "{NGRAM}" is the look-up alone')
    if (last := model.removeprefix(f"{NGRAM}+")) != model:
        raise ConfigError(f"draft {name!r} names the look-up first: write {last}+{NGRAM}")
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


def path_name(name: str, value: Any) -> str:
    """A path or hub id as text. Raises ConfigError for what is neither."""
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


def _weights(value: Any) -> str | None:
    if value is None:
        return None
    key = str(value).removeprefix("torch.").lower()
    found = WEIGHTS.get(key)
    if found is None:
        raise ConfigError(
            f"weights must be {', '.join(sorted(set(WEIGHTS.values())))}, got {value!r}. Leave it "
            "out to keep the weights as dtype says"
        )
    return found


def _taps(value: Any) -> tuple[int, ...] | Literal["auto"] | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = parse_taps(value)
        if value == "auto":
            return "auto"
    ids = tuple(value) if isinstance(value, Iterable) else ()
    if not ids or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
        raise ConfigError(f"taps must be a list of layer ids of 0 or more, got {value!r}")
    return ids
