"""Structs of llama.cpp's C interface, as the pinned builds lay them out.

llama.cpp moves fields between builds without a version number, and a wrong offset runs for a while
and then crashes. So layouts are kept for named versions of the package that brings the library,
and `check` compares what the library itself writes as defaults with what the layout says.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Mapping
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_float,
    c_int8,
    c_int32,
    c_size_t,
    c_uint32,
    c_void_p,
)
from typing import Any

from dflash.errors import MissingBackend

SPARE = 512  # bytes; more than any of these structs
FILL = 0xAA


class ModelParams(Structure):
    """``llama_model_params`` (80 bytes)."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", c_void_p),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("check_tensors", c_bool),
        ("use_extra_bufts", c_bool),
        ("no_host", c_bool),
        ("no_alloc", c_bool),
        ("load_mtp", c_bool),
    ]


_CONTEXT: list[tuple[str, Any]] = [
    ("n_ctx", c_uint32),
    ("n_batch", c_uint32),
    ("n_ubatch", c_uint32),
    ("n_seq_max", c_uint32),
    ("n_rs_seq", c_uint32),
    ("n_outputs_max", c_uint32),
    ("n_outputs_max_per_seq", c_uint32),
    ("n_threads", c_int32),
    ("n_threads_batch", c_int32),
    ("ctx_type", c_int32),
    ("rope_scaling_type", c_int32),
    ("pooling_type", c_int32),
    ("attention_type", c_int32),
    ("flash_attn_type", c_int32),
    ("rope_freq_base", c_float),
    ("rope_freq_scale", c_float),
    ("yarn_ext_factor", c_float),
    ("yarn_attn_factor", c_float),
    ("yarn_beta_fast", c_float),
    ("yarn_beta_slow", c_float),
    ("yarn_orig_ctx", c_uint32),
    ("defrag_thold", c_float),
    ("cb_eval", c_void_p),
    ("cb_eval_user_data", c_void_p),
    ("type_k", c_int32),
    ("type_v", c_int32),
    ("moe_cache_size", c_size_t),
    ("abort_callback", c_void_p),
    ("abort_callback_data", c_void_p),
    ("embeddings", c_bool),
    ("offload_kqv", c_bool),
    ("no_perf", c_bool),
    ("op_offload", c_bool),
    ("swa_full", c_bool),
    ("kv_unified", c_bool),
    ("samplers", c_void_p),
    ("n_samplers", c_size_t),
    ("ctx_other", c_void_p),
]


class ContextParams(Structure):
    """``llama_context_params`` (168 bytes)."""

    _fields_ = _CONTEXT


class OlderContextParams(Structure):
    """The same before caches of experts (160 bytes)."""

    _fields_ = [field for field in _CONTEXT if field[0] != "moe_cache_size"]


class Batch(Structure):
    """``llama_batch`` (56 bytes)."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("token", c_void_p),
        ("embd", c_void_p),
        ("pos", c_void_p),
        ("n_seq_id", c_void_p),
        ("seq_id", c_void_p),
        ("logits", POINTER(c_int8)),
    ]


_MODEL_DEFAULTS: Mapping[str, Any] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS: Mapping[str, Any] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "rope_freq_base": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "type_k": 1,
    "type_v": 1,
    "moe_cache_size": 0,
    "abort_callback": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}
LAYOUTS: Mapping[str, Mapping[str, type[Structure]]] = {
    "xllamacpp": {"2026.10.11549": ContextParams},
    "llama-cpp-python": {"0.3.36": OlderContextParams},
}
"""Package -> version -> its ``llama_context_params``; the other structs are the same in all."""


class _Spare(Structure):
    """Room for a struct of unknown size: only its real bytes are written."""

    _fields_ = [("bytes", ctypes.c_uint8 * SPARE)]


def check(library: Any, package: str, version: str) -> type[Structure]:
    """The ``llama_context_params`` of ``library``, which lays its structs out as this file says.

    Raises MissingBackend for a version that is not known here, or a build that is not it.
    """
    known = LAYOUTS[package]
    if version not in known:
        raise MissingBackend(
            f"{package} {version} is not a version whose memory layout is known here, and a wrong "
            f"one crashes. Install a known one: pip install '{package}=={[*known][-1]}'"
        )
    context = known[version]
    for name, kind, defaults in (
        ("llama_model_default_params", ModelParams, _MODEL_DEFAULTS),
        ("llama_context_default_params", context, _CONTEXT_DEFAULTS),
    ):
        raw = _written(getattr(library, name))
        found = kind.from_buffer_copy(raw)
        own = [key for key, *_ in kind._fields_ if key in defaults]
        wrong = [key for key in own if getattr(found, key) != defaults[key]]
        if _hidden_pointer():
            size = len(raw.rstrip(bytes([FILL])))  # padding at the end may stay unwritten
            wrong += (
                ["its size"] if not ctypes.sizeof(kind) - 7 <= size <= ctypes.sizeof(kind) else []
            )
        if wrong:
            raise MissingBackend(
                f"the library of {package} {version} is not the build known under that number "
                f"({name} differs in {', '.join(wrong[:4])}). Install it again from the package "
                f"index: pip install --force-reinstall '{package}=={version}'"
            )
    return context


def _written(function: Any) -> bytes:
    """What ``function`` returns by value, in a buffer larger than any such struct."""
    if not _hidden_pointer():
        function.argtypes, function.restype = [], _Spare
        return bytes(function().bytes)
    buffer = (ctypes.c_uint8 * SPARE)(*([FILL] * SPARE))
    function.argtypes, function.restype = [c_void_p], None
    function(ctypes.addressof(buffer))
    return bytes(buffer)


def _hidden_pointer() -> bool:
    """Whether a large result is written where the first argument points (System V, x86-64)."""
    return platform.machine() in ("x86_64", "AMD64") and sys.platform != "win32"
