"""The MLX face of upstream's package: its names, its arguments, its results.

    model, tokenizer = load("path/or/hub-id")
    draft = load_draft("path/or/hub-id")
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    for response in stream_generate(model, draft, tokenizer, prompt):
        print(response.text, end="")

A prompt that is text is taken as it stands, as upstream does: no chat template is put around it.
``load`` returns a named pair, so that ``.tokenizer`` works beside the two names above. The target
is a model of mlx-lm and is never altered. There is no loop in this file: ``dflash.core`` has it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dflash.config import GenerateConfig, LoadConfig
from dflash.drafts.spec import DraftSpec, read_spec
from dflash.engine import Engine
from dflash.errors import ConfigError, missing
from dflash.hf_tokenizer import ModelTokenizer
from dflash.prompt import encode
from dflash.results import Chunk

try:
    import mlx.core as mx
except ImportError as problem:
    raise missing("dflash.model_mlx needs MLX", "mlx") from problem

from dflash.backends.mlx import lm
from dflash.backends.mlx.dflash_session import bounds
from dflash.backends.mlx.draft_cache import LayerCache
from dflash.backends.mlx.draft_load import LoadedDraft, make_tables, quantise
from dflash.backends.mlx.draft_weights import load_weights
from dflash.backends.mlx.load import DTYPES, LoadedTarget, resolve, wrap_target
from dflash.backends.mlx.pair import MlxPair
from dflash.doctor.static import Choice
from dflash.model_folders import draft_folder
from dflash.target_facts import settle

__all__ = [
    "DFlashConfig",
    "DFlashDraftModel",
    "GenerationResponse",
    "Loaded",
    "load",
    "load_draft",
    "stream_generate",
]

SEEDS = 2**31 - 1


class Loaded(NamedTuple):
    """What ``load`` returns: also a plain pair of the two."""

    model: Any
    tokenizer: Any


@dataclass
class GenerationResponse:
    """What one round committed; upstream's fields."""

    text: str
    tokens: list[int]
    accepted: int | None  # tokens of a round, the bonus counted; None for the prompt's token
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int  # so far
    generation_tps: float
    peak_memory: float  # GB
    finish_reason: str | None = None


@dataclass(frozen=True)
class DFlashConfig:
    """What upstream's code reads of a draft's config."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    block_size: int  # anchor included; the native size and the cap
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    layer_types: tuple[str, ...]
    sliding_window: int | None
    sliding_window_size: int | None  # what `load_draft` was asked for; None = as trained

    @classmethod
    def of(cls, spec: DraftSpec, asked: int | None) -> DFlashConfig:
        """The same facts of a ``spec``."""
        return cls(
            spec.hidden_size,
            spec.num_layers,
            spec.vocab_size,
            spec.block_size,
            spec.mask_token_id,
            spec.taps,
            spec.layer_types,
            spec.sliding_window,
            asked,
        )


class DFlashDraftModel:
    """A draft as ``load_draft`` returns it."""

    def __init__(
        self, model: Any, own_tables: dict[str, Any], name: str, window: int | None = None
    ) -> None:
        """``window`` bounds the context rows the draft keeps."""
        self.model, self.own_tables, self.name, self.window = model, own_tables, name, window
        self.config = DFlashConfig.of(model.spec, window)
        self.bound: LoadedTarget | None = None

    def bind(self, target_model: Any) -> DFlashDraftModel:
        """Borrow embedding and head of ``target_model``; raises PairError if the two do not fit."""
        self.bound = target_model if isinstance(target_model, LoadedTarget) else _wrap(target_model)
        spec, dtype = self.model.spec, str(self.model.dtype).rpartition(".")[2]
        settle(spec, self.bound, Choice(self.name, dtype, self.window))
        return self

    def make_cache(self) -> list[LayerCache]:
        """Empty context caches, one a layer; those of sliding layers forget old rows."""
        return [LayerCache(bound) for bound in bounds(self.model, self.window)]

    def beside(self, target: LoadedTarget) -> LoadedDraft:
        """The draft ready to run beside ``target``."""
        self.bind(target)
        tables = make_tables(self.model.spec, target, self.own_tables)
        return LoadedDraft(self.model, tables, self.name, self.window)


def load(path_or_hf_repo: str) -> Loaded:
    """Model and tokenizer, as ``mlx_lm.load`` gives them."""
    return Loaded(*lm.load(resolve(str(path_or_hf_repo))))


def load_draft(
    draft_id: str | Path, sliding_window_size: int | None = None, draft_bits: int | None = None
) -> DFlashDraftModel:
    """The draft in a folder or behind a hub id, in the number format it is stored in.

    ``sliding_window_size`` bounds its history, ``draft_bits`` (4 or 8) quantises its linear layers.
    Raises ConfigError (a ValueError) for a value that cannot be, CheckpointError, WeightsError,
    DownloadError.
    """
    LoadConfig("target", draft_sliding_window_size=sliding_window_size, draft_bits=draft_bits)
    folder = draft_folder(str(draft_id))
    spec = read_spec(folder)
    stored = str(spec.raw.get("dtype") or spec.raw.get("torch_dtype") or "float32")
    model, own = load_weights(folder, spec, DTYPES[_narrow(stored)])
    quantise(model, draft_bits)  # refuses widths that cannot be
    return DFlashDraftModel(model, own, str(draft_id), sliding_window_size)


def stream_generate(
    model: Any,
    draft: DFlashDraftModel,
    tokenizer: Any,
    prompt: Any,  # text as it stands, ids, or an array of ids
    block_size: int | None = None,  # anchor included; None = the draft's
    max_tokens: int = 256,
    temperature: float = 0.0,
    sampler: Callable[[Any], Any] | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
) -> Iterator[GenerationResponse]:
    """One response a round; the last has ``finish_reason``.

    A text is encoded as it stands, without a chat template, as upstream does. For a chat model:

        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    ``model`` may be the pair that ``load`` returns. ``sampler`` takes log-probabilities [n, V] to
    ids [n], as mlx-lm's do, and then decides alone: drafts are kept where they equal its choice.
    Larger blocks than the draft's are clamped. ``mx.random.seed`` repeats a sampled text. The
    arguments are checked at the call.
    """
    if sampler is not None and not callable(sampler):
        raise ConfigError(f"sampler must be a callable, got {sampler!r}")
    if sampler is not None and temperature:
        raise ConfigError("give a temperature or a sampler, not both: a sampler has its own")
    _insist(draft, tokenizer)
    asked = GenerateConfig(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        block_size=draft.config.block_size if block_size is None else block_size,
    )
    target = _wrap(getattr(model, "model", model) if isinstance(model, tuple) else model, tokenizer)
    size, native = asked.block_size, draft.config.block_size
    if isinstance(size, int) and size > native:
        text = f"block size {size} is more than this draft can do: running with {native}"
        warnings.warn(text, UserWarning, stacklevel=2)
        size = native
    pair = MlxPair(target, draft.beside(target), sampler=sampler)
    engine = Engine(pair)
    ids = _ids(prompt, ModelTokenizer(target.tokenizer))
    start = time.perf_counter()
    drawn: Any = mx.random.randint(0, SEEDS).item()  # MLX's generator: its seed repeats a text
    chunks = engine.stream(
        ids,
        seed=int(drawn),
        max_tokens=asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        block_size=size,
    )
    return _responses(chunks, engine, len(ids), start)


def _responses(
    chunks: Iterator[Chunk], engine: Engine, prompt: int, start: float
) -> Iterator[GenerationResponse]:
    made, first, rate = 0, 0.0, 0.0
    with engine:
        for chunk in chunks:
            now = time.perf_counter()
            if not made:
                first, rate = now, prompt / max(now - start, 1e-9)
            accepted = len(chunk.token_ids) if made else None
            made += len(chunk.token_ids)
            yield GenerationResponse(
                text=chunk.text,
                tokens=list(chunk.token_ids),
                accepted=accepted,
                prompt_tokens=prompt,
                prompt_tps=rate,
                generation_tokens=made,
                generation_tps=(made - 1) / max(now - first, 1e-9) if made > 1 else 0.0,
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=chunk.finish_reason,
            )


def _insist(draft: Any, tokenizer: Any) -> None:
    """Raise ConfigError for what is no draft or no tokenizer."""
    if not isinstance(draft, DFlashDraftModel):
        raise ConfigError(f"draft must be what load_draft returns, got {type(draft).__name__}")
    # mlx-lm's wrapper or the tokenizer within; an encoder is needed for prompts of text alone
    if not _decodes(getattr(tokenizer, "_tokenizer", tokenizer)):
        kind = type(tokenizer).__name__
        raise ConfigError(f"tokenizer must be what load returns beside the model, got {kind}")


def _decodes(tokenizer: Any) -> bool:
    """Whether it makes text of ids: many a thing has a method of that name, bytes for one."""
    try:
        return isinstance(ModelTokenizer(tokenizer).decode([0]), str)
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


def _wrap(model: Any, tokenizer: Any = None) -> LoadedTarget:
    """The user's own model and tokenizer, described."""
    inner = getattr(tokenizer, "_tokenizer", tokenizer)
    eos = getattr(tokenizer, "eos_token_ids", None)
    if eos is None:  # transformers' own tokenizer
        eos = [getattr(inner, "eos_token_id", None)]
    return wrap_target(model, inner, eos=frozenset(int(i) for i in eos if i is not None))


def _ids(prompt: Any, tokenizer: ModelTokenizer) -> list[int]:
    """Token ids; a text is encoded as it stands, behind the begin-of-text token it lacks."""
    if isinstance(prompt, Mapping):  # what transformers' tokenizers make of messages
        prompt = prompt.get("input_ids", prompt)
    if not isinstance(prompt, str):
        return encode(None, prompt)
    bos = getattr(tokenizer, "bos_token", None)
    begun = bos is None or prompt.startswith(bos)
    found: list[int] = tokenizer.inner.encode(prompt, add_special_tokens=not begun)
    return found


def _narrow(stored: str) -> str:
    """float32 as it is, everything else in bfloat16: a draft never runs in float16."""
    return "float32" if stored.removeprefix("torch.") == "float32" else "bfloat16"
