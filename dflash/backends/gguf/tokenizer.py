"""The tokenizer of a GGUF file: llama.cpp's own, and the chat template in the file's metadata."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from dflash.backends.gguf.native import Model
from dflash.errors import ConfigError, MissingBackend

CONTROL = 3  # token type in the metadata
T = TypeVar("T")
PIECE = 256  # bytes of the longest token; longer ones ask again


class GgufTokenizer:
    """The ``Tokenizer`` protocol over the vocabulary of a model.

    Everything raises EngineClosed once the model is closed, also what was looked up before.
    """

    joins_bytes = True

    def __init__(self, model: Model, metadata: Mapping[str, Any]) -> None:
        """``metadata`` is the file's; the model is borrowed."""
        self._model, self._library = model, model.library
        self.chat_template: str | None = metadata.get("tokenizer.chat_template")
        bos, eos = (getattr(self._library, f"llama_vocab_{n}")(model.vocab) for n in ("bos", "eos"))
        self.bos_token_id: int | None = bos if bos >= 0 else None
        self.eos_token_id: int | None = eos if eos >= 0 else None
        self.add_bos_token = bool(self._library.llama_vocab_get_add_bos(model.vocab))
        pieces = metadata.get("tokenizer.ggml.model") == "llama"  # sentencepiece
        self.adds_space = pieces and bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        self._kinds = metadata.get("tokenizer.ggml.token_type") or []
        self._words = _Known(self._word)  # of tokens decoded so far
        self._texts = _Known(lambda token: self._words[token].decode(errors="replace"))
        texts = metadata.get("tokenizer.ggml.tokens") or []
        self._names = {
            name: texts[i] if i is not None and i < len(texts) else ""
            for name, i in (("bos_token", self.bos_token_id), ("eos_token", self.eos_token_id))
        }

    def encode(self, text: str) -> list[int]:
        """Text to ids; markers such as ``<|im_start|>`` in the text become their tokens."""
        return self._encode(text.encode(), markers=True)

    def encode_bytes(self, raw: bytes, markers: bool) -> list[int]:
        """The same for bytes, UTF-8 or not; ``markers`` False reads them as any text.

        Raises ConfigError for a byte that no token prints.
        """
        self._check_open()
        text = raw.decode(errors="surrogateescape")
        ids: list[int] = []
        for stray, run in groupby(text, _is_stray):  # llama.cpp itself would lose stray bytes
            part = "".join(run).encode(errors="surrogateescape")
            if stray:
                ids += map(self._of_byte, part)
            else:
                ids += self._encode_on(part, markers) if ids else self._encode(part, markers)
        if unsaid := sorted(set(raw) - self._bytes.keys()):  # unless longer tokens have them
            said = b"".join(map(self.name_of, ids))
            if said not in (raw, b" " + raw):
                self._of_byte(unsaid[0])
        return ids

    def _encode_on(self, raw: bytes, markers: bool) -> list[int]:
        """As what follows on something: without a space before it."""
        if not self.adds_space:
            return self._encode(raw, markers)
        nul = self._of_byte(0)  # which no piece joins
        ids = self._encode(b"\0" + raw, markers)
        return ids[ids.index(nul) + 1 :]

    def _encode(self, raw: bytes, markers: bool) -> list[int]:
        size = len(raw) + 8
        while True:
            ids = (ctypes.c_int32 * size)()
            with self._model.lock:
                count = self._library.llama_tokenize(
                    self._model.vocab, raw, len(raw), ids, size, False, markers
                )
            if count >= 0:
                return list(ids[:count])
            size = -count

    def _of_byte(self, byte: int) -> int:
        if byte not in self._bytes:
            raise ConfigError(
                f"byte 0x{byte:02x} of the text would be lost: no token of this vocabulary prints "
                "it. Leave it out"
            )
        return self._bytes[byte]

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """The token of each single byte that has one."""
        return {word[0]: i for i, word in enumerate(self.vocabulary) if len(word) == 1}

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out; bytes that are no character print as U+FFFD.

        Raises IndexError for what is no token.
        """
        self._check_open()
        if len(ids) == 1:  # a plain step's
            return self._texts[ids[0]]
        return b"".join(map(self._words.__getitem__, ids)).decode(errors="replace")

    @property
    def vocabulary(self) -> tuple[bytes, ...]:
        """What each token prints; control tokens print nothing."""
        self._check_open()
        return self._pieces

    @cached_property
    def _pieces(self) -> tuple[bytes, ...]:
        return tuple(self._word(token) for token in range(self._model.vocab_size))

    def __len__(self) -> int:
        """Tokens, control tokens included."""
        self._check_open()
        return self._model.vocab_size

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **_: Any
    ) -> str:
        """Messages as the file's template writes them. Raises jinja2.TemplateError, and
        MissingBackend without jinja2."""
        self._check_open()
        text: str = self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **self._names
        )
        return text

    @cached_property
    def _template(self) -> Any:
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as problem:
            raise MissingBackend(
                "chat templates need jinja2: pip install 'dflash-engine[gguf]'"
            ) from problem

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        return environment.from_string(self.chat_template or "")

    def name_of(self, token: int) -> bytes:
        """What ``token`` prints, or the name of a control token. Raises IndexError."""
        return self._piece(token, names=True)

    def _check_open(self) -> None:
        _ = self._model.vocab  # raises

    def _word(self, token: int) -> bytes:
        if 0 <= token < len(self._kinds) and self._kinds[token] == CONTROL:
            return b""  # whatever llama.cpp makes of it: it prints some that belong to a family
        return self._piece(token, names=False)

    def _piece(self, token: int, names: bool) -> bytes:
        token = range(self._model.vocab_size)[token]  # llama.cpp aborts at others
        size = PIECE
        while True:
            text = ctypes.create_string_buffer(size)
            with self._model.lock:
                count = self._library.llama_token_to_piece(
                    self._model.vocab, token, text, size, 0, names
                )
            if count >= 0:
                return text.raw[:count]
            size = -count


class _Known(dict[int, T]):
    """What ``find`` says of a token, found once."""

    def __init__(self, find: Callable[[int], T]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, token: int) -> T:
        return self.setdefault(token, self._find(token))


def _is_stray(letter: str) -> bool:
    """Whether it stands for a byte that is no UTF-8 (``surrogateescape``)."""
    return "\udc80" <= letter <= "\udcff"


def _to_json(value: Any, indent: int | None = None) -> str:
    """As transformers writes it: nothing escaped for HTML, letters as they are."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
