"""Products with packed weights, in the forms that a decoder layer wants.

``multiply`` is ``x -> W x``, ``plus`` adds something in the same pass, and a gated product is
``silu(gate x) * (up x)`` from the two halves of one matrix. MKL's and oneDNN's own operators, the
ones torch's compiler uses with frozen weights; `packed.py` tries each before it is used.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash.backends.torch.narrow import Multiply, direct, holding

ROWS_HINT = 8  # the packed layout is made for this many rows; measured flat from 1 to 16
FEW = 4  # oneDNN has a slower road for fewer rows than these
Plus = Callable[[Tensor, Tensor], Tensor]


def mkl(weight: Tensor) -> Multiply:
    """With a copy of ``weight`` [out, in] in MKL's layout; float32 alone."""
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, ROWS_HINT)
    shape = weight.new_empty(1).expand(weight.shape)  # the operator reads sizes only
    width, product = weight.shape[1], direct(torch.ops.mkl._mkl_linear.default)

    def multiply(x: Tensor) -> Tensor:
        rows = x.numel() // width  # any other number would take the unpacked road
        y: Tensor = product(x, packed, shape, None, rows)
        return y

    return multiply


def onednn(weight: Tensor) -> tuple[Multiply, Plus]:
    """With a copy of ``weight`` [out, in] in oneDNN's layout."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT)
    product = direct(torch.ops.mkldnn._linear_pointwise.default)
    both = direct(torch.ops.mkldnn._linear_pointwise.binary)
    width = weight.shape[1]

    def multiply(x: Tensor) -> Tensor:
        if x.numel() < FEW * width:
            return _filled(multiply, x)
        y: Tensor = product(x, packed, None, "none", [], "")
        return y

    def plus(x: Tensor, other: Tensor) -> Tensor:
        if x.numel() < FEW * width:
            return multiply(x).add_(other)
        y: Tensor = both(x, other, packed, None, "add")
        return y

    return holding(multiply, packed), plus


def onednn_gate(weight: Tensor) -> Multiply:
    """``silu(gate x) * (up x)``, gate being the first half of ``weight`` [2 out, in]."""
    gate, up = (torch.ops.mkldnn._reorder_linear_weight(w, ROWS_HINT) for w in weight.chunk(2))
    product = direct(torch.ops.mkldnn._linear_pointwise.default)
    both = direct(torch.ops.mkldnn._linear_pointwise.binary)
    width = weight.shape[1]

    def multiply(x: Tensor) -> Tensor:
        if x.numel() < FEW * width:
            return _filled(multiply, x)
        y: Tensor = both(x, product(x, gate, None, "swish", [], ""), up, None, "mul")
        return y

    return holding(multiply, gate, up)


def _filled(multiply: Multiply, x: Tensor) -> Tensor:
    """``multiply`` for few rows: `FEW` of them, less those too many."""
    rows = x.reshape(-1, x.shape[-1])
    y = multiply(F.pad(rows, (0, 0, 0, FEW - rows.shape[0])))
    return y[: rows.shape[0]].view(*x.shape[:-1], y.shape[-1])
