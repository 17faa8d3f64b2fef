"""llama-cpp-python's `Llama` over our engine: GGUF files on llama.cpp, with DFlash sidecars.

    from dflash.llama import Llama, SpecConfig, SpeculativeType

    spec = SpecConfig(SpeculativeType.DRAFT_DFLASH, draft_model_path="draft.gguf", draft_n_max=7)
    with Llama("target.gguf", n_ctx=4096, speculative=spec) as llm:
        print(llm("Rainbows form", max_tokens=32)["choices"][0]["text"])

Text only, one sequence. The ids are those of plain decoding; the file says whether a sidecar is
DFlash or DFlash2. There is no loop in this file: the engine has it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import index
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, SupportsIndex, cast

from dflash import llama_lines as lines
from dflash.checks import at_least, switch, threads
from dflash.closing import Closing
from dflash.comparison import kind_of_draft
from dflash.config import MTP, NGRAM, NO_DRAFT, GenerateConfig, path_name, split_draft
from dflash.engine import Engine, load
from dflash.errors import ConfigError
from dflash.gguf_file import is_gguf
from dflash.gguf_options import CACHE_TYPES, GgufOptions, GpuLayers
from dflash.llama_config import SpecConfig, SpeculativeType, speculative_output_limits
from dflash.llama_options import chat_options, fixed_seed, message_text, sampling
from dflash.llama_parts import Parts
from dflash.llama_stats import Running
from dflash.results import Chunk
from dflash.spelling import Spelling

__all__ = ["Llama", "SpecConfig", "SpeculativeType", "speculative_output_limits"]

OF_FILE = {  # what a draft's file is -> the type that asks for it
    "dflash": SpeculativeType.DRAFT_DFLASH,
    "dflash2": SpeculativeType.DRAFT_DFLASH,
    "eagle3": SpeculativeType.DRAFT_EAGLE3,
}
FLASH: Mapping[bool | None, Literal["auto", "on", "off"]] = {None: "auto", True: "on", False: "off"}


class Llama(Closing):
    """A GGUF model with, perhaps, a draft. Use as a context manager, or call ``close``."""

    def __init__(
        self,
        model_path: str | PathLike[str],
        *,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_gpu_layers: int | str = 0,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        ctx_checkpoints: int = 0,
        seed: int | None = None,
        speculative: SpecConfig | None = None,
        flash_attn: bool | None = None,
        type_k: str | int | None = None,
        type_v: str | int | None = None,
        verbose: bool = False,
    ) -> None:
        """Load ``model_path`` and the sidecar that ``speculative`` names.

        ``n_ctx`` 0 is what the model was trained for. ``type_k`` and ``type_v`` are names or
        ggml's numbers; ``seed`` None or -1 is a fresh one for each request. ``ctx_checkpoints`` is
        taken and has nothing to do: rejected drafts leave the cache by position. Raises ValueError
        and NotImplementedError as `SpecConfig.validate` does, ConfigError for a sidecar of another
        method than ``speculative`` names, and what ``dflash.load`` raises.
        """
        spec = SpecConfig() if speculative is None else speculative
        counts = {"n_batch": n_batch, "n_ubatch": n_ubatch}
        _check(spec, counts, {"n_ctx": n_ctx, "ctx_checkpoints": ctx_checkpoints})
        threads("n_threads", n_threads)
        threads("n_threads_batch", n_threads_batch)
        switch("flash_attn", False if flash_attn is None else flash_attn)
        switch("verbose", verbose)
        GenerateConfig(seed=fixed_seed(seed))
        most = spec.max_draft_tokens()
        self.spec, self.verbose, self._seed = spec, verbose, seed
        self.model_path = path_name("model_path", model_path)
        options = GgufOptions(
            n_ctx=n_ctx or None,
            n_batch=n_batch,
            n_ubatch=min(n_ubatch, n_batch),
            n_gpu_layers=cast("GpuLayers", n_gpu_layers),  # looked at there
            threads_batch=n_threads_batch,
            flash_attn=FLASH[flash_attn],
            type_k=_cache_type(type_k) or "f16",
            type_v=_cache_type(type_v) or "f16",
            verbose=verbose,
            **_draft_options(spec),
        )
        if verbose:
            self._say_all(lines.estimate(self.model_path, spec, options))
        self._engine: Engine = load(
            self.model_path,
            _draft_name(spec),
            backend="gguf",
            threads=n_threads,
            gguf=options,
        )
        self._running = Running()
        pair = self._engine.pair
        self._spelling = Spelling(pair.tokenizer)
        self._block = 1 + min(most, (pair.draft_block_size or 1) - 1)
        if n_gpu_layers not in (0, "auto") and pair.runs_on()["device"].startswith("cpu"):
            said = f"n_gpu_layers={n_gpu_layers!r}: this build of llama.cpp has no GPU; on CPU"
            print(said, file=sys.stderr)  # noqa: T201 - asked for, and not to be had
        for line in (*lines.clamped(most, self._block - 1), *lines.unused(spec)):
            print(line, file=sys.stderr)  # noqa: T201 - as above
        self._say_all(lines.start(getattr(pair, "draft_file", None), spec, self._block - 1))

    @property
    def last_speculative_stats(self) -> dict[str, Any]:
        """What the last request did, or has done so far; every key is there before the first, too.

        Of a request that runs, or was left before its end, the phases' seconds are 0: they are
        known once it has ended.
        """
        return self._running.figures()

    def n_ctx(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self._engine.pair.context_length

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Ids of ``text``, byte for byte (sentencepiece reads U+2581 as the space it writes so);
        ``special``: markers such as ``<|im_start|>`` in it become their tokens. Raises ConfigError
        for a byte that no token can say.
        """
        if not isinstance(text, bytes):
            raise ConfigError(f"text must be bytes (text.encode()), got {type(text).__name__}")
        tokenizer = self._engine.pair.tokenizer
        ids: list[int] = tokenizer.encode_bytes(text, special)
        bos = tokenizer.bos_token_id
        return [bos, *ids] if add_bos and tokenizer.add_bos_token and bos is not None else ids

    def detokenize(
        self,
        tokens: Sequence[int],
        prev_tokens: Sequence[int] | None = None,  # noqa: ARG002 - here no token's bytes need them
        special: bool = False,
    ) -> bytes:
        """Bytes of ``tokens``; special ones print nothing, or their names with ``special``."""
        tokenizer = self._engine.pair.tokenizer
        words = tokenizer.vocabulary
        ids = list(tokens) if isinstance(tokens, Iterable) else [tokens]
        if not all(isinstance(i, SupportsIndex) and 0 <= index(i) < len(words) for i in ids):
            raise ConfigError(f"tokens must be ids below {len(words)}, got {tokens!r}")
        found = b"".join(tokenizer.name_of(i) if special else words[i] for i in ids)
        # the space that was put before a text is none of it
        spaced = tokenizer.adds_space and ids and ids[0] == tokenizer.bos_token_id
        return found.removeprefix(b" ") if spaced else found

    def __call__(self, prompt: str | Sequence[int], **options: Any) -> Any:
        """`create_completion`."""
        return self.create_completion(prompt, **options)

    def create_completion(
        self, prompt: str | Sequence[int], *, stream: bool = False, **options: Any
    ) -> Any:
        """The completion of ``prompt`` in OpenAI's form; ``stream`` gives an iterator of parts.

        Options: max_tokens, temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
        frequency_penalty, seed, stop, logit_bias, logprobs, echo, ignore_eos. ``max_tokens`` None
        or 0 fills the context. Raises ConfigError for another.
        """
        chunks = self._run(prompt, chat=False, options=options)
        parts = Parts("text_completion", self.model_path, self._spelling)
        return parts.stream(chunks) if stream else parts.whole(chunks)

    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **options: Any
    ) -> Any:
        """The answer to ``messages`` through the file's chat template; options as above.

        ``logprobs`` is True or False, and ``top_logprobs`` says how many likeliest. Without
        ``max_tokens`` it ends where the model does, or the context. Raises ConfigError for
        a message that holds an image or audio: text only.
        """
        listed = isinstance(messages, Iterable) and not isinstance(messages, str)
        if not listed or not all(isinstance(m, Mapping) for m in messages):
            raise ConfigError(f"messages must be a list of mappings, got {messages!r}")
        turns = [
            {**message, "content": message_text(message.get("content"))} for message in messages
        ]
        chunks = self._run(turns, chat=True, options=chat_options(options))
        parts = Parts("chat.completion", self.model_path, self._spelling)
        return parts.stream(chunks) if stream else parts.whole(chunks)

    def close(self) -> None:
        """Free everything, sessions before weights; idempotent."""
        self._engine.close()

    def _run(self, prompt: Any, *, chat: bool, options: Mapping[str, Any]) -> Iterator[Chunk]:
        asked = sampling(options, self._seed)
        stream = self._engine.stream(
            prompt, chat_template=chat, block_size=self._block, strict_mode=True, **asked
        )
        self._running = Running()
        return self._watched(stream, self._running)

    def _watched(self, stream: Iterator[Chunk], running: Running) -> Iterator[Chunk]:
        """The same chunks, which ``running`` counts."""
        start = time.perf_counter()
        for chunk in stream:
            running.read(chunk, time.perf_counter() - start)
            if chunk.stats is not None:
                self._say_all(lines.summary(running.figures(), self.spec))
            yield chunk
            start = time.perf_counter()  # the reader's time is not ours

    def _say_all(self, lines: Iterable[str]) -> None:
        for line in lines if self.verbose else ():
            print(line, file=sys.stderr)  # noqa: T201 - that is what verbose means


def _check(spec: Any, counts: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse what cannot be meant: ``counts`` are 1 or more, ``others`` 0 or more."""
    if not isinstance(spec, SpecConfig):
        raise ConfigError(f"speculative must be a SpecConfig or None, got {spec!r}")
    spec.validate()
    _check_file(spec)
    for least, group in ((1, counts), (0, others)):
        for name, value in group.items():
            at_least(least, name, value, required=True)
    most, n_batch = spec.max_draft_tokens(), counts["n_batch"]
    if n_batch < 1 + most:
        raise ConfigError(
            f"n_batch {n_batch} cannot hold a verification batch of 1 + draft_n_max {most} "
            f"rows, and one is never split: n_batch must be at least {1 + most}"
        )


def _check_file(spec: SpecConfig) -> None:
    """Refuse a draft of another method than was asked for; which DFlash it is, the file says."""
    if not spec.has_file:
        return
    name = fspath(spec.draft_model_path or "")
    model, look_up = split_draft(name)
    if look_up or model in (NO_DRAFT, MTP):
        raise ConfigError(
            f"draft_model_path must be the sidecar's .gguf for {spec.spec_type}, got {name!r}"
        )
    known = is_gguf(name) and Path(name).expanduser().is_file()  # else opening it will tell
    kind = OF_FILE.get(kind_of_draft(name)[0]) if known else None
    if kind not in (None, spec.spec_type):
        raise ConfigError(
            f"{spec.spec_type} was asked for, and {name} is a draft of another method: say "
            f"SpeculativeType.{kind.name}"
        )


def _draft_name(spec: SpecConfig) -> str:
    if spec.has_file:
        return fspath(spec.draft_model_path or "")
    if spec.spec_type.is_mtp():
        return MTP
    return NGRAM if spec.spec_type.is_ngram() else NO_DRAFT


def _draft_options(spec: SpecConfig) -> dict[str, Any]:
    if not spec.spec_type.is_draft():
        return {}
    return {
        "draft_p_min": spec.draft_p_min,
        "draft_n_min": spec.draft_n_min,
        "draft_n_gpu_layers": spec.draft_n_gpu_layers,
        "draft_threads": spec.draft_n_threads,
        "draft_threads_batch": spec.draft_n_threads_batch,
        "draft_type_k": _cache_type(spec.draft_type_k),
        "draft_type_v": _cache_type(spec.draft_type_v),
    }


def _cache_type(value: Any) -> Any:
    """Our name of a number format for ggml's number; anything else as it is."""
    names = {number: name for name, number in CACHE_TYPES.items()}
    return names.get(value, value) if type(value) is int else value
