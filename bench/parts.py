"""Which part of a round an operator of torch belongs to, by its name."""

from __future__ import annotations

from typing import Any

Names = tuple[str, ...]
DRAFT, VERIFY, LOOP = "draft", "verify", "loop"
BODY, HEAD, ATTENTION, WRITES, OTHER = "products", "head", "attention", "copies", "elementwise"
CHOICE, CALLS, PYTHON = "choice", "calls", "python"
IDLE = (CALLS, PYTHON)  # no tensor kernel runs
PRODUCTS = ("linear", "addmm", "::mm", "bmm", "matmul", "pack_mm", "int_mm")
ATTENDING = ("attention", "softmax")
COPYING = ("copy_", "::cat", "index_copy", "clone", "index_put", "index_select")
CHOOSING: Names = ("::max", "argmax", "amax", "topk", "sort", "isfinite", "local_scalar", "cumsum")
CHOOSING += ("searchsorted", "gather", "scatter")
NOTHING: Names = ("view", "reshape", "slice", "select", "transpose", "permute", "expand", "unbind")
NOTHING += ("split", "chunk", "as_strided", "empty", "unsqueeze", "squeeze", "detach", "alias")
NOTHING += ("flatten", "::to", "::t", "narrow", "resize", "lift_fresh", "result_type", "::item")
NOTHING += ("resolve_conj", "resolve_neg", "is_nonzero", "unflatten", "tolist", "contiguous")


def part_of(name: str, shapes: Any, vocabulary: int) -> str:
    """The part of a round that an operator belongs to."""
    if any(key in name for key in PRODUCTS):
        wide = any(vocabulary in shape for shape in shapes or () if isinstance(shape, list))
        return HEAD if wide else BODY
    for keys, part in ((ATTENDING, ATTENTION), (COPYING, WRITES), (CHOOSING, CHOICE)):
        if any(key in name for key in keys):
            return part
    return CALLS if any(key in name for key in NOTHING) else OTHER


def computes(name: str) -> bool:
    """Whether an operator is a kernel: any that is not known to compute nothing."""
    return part_of(name, (), 0) not in IDLE
