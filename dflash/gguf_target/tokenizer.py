"""The tokenizer of a GGUF file, from its metadata.

Byte-level BPE files name how text is cut before merging (``tokenizer.ggml.pre``); merges learned
under one cut give other ids under another, so an unknown name is an error, never a guess.
SentencePiece files are built by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dflash.errors import CheckpointError, MissingBackend
from dflash.gguf_target.config import CONTROL, Metadata

USER_DEFINED = 4  # matched whole in text, but not special
PROBE = "Hello, world's 12345 items:\n\n  x = 42;  naïve 日本語 🙂\n"


def _words(digits: str, symbols: str = r"[\r\n]*") -> str:
    """The cut Llama 3 made common; families differ in how many digits stay together."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+"
        + symbols
        + r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


GPT2 = frozenset({"gpt-2", "gpt2", "default", "phi-2", "mpt", "olmo", "jais", "roberta-bpe"})
DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"})
LLAMA3 = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe", "falcon3", "pixtral", "lfm2"}
)
QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen", "megrez", "kormo"})
KNOWN = GPT2 | DIGITS | LLAMA3 | QWEN2


def build_tokenizer(fields: Mapping[str, Any], file: Path) -> Any:
    """A transformers tokenizer with chat template and special tokens. Raises CheckpointError."""
    meta = Metadata(fields, file.name)
    kind = meta.get("tokenizer.ggml.model")
    if kind == "llama":
        built: Any = _sentence_piece(file)
    elif kind == "gpt2":
        built = _byte_level(meta, file.name)
    else:
        raise CheckpointError(
            f"{file.name} has a tokenizer of kind {kind!r}; gpt2 (byte-level) and llama "
            "(SentencePiece) are read. Use the model's safetensors folder"
        )
    template = meta.get("tokenizer.chat_template", None)
    if template:
        built.chat_template = template
    text = built.decode(built.encode(PROBE, add_special_tokens=False))
    if text.strip() != PROBE.strip():
        raise CheckpointError(
            f"the tokenizer built from {file.name} does not give a text back as it was: the file "
            "is damaged or of a variant we cannot read. Use the model's safetensors folder"
        )
    return built


def _sentence_piece(file: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except ImportError as error:
        raise MissingBackend(
            f"{file.name} has a SentencePiece tokenizer, which transformers reads with torch only: "
            "pip install torch, or use the model's safetensors folder"
        ) from error


def _byte_level(meta: Metadata, file: str) -> Any:
    tokens = meta.get("tokenizer.ggml.tokens")
    cut = meta.get("tokenizer.ggml.pre", "default")
    # whole words of the vocabulary win over merging there
    backend = Tokenizer(_merging(tokens, meta.get("tokenizer.ggml.merges"), cut in LLAMA3, file))
    backend.pre_tokenizer = pre_tokenizer(cut, file)
    backend.decoder = decoders.ByteLevel()
    if cut in QWEN2:
        backend.normalizer = normalizers.NFC()
    _add_special(backend, tokens, meta.get("tokenizer.ggml.token_type", []))
    names = _named(meta, tokens)
    if meta.get("tokenizer.ggml.add_bos_token", cut in LLAMA3) and "bos_token" in names:
        bos = names["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokens.index(bos))]
        )
    build: Any = PreTrainedTokenizerFast
    return build(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        model_max_length=int(meta.get(".context_length")),
        **names,
    )


def _merging(tokens: list[str], stored: list[str], words_first: bool, file: str) -> models.BPE:
    """The merging model. Raises CheckpointError for merges that do not fit the tokens."""
    merges: list[tuple[str, str]] = []
    known = set(tokens)
    for merge in stored:
        left, _, right = merge.partition(" ")
        if not known.issuperset((left, right, left + right)):
            raise CheckpointError(
                f"{file} is damaged: its merge {merge!r} is not of two of its tokens to a third. "
                "Download it again"
            )
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    return models.BPE(vocab=vocab, merges=merges, ignore_merges=words_first)


def pre_tokenizer(cut: str, file: str) -> Any:
    """How text is cut before merging. Raises CheckpointError for a name not in the table."""
    if cut in GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if cut in DIGITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    if cut not in KNOWN:
        raise CheckpointError(
            f"{file} cuts text in the way {cut!r}, which is not among the known ones "
            f"({', '.join(sorted(KNOWN))}). Use the model's safetensors folder"
        )
    pattern = _words(r"\p{N}{1,3}" if cut in LLAMA3 else r"\p{N}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_special(backend: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Register tokens that are matched whole in text; they keep the ids they have."""
    pairs = list(zip(tokens, kinds, strict=False))
    special = [AddedToken(t, normalized=False, special=True) for t, k in pairs if k == CONTROL]
    plain = [AddedToken(t, normalized=False, special=False) for t, k in pairs if k == USER_DEFINED]
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _named(meta: Metadata, tokens: list[str]) -> dict[str, str]:
    """bos, eos, unk and pad tokens by name, as far as the file has them."""
    found = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        place = meta.get(f"tokenizer.ggml.{theirs}_token_id", None)
        if place is not None and int(place) < len(tokens):
            found[f"{ours}_token"] = tokens[int(place)]
    return found
