"""llama.cpp's library out of a Python package: checked, and its functions typed.

It exports llama.cpp's whole C interface and, but for Windows, the C++ calls that hand out the
inputs of layers. Nothing of the Python module beside it is imported.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int32, c_size_t, c_uint32, c_void_p
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

from dflash.backends.gguf.layout import Batch, ModelParams, check
from dflash.backends.gguf.provider import choose
from dflash.errors import MissingBackend

ERROR, DEBUG = 4, 1  # log levels of ggml

_Log = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "llama_backend_init": ([], None),
    "llama_log_set": ([_Log, c_void_p], None),
    "llama_model_load_from_file": ([c_char_p, ModelParams], c_void_p),
    "llama_model_free": ([c_void_p], None),
    "llama_model_default_params": ([], ModelParams),
    "llama_context_default_params": ([], ...),  # `layout.check` says which struct that is
    "llama_init_from_model": ([c_void_p, ...], c_void_p),
    "llama_free": ([c_void_p], None),
    "llama_decode": ([c_void_p, Batch], c_int32),
    "llama_encode": ([c_void_p, Batch], c_int32),
    "llama_get_logits": ([c_void_p], c_void_p),
    "llama_get_memory": ([c_void_p], c_void_p),
    "llama_memory_seq_rm": ([c_void_p, c_int32, c_int32, c_int32], c_bool),
    "llama_memory_seq_pos_max": ([c_void_p, c_int32], c_int32),
    "llama_memory_clear": ([c_void_p, c_bool], None),
    "llama_set_causal_attn": ([c_void_p, c_bool], None),
    "llama_state_seq_get_size": ([c_void_p, c_int32], c_size_t),
    "llama_state_seq_get_data": ([c_void_p, c_void_p, c_size_t, c_int32], c_size_t),
    "llama_state_seq_set_data": ([c_void_p, c_void_p, c_size_t, c_int32], c_size_t),
    "llama_n_ctx": ([c_void_p], c_uint32),
    "llama_model_get_vocab": ([c_void_p], c_void_p),
    "llama_model_n_ctx_train": ([c_void_p], c_int32),
    "llama_model_n_embd": ([c_void_p], c_int32),
    "llama_model_n_layer": ([c_void_p], c_int32),
    "llama_model_size": ([c_void_p], ctypes.c_uint64),
    "llama_model_desc": ([c_void_p, c_char_p, c_size_t], c_int32),
    "llama_model_is_recurrent": ([c_void_p], c_bool),
    "llama_model_is_hybrid": ([c_void_p], c_bool),
    "llama_model_rope_type": ([c_void_p], c_int32),
    "llama_supports_gpu_offload": ([], c_bool),
    "llama_vocab_n_tokens": ([c_void_p], c_int32),
    "llama_vocab_is_eog": ([c_void_p, c_int32], c_bool),
    "llama_vocab_is_control": ([c_void_p, c_int32], c_bool),
    "llama_vocab_bos": ([c_void_p], c_int32),
    "llama_vocab_eos": ([c_void_p], c_int32),
    "llama_vocab_get_add_bos": ([c_void_p], c_bool),
    "llama_tokenize": (
        [c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool],
        c_int32,
    ),
    "llama_token_to_piece": (
        [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool],
        c_int32,
    ),
    "ggml_get_name": ([c_void_p], c_char_p),
    "ggml_nbytes": ([c_void_p], c_size_t),
    "ggml_backend_tensor_get": ([c_void_p, c_void_p, c_size_t, c_size_t], None),
}
STAGING: dict[str, tuple[str, list[Any], Any]] = {  # our name -> C++ symbol; may change any time
    "get_layer_input": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        [c_void_p, c_uint32],
        c_void_p,
    ),
    "set_layer_input": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        [c_void_p, c_uint32, c_bool],
        None,
    ),
    "get_next": ("_Z26llama_get_embeddings_nextnP13llama_context", [c_void_p], c_void_p),
    "set_next": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        [c_void_p, c_bool, c_bool],
        None,
    ),
}


class Library:
    """The loaded library: every function above as a typed attribute, and its latest errors."""

    def __init__(self, path: Path, package: str, version: str) -> None:
        """``version`` of ``package`` brings it.

        Raises MissingBackend for an unknown build, or one without the functions needed.
        """
        self.path, self.name = path, f"{package} {version}"
        try:
            self._handle = ctypes.CDLL(str(path))
        except OSError as problem:
            raise MissingBackend(
                f"{path} cannot be loaded ({problem}). Install it again: pip install "
                f"--force-reinstall --no-deps '{package}=={version}'"
            ) from problem
        missing = [name for name in SIGNATURES if not hasattr(self._handle, name)]
        if missing:
            raise MissingBackend(
                f"the {package} wheel for this platform does not export what the decode loop "
                f"calls ({missing[0]} and {len(missing) - 1} more). Wheels for Linux and macOS "
                "do; on Windows use WSL, llama-cpp-python (DFLASH_GGUF_LIBRARY), the torch backend "
                "(--backend torch), or llama.cpp's own server, which drafts in a loop of its own "
                "(dflash serve --engine llama-server)"
            )
        self._bind(check(self._handle, package, version))
        self.verbose = False
        self._log = _Log(self._take)  # the library keeps the pointer
        self.listen()
        self.owners: WeakSet[Any] = WeakSet()  # models and contexts alive
        atexit.register(self._quit)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:
        """The functions bound by name."""
        raise AttributeError(name)

    def listen(self) -> list[str]:
        """Errors that the library logs from here on, until the next call of this."""
        self.llama_log_set(self._log, None)  # the wheel's own server takes it away
        self.errors: list[str] = []
        return self.errors

    def lacks(self) -> list[str]:
        """Symbols that drafts need to read states of the target, and that are not exported."""
        return [symbol for symbol, _, _ in STAGING.values() if not hasattr(self._handle, symbol)]

    def insist_on_states(self) -> None:
        """Raise MissingBackend where the library `lacks` something."""
        if why := self.why_no_states():
            raise MissingBackend(
                f"{why}. Plain decoding and --draft ngram run with it; for drafts use xllamacpp on "
                "Linux or macOS"
            )

    def why_no_states(self) -> str:
        """Why drafts cannot read states of the target; empty where they can."""
        missing = self.lacks()
        if not missing:
            return ""
        return (
            f"drafts read states of the target, and the library of {self.name} does not export the "
            f"calls for that on this platform ({missing[0]})"
        )

    def _bind(self, context: type[ctypes.Structure]) -> None:
        def bound(name: str, symbol: str, arguments: list[Any], result: Any) -> None:
            function = getattr(self._handle, symbol)
            function.argtypes = [context if one is ... else one for one in arguments]
            function.restype = context if result is ... else result
            setattr(self, name, function)

        for name, (arguments, result) in SIGNATURES.items():
            bound(name, name, arguments, result)
        for name, (symbol, arguments, result) in STAGING.items():
            if hasattr(self._handle, symbol):
                bound(name, symbol, arguments, result)

    def _take(self, level: int, text: bytes, _: Any) -> None:
        line = (text or b"").decode(errors="replace")
        if level == ERROR and line.strip():
            self.errors.append(line.strip())
        if self.verbose and level != DEBUG:  # those are by the thousand
            sys.stderr.write(line)

    def _quit(self) -> None:
        """Free what is left, contexts before models, while lines can still be taken from it."""
        for owner in sorted(self.owners, key=lambda one: one.order):
            owner.close()
        self.llama_log_set(_Log(), None)  # no Python may be called once the interpreter is going


@cache
def library() -> Library:
    """The library, loaded once. Raises MissingBackend with the pip command, ConfigError."""
    provider = choose()
    file, version = provider.find()
    return Library(file, provider.package, version)
