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
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self

from dflash.config import NGRAM, NO_DRAFT
from dflash.engine import Engine, load
from dflash.errors import ConfigError
from dflash.gguf_file import read_header
from dflash.llama_config import SpecConfig, SpeculativeType, speculative_output_limits
from dflash.llama_parts import Parts
from dflash.llama_stats import empty, llama_stats
from dflash.results import Chunk

__all__ = ["Llama", "SpecConfig", "SpeculativeType", "speculative_output_limits"]

SAMPLING = {  # their name -> ours
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "seed",
    "logit_bias": "logit_bias",
    "logprobs": "logprobs",
    "echo": "echo",
    "ignore_eos": "ignore_eos",
}


class Llama:
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
        type_k: str = "f16",
        type_v: str = "f16",
        verbose: bool = False,
    ) -> None:
        """Load ``model_path`` and the sidecar that ``speculative`` names.

        ``n_ctx`` 0 is what the model was trained for. ``ctx_checkpoints`` is taken and has nothing
        to do: rejected drafts leave the cache by position. Raises ValueError and
        NotImplementedError as `SpecConfig.validate` does, and what ``dflash.load`` raises.
        """
        spec = speculative or SpecConfig()
        spec.validate()
        most = spec.max_draft_tokens()
        if n_batch < 1 + most:
            raise ConfigError(
                f"n_batch {n_batch} cannot hold a verification batch of 1 + draft_n_max {most} "
                f"rows, and one is never split: n_batch must be at least {1 + most}"
            )
        assert ctx_checkpoints >= 0, "a number of checkpoints"
        self.spec, self.verbose, self._seed = spec, verbose, seed
        self.model_path = fspath(model_path)
        options = {
            "n_ctx": n_ctx or None,
            "n_batch": n_batch,
            "n_ubatch": min(n_ubatch, n_batch),
            "n_gpu_layers": n_gpu_layers,
            "threads_batch": n_threads_batch,
            "flash_attn": {None: "auto", True: "on", False: "off"}[flash_attn],
            "type_k": type_k,
            "type_v": type_v,
            "verbose": verbose,
            **_draft_options(spec),
        }
        if verbose:
            self._estimate(options)
        self._engine: Engine = load(
            self.model_path,
            _draft_name(spec),
            backend="gguf",
            threads=n_threads,
            gguf=options,
        )
        self._last = empty()
        self._block = 1 + min(most, (self._engine.pair.draft_block_size or 1) - 1)
        self._announce(n_gpu_layers)

    @property
    def last_speculative_stats(self) -> dict[str, Any]:
        """What the last request did; every key is there before the first one, too."""
        return dict(self._last)

    def n_ctx(self) -> int:
        """Most tokens of a request, prompt and output."""
        return self._engine.pair.context_length

    def tokenize(self, text: bytes, add_bos: bool = True) -> list[int]:
        """Ids of UTF-8 ``text``; markers such as ``<|im_start|>`` in it become their tokens."""
        tokenizer = self._engine.pair.tokenizer
        ids: list[int] = tokenizer.encode(text.decode(errors="ignore"))
        bos = tokenizer.bos_token_id
        return [bos, *ids] if add_bos and tokenizer.add_bos_token and bos is not None else ids

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        """UTF-8 text of ``tokens``; special ones print nothing."""
        words = self._engine.pair.tokenizer.vocabulary
        return b"".join(words[token] for token in tokens)

    def __call__(self, prompt: str, **options: Any) -> Any:
        """`create_completion`."""
        return self.create_completion(prompt, **options)

    def create_completion(
        self, prompt: str | Sequence[int], *, stream: bool = False, **options: Any
    ) -> Any:
        """The completion of ``prompt`` in OpenAI's form; ``stream`` gives an iterator of parts.

        Options: max_tokens, temperature, top_k, top_p, min_p, repeat_penalty, presence_penalty,
        frequency_penalty, seed, stop, logit_bias, logprobs, echo, ignore_eos. Raises ConfigError
        for another.
        """
        chunks = self._run(prompt, chat=False, options=options)
        parts = Parts("text_completion", self.model_path)
        return parts.stream(chunks) if stream else parts.whole(chunks)

    def create_chat_completion(
        self, messages: Sequence[Mapping[str, Any]], *, stream: bool = False, **options: Any
    ) -> Any:
        """The answer to ``messages`` through the file's chat template; options as above.

        Raises ConfigError for a message that holds an image or audio: text only.
        """
        turns = [{**message, "content": _text(message.get("content"))} for message in messages]
        chunks = self._run(turns, chat=True, options=options)
        parts = Parts("chat.completion", self.model_path)
        return parts.stream(chunks) if stream else parts.whole(chunks)

    def close(self) -> None:
        """Free everything, sessions before weights; idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        """This object."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _run(self, prompt: Any, *, chat: bool, options: Mapping[str, Any]) -> Iterator[Chunk]:
        asked = _sampling(options)
        asked.setdefault("seed", self._seed)
        stream = self._engine.stream(
            prompt, chat_template=chat, block_size=self._block, strict_mode=True, **asked
        )
        return self._watched(stream)

    def _watched(self, stream: Iterator[Chunk]) -> Iterator[Chunk]:
        """The same chunks; the statistics are kept when the last has come."""
        rounds: list[tuple[int, int]] = []
        for number, chunk in enumerate(stream):
            accepted = chunk.sources.count("draft")
            if number:  # the first token is the prompt's
                rounds.append((self._block - 1, accepted))
            if chunk.stats is not None:
                drafting = rounds if chunk.stats.drafted else []
                self._last = llama_stats(chunk.stats, drafting)
                self._summarise()
            yield chunk

    def _say(self, line: str) -> None:
        if self.verbose:
            print(line, file=sys.stderr)  # noqa: T201 - that is what verbose means

    def _estimate(self, options: Mapping[str, Any]) -> None:
        for name, size in _memory(self.model_path, self.spec, options).items():
            self._say(f"memory estimate: {name} {size / 2**20:.1f} MiB")

    def _announce(self, n_gpu_layers: int | str) -> None:
        pair, spec = self._engine.pair, self.spec
        if n_gpu_layers not in (0, "auto") and pair.runs_on()["device"].startswith("cpu"):
            said = f"n_gpu_layers={n_gpu_layers!r}: this build of llama.cpp has no GPU; on CPU"
            print(said, file=sys.stderr)  # noqa: T201 - asked for, and not to be had
        sidecar = getattr(pair, "sidecar", None)
        if sidecar is None:
            return
        kept = "inactive: the selector chooses" if sidecar.top_k else "inactive: sampled on host"
        mrope = any(sidecar.header.own("rope.dimension_sections") or ())
        asked = "requested" if spec.draft_backend_sampling else "off"
        self._say(f"LlamaDFlashDecoding: {sidecar.name} speculative decoding enabled")
        self._say(
            f"LlamaDFlashDecoding: draft_n_max {spec.draft_n_max} (runs {self._block - 1}), "
            f"draft_n_min {spec.draft_n_min}, draft_p_min {spec.draft_p_min}"
        )
        self._say(
            f"LlamaDFlashDecoding: block_size {sidecar.block_size}, mask_token "
            f"{sidecar.mask_token_id}, target_layers {list(sidecar.taps)}, selector_top_k "
            f"{sidecar.top_k}, mrope {mrope}"
        )
        self._say(f"LlamaDFlashDecoding: backend_sampling {asked}, {kept}")

    def _summarise(self) -> None:
        if not self.verbose or not self.spec.enabled:
            return
        s = self._last
        self._say(f"Llama.generate: {self.spec.spec_type.to_str()} summary")
        self._say(f"  Calls       draft {s['draft_calls']}, verify {s['process_calls']}")
        self._say(f"  Acceptance  {s['accepted']} of {s['drafted']} ({s['acceptance_rate']:.3f})")
        phases = f"draft {s['draft_seconds']:.3f} s, target {s['target_decode_seconds']:.3f} s"
        self._say(f"  Phase time  {phases}")
        self._say(f"  Checkpoint  none needed, {s['rollbacks']} rollbacks by position")
        rate = s["generation_tokens_per_second"]
        self._say(f"  Output      {s['generation_tokens']} tokens, {rate:.1f} tokens a second")


def _draft_name(spec: SpecConfig) -> str:
    if spec.spec_type.is_dflash:
        return fspath(spec.draft_model_path or "")
    return NGRAM if spec.spec_type.is_ngram else NO_DRAFT


def _draft_options(spec: SpecConfig) -> dict[str, Any]:
    if not spec.spec_type.is_dflash:
        return {}
    return {
        "draft_p_min": spec.draft_p_min,
        "draft_n_min": spec.draft_n_min,
        "draft_n_gpu_layers": spec.draft_n_gpu_layers,
        "draft_threads": spec.draft_n_threads,
        "draft_type_k": spec.draft_type_k,
        "draft_type_v": spec.draft_type_v,
    }


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for theirs. Raises ConfigError for one that has no meaning here."""
    given = dict(options)
    stop = given.pop("stop", None)
    limit = given.pop("max_tokens", 16)
    unknown = sorted(set(given) - set(SAMPLING))
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]!r}. Known: max_tokens, stop, {', '.join(SAMPLING)}"
        )
    asked = {SAMPLING[name]: value for name, value in given.items() if value is not None}
    whole = limit is None or limit <= 0  # as far as the context goes
    return {"max_tokens": 2**30 if whole else limit, "stop": stop or (), **asked}


def _text(content: Any) -> str:
    """The text of a message's content. Raises ConfigError naming a part that is none."""
    if isinstance(content, str) or content is None:
        return content or ""
    for part in content:
        if part.get("type") != "text":
            raise ConfigError(
                f"a message has a part of type {part.get('type')!r}: speculative decoding here is "
                "for text only, so leave images and audio out"
            )
    return "".join(part["text"] for part in content)


def _memory(path: str, spec: SpecConfig, options: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of weights, caches and logits, from the headers alone."""
    target = read_header(path)
    tokens = options["n_ctx"] or int(target.own("context_length", 0))
    heads = int(target.own("attention.head_count", 1))
    width = int(target.own("embedding_length", 0))
    kv = int(target.own("attention.head_count_kv", heads)) * (width // heads)
    found = {
        "target": target.path.stat().st_size,
        "target cache": 4 * tokens * kv * int(target.own("block_count", 0)),
        "logits": 4 * 64 * len(target.metadata.get("tokenizer.ggml.tokens") or ()),
    }
    if spec.spec_type.is_dflash:
        draft = read_header(fspath(spec.draft_model_path or ""))
        size = int(draft.own("attention.head_count_kv", 0)) * int(
            draft.own("attention.key_length", 0)
        )
        found["sidecar"] = draft.path.stat().st_size
        found["sidecar cache"] = 4 * tokens * size * int(draft.own("block_count", 0))
    return found
